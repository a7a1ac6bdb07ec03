"""What a contract says, checked: models, candidates, what is measured, and the rules to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from localllm.bench.measures import Measure, text_of
from localllm.bench.serving.spec import Api, Cache, Load, RunSpec
from localllm.bench.slo import Slo
from localllm.bench.workloads.ask import Workload

Key: TypeAlias = tuple[str, str, str]
"""Workload, cache and load as documents spell them."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a contract: exactly one of a file here, a reference as `localllm pull` takes it, a server's own name.

    `sha256` and `quant`: what the file must be; "" = not said. `place`: where the contract names it.
    """

    name: str
    file: Path | None = None
    reference: str = ""
    named: str = ""
    sha256: str = ""
    quant: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One server to measure: a command that starts it, or its URL.

    `serves`: the model's name at the server; "" = the first that it lists.
    """

    name: str
    model: Model
    command: tuple[str, ...] = ()
    url: str = ""
    api: Api = "openai-chat"
    variables: Mapping[str, str] = field(default_factory=dict)
    serves: str = ""
    is_best: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What every candidate is measured at. `by`: the measure that ranks them."""

    workload: Workload
    cache: Cache
    load: Load
    by: Measure
    n_requests: int | None
    duration_s: float | None = None
    slo: Slo | None = None

    @property
    def key(self) -> Key:
        """What is equal for equal cells."""
        return self.workload.spec, self.cache.value, str(self.load)

    def spec(self, *, n_warmup: int, seed: int, fills_length: bool) -> RunSpec:
        """Return one run of it."""
        return RunSpec(
            workload=self.workload,
            load=self.load,
            cache=self.cache,
            n_requests=self.n_requests,
            duration_s=self.duration_s,
            n_warmup=n_warmup,
            seed=seed,
            slo=self.slo,
            fills_length=fills_length,
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """A success rule that must hold at each of `cells`; without any, it is of the server's start.

    `number`: in the file, from 1; `where`: the cells in words; `bound`: the most (`is_upper`) or the
    least, in the measure's own unit or, with `over`, times that candidate's value.
    """

    number: int
    measure: Measure
    candidate: str
    cells: tuple[Key, ...]
    where: str
    bound: float
    is_upper: bool
    over: str = ""

    @property
    def text(self) -> str:
        """What is asked, as a sentence without its end."""
        word = "at most" if self.is_upper else "at least"
        bound = f"{self.bound:g} times that of {self.over}" if self.over else text_of(self.measure, self.bound)
        where = f" ({self.where})" if self.where else ""
        return f"{self.candidate}: {self.measure.name} {word} {bound}{where}"

    def holds(self, value: float) -> bool:
        """Say whether `value` keeps the bound."""
        return value <= self.bound if self.is_upper else value >= self.bound


@dataclass(frozen=True, slots=True)
class Contract:
    """An evaluation written down before anything is measured.

    `document`: as it was written, for the result; `sha256`: of its bytes. `folder`: what its paths
    are relative to, and where its commands run.
    """

    title: str
    rounds: int
    seed: int
    n_warmup: int
    max_repeats: int
    ready_timeout_s: float
    models: tuple[Model, ...]
    candidates: tuple[Candidate, ...]
    cells: tuple[Cell, ...]
    rules: tuple[Rule, ...]
    document: Mapping[str, Any]
    sha256: str
    folder: Path
