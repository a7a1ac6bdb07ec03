"""The peak of memory over samples of several processes."""

from __future__ import annotations

from localllm.bench.machine.memory import MemoryPeak
from localllm.bench.machine.processes import Footprint


def test_the_peak_is_of_the_sum_not_the_sum_of_the_peaks() -> None:
    peak = MemoryPeak()
    peak.take([Footprint(100, 60), Footprint(10, 5)])
    peak.take([Footprint(50, 30), Footprint(80, 40)])
    peak.take([])
    assert (peak.kind, peak.peak_bytes) == ("pss", 70)


def test_one_process_without_pss_makes_it_all_rss() -> None:
    peak = MemoryPeak()
    peak.take([Footprint(100, 60)])
    peak.take([Footprint(90, 50), Footprint(30)])
    assert (peak.kind, peak.peak_bytes) == ("rss", 120)


def test_nothing_seen_is_no_peak() -> None:
    peak = MemoryPeak()
    peak.take([])
    assert peak.peak_bytes is None
