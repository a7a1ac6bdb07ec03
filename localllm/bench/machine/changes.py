"""Says in which ways two fingerprints differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Facts = Mapping[str, Any]


def machine_changes(old: Facts, new: Facts) -> list[str]:
    """Return a sentence for each way in which the machine of a fingerprint is another; [] = the same."""
    return list(_machine(old.get("machine") or {}, new.get("machine") or {}))


def software_changes(old: Facts, new: Facts) -> list[str]:
    """Return a sentence for each part of the software that is another; [] = the same."""
    return list(_software(old.get("software") or {}, new.get("software") or {}))


def _machine(old: Facts, new: Facts) -> Iterator[str]:
    cpus = old.get("cpu") or {}, new.get("cpu") or {}
    yield from _differs("CPU", cpus, "name")
    yield from _set_differs("CPU features", cpus, "features")
    yield from _differs("usable cores", cpus, "n_usable")
    yield from _differs("CPU quota in cores", (old, new), "quota_cores", _or("none"))
    yield from _differs("governor", (old, new), "governor", _or("not told"))
    yield from _differs("memory", (old, new), "ram_bytes", gib)
    yield from _gpus(old, new)
    yield from _differs("system", (old, new), "os_name")
    yield from _differs("kernel", (old, new), "os")
    yield from _differs("architecture", (old, new), "architecture")
    yield from _differs("power", (old, new), "power", _or("not told"))


def _gpus(old: Facts, new: Facts) -> Iterator[str]:
    if "gpu" not in old or "gpu" not in new:
        return
    cards = old["gpu"] or [], new["gpu"] or []
    names = tuple(", ".join(card["name"] for card in side) or "none" for side in cards)
    if names[0] != names[1]:
        yield f"GPU: {names[0]}, now {names[1]}"
    drivers = [{card["vendor"]: card["driver"] for card in side if card.get("driver")} for side in cards]
    for vendor in sorted(drivers[0].keys() & drivers[1].keys()):
        yield from _differs(f"{vendor} driver", (drivers[0], drivers[1]), vendor)


def _software(old: Facts, new: Facts) -> Iterator[str]:
    sides = old, new
    # A wheel that is built anew under the same version may be compiled otherwise.
    for name in dict.fromkeys((*old, *new)):
        match name:
            case "git":
                yield from _differs("localllm's commit", sides, "git", _commit)
            case "python":
                yield from _differs("Python", sides, "python")
            case "executable_bits":
                yield from _differs("bits of the executable", sides, name)
            case "wheel":
                yield from _differs("wheel of llama-cpp-python", sides, "wheel", lambda tags: ", ".join(tags) or "none")
            case "llama.cpp":
                if old.get(name) and new.get(name):
                    yield from _differs("llama.cpp's commit", sides, name)
            case _:
                yield from _differs(name, sides, name, _or("not installed"))


def _differs(what: str, sides: tuple[Facts, Facts], key: str, text: Callable[[Any], str] = str) -> Iterator[str]:
    """Yield a sentence where both sides tell, and differ."""
    old, new = sides
    if key in old and key in new and old[key] != new[key]:
        yield f"{what}: {text(old[key])}, now {text(new[key])}"


def _set_differs(what: str, sides: tuple[Facts, Facts], key: str) -> Iterator[str]:
    old, new = (set(side.get(key) or ()) for side in sides)
    if not old or not new or old == new:
        return
    parts = [f"without {_listed(sorted(old - new))}"] if old - new else []
    parts += [f"with {_listed(sorted(new - old))}"] if new - old else []
    yield f"{what}: now {' and '.join(parts)}"


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _or(absent: str) -> Callable[[Any], str]:
    return lambda value: absent if value is None else str(value)


def _commit(state: Facts | None) -> str:
    if state is None:
        return "not told"
    return f"{state['commit']} with changes" if state.get("dirty") else str(state["commit"])


def gib(n_bytes: int | None) -> str:
    """Return memory as people name it."""
    return "not told" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"
