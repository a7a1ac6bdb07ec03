from __future__ import annotations

import base64
import json

import pytest

from proof.canary import Needle, Search, requests_of, search_works, what_may_hold_none
from proof.canary_requests import requests

NEEDLE = Needle("q0123456789ab")


def test_the_search_finds_a_canary_in_every_spelling() -> None:
    text = f"some {NEEDLE.canary(12)} text"
    assert search_works(NEEDLE)
    assert NEEDLE.found_in(text.encode()) == ["00012"]
    assert NEEDLE.found_in(json.dumps(text).encode()) == ["00012"]
    for shift in range(4):
        assert NEEDLE.found_in(base64.b64encode(b"." * shift + text.encode()))
    assert NEEDLE.found_in(text.encode().hex().encode())
    assert NEEDLE.found_in(b"nothing of it, q0123456789a") == []


def test_every_kind_holds_the_canary_somewhere() -> None:
    canary = NEEDLE.canary(3)
    for name, raw in requests(canary).items():
        sent = raw.bytes("localhost:1")
        assert canary.encode() in sent or name == "body: empty", name


def test_every_request_has_a_canary_of_its_own() -> None:
    made = list(requests_of(NEEDLE, 5, 100))
    assert [number for number, _, _ in made] == list(range(5, 105))
    assert len({name for _, name, _ in made}) == len(requests(""))


ERROR = b'HTTP/1.1 400 Bad Request\r\nx: y\r\n\r\n{"error": {"message": "no"}}'
SPOKEN = b'HTTP/1.1 200 OK\r\nx: y\r\n\r\ndata: {"choices": [1]}\n\ndata: {"error": {"message": "no"}}\n\n'


def test_errors_and_headers_are_searched_but_not_what_the_model_says() -> None:
    assert what_may_hold_none(ERROR) == ERROR
    assert b"choices" not in what_may_hold_none(SPOKEN)
    assert b"message" in what_may_hold_none(SPOKEN)
    assert b"x: y" in what_may_hold_none(SPOKEN)


@pytest.mark.parametrize(("data", "n"), [(b"clean", 0), (NEEDLE.canary(1).encode(), 1)])
def test_what_is_found_tells_where_and_of_which_request(data: bytes, n: int) -> None:
    search = Search(NEEDLE, {1: "stop"})
    search.look("log", "serve.log", data)
    assert search.places == {"log": 1}
    assert search.found == [{"where": "log", "place": "serve.log", "canary": "00001", "request": "stop"}][:n]


def test_the_name_of_a_field_may_be_told_to_the_one_who_sent_it_alone() -> None:
    search = Search(NEEDLE, {1: "chat: unknown field"})
    for kind, place in (("answer", "chat: unknown field"), ("answer", "stop"), ("log", "serve.log")):
        search.look(kind, place, NEEDLE.canary(1).encode())
    assert [hit["place"] for hit in search.told_back] == ["chat: unknown field"]
    assert [hit["place"] for hit in search.found] == ["stop", "serve.log"]
