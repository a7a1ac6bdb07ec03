"""From a finished sequence to the prompt of the next turn: whatever ended the answer, its tokens are found again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from localllm.models.chat_template import ChatTemplate
from localllm.runtime import events
from localllm.runtime.answers import AnswerMemory
from localllm.runtime.events import FinishReason
from localllm.runtime.prepare import ModelFacts, prepare, recollection_of
from localllm.runtime.prompts import encode_prompt
from localllm.runtime.sampling_params import Sampling
from localllm.runtime.sequence import RequestRun
from localllm.runtime.stream import TokenStream
from localllm.runtime.types import ChatRequest, CompletionRequest, GenerationOptions, Message
from tests.fake_engine import SPEC
from tests.word_tokenizer import WordTokenizer

SPECIALS = ("<s>", "</s>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}</s>{% else %}<|user|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "Question?"}
EOS = 257


class Model:
    """A model without an engine: a request is prepared, then answered with tokens that the test gives."""

    def __init__(self) -> None:
        self.tokenizer = WordTokenizer(SPECIALS, ["Hello", " there", "STOP"], bos="<s>", eos="</s>")
        template = ChatTemplate(TEMPLATE, specials=SPECIALS)
        self.facts = ModelFacts("m", self.tokenizer, template, Sampling(temperature=0.0), lambda: 4096)
        self.spec = replace(SPEC, n_vocab=self.tokenizer.vocabulary.n_vocab)
        self.answers = AnswerMemory(self.tokenizer)

    def prepared(self, *messages: Message, **options: Any) -> RequestRun:
        request = ChatRequest(messages, GenerationOptions(**{"max_tokens": 50, **options}))
        stream = TokenStream(request.request_id, lambda stream: None)
        return prepare(request, self.facts, self.spec, stream, None, self.answers)

    def prompt(self, *messages: Message, **options: Any) -> list[int]:
        return list(self.prepared(*messages, **options).sequences[0].tokens)

    def answered(self, ids: list[int], end: FinishReason | None = None, **options: Any) -> tuple[list[int], Message]:
        """Answer USER; return the prompt and the tokens after it, and the message that was told."""
        run = self.prepared(USER, **options)
        run.sequences[0].take(ids, ())
        if end is not None:
            run.sequences[0].finish(end)
        assert run.is_finished
        text = "".join(event.text for event in run.outbox if isinstance(event, events.Token))
        return list(run.sequences[0].tokens), {"role": "assistant", "content": text}


def letters(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize(
    ("ids", "end", "options", "n_uncommon"),
    [
        ([*letters("Hello there"), EOS], None, {}, 1),
        (letters("Hello there"), None, {"max_tokens": 11}, 0),
        (letters("Hello the"), "cancelled", {}, 0),
        (letters("Hello the"), "length", {}, 0),
        (letters("Hello ST"), "cancelled", {"stop": ("STOP",)}, 0),
        (letters("Hello STOP"), None, {"stop": ("STOP",)}, 4),
        (letters("Hello there S"), "length", {"stop": ("there STOP",)}, 0),
        ([*letters("Hello "), *"ü".encode()[:1]], "length", {}, 1),
        ([*letters("Hello "), 0xFF, *letters("x")], "length", {}, 2),
    ],
)
def test_whatever_ends_an_answer_the_next_turn_goes_on_after_it(
    ids: list[int], end: FinishReason | None, options: Mapping[str, Any], n_uncommon: int
) -> None:
    model = Model()
    held, told = model.answered(ids, end, **options)
    prompt = model.prompt(USER, told, USER)
    n_common = len(held) - n_uncommon
    assert prompt[:n_common] == held[:n_common]
    usual = Model().prompt(USER, told, USER)
    assert prompt != usual
    assert model.tokenizer.decode(prompt) == model.tokenizer.decode(usual)


def test_every_choice_is_remembered() -> None:
    model = Model()
    run = model.prepared(USER, n=3)
    for i, sequence in enumerate(run.sequences):
        sequence.take([*letters(f"Hello {i}"), EOS], ())
    for i, sequence in enumerate(run.sequences):
        told = {"role": "assistant", "content": f"Hello {i}"}
        assert model.prompt(USER, told, USER)[: sequence.n_tokens - 1] == sequence.tokens[:-1]


def test_a_request_that_wants_no_cache_neither_remembers_nor_is_remembered() -> None:
    model = Model()
    _, told = model.answered([*letters("Hello"), EOS], cache="off")
    assert model.answers.n_bytes == 0
    usual = model.prompt(USER, told, USER)
    model.answered([*letters("Hello"), EOS])
    assert model.prompt(USER, told, USER, cache="off") == usual
    assert model.prompt(USER, told, USER) != usual
    assert model.prompt(USER, told, USER, reuse_prefix=False) != usual  # it is computed anew, and the same prompt


def test_salts_do_not_know_each_others_answers() -> None:
    model = Model()
    _, told = model.answered([*letters("Hello"), EOS], salt="a")
    usual = Model().prompt(USER, told, USER)
    assert model.prompt(USER, told, USER) == usual
    assert model.prompt(USER, told, USER, salt="b") == usual
    assert model.prompt(USER, told, USER, salt="a") != usual


def test_asking_what_a_prompt_becomes_changes_nothing() -> None:
    model = Model()
    _, told = model.answered([*letters("Hello"), EOS])
    request = ChatRequest((USER, told, USER))
    n_bytes = model.answers.n_bytes
    asked = encode_prompt(request, model.facts, recollection=recollection_of(request, model.answers)).tokens
    assert asked == model.prompt(USER, told, USER)
    assert model.answers.n_bytes == n_bytes


def test_a_text_that_is_rendered_already_has_no_answers() -> None:
    model = Model()
    request = CompletionRequest("<|user|>Question?<|assistant|>Hello")
    stream = TokenStream(request.request_id, lambda stream: None)
    run = prepare(request, model.facts, model.spec, stream, None, model.answers)
    run.sequences[0].take([*letters("Hello"), EOS], ())
    assert model.answers.n_bytes == 0
