"""What every shipped workload is made of: a name, parameters, sessions, and the facts about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from localllm.bench.workloads.ask import Session, Workload
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import canonical, described, parse_parameters

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = TypeVar("P", bound="DataclassInstance")

GENERATOR = 1  # goes up whenever the same spec and seed give other text than before


@dataclass(frozen=True, slots=True)
class Shared:
    """A part of the prompt that several requests have: which, who has it, how many different ones there are."""

    part: str
    by: str
    distinct: str


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which prefixes a workload repeats.

    `repeated`: expected share of the words of all prompts that stand in a prefix which an earlier
    request of a long run had. `before_last`: the same of what stands before the last message (in a
    prompt: the last line).
    """

    parts: tuple[Shared, ...]
    repeated: float
    before_last: float

    def facts(self) -> dict[str, Any]:
        """Return it as a report writes it."""
        return {
            "shared": [asdict(part) for part in self.parts],
            "repeated_share": round(self.repeated, 3),
            "before_last_share": round(self.before_last, 3),
        }


@dataclass(frozen=True, slots=True)
class Recipe(Generic[P]):
    """One kind of workload. `sessions` makes them from parameters and a seed; `effect` says what it asks."""

    name: str
    effect: str
    parameters: type[P]
    sessions: Callable[[P, int], Iterator[Session]]
    n_asks: Callable[[P], int]
    lengths: Callable[[P], Mapping[str, Lengths]]
    sharing: Callable[[P], Sharing]

    def workload(self, text: str) -> Workload:
        """Return the workload with the parameters that `text` spells. Raises UsageError."""
        return Shipped(self, parse_parameters(self.name, self.parameters, text))

    def describe(self) -> str:
        """Return what it asks and its parameters, a line each."""
        return "\n".join([f"{self.name}: {self.effect}", *described(self.parameters)])


@dataclass(frozen=True, slots=True)
class Shipped(Generic[P]):
    """A shipped workload with its parameters."""

    recipe: Recipe[P]
    parameters: P
    is_trace: bool = False

    @property
    def spec(self) -> str:
        """Its canonical text."""
        changed = canonical(self.parameters)
        return f"{self.recipe.name}:{changed}" if changed else self.recipe.name

    @property
    def facts(self) -> Mapping[str, Any]:
        """What it asks, its parameters, lengths and shared prefixes."""
        return {
            "effect": self.recipe.effect,
            "generator": GENERATOR,
            "parameters": asdict(self.parameters),
            "requests_per_session": self.recipe.n_asks(self.parameters),
            "lengths": {name: of.facts() for name, of in self.recipe.lengths(self.parameters).items()},
            **self.recipe.sharing(self.parameters).facts(),
        }

    def sessions(self, seed: int) -> Iterator[Session]:
        """Yield sessions without end."""
        return self.recipe.sessions(self.parameters, seed)
