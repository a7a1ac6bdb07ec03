"""Growing chats on every shared template: the next turn begins with the last prompt and what was generated after it.

Generated tokens are forced to differ from those that their text becomes. Where a template cannot, the reason is here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from localllm.backends.llamacpp.model import LlamaModel
from localllm.backends.llamacpp.settings import ModelSettings
from localllm.backends.llamacpp.tokenizer import LlamaTokenizer
from localllm.models.chat_template import ChatTemplate, encode
from localllm.models.info import read_info
from localllm.runtime.answers import AnswerMemory
from localllm.runtime.kv.blocks import NO_ROOT
from tests.models import templates
from tests.models.templates import BOS, EOS, NAMES, TOOLS
from tests.word_tokenizer import WordTokenizer

PLAIN = ("Hello there. 42 is the answer!", "Grüße 😀, <b>x</b> & 'q'", "```python\nprint(1)\n```", "No. Yes")
LEADING, TRAILING = " A space, or a line end, before", "A list:\n- one\n- two\n\n"

# The prompt ends with words that history does not have: it opens a block of thought, which the template leaves
# out (or never had) once the turn is past. What follows is computed again, whoever tokenises it.
DROPS_ITS_OPENING = {
    "MiniMax-M2",
    "Qwen3.5-4B",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "google-gemma-4-31B-it",
}
# History has words between the prompt's end and the answer, which the model itself wrote: found where it did.
WRITES_BEFORE = {
    "GLM-4.6": "\n<think></think>\n",
    "openai-gpt-oss-120b": "<|channel|>final<|message|>",
}
TRIMS_BOTH_ENDS = {
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
}
TRIMS_LINE_ENDS_BEFORE = {"HuggingFaceTB-SmolLM3-3B"}
EXACT = [name for name in NAMES if name not in DROPS_ITS_OPENING | WRITES_BEFORE.keys()]
# These write a call of history nowhere, elsewhere, or not at all without more (gemma-2, Kimi-K2 refuse one).
WRITES_NO_CALL = {
    *("HuggingFaceTB-SmolLM3-3B", "LFM2.5-Instruct", "microsoft-Phi-3.5-mini-instruct"),
    *("MiniMax-M2", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "google-gemma-4-31B-it"),
    *("google-gemma-2-2b-it", "Kimi-K2-Instruct"),
}
VOCABULARIES = ("ggml-vocab-llama-spm", "ggml-vocab-phi-3", "smollm2")


@pytest.fixture(scope="module", params=VOCABULARIES)
def tokenizer(request: pytest.FixtureRequest, shared: Path) -> Iterator[LlamaTokenizer]:
    """Real vocabularies: two of SentencePiece, which put a space before a text, and one of bytes in pairs."""
    is_smollm2 = request.param == "smollm2"
    path = request.getfixturevalue("smollm2") if is_smollm2 else shared / "models" / "vocab" / f"{request.param}.gguf"
    model = LlamaModel.load(read_info(path), ModelSettings(vocab_only=True))
    yield model.tokenizer
    model.close()


def oddly(tokenizer: LlamaTokenizer, text: str, rng: random.Random) -> list[int]:
    """Return tokens of a text, cut at random, that are not those it becomes."""
    usual = tokenizer.encode(text, parse_special=True, continues=True)
    for _ in range(100):
        cuts = [0, *sorted(rng.sample(range(1, len(text)), len(text) // 3)), len(text)]
        parts = (text[start:end] for start, end in pairwise(cuts))
        ids = [token for part in parts for token in tokenizer.encode(part, parse_special=True, continues=True)]
        if ids != usual and tokenizer.decode(ids) == text:
            return ids
    raise AssertionError("this text has only one row of tokens")


class Growing:
    """A chat that grows by a question and an answer a turn; `n_held`: tokens of each prompt that were held before."""

    def __init__(self, shared: Path, name: str, tokenizer: LlamaTokenizer) -> None:
        source = templates.source(shared, name)
        specials = {*tokenizer.vocabulary.specials, *templates.spellings(source)}
        self.template = ChatTemplate(source, specials=sorted(specials), bos=BOS, eos=EOS)
        self.tokenizer = tokenizer
        self.memory = AnswerMemory(tokenizer)
        self.messages: list[Any] = []
        self.held: list[int] = []
        self.rng = random.Random(1)

    def turn(self, generated: str, told: str | None = None) -> tuple[list[int], list[int]]:
        """Ask; return what was held before and the prompt. The caller sends `told` back (None: what was generated)."""
        self.messages.append({"role": "user", "content": f"Question {len(self.messages)}?"})
        rendered = self.template.render(self.messages, max_chars=100_000)
        recollection = self.memory.recall(NO_ROOT)
        tokens = encode(self.tokenizer, rendered, recollection).tokens
        recollection.ends(rendered)
        usual = encode(self.tokenizer, rendered).tokens
        assert self._words(tokens) == self._words(usual)
        ids = oddly(self.tokenizer, generated, self.rng)
        recollection.keep(ids)
        held, self.held = self.held, tokens + ids
        self.messages.append({"role": "assistant", "content": generated if told is None else told})
        return held, tokens

    def _words(self, tokens: Sequence[int]) -> bytes:
        """Return the text of tokens without the white space that a vocabulary adds or swallows after a special one."""
        return b"".join(b"".join(map(self.tokenizer.piece, tokens)).split())


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("name", EXACT)
def test_the_next_turn_begins_with_all_that_is_held(shared: Path, tokenizer: LlamaTokenizer, name: str) -> None:
    chat = Growing(shared, name, tokenizer)
    for text in (*PLAIN, *PLAIN):
        held, prompt = chat.turn(text)
        assert prompt[: len(held)] == held


@pytest.mark.parametrize("name", EXACT)
def test_white_space_round_an_answer_costs_what_the_template_trims(
    shared: Path, tokenizer: LlamaTokenizer, name: str
) -> None:
    for text in (TRAILING, LEADING, "\n\n" + PLAIN[0]):
        chat = Growing(shared, name, tokenizer)
        held, first = chat.turn(text)
        held, prompt = chat.turn(PLAIN[0])
        n_held, n_after = n_common(held, prompt), 0
        if name in TRIMS_BOTH_ENDS or (name in TRIMS_LINE_ENDS_BEFORE and text[0] == "\n"):
            if text is not TRAILING:
                assert n_held <= len(first) + 1  # from the answer's first character on it is another text
                continue
            n_after = len(text) - len(text.rstrip())
        assert n_held >= len(held) - n_after


@pytest.mark.parametrize("name", DROPS_ITS_OPENING)
def test_a_prompt_that_history_does_not_repeat_cannot_be_continued(
    shared: Path, tokenizer: LlamaTokenizer, name: str
) -> None:
    chat = Growing(shared, name, tokenizer)
    chat.turn(PLAIN[0])
    asked = chat.template.render(chat.messages[:1], max_chars=100_000).text
    history = chat.template.render([*chat.messages, chat.messages[0]], max_chars=100_000).text
    assert not history.startswith(asked)
    held, prompt = chat.turn(PLAIN[0])
    assert n_common(held, prompt) < len(held)


@pytest.mark.parametrize("name", WRITES_BEFORE)
def test_what_a_template_writes_before_an_answer_is_what_its_model_wrote(
    shared: Path, tokenizer: LlamaTokenizer, name: str
) -> None:
    chat = Growing(shared, name, tokenizer)
    for text in PLAIN:
        held, prompt = chat.turn(WRITES_BEFORE[name] + text, told=text)
        assert prompt[: len(held)] == held
    held, prompt = chat.turn(PLAIN[0])  # it did not
    assert prompt[: len(held)] == held
    held, prompt = chat.turn(PLAIN[0])
    assert n_common(held, prompt) < len(held)


@pytest.mark.parametrize("name", EXACT)
def test_a_stopped_or_cut_answer_is_continued_to_its_last_whole_token(
    shared: Path, tokenizer: LlamaTokenizer, name: str
) -> None:
    chat = Growing(shared, name, tokenizer)
    _, first = chat.turn("Hello there. 42 is the STOP", told="Hello there. 42 is the")
    held, prompt = chat.turn(PLAIN[0])
    shown = b"".join(map(tokenizer.piece, held[len(first) : n_common(held, prompt)])).decode("utf-8", "replace")
    assert len("Hello there. 42 is the") - len(shown) < 8
    assert "Hello there. 42 is the".startswith(shown)


@pytest.mark.parametrize("name", ["HuggingFaceTB-SmolLM3-3B", "Qwen-Qwen3-0.6B", "LFM2.5-Instruct"])
def test_thoughts_that_come_back_as_the_callers_words_form_no_control_token(
    shared: Path, tokenizer: LlamaTokenizer, name: str
) -> None:
    chat = Growing(shared, name, tokenizer)
    chat.turn("<think>\nhm\n</think>\n\nFine.")
    _, prompt = chat.turn(PLAIN[0])
    spellings = [s for s in ("<think>", "</think>") if s in tokenizer.vocabulary.specials]
    assert not {tokenizer.piece(token).decode("utf-8", "replace") for token in prompt} & set(spellings)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRITES_NO_CALL])
def test_a_call_that_the_template_spells_as_its_model_did_keeps_its_tokens(shared: Path, name: str) -> None:
    source = templates.source(shared, name)
    specials = templates.spellings(source)
    tokenizer = WordTokenizer(specials, ["get", "_weather", "Rom"])
    template, memory = ChatTemplate(source, specials=specials, bos=BOS, eos=EOS), AnswerMemory(tokenizer)
    call = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rom"}}}
    result = {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": "20"}
    user = {"role": "user", "content": "Question?"}
    asked = template.render([user], tools=TOOLS, max_chars=100_000)
    messages = [user, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    history = template.render(messages, tools=TOOLS, max_chars=100_000)
    generated = history.text[len(asked.text) : history.answers[0].until]
    controls = (tokenizer.encode(spelling, parse_special=True) for spelling in specials)
    spelled = {tokenizer.piece(ids[0]).decode(): ids[0] for ids in controls}
    parts = re.split("(" + "|".join(map(re.escape, sorted(specials, key=len, reverse=True))) + ")", generated)
    ids = [token for part in parts for token in ([spelled[part]] if part in spelled else part.encode())]
    recollection = memory.recall(NO_ROOT)
    prompt = encode(tokenizer, asked, recollection).tokens
    recollection.ends(asked)
    recollection.keep(ids)
    tokens = encode(tokenizer, history, memory.recall(NO_ROOT)).tokens
    usual = encode(tokenizer, history).tokens
    assert tokens[: len(prompt) + len(ids)] == prompt + ids
    assert tokens != usual
    assert tokenizer.control(tokens) == tokenizer.control(usual)
    assert tokenizer.decode(tokens) == tokenizer.decode(usual)
