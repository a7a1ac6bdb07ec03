"""The cases of `kv_cases`: what is asked in which order, and what must have happened so that it proves anything."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from localllm.bench.client.calls import End
from proof.kv_answers import MIN_HIT_TOKENS, Verdict, answers, verdict
from proof.kv_case_asks import CUE_TOKENS, FROM_DISK, HITS, Cases
from proof.kv_sides import Ours
from proof.kv_streams import BLOCK_TOKENS, written_blocks

LONG_TOKENS = 1100
"""From 1 024 tokens on a prompt is written as soon as it was exported."""
N_TRIES, WRITE_S = 4, 5.0


def all_cases(of: Cases) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the cases by name; each counts under that name. Later ones find what earlier ones left."""
    for case in (_repeat, _prefix, _one_token, _edit, _branches, _at_once, _evicted, _restarted, _cancelled,
                 _damaged, _killed, _off):  # fmt: skip
        name = (case.__doc__ or "").split(".")[0]
        yield name, lambda case=case, name=name: case(of, name)  # type: ignore[misc]
    if of.beside is not None:
        name = "two models share a disk tier"
        yield name, lambda: _two_models(of, of.beside, name)  # type: ignore[arg-type]
    name = "control: a block of other tokens in the middle must show"
    yield name, lambda: _control(of, name)


def _repeat(of: Cases, name: str) -> None:
    """an exact repeat."""
    for _ in range(of.n_times):
        of.check(name, [of.fresh()] * 3, owed=2)


def _prefix(of: Cases, name: str) -> None:
    """a prefix of a cached prompt."""
    for _ in range(of.n_times):
        whole = of.fresh()
        of.ask(of.kept, whole)
        n_tokens = len(whole)
        ends = of.rng.randrange(2, n_tokens // 2), of.rng.randrange(n_tokens // 2 + 5, n_tokens)
        of.check(name, [whole[:end] for end in ends], owed=1)


def _one_token(of: Cases, name: str) -> None:
    """a prompt of one token."""
    letter = of.letters(1)
    of.check(name, [letter, letter, of.letters(1), letter], owed=0)


def _edit(of: Cases, name: str) -> None:
    """an edit in the middle."""
    for _ in range(of.n_times):
        whole = of.fresh()
        of.ask(of.kept, whole)
        at = of.rng.randrange(BLOCK_TOKENS + 1, len(whole) - 10)
        of.check(name, [whole[:at] + of.letters(3) + whole[at + of.rng.choice((0, 3, 7)) :]], owed=1)


def _branches(of: Cases, name: str) -> None:
    """branches of one prefix, eight at a time."""
    prefix = of.fresh()
    for at in range(of.n_branches // 8):
        of.check(name, [of.on(prefix) for _ in range(8)], owed=8 if at else 7, at_once=True)


def _at_once(of: Cases, name: str) -> None:
    """eight at once, some of them alike, answered as one by one."""
    for _ in range(of.n_times):
        first, second = of.fresh(of.n_prompt - 40), of.fresh(of.n_prompt // 3)
        prompts = [first, first, of.on(first), of.on(first, 30), second, of.on(second), of.fresh(), of.letters(5)]
        of.rng.shuffle(prompts)
        of.check(name, prompts, owed=3, at_once=True)


def _evicted(of: Cases, name: str) -> None:
    """asked in turn, more than the device holds."""
    documents = [of.fresh() for _ in range(12 if of.n_times > 2 else 8)]
    for turn in range(3):
        of.check(name, [of.on(document) for document in documents], owed=len(documents) if turn else 0)


def _restarted(of: Cases, name: str) -> None:
    """after a restart of the server."""
    prefixes = [of.fresh() for _ in range(of.n_times)]
    for prefix in prefixes:
        of.ask(of.kept, prefix)
    of.restart()
    for prefix in prefixes:
        of.check_disk(name, [of.on(prefix)], owed=1)
        of.check_disk(name, [prefix, prefix[: of.n_prompt // 2]], owed=0)


def _cancelled(of: Cases, name: str) -> None:
    """a client that goes while its prefix is put back."""
    first, *prefixes = [of.fresh(LONG_TOKENS) for _ in range(1 + max(4, of.n_times // 4))]
    for prefix in (first, *prefixes):
        of.ask(of.kept, prefix)
    of.restart()
    whole = of.cancelled(first, 60.0, beside_stream=True)
    whole_s = whole.token_s[0] - whole.started_s if whole.token_s else 0.0
    count = of.count(name, "clients that went when some of their blocks were put back, and not yet all", 1)
    for prefix in prefixes:
        n_put, n_blocks = 0, len(prefix) // BLOCK_TOKENS
        for _ in range(N_TRIES):
            n_before = _put_back(of)
            gone = of.cancelled(of.on(prefix), of.rng.uniform(0.1, 0.9) * whole_s, beside_stream=True)
            time.sleep(0.05)  # what was under way when the client went
            n_put += _put_back(of) - n_before
            is_amid = n_put > 0 and (n_put < n_blocks or of.puts_back_at_once)
            if gone.end is End.CANCELLED and not gone.token_s and is_amid:
                count.proven += 1
            if n_put:
                break
        answer = of.ask(of.kept, again := of.on(prefix))[0]
        count.add(answer, of.judged(again, answer))


def _put_back(of: Cases) -> int:
    return int(of.kept.samples().get("localllm_kv_restored_blocks_total", 0))


def _damaged(of: Cases, name: str) -> None:
    """files on disk that were cut, filled, mixed up or changed in one bit."""
    prefixes = [of.fresh() for _ in range(max(4, of.n_times))]
    for prefix in prefixes:
        of.ask(of.kept, prefix)
    of.kept.stop()
    files = sorted((of.kept.folder / "home").rglob("*.kv"))
    for at, path in enumerate(files):
        _damage(path, files[at - 1], at % 5, of.rng)
    of.kept.start()
    count = of.count(name, "damaged files that were met and set aside", len(prefixes))
    for prompt in [of.on(prefix) for prefix in prefixes]:
        answer = of.ask(of.kept, prompt)[0]
        count.add(answer, of.judged(prompt, answer))
    count.proven = int(of.kept.samples().get("localllm_kv_disk_bad_files_total", 0))
    count.notes.append(f"{len(files)} files damaged")


def _damage(path: Path, other: Path, how: int, rng: random.Random) -> None:
    """Change one file, the way a full disk, a bad cable or a careless hand does."""
    data = bytearray(path.read_bytes())
    if how == 0:
        data = data[: rng.randrange(len(data))]
    elif how == 1:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 2:
        data = bytearray(other.read_bytes())
    elif how == 3:
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    else:
        data += b"more"
    path.write_bytes(data)


def _killed(of: Cases, name: str) -> None:
    """after the server and its worker were killed at a random moment."""
    for _ in range(max(2, of.n_times // 5)):
        written, amid = of.fresh(LONG_TOKENS), of.fresh(LONG_TOKENS)
        n_before, began_s = written_blocks(of.kept), time.monotonic()
        of.ask(of.kept, written)
        took_s = time.monotonic() - began_s
        while written_blocks(of.kept) - n_before < LONG_TOKENS // BLOCK_TOKENS:
            if time.monotonic() - began_s > took_s + WRITE_S:
                break
            time.sleep(0.05)
        of.cancelled(amid, of.rng.uniform(0.0, 2.0) * took_s)
        time.sleep(of.rng.uniform(0.0, 0.2))
        pids = [of.kept.serving.pid, *of.kept.serving.workers()]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        of.restart()
        of.check_disk(name, [of.on(written)], owed=1)
        of.check_disk(name, [of.on(amid)], owed=0)


def _off(of: Cases, name: str) -> None:
    """a request with cache off uses nothing and leaves nothing."""
    count = of.count(name, HITS + " of those that may use it", of.n_times)
    for _ in range(of.n_times):
        prompt = of.fresh()
        found = []
        for cache in ("off", "off", "on", "off", "on"):
            answer = answers(of.kept, [prompt], of.n_gen, cache=cache)[0]
            count.add(answer, of.judged(prompt, answer))
            found.append(answer.n_cached)
        count.proven += found[4] >= MIN_HIT_TOKENS
        if found[0] or found[1] or found[3] or found[2] >= MIN_HIT_TOKENS:
            count.failed += 1
            count.notes.append("something was cached")


def _two_models(of: Cases, other: Ours, name: str) -> None:
    """Ask both models the same prompts in turn, each after a restart too: neither may use what the other left."""
    prompts = [of.fresh() for _ in range(of.n_times)]
    other.start()
    own = {prompt: of.ask(other, prompt)[0] for prompt in prompts}
    of.check_disk(name, prompts, owed=0)
    other.stop()
    of.restart()
    other.start()
    of.check_disk(name, prompts, owed=len(prompts))
    count = of.count(name, FROM_DISK, len(prompts))
    for prompt in prompts:
        n_before = other.sources().get("disk", 0)
        answer = of.ask(other, prompt)[0]
        count.proven += other.sources().get("disk", 0) - n_before >= MIN_HIT_TOKENS
        count.add(answer, verdict(own[prompt], answer, is_exact=of.is_exact))
    other.stop()


def _control(of: Cases, name: str) -> None:
    """Hold answers against those of a prompt with one block of other tokens: a check that finds no difference is none.

    The block is the one of which the prompt's end repeats some tokens, as those of the cases do of any. Right here is
    what was judged to be wrong.
    """
    count = of.count(name, "")
    for _ in range(of.n_times):
        text = of.letters(of.n_prompt - CUE_TOKENS)
        start = of.rng.randrange(len(text) - BLOCK_TOKENS)
        at = start + of.rng.randrange(BLOCK_TOKENS - 2 * CUE_TOKENS)
        cue = text[at : at + CUE_TOKENS]
        prompt, other = text + cue, text[:start] + of.letters(BLOCK_TOKENS) + text[start + BLOCK_TOKENS :] + cue
        found = of.ask(of.kept, prompt)[0]
        is_shown = of.judged(other, found) is Verdict.WRONG
        count.add(found, Verdict.RIGHT if is_shown else Verdict.WRONG)
