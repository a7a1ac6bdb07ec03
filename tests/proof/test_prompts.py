from __future__ import annotations

from itertools import islice

from proof.prompts import stories, token_prompts


def test_prompts_have_their_length_and_begin_with_an_id_of_their_own() -> None:
    found = list(token_prompts(lambda text: [ord(c) for c in text[:30]], 500, 3, 100))
    assert len(found) == 500
    assert {len(prompt) for prompt in found} == {100}
    assert len({prompt[0] for prompt in found}) == 500
    assert found == list(token_prompts(lambda text: [ord(c) for c in text[:30]], 500, 3, 100))


def test_stories_differ_and_repeat_with_their_seed() -> None:
    first = list(islice(stories(1, 20), 50))
    assert len(set(first)) == 50
    assert first == list(islice(stories(1, 20), 50))
    assert first != list(islice(stories(2, 20), 50))
