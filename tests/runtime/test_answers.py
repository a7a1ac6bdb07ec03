"""Generated tokens are put where their answer stands unchanged in the next turn, and nowhere else."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localllm.models.chat_template import ChatTemplate, Encoded, encode
from localllm.runtime.answers import AnswerMemory
from localllm.runtime.kv.blocks import NO_ROOT, Root
from tests.word_tokenizer import WordTokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = CHATML.replace("m.content", "m.content|trim")
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.name + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|im_start|>", "<|im_end|>", "<call>", "</call>", "<s>")
WORDS = ("Hello", "He", "llo", " there", " the", "re", "\n\n", "assistant\n", "Hi", "😀", "ü")
USER = {"role": "user", "content": "Question?"}
MORE = {"role": "user", "content": "And then?"}


class Chat:
    """A conversation at one model: what its prompts become, and what is remembered of its answers."""

    def __init__(self, source: str = CHATML, *, max_bytes: int = 1 << 20) -> None:
        self.tokenizer = WordTokenizer(SPECIALS, WORDS, bos="<s>", eos="<|im_end|>", add_bos=True)
        self.template = ChatTemplate(source, specials=SPECIALS)
        self.memory = AnswerMemory(self.tokenizer, max_bytes=max_bytes)

    def ask(self, *messages: Any, root: Root = NO_ROOT, answers: tuple[list[int], ...] = ()) -> list[int]:
        """Return a prompt's tokens; the model answers it with these."""
        rendered = self.template.render(messages, max_chars=100_000)
        recollection = self.memory.recall(root)
        tokens = encode(self.tokenizer, rendered, recollection).tokens
        recollection.ends(rendered)
        for ids in answers:
            recollection.keep(ids)
        return tokens

    def canonical(self, *messages: Any) -> Encoded:
        """Return what a prompt becomes where nothing is remembered."""
        return encode(self.tokenizer, self.template.render(messages, max_chars=100_000))

    def told(self, ids: list[int]) -> dict[str, str]:
        """Return an answer as the caller sends it back."""
        return {"role": "assistant", "content": self.tokenizer.decode(ids)}


def test_an_answer_keeps_its_tokens() -> None:
    chat = Chat()
    ids = chat.tokenizer.oddly("Hello there")
    first = chat.ask(USER, answers=(ids,))
    second = chat.ask(USER, chat.told(ids), MORE)
    assert second[: len(first) + len(ids)] == first + ids
    assert chat.tokenizer.decode(second) == chat.tokenizer.decode(chat.canonical(USER, chat.told(ids), MORE).tokens)
    assert second != chat.canonical(USER, chat.told(ids), MORE).tokens


def test_so_do_all_answers_of_a_growing_chat() -> None:
    chat, rng = Chat(), random.Random(3)
    messages: list[Any] = []
    before: list[int] = []
    for turn in range(20):
        messages.append({"role": "user", "content": f"Question {turn}?"})
        ids = chat.tokenizer.anyhow(f"Hello there {turn}\n\nHi", rng)
        prompt = chat.ask(*messages, answers=(ids,))
        assert prompt[: len(before)] == before
        before = prompt + ids
        messages.append(chat.told(ids))


def test_the_seam_to_the_prompt_is_not_merged() -> None:
    chat = Chat(CHATML.replace("'<|im_start|>assistant\n' }}", "'<|im_start|>assistant\n' }}"))
    ids = list(b"\nHi")  # after "assistant\n" the two line ends would be one token elsewhere
    first = chat.ask(USER, answers=(ids,))
    assert chat.ask(USER, chat.told(ids), MORE)[: len(first) + 3] == first + ids


def test_boundaries_are_those_of_the_text() -> None:
    chat = Chat()
    ids = chat.tokenizer.oddly("Hello there")
    chat.ask(USER, answers=(ids,))
    rendered = chat.template.render((USER, chat.told(ids), MORE), max_chars=10_000)
    encoded = encode(chat.tokenizer, rendered, chat.memory.recall(NO_ROOT))
    ends = [chat.tokenizer.decode(encoded.tokens[1:end]) for end in encoded.boundaries]
    assert ends == [rendered.text[:end] for end in rendered.boundaries]


@pytest.mark.parametrize("end", ["<|im_end|>", ""])
def test_the_end_token_is_the_templates(end: str) -> None:
    chat = Chat()
    ids = chat.tokenizer.oddly("Hello")
    ended = [*ids, *chat.tokenizer.encode(end, parse_special=True)]
    first = chat.ask(USER, answers=(ended,))
    second = chat.ask(USER, chat.told(ids), MORE)
    assert second[: len(first) + len(ids)] == first + ids
    assert chat.tokenizer.control(second[len(first) :])[0] == "<|im_end|>"


def test_what_a_stop_text_or_the_caller_cut_off_is_left_out_to_the_token() -> None:
    chat = Chat()
    hello, there = (
        chat.tokenizer.encode("Hello", parse_special=False),
        chat.tokenizer.encode(" there", parse_special=False),
    )
    first = chat.ask(USER, answers=(list(b"He") + list(b"llo") + there,))
    second = chat.ask(USER, {"role": "assistant", "content": "Hello the"}, MORE)
    assert second[len(first) : len(first) + 5] == list(b"Hello")
    assert chat.tokenizer.piece(second[len(first) + 5]) == b" the"
    assert hello != list(b"Hello")


def test_a_cut_character_is_left_out() -> None:
    chat = Chat()
    first = chat.ask(USER, answers=(list("Hello ü".encode())[:-1],))
    second = chat.ask(USER, {"role": "assistant", "content": "Hello "}, MORE)
    assert second[len(first) : len(first) + 6] == list(b"Hello ")


def test_bytes_that_are_no_character_are_not_put_back() -> None:
    chat = Chat()
    ids = [*b"Hello ", 0xFF, *b"llo"]
    first = chat.ask(USER, answers=(ids,))
    second = chat.ask(USER, chat.told(ids), MORE)
    assert second[len(first) : len(first) + 6] == list(b"Hello ")
    assert bytes(second[len(first) + 6 : len(first) + 9]) == "\ufffd".encode()


def test_white_space_that_a_template_trims_costs_no_more() -> None:
    chat = Chat(TRIMMED)
    ids = list(b"Hello there\n\n")
    first = chat.ask(USER, answers=(ids,))
    assert chat.ask(USER, chat.told(ids), MORE)[: len(first) + 11] == first + ids[:11]


@pytest.mark.parametrize("content", ["Hello There", "Hello there!", " Hello there", "Hallo there", "", "there"])
def test_an_edited_answer_is_tokenised(content: str) -> None:
    chat = Chat()
    chat.ask(USER, answers=(chat.tokenizer.oddly("Hello there"),))
    messages = (USER, {"role": "assistant", "content": content}, MORE)
    assert chat.ask(*messages) == chat.canonical(*messages).tokens


def test_so_is_one_after_another_prompt_or_of_another_role() -> None:
    chat = Chat()
    ids = chat.tokenizer.oddly("Hello there")
    chat.ask(USER, answers=(ids,))
    for messages in (
        (MORE, chat.told(ids), MORE),
        ({"role": "system", "content": "x"}, USER, chat.told(ids), MORE),
        (USER, {"role": "user", "content": "Hello there"}, MORE),
        (USER, {"role": "tool", "content": "Hello there"}, MORE),
    ):
        assert chat.ask(*messages) == chat.canonical(*messages).tokens


def test_roots_know_nothing_of_each_other() -> None:
    chat = Chat()
    ids = chat.tokenizer.oddly("Hello there")
    messages = (USER, chat.told(ids), MORE)
    chat.ask(USER, root=("", "key:a"), answers=(ids,))
    for root in (NO_ROOT, ("", "key:b"), ("key:a", ""), ("a", "key:")):
        assert chat.ask(*messages, root=root) == chat.canonical(*messages).tokens
    assert chat.ask(*messages, root=("", "key:a")) != chat.canonical(*messages).tokens


def test_of_several_choices_the_one_that_was_taken_is_found() -> None:
    chat = Chat()
    answers = [list(f"Hello {i}".encode()) for i in range(5)]
    first = chat.ask(USER, answers=tuple(answers))
    for ids in answers:
        assert chat.ask(USER, chat.told(ids), MORE)[: len(first) + len(ids)] == first + ids


def test_of_two_that_read_the_same_the_first_stays_and_the_longest_is_taken() -> None:
    chat = Chat()
    usual = chat.tokenizer.encode("Hello", parse_special=False)
    first = chat.ask(USER, answers=(list(b"Hello"), usual, list(b"He")))
    for _ in range(2):
        assert chat.ask(USER, chat.told(usual), MORE)[len(first) : len(first) + 5] == list(b"Hello")
        chat.ask(USER, answers=(usual,))


def test_a_later_answer_is_only_used_where_the_tokens_before_it_are_the_same() -> None:
    chat = Chat()
    one, two = chat.tokenizer.oddly("Hello there"), chat.tokenizer.oddly("Hello Hello")
    chat.ask(USER, answers=(one,))
    chat.ask(USER, chat.told(one), MORE, answers=(two,))
    other = Chat()  # a process that knows the second answer only
    other.memory = chat.memory
    chat.memory._drop(next(answer for answer in chat.memory._answers if answer.told == "Hello there"))
    messages = (USER, chat.told(one), MORE, chat.told(two), USER)
    assert other.ask(*messages) == other.canonical(*messages).tokens


# However many talk at once


def test_a_live_chat_goes_on_after_its_first_answer_however_many_others_began_like_it() -> None:
    chat = Chat()
    first = chat.tokenizer.oddly("Hello there")
    before = chat.ask(USER, answers=(first,)) + first
    messages = [USER, chat.told(first)]
    for turn in range(5):
        for other in range(40):
            chat.ask(USER, answers=(chat.tokenizer.oddly(f"Hi there, {turn} {other}"),))
        messages.append({"role": "user", "content": f"Question {turn}?"})
        ids = chat.tokenizer.oddly(f"Hello {turn}")
        prompt = chat.ask(*messages, answers=(ids,))
        assert prompt[: len(before)] == before
        before = prompt + ids
        messages.append(chat.told(ids))


def test_nor_do_others_who_got_the_same_words_in_other_tokens_change_it() -> None:
    chat = Chat()
    usual, odd = chat.tokenizer.encode("Hello there", parse_special=False), chat.tokenizer.oddly("Hello there")
    chat.ask(USER, answers=(odd,))
    second = chat.ask(USER, chat.told(odd), MORE, answers=(odd,))
    chat.ask(USER, answers=(usual,))
    third = chat.ask(USER, chat.told(odd), MORE, chat.told(odd), USER)
    assert third[: len(second) + len(odd)] == second + odd


def test_an_answer_that_is_used_outlasts_newer_ones_to_the_same_prompt() -> None:
    chat = Chat(max_bytes=20_000)
    ids = chat.tokenizer.oddly("Hello there")
    chat.ask(USER, answers=(ids,))
    for i in range(200):
        chat.ask(USER, answers=(list(f"Hello {i}".encode()),))
        assert chat.memory.n_bytes <= 20_000
        chat.ask(USER, chat.told(ids), MORE)
    assert chat.ask(USER, chat.told(ids), MORE) != chat.canonical(USER, chat.told(ids), MORE).tokens
    oldest = {"role": "assistant", "content": "Hello 0"}
    assert chat.ask(USER, oldest, MORE) == chat.canonical(USER, oldest, MORE).tokens


def test_of_thousands_of_answers_to_one_prompt_few_are_looked_at() -> None:
    chat = Chat(max_bytes=1 << 24)
    rendered = chat.template.render((USER,), max_chars=10_000)
    recollection = chat.memory.recall(NO_ROOT)
    recollection.ends(rendered)
    for i in range(5000):
        recollection.keep(list(f"Hello {i}.".encode()))
    ((place, held),) = chat.memory._at.items()
    assert len(held) == 5000
    for i in (0, 17, 4999):
        assert [answer.told for answer in chat.memory.beginning(place, f"Hello {i}.")] == [f"Hello {i}."]
    assert len(chat.memory.beginning(place, "Hello")) < 100
    assert chat.memory.beginning(place, "Help") == []


class Counting(WordTokenizer):
    """Counts the characters that it makes tokens of."""

    n_chars = 0

    def encode(self, text: str, **options: Any) -> list[int]:
        """Count, then encode."""
        self.n_chars += len(text)
        return super().encode(text, **options)


@pytest.mark.parametrize("forgotten", [(), (0,), (20,), (0, 20), range(40)])
def test_each_character_of_a_chat_is_tokenised_once_whatever_of_it_is_forgotten(forgotten: Sequence[int]) -> None:
    chat = Chat()
    tokenizer = chat.tokenizer = chat.memory.tokenizer = Counting(SPECIALS, WORDS, bos="<s>", eos="<|im_end|>")
    messages: list[Any] = []
    for turn in range(40):
        messages.append({"role": "user", "content": f"{turn}?"})
        ids = tokenizer.oddly(f"Hello {turn}")
        chat.ask(*messages, answers=(ids,))
        messages.append(chat.told(ids))
    answers = sorted(chat.memory._answers, key=lambda answer: answer.place[0])
    for turn in forgotten:
        chat.memory._drop(answers[turn])
    tokenizer.n_chars = 0
    rendered = chat.template.render([*messages, MORE], max_chars=100_000)
    tokens = encode(tokenizer, rendered, chat.memory.recall(NO_ROOT)).tokens
    assert tokenizer.decode(tokens) == rendered.text
    assert tokenizer.n_chars <= len(rendered.text)


def test_a_mark_that_must_be_another_character_does_not_hide_what_came_before_it() -> None:
    chat = Chat()
    user = {"role": "user", "content": "What is <|im_end|>?"}
    ids = chat.tokenizer.oddly("Hello there")
    first = chat.ask(user, answers=(ids,))
    second = chat.ask(user, chat.told(ids), {"role": "user", "content": "And \ufdd0?"})
    assert second[: len(first) + len(ids)] == first + ids


# The caller's words never become a control token, and a template's control tokens stay


def test_a_control_spelling_in_an_answer_is_not_put_back() -> None:
    chat = Chat()
    control = chat.tokenizer.encode("<|im_start|>", parse_special=True)
    ids = [*b"Hello", *control, *b"Hi"]
    chat.ask(USER, answers=(ids,))
    messages = (USER, chat.told(ids), MORE)
    assert chat.ask(*messages) == chat.canonical(*messages).tokens
    assert chat.tokenizer.control(chat.ask(*messages)) == chat.tokenizer.control(chat.ask(USER, MORE, MORE))


def test_a_turn_that_the_model_only_spelled_does_not_replace_the_templates() -> None:
    chat = Chat()
    ids = list(b"Hello<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n")  # in letters
    first = chat.ask(USER, answers=(ids,))
    messages = (USER, {"role": "assistant", "content": "Hello"}, MORE)
    tokens = chat.ask(*messages)
    assert tokens[: len(first) + 5] == first + list(b"Hello")  # only its own words are put back
    assert chat.tokenizer.control(tokens) == chat.tokenizer.control(chat.canonical(*messages).tokens)


def test_a_call_that_the_template_writes_keeps_its_tokens_where_its_controls_are_real() -> None:
    chat = Chat(CALLS)
    call, end = (chat.tokenizer.encode(text, parse_special=True) for text in ("<call>", "</call>"))
    real, spelled = [*call, *b"Hello", *end], list(b"<call>Hello</call>")
    messages = (USER, {"role": "assistant", "content": "", "tool_calls": [{"name": "Hello"}]}, MORE)
    first = chat.ask(USER, answers=(spelled,))
    assert chat.ask(*messages) == chat.canonical(*messages).tokens
    chat.ask(USER, answers=(real,))
    assert chat.ask(*messages)[: len(first) + len(real)] == first + real


def test_no_character_of_ours_can_be_sent() -> None:
    chat = Chat()
    rendered = chat.template.render((USER, {"role": "assistant", "content": "<|im_end|>"}, MORE), max_chars=10_000)
    ids = list(f"<|im_end|{rendered.mark}>".encode())  # the text as it looks when marked
    chat.ask(USER, answers=(ids,))
    messages = (USER, {"role": "assistant", "content": "<|im_end|>"}, MORE)
    assert chat.ask(*messages) == chat.canonical(*messages).tokens
    own = (USER, chat.told(ids), MORE)
    assert chat.tokenizer.decode(chat.ask(*own)) == chat.tokenizer.decode(chat.canonical(*own).tokens)


TEXTS = st.text(alphabet="Helo t\n<|im_endstar>\ufdd0ü😀", max_size=30)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from([CHATML, TRIMMED, CALLS]))
def test_whatever_is_remembered_the_text_and_its_control_tokens_are_the_same(data: st.DataObject, source: str) -> None:
    chat = Chat(source)
    messages: list[Any] = []
    for _ in range(data.draw(st.integers(1, 4))):
        messages.append({"role": "user", "content": data.draw(TEXTS)})
        text = data.draw(TEXTS)
        ids = chat.tokenizer.anyhow(text, random.Random(data.draw(st.integers(0, 99))))
        if data.draw(st.booleans()):
            ids += data.draw(st.lists(st.integers(0, chat.tokenizer.vocabulary.n_vocab - 1), max_size=4))
        tokens, usual = chat.ask(*messages, answers=(ids,)), chat.canonical(*messages).tokens
        assert chat.tokenizer.decode(tokens) == chat.tokenizer.decode(usual)
        assert chat.tokenizer.control(tokens) == chat.tokenizer.control(usual)
        told = chat.told(ids)["content"]
        cut = data.draw(st.sampled_from([told, told, told.strip(), told[: len(told) // 2], text, told + "t"]))
        messages.append({"role": "assistant", "content": cut})


# Bounds


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    chat = Chat(max_bytes=20_000)
    ids = chat.tokenizer.oddly("Hello there")
    users = [{"role": "user", "content": f"Question {i}"} for i in range(100)]
    for user in users:
        chat.ask(user, answers=(ids,))
        assert chat.memory.n_bytes <= 20_000
        chat.ask(users[0], chat.told(ids), MORE)  # one that is used stays
    kept = [chat.ask(u, chat.told(ids), MORE) != chat.canonical(u, chat.told(ids), MORE).tokens for u in users]
    assert kept[0]
    assert kept[-1]
    assert not any(kept[1:50])


def test_an_answer_that_is_too_large_is_not_kept_and_no_other_goes_for_it() -> None:
    chat = Chat(max_bytes=5000)
    chat.ask(USER, answers=(list(b"x" * 5000),))
    assert chat.memory.n_bytes == 0
    assert chat.memory.lengths(0, 1000) == []
    chat.ask(USER, answers=(list(b"x"), list(b"x" * 5000)))
    assert 0 < chat.memory.n_bytes < 1000


def test_nothing_is_remembered_of_no_answer() -> None:
    chat = Chat()
    chat.ask(USER, answers=([], chat.tokenizer.encode("<|im_end|>", parse_special=True)))
    chat.memory.recall(NO_ROOT).keep([1])  # its prompt was never told
    assert chat.memory.n_bytes == 0


def test_threads_may_ask_and_keep_at_once() -> None:
    chat, failures = Chat(max_bytes=30_000), list[BaseException]()

    def talk(who: int) -> None:
        try:
            for turn in range(40):
                user = {"role": "user", "content": f"{who % 4} {turn % 10}"}
                ids = chat.tokenizer.oddly(f"Hello there {turn % 10}")
                first = chat.ask(user, answers=(ids,))
                second = chat.ask(user, chat.told(ids), MORE)
                assert chat.tokenizer.decode(second).startswith(chat.tokenizer.decode(first + ids))
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=talk, args=(who,)) for who in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert chat.memory.n_bytes <= 30_000
