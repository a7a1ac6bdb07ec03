"""The servers whose caches are compared: ours with and without tiers, and others; and the prompts that they get."""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from localllm.bench.client.calls import Target
from localllm.models.hashes import sha256_of
from localllm.models.store import Store
from proof.peers import Peer, Wanted, running
from proof.prompts import stories
from proof.serving import Serving
from proof.sides import BurstFailed, HttpSide

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_SOURCE = re.compile(r'source="(\w+)"')


class Server(Protocol):
    """One that is asked, and can be started anew."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def side(self) -> HttpSide:
        """Where it is asked now."""
        ...

    def start(self) -> None:
        """Start it and wait until it answers."""
        ...

    def stop(self) -> None:
        """End it properly. Idempotent."""
        ...


@dataclass(slots=True)
class Ours:
    """`localllm serve` in a folder of its own, which it finds again when it is started anew.

    `arguments` begin with the path of the model.
    """

    name: str
    folder: Path
    arguments: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    _serving: Serving | None = None
    _n_starts: int = 0

    @property
    def serving(self) -> Serving:
        """The process."""
        assert self._serving is not None
        return self._serving

    @property
    def side(self) -> HttpSide:
        """Where it is asked now."""
        return HttpSide(self.name, self.serving.target(), {"ignore_eos": True, **self.fields}, self.serving.pid)

    def start(self) -> None:
        """Start it; what it said before is set aside."""
        if self._n_starts:
            self.serving.log.rename(self.folder / f"serve-{self._n_starts}.log")
        else:  # only the KV of a model whose hash is known goes to disk
            sha256_of(Path(self.arguments[0]), Store(Path(self.variables.get("LOCALLLM_HOME", self.folder / "home"))))
        self._n_starts += 1
        self._serving = Serving(self.folder, self.arguments, self.variables).__enter__()

    def stop(self) -> None:
        """End it properly."""
        if self._serving is not None:
            self._serving.stop()

    @property
    def pool_tokens(self) -> int:
        """The cells of its pool."""
        (model,) = json.loads(text(self.serving.target(), "/v1/models"))["data"]
        return int(model["meta"]["n_ctx"])

    def samples(self) -> dict[str, float]:
        """Return what /metrics tells, by the names without labels: those of several samples added up."""
        found: dict[str, float] = {}
        for name, _, value in _SAMPLE.findall(text(self.serving.target(), "/metrics")):
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def sources(self) -> dict[str, int]:
        """Return prompt tokens so far by where their KV came from."""
        lines = _SAMPLE.findall(text(self.serving.target(), "/metrics"))
        of = [(_SOURCE.search(labels), v) for name, labels, v in lines if name == "localllm_prompt_tokens_total"]
        return {found[1]: int(float(value)) for found, value in of if found is not None}


@dataclass(slots=True)
class Other:
    """Another server, on a port of its own. `fields` go into every body."""

    peer: Peer
    wanted: Wanted
    fields: Mapping[str, Any]
    port: int
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _target: Target | None = None

    @property
    def name(self) -> str:
        """What it is called."""
        return self.peer.name

    @property
    def side(self) -> HttpSide:
        """Where it is asked now."""
        assert self._target is not None
        return HttpSide(self.name, self._target, self.fields)

    def start(self) -> None:
        """Start it."""
        self._target = self._stack.enter_context(running(self.peer, self.wanted, self.port))

    def stop(self) -> None:
        """End it."""
        self._stack.close()


@dataclass(slots=True)
class TokenPrompts:
    """Draws prompts as token ids. `ids`: of ordinary text; a fresh prompt begins with an id that none began with."""

    ids: Sequence[int]
    firsts: list[int]
    rng: random.Random

    @classmethod
    def of(cls, target: Target, n_vocab: int, seed: int) -> TokenPrompts:
        """Return a source for the model that a server of ours at `target` serves."""
        texts = stories(seed, 400)
        body = {"content": " ".join(next(texts) for _ in range(20)), "add_special": False}
        rng = random.Random(seed)
        firsts = rng.sample(range(n_vocab // 4, n_vocab // 2), n_vocab // 8)
        return cls(json.loads(text(target, "/tokenize", body))["tokens"], firsts, rng)

    def fresh(self, n_tokens: int) -> tuple[int, ...]:
        """Return a prompt that shares nothing with those before."""
        return (self.firsts.pop(), *self.rng.choices(self.ids, k=n_tokens - 1))

    def on(self, prefix: Sequence[int], n_tokens: int) -> tuple[int, ...]:
        """Return `prefix` and `n_tokens` of its own after it."""
        return (*prefix, *self.fresh(n_tokens))


def text(target: Target, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 60.0) -> str:
    """Return what a path answers, to a POST where there is a body. Raises BurstFailed, OSError."""
    connection = http.client.HTTPConnection(target.host, target.port, timeout=timeout_s)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        found = answer.read().decode()
    finally:
        connection.close()
    if answer.status != 200:
        raise BurstFailed(f"{path}: {answer.status}: {found[:300]}")
    return found
