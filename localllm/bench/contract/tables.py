"""The shape of a contract's TOML: which keys there are, of which type. Meaning is checked in `check`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from localllm.bench.serving.spelling import MAX_CLIENTS

VERSION = 1

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=80)]
Requests: TypeAlias = Annotated[int, Meta(ge=1, le=1_000_000)]
Clients: TypeAlias = Annotated[int, Meta(ge=1, le=MAX_CLIENTS)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]


class RunTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[run]: how everything is measured."""

    rounds: Annotated[int, Meta(ge=1, le=1_000)] = 5
    seed: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 1
    warmup: Annotated[int, Meta(ge=0, le=1_000_000)] = 2
    requests: Requests = 32
    max_repeats: Annotated[int, Meta(ge=0, le=100)] = 2
    ready_timeout_s: Seconds = 600.0


class ModelTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[model]]: what the candidates serve."""

    name: Name
    file: Text | None = None
    reference: Text | None = None
    named: Text | None = None
    sha256: str = ""
    quant: str = ""


class CandidateTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[candidate]]: a server, at its defaults (with `flags`, as given) and at its best flags."""

    name: Name
    model: str = ""
    command: list[Text] | None = None
    flags: list[Text] = []
    best: list[Text] | None = None
    url: Text | None = None
    api: str = "openai-chat"
    variables: dict[str, str] = {}
    serves: str = ""


class WorkloadTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[workload]]: what is asked, at which loads."""

    use: Text
    requests: Requests | None = None
    duration_s: Seconds | None = None
    concurrency: Clients | list[Clients] | None = None
    rate: float | str | list[float | str] | None = None
    cache: str | list[str] | None = None
    slo: Text | None = None
    by: Text | None = None


class RuleTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[rule]]: what must hold for the contract to be kept."""

    measure: Text
    candidate: Text
    workload: Text | None = None
    cache: Text | None = None
    load: Text | None = None
    at_most: float | str | None = None
    at_least: float | str | None = None
    over: Text | None = None


class ContractTable(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    version: int
    title: Annotated[str, Meta(min_length=1, max_length=200)]
    model: list[ModelTable]
    candidate: list[CandidateTable]
    workload: list[WorkloadTable]
    run: RunTable = RunTable()
    rule: list[RuleTable] = []


TABLES: dict[str, type[Struct]] = {
    "": ContractTable,
    "run": RunTable,
    "model": ModelTable,
    "candidate": CandidateTable,
    "workload": WorkloadTable,
    "rule": RuleTable,
}
