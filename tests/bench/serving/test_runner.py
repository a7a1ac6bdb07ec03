"""Whole runs on made-up servers: what is sent, in which order, what counts, and what is said of odd servers."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localllm import compose
from localllm.bench.client.calls import End, Outcome
from localllm.bench.serving.driving import Kept
from localllm.bench.serving.result import RunResult
from localllm.bench.serving.runner import Runner
from localllm.bench.serving.spec import Api, Cache, Load, RunSpec
from localllm.bench.workloads.ask import Ask
from localllm.errors import LocalLLMError, ServerUnreachable, UsageError
from tests.bench.client.stand_in import Reply, Seen
from tests.bench.serving.asked import MadeUp, chats, conversation, turn
from tests.bench.serving.rival import Fault, Rival, served


@dataclass
class Given:
    """A server that runs; `on_restart` makes it one that can be restarted."""

    url: str
    name: str = "rival"
    ready_s: float | None = None
    can_restart: bool = False
    on_restart: Any = None
    stopped: list[float] = field(default_factory=list)

    def pids(self) -> Sequence[int]:
        return ()

    def restart(self) -> None:
        self.on_restart()

    def stop(self) -> None:
        self.stopped.append(time.perf_counter())


@contextmanager
def runner(rival: Rival, api: Api = "openai-chat", **settings: Any) -> Iterator[Runner]:
    with served(rival) as url:
        yield Runner(Given(url, **settings), api, on_progress=lambda what, done, total: None)


def spec(**fields: Any) -> RunSpec:
    known: dict[str, Any] = {"workload": chats(), "load": Load(concurrency=1), "n_requests": 6, "n_warmup": 0}
    return RunSpec(**(known | fields))


def run(rival: Rival, **fields: Any) -> RunResult:
    with runner(rival) as one:
        return one.run(spec(**fields))


def notes(result: RunResult) -> str:
    return "; ".join(result.notes)


def ends(result: RunResult) -> list[str]:
    return [sample.outcome.end.value for sample in result.samples]


# --- what is sent


def test_each_cold_request_begins_with_text_of_its_own() -> None:
    rival = Rival()
    result = run(rival, cache=Cache.COLD)
    counted = rival.texts()[1:]  # the trial comes first
    assert len(counted) == len(set(counted)) == len(result.samples) == 6
    assert len({len(text) for text in counted}) == 1
    assert ends(result) == ["answer"] * 6


def test_warm_requests_share_a_salt_and_what_their_sessions_begin_with_was_sent_before() -> None:
    rival = Rival()
    result = run(rival, cache=Cache.WARM)
    before, counted = rival.asked[1:2], rival.asked[2:]
    assert len(counted) == len(result.samples) == 6
    salts = {text.partition("]")[0] for text in rival.texts()[1:]}
    assert len(salts) == 1
    assert {one["max_tokens"] for one in before} == {1}
    assert {one["max_tokens"] for one in counted} != {1}
    assert all(one["messages"][:1] == before[0]["messages"][:-1] for one in counted)
    assert "what 2 sessions begin with was sent before, in 1 request" in notes(result)


def test_what_was_sent_before_is_counted_in_words_that_agree() -> None:
    rival = Rival()
    result = run(rival, cache=Cache.WARM, n_requests=1)
    assert "what 1 session begins with was sent before, in 1 request" in notes(result)


def test_no_two_runs_share_a_salt() -> None:
    rival = Rival()
    with runner(rival) as one:
        for _ in range(2):
            one.run(spec(cache=Cache.WARM, n_requests=2))
    assert len({text.partition("]")[0] for text in rival.texts()}) == 3  # the trial and two runs


def test_warm_up_has_salts_of_its_own_and_does_not_count() -> None:
    rival = Rival()
    result = run(rival, cache=Cache.WARM, n_warmup=3)
    assert result.n_warmed_up == 3
    assert len(result.samples) == 6
    assert len(rival.asked) == 1 + 3 + 1 + 6
    salts = [text.partition("]")[0] for text in rival.texts()]
    assert len(set(salts[:4])) == 4
    assert len(set(salts[4:])) == 1


def test_restart_comes_between_the_beginnings_and_what_counts() -> None:
    first, second = Rival(), Rival(models=("other", "small"))
    with served(first) as url, served(second) as other:
        given = Given(url, can_restart=True)

        def restart() -> None:
            given.url = other

        given.on_restart = restart
        one = Runner(given, "openai-chat", on_progress=lambda *_: None)
        result = one.run(spec(cache=Cache.RESTART, n_warmup=1))
        assert one.endpoint.target.port == int(other.rpartition(":")[2])
    assert len(first.asked) == 1 + 2
    assert len(second.asked) == 1 + 6
    assert {body["model"] for body in second.asked} == {"small"}
    assert len({text.partition("]")[0] for text in (*first.texts()[1:], *second.texts()[1:])}) == 1
    assert ends(result) == ["answer"] * 6
    assert "what requests leave for each other after the restart counts as cached too" in notes(result)


def test_restart_of_a_server_that_is_not_ours_is_refused_before_anything_is_sent() -> None:
    rival = Rival()
    with runner(rival) as one, pytest.raises(UsageError, match="was not"):
        one.run(spec(cache=Cache.RESTART))
    assert rival.asked == []


def test_a_session_is_sent_in_order_and_clients_have_one_each() -> None:
    rival = Rival(token_s=0.005)
    run(rival, load=Load(concurrency=3), n_requests=9)
    turns = [one["messages"][-1]["content"] for one in rival.asked[1:]]
    for name in ("c0", "c1", "c2"):
        assert [text for text in turns if text.startswith(f"{name} ")] == [f"{name} asks {n}" for n in range(3)]
    assert rival.n_most_open == 3


def test_the_same_seed_asks_the_same_but_for_the_salts() -> None:
    def asked() -> list[list[str]]:
        rival = Rival()
        run(rival, n_requests=5)
        return [[message["content"].rpartition("] ")[2] for message in one["messages"]] for one in rival.asked]

    assert asked() == asked()


def test_an_open_loop_keeps_its_times_whatever_the_server_does() -> None:
    rival = Rival(first_s=0.2)
    result = run(rival, load=Load(rate_per_s=50.0), n_requests=10)
    due_s = sorted(sample.outcome.due_s for sample in result.samples)
    assert due_s[-1] - due_s[0] < 1.0
    assert rival.n_most_open > 1  # it does not wait for answers
    assert len(result.samples) == 10


def test_a_rate_that_the_client_cannot_keep_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(self: Kept, outcome: Outcome) -> None:
        time.sleep(0.05)  # who keeps outcomes holds up the loop that sends
        self.outcomes.append(outcome)

    assert "could not keep the rate" not in notes(run(Rival(), load=Load(rate_per_s=20.0)))
    monkeypatch.setattr(Kept, "__call__", slow)
    result = run(Rival(), load=Load(rate_per_s=500.0), n_requests=20)
    assert "of 20 requests were sent later than they were due" in notes(result)
    assert "could not keep the rate" in notes(result)


def test_a_trace_is_sent_at_its_recorded_times() -> None:
    asks = [replace(turn(f"t{n}"), at_s=at_s) for n, at_s in enumerate((0.3, 0.0, 0.15))]
    rival = Rival()
    result = run(rival, workload=MadeUp([(one,) for one in asks], is_trace=True), load=Load(), n_requests=None)
    due_s = {result_ask: sample.outcome.due_s for sample in result.samples if (result_ask := sample.outcome.label)}
    assert due_s["0"] - due_s["1"] == pytest.approx(0.3)
    assert due_s["2"] - due_s["1"] == pytest.approx(0.15)


def test_a_trace_ends_where_the_time_does() -> None:
    asks = [replace(turn(f"t{n}"), at_s=n * 0.1) for n in range(10)]
    workload = MadeUp([(one,) for one in asks], is_trace=True)
    assert len(run(Rival(), workload=workload, load=Load(), n_requests=None, duration_s=0.25).samples) == 3


def test_a_workload_of_less_than_what_was_asked_for_ends_with_it() -> None:
    workload = MadeUp([conversation("a", 3)], is_trace=True)
    assert len(run(Rival(), workload=workload, n_requests=50).samples) == 3


# --- when it ends


@pytest.mark.parametrize("load", [Load(concurrency=2), Load(rate_per_s=40.0)])
def test_time_and_number_whichever_is_first(load: Load) -> None:
    rival = Rival(token_s=0.01)
    few = run(rival, load=load, n_requests=3, duration_s=30.0)
    assert len(few.samples) == 3
    short = run(rival, load=load, n_requests=1000, duration_s=0.3)
    assert 0 < len(short.samples) < 100
    assert not few.partial
    assert not short.partial


@pytest.mark.parametrize("cache", [Cache.COLD, Cache.WARM])
def test_a_run_of_a_given_time_ends_with_it(cache: Cache) -> None:
    result = run(Rival(token_s=0.005), cache=cache, n_requests=None, duration_s=0.5, load=Load(concurrency=2))
    assert 0.4 < result.duration_s < 10
    assert len(result.samples) > 1
    assert not result.partial


def test_cold_runs_go_on_past_what_was_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AHEAD", 5)
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AT_FIRST", 5)
    for load in (Load(concurrency=1), Load(rate_per_s=60.0)):
        rival = Rival()
        result = run(rival, n_requests=None, duration_s=0.6, load=load)
        assert len(result.samples) > 5, load
        assert len(set(rival.texts())) == len(rival.asked)
        assert sorted(int(sample.outcome.label) for sample in result.samples) == list(range(len(result.samples)))


@pytest.mark.parametrize("load", [Load(concurrency=3), Load(rate_per_s=300.0)])
def test_a_number_beyond_what_was_made_ahead_is_kept_to(monkeypatch: pytest.MonkeyPatch, load: Load) -> None:
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AHEAD", 7)
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AT_FIRST", 5)
    rival = Rival(token_s=0.001)
    result = run(rival, workload=chats(100), load=load, n_requests=40)
    assert sorted(int(sample.outcome.label) for sample in result.samples) == list(range(40))
    assert rival.n_most_open <= 3 or load.concurrency is None


def test_turns_of_one_session_never_overlap_also_beyond_what_was_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AHEAD", 6)
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AT_FIRST", 4)
    open_now: set[str] = set()

    async def alone(rival: Rival, seen: Seen, reply: Reply) -> bool:
        name = str(seen.fields["messages"][-1]["content"]).split(" ")[0]
        assert name not in open_now
        open_now.add(name)
        await rival._stream(seen.fields, reply)
        open_now.discard(name)
        return True

    result = run(Rival(fault=alone, token_s=0.003), load=Load(concurrency=4), n_requests=60)
    assert ends(result) == ["answer"] * 60


def test_all_of_a_warm_run_is_made_and_sent_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AHEAD", 6)
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AT_FIRST", 4)
    result = run(Rival(), cache=Cache.WARM, n_requests=12)
    assert len(result.samples) == 12
    assert "what 4 sessions begin with was sent before, in 1 request" in notes(result)


def test_warm_runs_end_with_what_was_sent_before_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AHEAD", 5)
    monkeypatch.setattr("localllm.bench.serving.one_run.N_AT_FIRST", 5)
    for load in (Load(concurrency=1), Load(rate_per_s=100.0)):
        result = run(Rival(), cache=Cache.WARM, n_requests=None, duration_s=5.0, load=load)
        assert len(result.samples) == 5
        assert "the run ended before its time: what 5 requests begin with was sent before" in notes(result)


def after(n: int, then: Callable[[], None], *, hangs: bool = False) -> Fault:
    """Return a fault that does something at the n-th request, and answers it or not."""

    async def fault(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) == n:
            then()
            if hangs:
                await asyncio.sleep(60)
        return False

    return fault


def test_a_stop_keeps_what_is_complete() -> None:
    rival = Rival(first_s=0.01)
    with runner(rival) as one:
        rival.fault = after(12, one.stop)
        result = one.run(spec(n_requests=1000, load=Load(concurrency=4)))
        again = one.run(spec(n_requests=1000))
    assert result.partial
    assert 0 < len(result.samples) < 20
    assert set(ends(result)) == {"answer"}
    assert "ended early" in notes(result)
    assert again.partial
    assert again.samples == ()


def test_a_stop_while_requests_are_made_ends_that() -> None:
    def endless() -> Iterator[Any]:
        for n in itertools.count():
            if n == 300:
                one.stop()
            yield conversation(str(n), 1)

    class Endless(MadeUp):
        def sessions(self, seed: int) -> Iterator[Any]:
            return endless()

    with runner(Rival()) as one:
        result = one.run(spec(workload=Endless([]), n_requests=10**9, cache=Cache.WARM))
    assert result.partial
    assert result.samples == ()


def test_a_stop_ends_a_request_that_hangs() -> None:
    rival = Rival()
    with runner(rival) as one:
        rival.fault = after(4, one.stop, hangs=True)
        result = one.run(spec())
    assert result.partial
    assert len(result.samples) == 2  # after the trial


def test_a_stop_while_it_restarts_gives_the_restart_up() -> None:
    going = threading.Event()

    def restart() -> None:
        going.wait(10)
        raise ServerUnreachable("It ended.", "start it")

    with served(Rival()) as url:
        given = Given(url, can_restart=True)
        given.stop = going.set  # type: ignore[method-assign]
        one = Runner(given, "openai-chat", on_progress=lambda *_: None)

        def stopped_meanwhile() -> None:
            one.stop()
            restart()

        given.on_restart = stopped_meanwhile
        result = one.run(spec(cache=Cache.RESTART))
    assert going.is_set()
    assert result.partial
    assert result.samples == ()


def test_a_server_that_does_not_come_back_is_the_failure() -> None:
    def restart() -> None:
        raise ServerUnreachable("It ended.", "start it")

    with runner(Rival(), can_restart=True, on_restart=restart) as one, pytest.raises(LocalLLMError, match="It ended"):
        one.run(spec(cache=Cache.RESTART))


def test_a_server_that_dies_ends_the_run_and_keeps_what_there_is() -> None:
    enough, results = threading.Event(), list[RunResult]()
    with runner(Rival(fault=after(10, enough.set))) as one:
        endless = spec(n_requests=None, duration_s=60.0, load=Load(concurrency=2))
        thread = threading.Thread(target=lambda: results.append(one.run(endless)))
        thread.start()
        assert enough.wait(30)
    thread.join(30)  # the server is gone now
    (result,) = results
    assert result.partial
    assert End.ANSWER.value in ends(result)
    assert "the server stopped answering after" in notes(result)
    assert result.duration_s < 50


# --- odd servers


def test_answers_without_usage_are_counted_by_the_servers_tokenizer() -> None:
    rival = Rival(tells_usage=False, routes={"/tokenize": lambda fields: {"tokens": fields["content"].split() * 2}})
    result = run(rival)
    assert result.token_source == "server tokenizer"
    assert {sample.output_tokens for sample in result.samples} == {8}
    assert "6 of 6 answers came without usage" in notes(result)


@pytest.mark.real
def test_answers_without_usage_are_counted_by_the_models_own_file(smollm2: Path) -> None:
    rival = Rival(tells_usage=False)
    _, info = compose.find(smollm2)
    with served(rival) as url:
        result = Runner(
            Given(url), "openai-chat", info_of=lambda endpoint: info, on_progress=lambda what, done, total: None
        ).run(spec())
    assert result.token_source == "local tokenizer"
    with closing(compose.open_tokenizer(smollm2)) as opened:
        texts = [sample.outcome.text for sample in result.samples]
        counted = [len(opened.tokenizer.encode(text, parse_special=False)) for text in texts]
    assert [sample.output_tokens for sample in result.samples] == counted
    assert "the model's own file counts" in notes(result)


def test_an_empty_answer_does_not_change_who_counts_the_others() -> None:
    async def first_is_empty(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) != 2:  # after the trial
            return False
        await reply.begin_stream()
        await reply.finish()
        await reply.end_stream()
        return True

    routes = {"/tokenize": lambda fields: {"tokens": fields["content"].split() * 2}}
    result = run(Rival(tells_usage=False, routes=routes, fault=first_is_empty))
    assert result.token_source == "server tokenizer"
    assert [sample.output_tokens for sample in result.samples] == [0, 8, 8, 8, 8, 8]


def test_answers_without_usage_and_without_a_tokenizer_are_counted_in_pieces() -> None:
    result = run(Rival(tells_usage=False))
    assert result.token_source == "pieces"
    assert {sample.output_tokens for sample in result.samples} == {4}
    assert "pieces of text are counted as tokens" in notes(result)


def test_a_server_that_keeps_no_max_tokens_is_told_of() -> None:
    result = run(Rival(keeps_max_tokens=False, natural_tokens=9))
    assert all(sample.is_over_limit for sample in result.samples)
    assert "6 of 6 answers are longer than their max_tokens" in notes(result)


def test_streams_that_break_the_rules_are_counted_and_told() -> None:
    async def garble(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) % 2:
            return False
        await reply.begin_stream()
        await reply.chunk(b"data: {not json\n\n")
        await reply.end_stream()
        return True

    result = run(Rival(fault=garble))
    assert sorted(ends(result)) == ["answer"] * 3 + ["malformed"] * 3
    assert "3 of 6 requests got an answer that breaks the rules" in notes(result)


def test_answers_that_come_whole_are_told_of() -> None:
    async def whole(rival: Rival, seen: Seen, reply: Reply) -> bool:
        choice = {"index": 0, "message": {"role": "assistant", "content": "a b"}, "finish_reason": "stop"}
        await reply.json({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 2}})
        return True

    result = run(Rival(fault=whole))
    assert ends(result) == ["answer"] * 6
    assert "6 of 6 answers came whole, not as a stream" in notes(result)


def test_usage_that_counts_fewer_tokens_than_pieces_came_is_told_of() -> None:
    async def stingy(rival: Rival, seen: Seen, reply: Reply) -> bool:
        await reply.begin_stream()
        for _ in range(4):
            await reply.text("word ")
        await reply.finish()
        await reply.end_stream(usage={"prompt_tokens": 7, "completion_tokens": 0})
        return True

    assert "6 of 6 answers came in far more pieces than their usage says" in notes(run(Rival(fault=stingy)))
    assert "pieces" not in notes(run(Rival()))


def test_a_server_that_ends_no_answer_is_given_up_at_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(rival: Rival, seen: Seen, reply: Reply) -> bool:
        await reply.begin_stream()
        await asyncio.sleep(30)
        return True

    rival = Rival(fault=hang)
    with served(rival) as url:
        one = Runner(Given(url), "openai-chat", on_progress=lambda *_: None)
        hurried = replace(one.endpoint, target=replace(one.endpoint.target, timeout_s=0.2))
        monkeypatch.setattr(Runner, "endpoint", hurried)
        with pytest.raises(ServerUnreachable, match=r"does not answer a short request: no end within 0\.2 s"):
            one.run(spec())
    assert len(rival.asked) == 1


def test_a_server_that_stops_ending_its_answers_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if len(rival.asked) > 3:
            await asyncio.sleep(30)
        return False

    rival = Rival(fault=hang)
    with served(rival) as url:
        one = Runner(Given(url), "openai-chat", on_progress=lambda *_: None)
        hurried = replace(one.endpoint, target=replace(one.endpoint.target, timeout_s=0.2))
        monkeypatch.setattr(Runner, "endpoint", hurried)
        result = one.run(spec(n_warmup=0, n_requests=30))
    assert result.partial
    assert "the server stopped answering after 2 answers: no end within 0.2 s" in notes(result)
    assert ends(result) == ["answer"] * 2 + ["timed_out"] * 3


def test_lost_connections_and_refusals_are_counted_and_told() -> None:
    async def fail(rival: Rival, seen: Seen, reply: Reply) -> bool:
        match len(rival.asked):
            case 3:
                await reply.begin_stream()
                await reply.text("half")
                reply.writer.close()
                return True
            case 4:
                await reply.json({"error": {"message": "queue is full"}}, "429 Too Many Requests")
                return True
        return False

    result = run(Rival(fault=fail))
    assert sorted(ends(result)) == ["answer"] * 4 + ["lost", "refused"]
    assert "1 of 6 requests were refused: HTTP 429: queue is full" in notes(result)
    assert "1 of 6 requests were lost" in notes(result)
    assert not result.partial


def test_a_key_that_is_refused_only_where_it_counts_has_its_own_sentence() -> None:
    rival = Rival(key="right", lists_to_anybody=True)
    with served(rival) as url:
        one = Runner(Given(url), "openai-chat", key="wrong", on_progress=lambda *_: None)
        with pytest.raises(ServerUnreachable, match="does not take the key"):
            one.run(spec())
        with pytest.raises(ServerUnreachable, match="asks for a key"):
            Runner(Given(url), "openai-chat", on_progress=lambda *_: None).run(spec())


# --- what an endpoint does not do


class Colour(msgspec.Struct, forbid_unknown_fields=True):
    name: str


def coloured(n_turns: int = 1) -> MadeUp:
    return chats(n_turns=n_turns, answer_type=Colour, is_free=False)


async def refuse(rival: Rival, seen: Seen, reply: Reply) -> bool:
    if "response_format" not in seen.fields:
        return False
    await reply.json({"error": {"message": "response_format is not supported"}}, "400 Bad Request")
    return True


def test_a_refused_field_makes_the_workload_unsupported() -> None:
    rival = Rival(fault=refuse)
    result = run(rival, workload=coloured())
    assert result.unsupported == "HTTP 400: response_format is not supported"
    assert result.samples == ()
    assert not result.partial
    assert len(rival.asked) == 1


@pytest.mark.parametrize(
    "body", [{"detail": "no schemas here"}, {"detail": [{"loc": ["body"], "msg": "no schemas here"}]}]
)
def test_a_refusal_in_words_of_its_own_is_one_too(body: dict[str, object]) -> None:
    async def refuse_so(rival: Rival, seen: Seen, reply: Reply) -> bool:
        await reply.json(body, "422 Unprocessable Entity")
        return True

    result = run(Rival(fault=refuse_so))
    assert (result.unsupported, result.samples) == ("HTTP 422: no schemas here", ())


def test_of_a_mix_the_refused_part_is_named() -> None:
    mixed = MadeUp([conversation("a", 2), (replace(turn("b"), kind="json", answer_type=Colour),)])
    assert run(Rival(fault=refuse), workload=mixed).unsupported.startswith("json: HTTP 400")


def test_answers_that_are_never_valid_make_it_unsupported() -> None:
    rival = Rival(answer="Here you are: blue")
    assert "not valid under the schema" in run(rival, workload=coloured()).unsupported
    assert len(rival.asked) == 3


def test_valid_answers_are_measured_and_judged() -> None:
    rival = Rival(answer='{"name": "blue"}')
    result = run(rival, workload=coloured())
    assert result.unsupported == ""
    assert [sample.is_valid for sample in result.samples] == [True] * 6
    assert "response_format" in rival.asked[-1]


def test_an_answer_that_is_cut_by_its_length_says_nothing_of_the_server() -> None:
    rival = Rival(natural_tokens=100)  # finish_reason length
    result = run(rival, workload=coloured())
    assert result.unsupported == ""
    assert [sample.is_valid for sample in result.samples] == [False] * 6


def test_a_tool_that_must_be_called_and_is_not_makes_it_unsupported() -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    workload = chats(tools=(tool,), tool_choice="required", is_free=False)
    assert "calls no tool" in run(Rival(), workload=workload).unsupported
    assert run(Rival(calls_tools=True), workload=workload).unsupported == ""


def test_what_the_api_has_no_field_for_is_unsupported_without_asking() -> None:
    rival = Rival()
    with runner(rival, "openai-completions") as one:
        assert "--api openai-chat" in one.run(spec(workload=coloured())).unsupported
    assert rival.asked == []


def test_texts_to_complete_are_measured_too() -> None:
    asks = [(Ask("fim", 4, prompt=f"def f{n}(\n    ", suffix="return x"),) for n in range(8)]
    rival = Rival(heeds_suffix=True)
    with runner(rival, "openai-completions") as one:
        result = one.run(spec(workload=MadeUp(asks)))
    assert len(result.samples) == 6
    assert set(rival.paths[-6:]) == {"/v1/completions"}
    assert [body["suffix"] for body in rival.asked[-6:]] == ["return x"] * 6
    assert "takes a suffix" in run(Rival(), workload=MadeUp(asks)).unsupported


# --- what is told


def test_progress_tells_how_far_it_is() -> None:
    told: list[tuple[str, int, int]] = []
    with served(Rival()) as url:
        Runner(Given(url), "openai-chat", on_progress=lambda *line: told.append(line)).run(spec(n_warmup=1))
    assert told[-1][1:] == (6, 6)
    assert told[-1][0].startswith("made-up cold, concurrency 1: ")
    assert any("warm-up" in what for what, _, _ in told)


def test_a_run_tells_what_was_measured() -> None:
    result = run(Rival(models=("small", "large")), seed=5)
    assert (result.model, result.api, result.spec.seed) == ("small", "openai-chat", 5)
    assert result.server["models"] == ["small", "large"]
    assert result.client_cpu_s > 0
    assert 0 < result.duration_s < 30
    assert result.began_at.endswith("+00:00")
