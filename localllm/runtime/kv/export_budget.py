"""How much time exporting may take of those who wait for tokens."""

from __future__ import annotations

_SHARE = 0.05  # of the time that passes
_SAVED_S = 0.02  # at most, for later
_DEBT_S = 0.1  # that may be made where something would be lost, or would slow a long prefill down


class ExportBudget:
    """Time for exporting: a share of all time, with a debt that is paid back."""

    def __init__(self) -> None:
        self._balance_s = 0.0

    def earn(self, elapsed_s: float) -> None:
        """Take note that time has passed."""
        self._balance_s = min(_SAVED_S, self._balance_s + _SHARE * elapsed_s)

    def spend(self, elapsed_s: float) -> None:
        """Take note of time that an export took."""
        self._balance_s -= elapsed_s

    def allows(self, *, debt: bool, pledged_s: float = 0.0) -> bool:
        """Say whether another block may be exported now, beside others that will take `pledged_s`."""
        return self._balance_s - pledged_s > (-_DEBT_S if debt else 0.0)
