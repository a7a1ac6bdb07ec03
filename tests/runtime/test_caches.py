"""What people are told of the caches is what requests find there, for the right reason, in nobody else's words."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import EngineError, Unavailable, UsageError
from localllm.models.template import names
from localllm.runtime import caches, events
from localllm.runtime.config import RuntimeConfig, TierConfig
from localllm.runtime.cost import StepCost
from localllm.runtime.engine import Batch, EngineSpec, PrefixRule
from localllm.runtime.kv import asking as asking_module
from localllm.runtime.kv import disk as disk_module
from localllm.runtime.kv import disk_room
from localllm.runtime.kv.disk_index import DiskIndex, Found
from localllm.runtime.kv.explain import MESSAGES, Cleared, Explanation
from localllm.runtime.kv.ram import Note
from localllm.runtime.service import Service
from localllm.runtime.stream import collect
from localllm.runtime.types import ChatRequest, CompletionRequest, EmbeddingRequest, GenerationOptions
from tests.fake_engine import SPEC, TEMPLATE, FakeEngine, endless_token, fake_service, next_token
from tests.runtime.harness import SPECS

WAIT_S = 20.0
HARBOUR = "The harbour opens at nine and closes at six. " * 8
OTHER = "Quite another text about the mountains. " * 9
DATED = "{{ bos_token }}{{ strftime_now('%d %b %Y') }}|" + TEMPLATE.removeprefix("{{ bos_token }}")
Making = Callable[..., Service]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Making]:
    """Make services over FakeEngines; `disk` names a folder that they share."""
    made: list[Service] = []

    def service(
        spec: EngineSpec = SPEC, *, ram_bytes: int = 1 << 20, disk: str = "", template: str = TEMPLATE, **engine: Any
    ) -> Service:
        folder = str(tmp_path / disk) if disk else ""
        tiers = TierConfig(ram_bytes=ram_bytes, disk_dir=folder, disk_bytes=1 << 24, keeps_all=True)
        engine = {"script": endless_token, **engine}
        made.append(fake_service(FakeEngine(spec, **engine), config=RuntimeConfig(tiers=tiers), template=template))
        return made[-1]

    yield service
    for each in made:
        each.close()


@pytest.fixture
def restores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put everything back that can be: a FakeEngine computes as quickly as it restores."""
    monkeypatch.setattr(StepCost, "restore_pays", lambda *of: True)


def asking(prompt: str, **options: Any) -> CompletionRequest:
    return CompletionRequest(prompt, GenerationOptions(**{"max_tokens": 2, **options}))


def run(service: Service, prompt: str, **options: Any) -> dict[str, int]:
    """Answer a prompt, let what is kept of it settle, and return what was cached, by tier."""
    usage = collect(service.submit(asking(prompt, **options))).usage
    settle(service)
    return {tier: n for tier, n in usage.cached_tokens.items() if n}


def settle(service: Service) -> None:
    end_s = time.monotonic() + WAIT_S
    while service._caches._left_to_keep():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def wait_until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def off_device(service: Service) -> None:
    service._on_engine(service._scheduler.clear_retained)


def explain(service: Service, prompt: str, **options: Any) -> Explanation:
    told = service.explain(asking(prompt, **options))
    assert told.message == MESSAGES[told.reason]
    assert told.n_known_tokens <= max(told.n_held_tokens, 0) <= told.n_prompt_tokens
    return told


def known(told: Explanation) -> dict[str, int]:
    return {tier: n for tier, n in told.known_tokens.items() if n}


# What is told is what is taken


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_what_is_told_to_be_known_is_what_the_request_takes(spec: EngineSpec, make: Making) -> None:
    service, rng = make(replace(spec, pool_tokens=700), ram_bytes=6000), random.Random(spec.fingerprint)
    texts = [HARBOUR, OTHER, HARBOUR[:200] + OTHER]
    reasons = set()
    for _ in range(40):
        prompt = rng.choice(texts)[: rng.choice((70, 150, 250, 300))] + rng.choice(("", "A", "B" * 70))
        told = explain(service, prompt)
        assert run(service, prompt) == known(told)
        reasons.add(told.reason)
    if spec.prefix_rule is PrefixRule.ANY:  # which prompts find all, elsewhere, depends on how quick steps are
        assert {"never_seen", "complete"} <= reasons
    assert len(reasons) > 1


@pytest.mark.usefixtures("restores")
def test_looking_changes_nothing_and_reads_nothing(make: Making) -> None:
    service = make(disk="kv", ram_bytes=0)
    run(service, HARBOUR * 3)
    off_device(service)
    before, engine = service.cache_stats(), service._loop.engine
    assert isinstance(engine, FakeEngine)
    n_edits, n_batches = len(engine.edits), len(engine.batches)
    for _ in range(5):
        told = explain(service, HARBOUR * 3 + "When?")
        assert (told.tier, told.known_tokens["disk"]) == ("disk", told.n_known_tokens)
    time.sleep(0.05)
    assert service.cache_stats() == before
    assert (len(engine.edits), len(engine.batches)) == (n_edits, n_batches)


@pytest.mark.usefixtures("restores")
def test_age_is_that_of_the_last_use(make: Making) -> None:
    service = make()
    run(service, HARBOUR)
    time.sleep(0.2)
    for tier in ("device", "ram"):
        told = explain(service, HARBOUR)
        assert told.tier == tier
        assert told.age_s is not None
        assert 0.19 < told.age_s < WAIT_S
        off_device(service)
    assert explain(service, OTHER).age_s is not None  # of the token that all begin with
    assert explain(service, OTHER, salt="another").age_s is None


# The reasons


def test_where_the_prompt_goes_on_alone_its_own_words_are_told(make: Making) -> None:
    service = make()
    run(service, HARBOUR + "What does it cost?")
    told = explain(service, HARBOUR + "When does it open?")
    at = told.diverges_at
    assert at is not None
    assert told.reason == "never_seen"
    assert (at.position, at.text, at.after) == (told.n_held_tokens, "e", "n does it open?")
    assert (HARBOUR + "Wh").endswith(at.before)
    assert len(at.before) > 8


def test_a_request_that_asks_for_no_cache(make: Making) -> None:
    service = make()
    run(service, HARBOUR)
    for options in ({"cache": "off"}, {"reuse_prefix": False}):
        told = explain(service, HARBOUR, **options)
        assert (told.reason, told.n_known_tokens, told.tier, told.age_s) == ("off", 0, "", None)
        assert told.n_held_tokens >= told.n_prompt_tokens - 1
        assert run(service, HARBOUR, **options) == {}


def test_a_window_that_is_gone(make: Making) -> None:
    service = make(replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=24), ram_bytes=0)
    run(service, HARBOUR, max_tokens=60)
    told = explain(service, HARBOUR[:300] + "X")
    assert (told.reason, told.n_known_tokens) == ("window", 0)
    assert told.n_held_tokens == 301


def test_a_state_that_can_only_be_taken_up_where_it_was_kept(make: Making) -> None:
    service = make(SPECS["recurrent"])
    run(service, HARBOUR)
    told = explain(service, HARBOUR[:300] + "X")
    assert (told.reason, told.n_known_tokens, told.n_held_tokens) == ("checkpoint", 0, 301)


@pytest.mark.usefixtures("restores")
def test_a_block_that_is_only_used_as_a_whole(make: Making) -> None:
    service = make(replace(SPEC, prefix_rule=PrefixRule.WINDOW, window_tokens=24))
    run(service, HARBOUR)
    off_device(service)
    told = explain(service, HARBOUR[:150] + "X")  # 151 tokens with the first: two blocks, and 23 tokens of the third
    assert (told.reason, told.known_tokens, told.n_held_tokens) == ("block_end", {"ram": 128}, 151)


def test_so_little_that_computing_is_quicker(make: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make()
    run(service, HARBOUR)
    off_device(service)
    monkeypatch.setattr(StepCost, "restore_pays", lambda *of: False)
    told = explain(service, HARBOUR)
    assert (told.reason, told.n_known_tokens) == ("too_little", 0)
    assert told.n_held_tokens == told.n_prompt_tokens


@pytest.mark.parametrize("name", ["any", "recurrent", "window"])
def test_what_had_to_make_room(name: str, make: Making) -> None:
    service = make(replace(SPECS[name], pool_tokens=900), ram_bytes=3000)
    run(service, HARBOUR)
    off_device(service)
    for text in ("Mountains", "Rivers", "Deserts", "Forests"):
        run(service, f"{text} are what this text is about. " * 12)
    assert explain(service, HARBOUR).reason == "evicted"
    assert explain(service, "Never was there such a text. " * 9).reason == "never_seen"


def test_another_adapter(make: Making) -> None:
    service = make(replace(SPEC, adapters=("formal",)))
    tokens = service.prompt_tokens(asking(HARBOUR))
    for salt, wanted in (("someone else", "never_seen"), ("", "adapter")):
        chain = service._tiers.blank(("formal", salt)).chain
        service._tiers.put(chain.block(tokens, 0, 64), b"blob", Note(len(tokens)))
        assert explain(service, HARBOUR).reason == wanted


@pytest.mark.parametrize("name", ["any", "recurrent"])
def test_other_load_settings_of_the_same_model(name: str, make: Making) -> None:
    spec = SPECS[name]
    before = make(replace(spec, fingerprint="f16"), disk="kv")
    run(before, HARBOUR * 4)
    before.close()
    after = make(replace(spec, fingerprint="q8_0"), disk="kv")
    told = explain(after, HARBOUR * 4 + "When?")
    assert (told.reason, told.n_held_tokens) == ("other_settings", 0)
    assert explain(after, OTHER).reason == "never_seen"
    assert explain(after, HARBOUR * 4 + "When?", salt="another").reason == "never_seen"


@pytest.mark.usefixtures("restores")
def test_the_same_settings_are_found_again_after_a_restart(make: Making) -> None:
    before = make(disk="kv")
    run(before, HARBOUR * 4)
    before.close()
    after = make(disk="kv")
    told = explain(after, HARBOUR * 4)
    assert (told.reason, told.tier) == ("complete", "disk")
    assert run(after, HARBOUR * 4) == known(told)


class Clock(datetime):
    days = 0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime(2026, 3, 5) + timedelta(days=cls.days)


@pytest.mark.parametrize(
    ("days", "reason"), [(0, "complete"), (1, "template_date"), (5, "template_date"), (9, "never_seen")]
)
@pytest.mark.parametrize("is_on_device", [True, False])
def test_the_day_that_the_template_writes(
    days: int, reason: str, is_on_device: bool, make: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "datetime", Clock)
    monkeypatch.setattr(Clock, "days", 0)
    service = make(template=DATED)
    conversation = ChatRequest(({"role": "user", "content": HARBOUR},), GenerationOptions(max_tokens=2))
    collect(service.submit(conversation))
    settle(service)
    if not is_on_device:
        off_device(service)
    monkeypatch.setattr(Clock, "days", days)
    assert service.explain(conversation).reason == reason
    other = replace(conversation, messages=({"role": "user", "content": OTHER},))
    assert service.explain(other).reason == "never_seen"


def test_another_request_is_computing_it(make: Making) -> None:
    steps, is_at_work = threading.Semaphore(0), threading.Event()

    def wait(batch: Batch) -> None:
        is_at_work.set()
        steps.acquire(timeout=WAIT_S)

    service = make(replace(SPEC, max_batch_tokens=64), on_forward=wait)
    stream = service.submit(asking(HARBOUR))
    assert is_at_work.wait(WAIT_S)
    told: list[Explanation] = []
    asker = threading.Thread(target=lambda: told.append(explain(service, HARBOUR)))
    asker.start()
    time.sleep(0.02)
    steps.release()
    asker.join(WAIT_S)
    steps.release(1000)
    collect(stream)
    assert told[0].reason == "in_progress"
    assert told[0].n_held_tokens < told[0].n_prompt_tokens - 1


# Nobody else's


@pytest.mark.parametrize("name", ["any", "window", "recurrent"])
def test_no_word_of_another_request_is_ever_told(name: str, make: Making) -> None:
    service, rng = make(replace(SPECS[name], pool_tokens=800), ram_bytes=4000, disk="kv"), random.Random(name)
    for _ in range(40):
        shared = HARBOUR[: rng.randrange(200)]
        secret = "".join(rng.choices("0123456789", k=60))
        run(service, shared + secret)
        mine = shared + "".join(rng.choices("abcdefghijklmnop ", k=rng.randrange(1, 60)))
        told = explain(service, mine)
        assert not any(digit in repr(asdict(told.diverges_at)["text"] if told.diverges_at else "") for digit in secret)
        if told.diverges_at is not None:
            at = told.diverges_at
            assert (f"<s>{mine}").find(at.before + at.text + at.after) >= 0
            assert len(at.before) <= 80
            assert len(at.after) <= 80


def test_another_salt_sees_nothing(make: Making) -> None:
    service = make()
    run(service, HARBOUR, salt="a")
    for salt in ("b", ""):
        told = explain(service, HARBOUR, salt=salt)
        assert (told.reason, told.n_held_tokens, told.age_s, told.tier) == ("never_seen", 0, None, "")
    off_device(service)
    assert explain(service, HARBOUR, salt="b").n_held_tokens == 0
    assert explain(service, HARBOUR, salt="a").reason == "complete"


# Warming


@pytest.mark.usefixtures("restores")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_warmed_document_is_known_to_its_end_whatever_follows(spec: EngineSpec, make: Making) -> None:
    service = make(spec)
    warmed = service.warm(CompletionRequest(HARBOUR))
    assert warmed.n_tokens == warmed.n_computed_tokens == len(service.prompt_tokens(asking(HARBOUR)))
    assert warmed.kept_tokens == {"device": warmed.n_tokens, "ram": warmed.n_tokens, "disk": 0}
    assert warmed.is_pinned
    for question in (" When?", "\n\nWhat does it cost?", "1"):
        off_device(service)
        assert run(service, HARBOUR + question) == {"ram": warmed.n_tokens}


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_conversations_beginning_is_warmed_as_far_as_any_next_turn_goes(role: str, make: Making) -> None:
    service = make()
    beginning = {"role": role, "content": HARBOUR}
    warmed = service.warm(ChatRequest((beginning,)))
    if role == "user":
        turns = ({"role": "user", "content": HARBOUR + "\n\nWhen?"},)
    else:
        turns = (beginning, {"role": "user", "content": "When?"})
    usage = collect(service.submit(ChatRequest(turns, GenerationOptions(max_tokens=2)))).usage
    assert usage.cached_tokens["device"] == warmed.n_tokens > len(HARBOUR)


def test_parts_of_a_message_are_warmed_too(make: Making) -> None:
    service = make()
    parts = {"role": "user", "content": [{"type": "text", "text": HARBOUR}]}
    assert service.document(ChatRequest((parts,))) == service.document(
        ChatRequest(({"role": "user", "content": HARBOUR},))
    )


def test_ids_are_warmed_as_they_are(make: Making) -> None:
    service = make()
    warmed = service.warm(CompletionRequest(tuple(range(32, 110))))
    assert (warmed.n_tokens, warmed.kept_tokens["ram"]) == (78, 78)


@pytest.mark.usefixtures("restores")
def test_what_is_pinned_outlives_all_that_comes_after(make: Making) -> None:
    service = make(replace(SPEC, pool_tokens=900), ram_bytes=6000)
    n_tokens = service.warm(CompletionRequest(HARBOUR)).n_tokens
    for at in range(12):
        run(service, f"Quite another text, number {at}. " * 15)
    assert explain(service, HARBOUR + "When?").known_tokens == {"ram": n_tokens}


def test_warming_again_finds_it_and_pins_it(make: Making) -> None:
    service = make()
    run(service, HARBOUR + "When?")
    warmed = service.warm(CompletionRequest(HARBOUR))
    assert (warmed.n_computed_tokens, warmed.found_tokens["device"]) == (1, warmed.n_tokens - 1)
    assert warmed.kept_tokens["ram"] == warmed.n_tokens


@pytest.mark.usefixtures("restores")
def test_a_warmed_document_lies_on_disk_and_is_there_after_a_restart(make: Making, tmp_path: Path) -> None:
    before = make(disk="kv")
    warmed = before.warm(CompletionRequest(HARBOUR))  # short as it is: what is pinned is written at once
    assert warmed.kept_tokens == dict.fromkeys(("device", "ram", "disk"), warmed.n_tokens)
    before.close()
    after = make(disk="kv")
    assert run(after, HARBOUR + "When?") == {"disk": warmed.n_tokens}
    assert any((tmp_path / "kv").rglob("*.pin.kv"))


def test_what_is_private_is_pinned_in_ram_alone(make: Making, tmp_path: Path) -> None:
    service = make(disk="kv")
    warmed = service.warm(CompletionRequest(HARBOUR, GenerationOptions(is_private=True)))
    assert warmed.kept_tokens == {"device": warmed.n_tokens, "ram": warmed.n_tokens, "disk": 0}
    service.close()
    assert not any((tmp_path / "kv").rglob("*.kv"))


def test_without_tiers_nothing_is_pinned(make: Making) -> None:
    warmed = make(ram_bytes=0).warm(CompletionRequest(HARBOUR))
    assert not warmed.is_pinned
    assert warmed.kept_tokens["device"] == warmed.n_tokens


def test_what_happens_while_warming_is_told(make: Making) -> None:
    seen: list[events.Event] = []
    make(replace(SPEC, max_batch_tokens=64)).warm(CompletionRequest(HARBOUR), seen.append)
    assert isinstance(seen[-1], events.Done)
    assert any(isinstance(event, events.Progress) for event in seen)


def test_what_cannot_be_warmed_is_refused(make: Making) -> None:
    service = make()
    for request in (CompletionRequest("a", suffix="b"), EmbeddingRequest(("a",))):
        with pytest.raises(UsageError):
            service.document(request)
    with pytest.raises(UsageError):
        service.explain(EmbeddingRequest(("a",)))


# Counting and clearing


def test_clearing_leaves_nothing(make: Making, tmp_path: Path) -> None:
    service = make(disk="kv")
    run(service, HARBOUR * 4)
    service.warm(CompletionRequest(OTHER))
    held = service.cache_stats()
    cleared = service.clear_cache()
    assert cleared.n_device_cells == held.retained_cells > 0
    assert (cleared.n_ram_blocks, cleared.ram_bytes) == (held.n_ram_blocks, held.ram_bytes)
    assert cleared.n_disk_blocks > 0
    assert cleared.disk_bytes > 0
    assert not any((tmp_path / "kv").rglob("*.kv"))
    left = service.cache_stats()
    assert (left.used_cells, left.ram_bytes, left.n_ram_blocks) == (0, 0, 0)
    for text in (HARBOUR * 4, OTHER):
        told = explain(service, text)
        assert (told.reason, told.n_held_tokens) == ("never_seen", 0)
    assert run(service, HARBOUR * 4) == {}


@pytest.mark.usefixtures("restores")
@pytest.mark.parametrize("kind", ["any", "window", "recurrent"])
def test_what_ends_or_is_put_back_while_files_are_cleared_leaves_nothing_either(
    kind: str, make: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, begun, goes_on = make(SPECS[kind], disk="kv"), threading.Event(), threading.Event()
    run(service, HARBOUR * 4)
    off_device(service)
    disk = service._tiers.disk
    assert disk is not None
    clear = disk.clear

    def slow() -> tuple[int, int]:
        begun.set()
        assert goes_on.wait(WAIT_S)
        return clear()

    monkeypatch.setattr(disk, "clear", slow, raising=False)
    cleared = list[Cleared]()
    clearing = threading.Thread(target=lambda: cleared.append(service.clear_cache()))
    clearing.start()
    assert begun.wait(WAIT_S)
    assert service.cache_stats().n_ram_blocks == 0
    run(service, HARBOUR * 4)  # from the files that are about to go, into RAM and a slot
    assert service.cache_stats().n_ram_blocks > 0
    goes_on.set()
    clearing.join(WAIT_S)
    assert cleared
    left = service.cache_stats()
    assert (left.used_cells, left.ram_bytes, left.n_ram_blocks) == (0, 0, 0)
    assert explain(service, HARBOUR * 4).n_held_tokens == 0
    assert not any((tmp_path / "kv").rglob("*.kv"))


def test_what_was_to_be_exported_of_a_cleared_slot_is_not(make: Making) -> None:
    service = make()
    run(service, HARBOUR)

    def evict_then_clear() -> None:
        scheduler = service._scheduler
        scheduler.tiers.clear_ram()
        assert scheduler._room.evict_one()
        assert scheduler.exports.has_work
        service._caches._clear_held()
        assert not scheduler.exports.has_work

    service._on_engine(evict_then_clear)
    assert service.cache_stats().n_ram_blocks == 0


@pytest.mark.parametrize("kind", ["window", "own memory"])
def test_who_runs_while_all_is_cleared_is_kept_from_its_beginning(kind: str, make: Making) -> None:
    service = make(SPECS[kind], on_forward=lambda batch: time.sleep(0.001))
    stream = service.submit(asking(HARBOUR, max_tokens=60))
    while service.stats().n_generated_tokens < 5:
        time.sleep(0.001)
    service.clear_cache()
    answer = collect(stream)
    settle(service)
    turn = HARBOUR + answer.text + " And then?"
    off_device(service)
    told = explain(service, turn)
    n_blocks = service.cache_stats().n_ram_blocks
    entries = list(service._tiers._ram)
    held = {entry.block.key for entry in entries}
    assert n_blocks > 0
    assert all(not entry.block.start or entry.block.parent in held for entry in entries), told


def test_clearing_forgets_what_was_generated(make: Making) -> None:
    service = make(script=next_token)
    collect(service.submit(ChatRequest(({"role": "user", "content": HARBOUR},), GenerationOptions(max_tokens=20))))
    assert service._answers is not None
    assert service._answers.n_bytes > 0
    service.clear_cache()
    assert service._answers.n_bytes == 0


def test_clearing_beside_work_loses_no_answer(make: Making) -> None:
    service = make(on_forward=lambda batch: time.sleep(0.001))
    alone = collect(make().submit(asking(HARBOUR, max_tokens=40)))
    streams = [service.submit(asking(HARBOUR, max_tokens=40)) for _ in range(4)]
    for _ in range(10):
        service.clear_cache()
    assert [collect(stream).choices[0].ids for stream in streams] == [alone.choices[0].ids] * 4


@pytest.mark.usefixtures("restores")
def test_sources_are_counted_apart(make: Making) -> None:
    service = make()
    n_prompt = len(service.prompt_tokens(asking(HARBOUR)))
    run(service, HARBOUR)
    run(service, HARBOUR)
    off_device(service)
    run(service, HARBOUR)
    stats = service.cache_stats()
    assert stats.prompt_tokens == {"computed": n_prompt + 2, "device": n_prompt - 1, "ram": n_prompt - 1, "disk": 0}
    assert stats.n_restored_blocks > 0
    assert stats.disk is None


def disk_bytes(service: Service) -> int:
    return int((service.cache_stats().disk or {})["used_bytes"])


def test_what_lay_on_disk_before_is_counted_once_somebody_asks(make: Making, tmp_path: Path) -> None:
    before = make(disk="kv")
    before.warm(CompletionRequest(HARBOUR))
    before.close()
    n_bytes = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.kv"))
    after = make(disk="kv")
    wait_until(lambda: disk_bytes(after) == n_bytes > 0)
    after.clear_cache()
    wait_until(lambda: disk_bytes(after) == 0)


def test_counting_waits_for_no_folder(make: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, lookers = threading.Event(), list[str]()
    entries = disk_room._entries

    def slowly(folder: Path) -> Any:
        lookers.append(threading.current_thread().name)
        assert goes_on.wait(WAIT_S)
        return entries(folder)

    before = make(disk="kv")
    before.warm(CompletionRequest(HARBOUR))
    before.close()
    monkeypatch.setattr(disk_room, "_entries", slowly)
    service = make(disk="kv")
    try:
        for _ in range(5):
            assert disk_bytes(service) == 0
        wait_until(lambda: bool(lookers))
        assert disk_bytes(service) == 0
    finally:
        goes_on.set()
    wait_until(lambda: disk_bytes(service) > 0)
    assert set(lookers) == {"localllm-kv-write"}


# The engine's thread


def test_a_folder_that_hangs_holds_up_no_request_and_its_questions_end(
    make: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking_module, "STEP_S", 0.1)
    monkeypatch.setattr(caches, "_ANSWER_S", 0.2)
    service, gate, real = make(disk="kv"), threading.Event(), DiskIndex.children
    run(service, HARBOUR)
    off_device(service)

    def hangs(index: DiskIndex, parent: bytes) -> list[Found]:
        gate.wait(30)
        return real(index, parent)

    monkeypatch.setattr(DiskIndex, "children", hangs)
    begun_s = time.monotonic()
    assert run(service, HARBOUR).get("ram")
    for number in range(4):
        run(service, f"{number} {OTHER}")
    with pytest.raises(Unavailable):
        service.explain(asking(HARBOUR))
    assert service.cache_stats().disk is not None
    assert time.monotonic() - begun_s < 10
    gate.set()


def test_a_model_is_loaded_without_a_folder_that_hangs(make: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(disk_module, "_OPEN_S", 0.1)
    monkeypatch.setattr(disk_module, "open_folder", lambda folder: b"s" * 32 if gate.wait(30) else b"")
    service = make(disk="kv")
    assert run(service, HARBOUR) == {}
    told = service.cache_stats().disk
    assert told is not None
    assert "does not answer" in str(told["failure"])
    assert service.clear_cache().n_disk_blocks == 0
    gate.set()


def test_a_question_that_fails_is_the_askers_alone(make: Making) -> None:
    service = make()

    def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        service._on_engine(fail)
    assert service.is_alive
    assert run(service, HARBOUR) == {}


def test_a_closed_model_answers_no_questions(make: Making) -> None:
    service = make()
    service.close()
    for ask in (lambda: explain(service, HARBOUR), service.clear_cache, lambda: service.warm(asking(HARBOUR))):
        with pytest.raises(Unavailable):
            ask()


def test_who_waits_for_an_engine_that_dies_is_told(make: Making) -> None:
    goes_on = threading.Event()

    def die() -> None:
        goes_on.wait(WAIT_S)
        raise SystemExit

    service = make()
    service.ping(die)
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            explain(service, HARBOUR)
        except BaseException as error:
            failures.append(error)

    asker = threading.Thread(target=ask)
    asker.start()
    time.sleep(0.05)
    goes_on.set()
    asker.join(WAIT_S)
    assert not asker.is_alive()
    assert isinstance(failures[0], (EngineError, Unavailable))


def test_what_is_kept_is_told_while_another_sequence_runs_on(make: Making) -> None:
    service = make(replace(SPECS["window"], max_sequence_tokens=4096), on_forward=lambda batch: time.sleep(0.002))
    stream = service.submit(asking(OTHER, max_tokens=3000, ignore_eos=True))
    run_beside = collect(service.submit(asking(HARBOUR)))
    assert run_beside.usage.prompt_tokens
    started_s = time.monotonic()
    kept = service.kept(asking(HARBOUR))
    elapsed_s = time.monotonic() - started_s
    assert not stream._ended
    stream.cancel()
    assert kept["ram"] > 0
    assert elapsed_s < 5  # not all of the time that it may take
