"""Turns the tables of a contract into terms, and refuses what makes no sense."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from localllm.bench.client.calls import Target
from localllm.bench.contract.cells import cells_of
from localllm.bench.contract.check_rules import rules_of
from localllm.bench.contract.places import Place, Places
from localllm.bench.contract.tables import CandidateTable, ContractTable, ModelTable
from localllm.bench.contract.terms import Candidate, Cell, Contract, Model
from localllm.bench.serving.servers.starting import PLACEHOLDERS, placeholders
from localllm.bench.serving.spec import Api, Cache
from localllm.errors import UsageError

BEST = "{} (best)"


def checked(table: ContractTable, places: Places, document: Mapping[str, Any], sha256: str, folder: Path) -> Contract:
    """Return the contract that the tables mean. Raises UsageError naming the place."""
    _check_names(table, places)
    for name in ("model", "candidate", "workload"):
        if not getattr(table, name):
            raise places.of().mistake(f"there is no {name}.", hint=f"[[{name}]]")
    models = tuple(_model(each, places.of("model", i), folder) for i, each in enumerate(table.model))
    candidates = tuple(
        candidate
        for i, each in enumerate(table.candidate)
        for candidate in _candidates(each, models, places.of("candidate", i))
    )
    cells = cells_of(table, places, folder)
    _check_restarts(candidates, cells, table, places)
    return Contract(
        title=table.title,
        rounds=table.run.rounds,
        seed=table.run.seed,
        n_warmup=table.run.warmup,
        max_repeats=table.run.max_repeats,
        ready_timeout_s=table.run.ready_timeout_s,
        models=models,
        candidates=candidates,
        cells=cells,
        rules=rules_of(table.rule, candidates, cells, places),
        document=document,
        sha256=sha256,
        folder=folder,
    )


def _check_names(table: ContractTable, places: Places) -> None:
    """Refuse names that are used twice, also by a candidate's best flags, or cannot be printed."""
    _check_unique("model", [[model.name] for model in table.model], places)
    _check_unique("candidate", [_names(candidate) for candidate in table.candidate], places)


def _names(table: CandidateTable) -> list[str]:
    return [table.name] if table.best is None else [table.name, BEST.format(table.name)]


def _check_unique(kind: str, names: Sequence[Sequence[str]], places: Places) -> None:
    seen: set[str] = set()
    for index, of_one in enumerate(names):
        place = places.of(kind, index)
        for name in of_one:
            if not name.isprintable() or name != name.strip():
                raise place.mistake(f"the name {name!r} cannot be printed as it is.", "name")
            if name in seen:
                raise place.mistake(f"there are two {kind}s called {name!r}.", "name")
            seen.add(name)


def _model(table: ModelTable, place: Place, folder: Path) -> Model:
    given = {key: value for key in ("file", "reference", "named") if (value := getattr(table, key)) is not None}
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise place.mistake(f"a model has one of file, reference and named; this one has {found}.")
    (key,) = given
    if key == "named" and (table.sha256 or table.quant):
        raise place.mistake("what only a server knows by name cannot be checked: leave out sha256 and quant.", key)
    if table.sha256 and not (len(table.sha256) == 64 and set(table.sha256.lower()) <= set("0123456789abcdef")):
        raise place.mistake("sha256 takes 64 hexadecimal digits.", "sha256")
    _check_sendable(given[key], place, key)
    return Model(
        name=table.name,
        file=None if table.file is None else folder / os.path.expanduser(table.file),
        reference=table.reference or "",
        named=table.named or "",
        sha256=table.sha256.lower(),
        quant=table.quant,
        place=place.text(key),
    )


def _candidates(table: CandidateTable, models: tuple[Model, ...], place: Place) -> list[Candidate]:
    """Return the candidate as it is and, where flags are named for it, at its best."""
    if (table.command is None) == (table.url is None):
        found = "neither" if table.url is None else "both"
        raise place.mistake(f"a candidate has a command or a url; this one has {found}.")
    apis = {name: name for name in get_args(Api)}
    if table.api not in apis:
        raise place.mistake(f"api takes {' or '.join(apis)}, not {table.api!r}.", "api")
    _check_sendable(table.serves, place, "serves")
    one = Candidate(table.name, _model_of(table, models, place), api=apis[table.api], serves=table.serves)
    if table.command is None:
        return [replace(one, url=_url(table, place))]
    _check_command(table, table.command, place)
    one = replace(one, command=(*table.command, *table.flags), variables=table.variables)
    if table.best is None:
        return [one]
    best = replace(one, name=BEST.format(table.name), command=(*table.command, *table.best), is_best=True)
    return [one, best]


def _model_of(table: CandidateTable, models: tuple[Model, ...], place: Place) -> Model:
    if not table.model and len(models) == 1:
        return models[0]
    for model in models:
        if model.name == table.model:
            return model
    names = ", ".join(model.name for model in models)
    what = f"there is no model {table.model!r}" if table.model else "it must say which model it serves"
    raise place.mistake(f"{what}; there are {names}.", "model")


def _url(table: CandidateTable, place: Place) -> str:
    url = table.url or ""
    for key, is_set in (("flags", table.flags), ("best", table.best is not None), ("variables", table.variables)):
        if is_set:
            raise place.mistake(f"{key} is for a command; a server given by its url runs as it is.", key)
    with place.at("url"):
        if "?" in url or "@" in url:
            raise UsageError("an address holds neither a key nor a query.", 'serves = "NAME" chooses the model')
        try:
            Target.of_url(url)
        except ValueError:
            raise UsageError(f"{url!r} is no address of a server.", "http://127.0.0.1:8080") from None
    return url


def _check_command(table: CandidateTable, command: Sequence[str], place: Place) -> None:
    """Refuse a command that has no port, or holds what stands for nothing."""
    if not command:
        example = 'command = ["localllm", "serve", "{model}", "--port", "{port}"]'
        raise place.mistake("the command is empty.", "command", example)
    values = [*table.variables.values()]
    for key, words in (("command", command), ("flags", table.flags), ("best", table.best or []), ("variables", values)):
        for word in words:
            _check_sendable(word, place, key)
        unknown = [name for name in placeholders(words) if name not in PLACEHOLDERS]
        if unknown:
            known = " and ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise place.mistake(f"{{{unknown[0]}}} stands for nothing; there are {known}.", key)
    for flags in (table.flags, table.best):
        if flags is not None and "port" not in placeholders([*values, *command, *flags]):
            example = 'command = [..., "--port", "{port}"]'
            raise place.mistake("the command does not say where the port goes.", "command", example)
    for name in table.variables:
        if not name or "=" in name or "\0" in name:
            raise place.mistake(f"{name!r} cannot be set in an environment.", "variables")


def _check_sendable(text: str, place: Place, key: str) -> None:
    if "\0" in text:
        raise place.mistake(f"{key} holds a character that no command takes.", key)


def _check_restarts(
    candidates: tuple[Candidate, ...], cells: tuple[Cell, ...], table: ContractTable, places: Places
) -> None:
    given = [candidate.name for candidate in candidates if candidate.url]
    if not given or not any(cell.cache is Cache.RESTART for cell in cells):
        return
    index = next(i for i, w in enumerate(table.workload) if "restart" in (w.cache or "") or "restart" in w.use)
    raise places.of("workload", index).mistake(
        f"restart needs servers started here, and {given[0]} is given by its url.",
        "cache",
        "give it a command, or leave out restart",
    )
