"""What the shell is told when it completes a model's name."""

from __future__ import annotations


def complete_model(incomplete: str) -> list[str]:
    """Return stored models and catalog aliases that begin so; a path is left to the shell."""
    from localllm.models import catalog
    from localllm.models.store import Store

    names = {stored.name for stored in Store().list()} | {entry.alias for entry in catalog.CATALOG}
    return sorted(name for name in names if name.startswith(incomplete))
