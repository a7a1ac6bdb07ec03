"""Exporting takes a bounded share of the time."""

from __future__ import annotations

from localllm.runtime.kv.export_budget import ExportBudget


def test_a_budget_is_a_share_of_time_with_a_bounded_debt() -> None:
    budget = ExportBudget()
    assert not budget.allows(debt=False)
    assert budget.allows(debt=True)
    budget.earn(0.1)
    assert budget.allows(debt=False)
    budget.spend(0.006)
    assert not budget.allows(debt=False)
    budget.spend(0.1)
    assert not budget.allows(debt=True)
    budget.earn(3600)  # an hour of nothing saves no more than a moment
    assert budget.allows(debt=False, pledged_s=0.01)
    assert not budget.allows(debt=False, pledged_s=0.03)
