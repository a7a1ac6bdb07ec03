"""The most memory that some processes held together."""

from __future__ import annotations

from collections.abc import Iterable

from localllm.bench.machine.processes import Footprint


class MemoryPeak:
    """Keeps the peak over samples of the sum over processes.

    `kind` "pss" counts shared pages once; where those of one process cannot be read in any sample, it
    is "rss", in which each process counts them.
    """

    def __init__(self) -> None:
        self._pss_bytes = self._rss_bytes = 0
        self._has_pss = True

    def take(self, footprints: Iterable[Footprint]) -> None:
        """Look at one sample: what each process holds at this moment."""
        found = list(footprints)
        pss = [one.pss_bytes for one in found if one.pss_bytes is not None]
        self._has_pss = self._has_pss and len(pss) == len(found)
        self._pss_bytes = max(self._pss_bytes, sum(pss))
        self._rss_bytes = max(self._rss_bytes, sum(one.rss_bytes for one in found))

    @property
    def kind(self) -> str:
        """What the peak counts."""
        return "pss" if self._has_pss else "rss"

    @property
    def peak_bytes(self) -> int | None:
        """The peak; None where no process was ever seen."""
        return (self._pss_bytes if self._has_pss else self._rss_bytes) or None
