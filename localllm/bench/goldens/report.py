"""What a check of goldens found, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from localllm.bench.goldens.checking import DRIFT_NATS
from localllm.bench.goldens.golden import GoldenCheck

_N_DIGITS = 12


def check_document(checks: Sequence[GoldenCheck]) -> dict[str, Any]:
    """Return the result of a check as one JSON document."""
    return {
        "localllm_bench_golden": 1,
        "moved": any(check.has_moved for check in checks),
        "drift_nats": DRIFT_NATS,
        "goldens": [
            {
                "name": check.golden["model"]["name"],
                "moved": check.has_moved,
                "recorded_at": check.golden["recorded_at"],
                "recorded_sha256": check.golden["model"]["id"],
                "sha256": check.model_id,
                "is_another_file": check.is_another_file,
                "stale": list(check.stale),
                "settings_changed": list(check.settings),
                "failed": check.failed or None,
                "prompts": [prompt.document() for prompt in check.prompts],
            }
            for check in checks
        ],
    }


def check_text(checks: Sequence[GoldenCheck]) -> str:
    """Return the result of a check in lines."""
    return "\n".join(line for check in checks for line in _lines(check)) + "\n"


def _lines(check: GoldenCheck) -> Iterator[str]:
    model = check.golden["model"]
    yield f"{model['name']}  {model['quant']}  {model['id'][:_N_DIGITS]}: {'moved' if check.has_moved else 'unmoved'}"
    changed = (*check.stale, *check.settings)
    yield f"  recorded {check.golden['recorded_at']}; since then " + ("changed:" if changed else "nothing changed")
    yield from (f"    {sentence}" for sentence in changed)
    if check.is_another_file:
        yield f"  the model file is another one: sha256 {check.model_id[:_N_DIGITS]}"
    if check.failed:
        yield f"  it cannot be asked any more: {check.failed}"
    yield from (f"  {prompt.name}: {prompt.sentence}" for prompt in check.prompts if prompt.moves)
    same = [prompt for prompt in check.prompts if not prompt.moves and not prompt.is_refused]
    n_refused = sum(1 for prompt in check.prompts if not prompt.moves and prompt.is_refused)
    if n_refused:
        yield f"  {n_refused} of {len(check.prompts)} prompts refused, as before"
    if same:
        drift = max((prompt.drift_nats or 0.0 for prompt in same), default=0.0)
        yield f"  {len(same)} of {len(check.prompts)} prompts the same; logprobs differ by at most {drift:.2g} nats"


def recorded_document(golden: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return what was recorded as one JSON document, without the answers."""
    entries = golden["entries"]
    return {
        "localllm_bench_golden": 1,
        "model": golden["model"],
        "recorded_at": golden["recorded_at"],
        "settings": golden["settings"],
        "n_prompts": sum(1 for entry in entries if not entry["refused"]),
        "refused": {entry["name"]: entry["refused"] for entry in entries if entry["refused"]},
        "path": str(path),
    }


def recorded_lines(golden: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was recorded in sentences."""
    model, entries = golden["model"], golden["entries"]
    n_taken = sum(1 for entry in entries if not entry["refused"])
    yield f"recorded {n_taken} prompts of {model['name']} ({model['quant']}, sha256 {model['id'][:_N_DIGITS]})"
    yield from (f"left out: {entry['name']}: {entry['refused']}" for entry in entries if entry["refused"])
