"""What is found out before anything is measured: whether answers can be filled, and how tokens are counted."""

from __future__ import annotations

import pytest

from localllm.bench.serving.endpoint import discover
from localllm.bench.serving.preliminary import QUESTIONS, Preliminary, examine
from localllm.bench.serving.spec import Api
from localllm.errors import ServerUnreachable
from tests.bench.client.stand_in import Reply, Seen
from tests.bench.serving.rival import Rival, served


def found(rival: Rival, api: Api = "openai-chat", key: str | None = None) -> Preliminary:
    with served(rival) as url:
        return examine(discover(url, api=api, key=key))


def test_a_server_that_goes_on_when_told_to_fills_answers() -> None:
    rival = Rival(honours_ignore_eos=True)
    assert found(rival).fills_length
    assert [bool(body.get("ignore_eos")) for body in rival.asked] == [False, True]


def test_a_server_that_stops_all_the_same_does_not() -> None:
    assert not found(Rival(honours_ignore_eos=False)).fills_length


def test_answers_that_never_end_by_themselves_show_nothing() -> None:
    rival = Rival(natural_tokens=1000, honours_ignore_eos=True)
    assert not found(rival).fills_length
    assert [body["max_tokens"] for body in rival.asked] == [n for _, n in QUESTIONS]


def test_a_model_that_thinks_first_is_given_the_room() -> None:
    rival = Rival(natural_tokens=100, honours_ignore_eos=True)
    assert found(rival).fills_length
    assert rival.asked[-1]["max_tokens"] == 108


def test_a_server_that_refuses_the_field_does_not_fill() -> None:
    async def refuse(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if "ignore_eos" not in seen.fields:
            return False
        await reply.json({"error": {"message": "unknown field"}}, "400 Bad Request")
        return True

    assert not found(Rival(fault=refuse, honours_ignore_eos=True)).fills_length


def test_pieces_are_counted_where_there_is_no_usage() -> None:
    assert found(Rival(honours_ignore_eos=True, tells_usage=False)).fills_length


def test_a_server_that_only_completes_texts_is_asked_so() -> None:
    async def no_chats(rival: Rival, seen: Seen, reply: Reply) -> bool:
        if "/chat/" not in seen.line:
            return False
        await reply.json({"error": {"message": "no such route"}}, "404 Not Found")
        return True

    rival = Rival(fault=no_chats, honours_ignore_eos=True)
    assert found(rival, "openai-completions").fills_length
    assert rival.paths.count("/v1/chat/completions") == 1


def test_a_server_that_fails_is_left_for_the_run_to_tell() -> None:
    async def fail(rival: Rival, seen: Seen, reply: Reply) -> bool:
        await reply.json({"error": {"message": "broken"}}, "500 Internal Server Error")
        return True

    assert found(Rival(fault=fail)) == Preliminary(False, ())


@pytest.mark.parametrize(("n_per_word", "is_told"), [(1, False), (3, True)])
def test_usage_is_checked_against_the_servers_own_tokenizer(n_per_word: int, is_told: bool) -> None:
    count = {"/tokenize": lambda fields: {"tokens": fields["content"].split() * n_per_word}}
    notes = found(Rival(routes=count)).notes
    assert bool(notes) == is_told
    if is_told:
        assert notes == ("the server's usage says 4 tokens where its /tokenize counts 12",)


def test_a_key_that_only_answers_ask_for_is_told() -> None:
    with pytest.raises(ServerUnreachable, match="asks for a key"):
        found(Rival(key="right", lists_to_anybody=True))
    with served(Rival(key="right")) as url:
        assert not examine(discover(url, api="openai-chat", key="right")).fills_length
