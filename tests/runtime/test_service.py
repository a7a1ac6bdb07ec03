"""The service as callers use it: text in, events and answers out."""

from __future__ import annotations

import pytest

from localllm.errors import ContextOverflow, QueueFull, TemplateError
from localllm.runtime import events
from localllm.runtime.config import RuntimeConfig
from localllm.runtime.stream import TokenStream, collect
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions
from tests.fake_engine import EOS, FakeEngine, fake_service
from tests.runtime.harness import truth


def _says(answer: bytes, prompt_end: int = 259) -> FakeEngine:
    """An engine that writes these bytes after the prompt, then ends."""

    def script(tokens: object) -> int:
        ids = list(tokens)  # type: ignore[call-overload]
        n_said = len(ids) - 1 - max(i for i, t in enumerate(ids) if t == prompt_end)
        return answer[n_said] if n_said < len(answer) else EOS

    return FakeEngine(script=script)


def _texts(stream: object) -> list[str]:
    return [e.text for e in stream if isinstance(e, events.Token)]  # type: ignore[attr-defined]


def test_generate_answers_in_order_and_batched() -> None:
    engine = FakeEngine()
    with fake_service(engine) as service:
        prompts = [CompletionRequest((65 + i,) * 30, GenerationOptions(max_tokens=20)) for i in range(5)]
        answers = service.generate(prompts)
    assert [a.choices[0].ids for a in answers] == [truth(p.prompt) for p in prompts]  # type: ignore[arg-type]
    assert max(len(b.items) for b in engine.batches) > 1


def test_generate_takes_text_messages_and_more_prompts_than_may_wait() -> None:
    with fake_service(_says(b"yes"), config=RuntimeConfig(max_waiting=4)) as service:
        answers = service.generate(["hi"] * 9 + [[{"role": "user", "content": "hi"}]], max_tokens=9)
    assert [a.text for a in answers] == ["yes"] * 10


def test_bytes_of_one_character_in_four_tokens_come_as_one_character() -> None:
    with fake_service(_says("🦊👩‍💻한𝕏".encode())) as service:
        texts = _texts(service.stream("repeat"))
        assert "".join(texts) == "🦊👩‍💻한𝕏"
        assert not any("\ufffd" in t for t in texts)
        assert collect(service.stream("repeat")).text == "🦊👩‍💻한𝕏"


def test_a_character_cut_by_max_tokens_is_dropped_and_its_bytes_are_in_the_logprobs() -> None:
    with fake_service(_says("ab🦊".encode())) as service:
        answer = collect(service.stream("x", max_tokens=4, logprobs=0))
    assert (answer.text, answer.choices[0].finish_reason) == ("ab", "length")
    assert b"".join(p.raw for p in answer.choices[0].logprobs) == "ab🦊".encode()[:4]


@pytest.mark.parametrize(
    ("said", "stop", "text", "reason", "matched"),
    [
        (b"ab", ["abc"], "ab", "stop", None),
        (b"abcd", ["bc", "abcd"], "", "stop", "abcd"),
        (b"x END y", [" END"], "x", "stop", " END"),
        (b"hello", ["zzz"], "hello", "stop", None),
    ],
)
def test_stop_strings_cut_before_the_earliest_match(
    said: bytes, stop: list[str], text: str, reason: str, matched: str | None
) -> None:
    with fake_service(_says(said)) as service:
        choice = collect(service.stream("q", stop=stop)).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop) == (text, reason, matched)


def test_text_held_for_a_stop_is_told_when_the_length_ends_it() -> None:
    with fake_service(_says(b"abx")) as service:
        choice = collect(service.stream("q", stop=["abc"], max_tokens=2)).choices[0]
    assert (choice.text, choice.finish_reason) == ("ab", "length")


def test_a_stop_string_in_the_prompt_stops_nothing() -> None:
    with fake_service(_says(b"fine")) as service:
        assert collect(service.stream("say STOP", stop=["STOP"])).text == "fine"


def test_a_repeated_prompt_gives_the_same_answer_and_a_one_token_prompt_works() -> None:
    with fake_service() as service:
        answers = [collect(service.stream("the same", max_tokens=12)) for _ in range(3)]
        assert len({a.choices for a in answers}) == 1
        assert answers[1].usage.cached_tokens["device"] == answers[1].usage.prompt_tokens - 1
        one = collect(service.submit(CompletionRequest((65,), GenerationOptions(max_tokens=5))))
        assert one.usage.cached_tokens["device"] == 0
        assert one.choices[0].ids


def test_strict_prefix_of_a_cached_prompt_runs_its_last_token_again() -> None:
    with fake_service() as service:
        collect(service.submit(CompletionRequest(tuple(range(32, 90)), GenerationOptions(max_tokens=8))))
        answer = collect(service.submit(CompletionRequest(tuple(range(32, 60)), GenerationOptions(max_tokens=8))))
    assert answer.choices[0].ids == truth(range(32, 60), 8)
    assert answer.usage.cached_tokens == {"device": 27}


def test_min_tokens_and_ignore_eos_keep_an_answer_going() -> None:
    with fake_service(_says(b"a")) as service:
        assert len(collect(service.stream("q", min_tokens=5, max_tokens=9)).choices[0].ids) >= 5
        assert collect(service.stream("q", ignore_eos=True, max_tokens=9)).choices[0].finish_reason == "length"


def test_the_order_of_events_is_the_contract() -> None:
    with fake_service(_says(b"hey")) as service:
        kinds = [type(e).__name__ for e in service.stream("q")]
    assert kinds == ["Queued", "Admitted", "Token", "Token", "Token", "Finished", "Usage", "Done"]


def test_usage_counts_the_end_token_and_names_every_phase() -> None:
    with fake_service(_says(b"hey")) as service:
        usage = collect(service.stream("q")).usage
    assert usage.completion_tokens == 4
    assert {"queue", "template", "tokenise", "prefill", "decode", "sample", "total"} <= usage.timings_ms.keys()


def test_what_prepare_refuses_is_raised_at_submit() -> None:
    with fake_service(template=None) as service:
        with pytest.raises(TemplateError):
            service.submit(ChatRequest(({"role": "user", "content": "x"},)))
        with pytest.raises(ContextOverflow):
            service.submit(CompletionRequest((65,) * 5000))
        assert service.stats().n_steps == 0


def test_a_full_queue_refuses_the_next() -> None:
    with fake_service(config=RuntimeConfig(max_waiting=2, max_running=1)) as service:
        streams, refusal = list[TokenStream](), None
        for _ in range(200):
            try:
                streams.append(service.stream("q", max_tokens=2000, ignore_eos=True))
            except QueueFull as error:
                refusal = error
                break
        for stream in streams:
            stream.cancel()
        assert refusal is not None
        assert len(streams) >= 2


def test_close_is_idempotent() -> None:
    engine = FakeEngine()
    service = fake_service(engine)
    service.close()
    service.close()
    assert engine.closed
    assert not service.is_alive
