from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from localllm.bench.client.calls import End, Outcome
from proof.figures import BARE, ENGINE, OURS, Figure, Turns, burst_figures, table
from proof.sides import Burst, BurstFailed, burst_of

SLOW = Burst(n_tokens=400, total_s=4.0, ttft_ms=(110.0, 130.0), pace_ms=20.0, cpu_s=0.04)
FAST = Burst(n_tokens=400, total_s=3.9, ttft_ms=(100.0, 120.0), pace_ms=19.0)
ROUNDS = [{OURS: SLOW, ENGINE: FAST, BARE: FAST, "other": replace(FAST, total_s=8.0)}] * 5


def named(figures: Sequence[Figure]) -> dict[str, Figure]:
    return {figure.what: figure for figure in figures}


def test_one_client_is_held_against_the_engine() -> None:
    ratio, above, cpu = burst_figures(ROUNDS, 1)
    assert (ratio.value, ratio.reached) == (pytest.approx(0.95), False)
    assert (above.value, above.unit, above.reached) == (pytest.approx(10.0), "ms", False)
    assert (cpu.value, cpu.reached) == (pytest.approx(0.1), True)


def test_the_servers_own_clock_tells_what_is_outside_the_engine() -> None:
    timed = replace(ANSWER, timings={"queue_ms": 20.0, "prompt_ms": 477.0})
    assert burst_of("x", [timed, ANSWER], 3, None).outside_ms == pytest.approx((3.0,))
    rounds = [{**ROUNDS[0], OURS: replace(SLOW, outside_ms=(3.0,))}]
    found = named(burst_figures(rounds, 1))["1 client: first token, time outside queue and prefill"]
    assert (found.value, found.reached) == (3.0, True)


def test_several_clients_are_held_against_the_bare_loop_and_every_other_server() -> None:
    found = named(burst_figures(ROUNDS, 8))
    assert found["8 clients: tokens/s over the bare loop's"].value == pytest.approx(0.975)
    assert found["8 clients: tokens/s over other"].value == pytest.approx(2.0)
    assert found["CPU of the HTTP process a streamed token, 8 streams"].asked == 0.2
    assert len(burst_figures(ROUNDS, 4)) == 2


def test_without_rounds_there_are_no_figures() -> None:
    assert burst_figures([], 4) == []
    assert table([]) == []


def test_the_table_has_a_line_a_side_and_ratios_of_the_others() -> None:
    lines = {line["side"]: line for line in table(ROUNDS)}
    assert lines[OURS]["tokens_per_s"] == 100.0
    assert lines[OURS]["speed_ratio"] is None
    assert lines["other"]["speed_ratio"] == [2.0, 2.0, 2.0]


@dataclass
class Scripted:
    """A side that writes down its turns."""

    name: str
    turns: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def burst(self, prompts: Sequence[Sequence[int]], n_gen: int) -> Burst:
        self.turns.append((self.name, tuple(prompts[0])))
        return SLOW


def test_sides_take_turns_on_the_same_fresh_prompts() -> None:
    turns: list[tuple[str, tuple[int, ...]]] = []
    n_drawn = 0

    def draw(n: int) -> list[tuple[int, ...]]:
        nonlocal n_drawn
        n_drawn += 1
        return [(n_drawn, i) for i in range(n)]

    rounds = Turns([Scripted("a", turns), Scripted("b", turns), Scripted("c", turns)], draw, {}).take(2, 5, 3)
    assert len(rounds) == 3  # the first, not counted, is gone
    order = "".join(name for name, _ in turns)
    assert order == "bac" + "abc" + "cba" + "bca"  # each is followed by each other one
    assert [prompt[0] for _, prompt in turns] == [n for n in (1, 2, 3, 4) for _ in range(3)]


class Failing(Scripted):
    """A side that fails at its second turn."""

    def burst(self, prompts: Sequence[Sequence[int]], n_gen: int) -> Burst:
        if self.turns:
            raise BurstFailed("it fell over")
        return super().burst(prompts, n_gen)


def test_a_server_of_others_that_fails_is_left_out() -> None:
    left_out: dict[str, str] = {}
    turns = Turns([Scripted(OURS), Failing("other")], lambda n: [(1,)] * n, left_out)
    assert [set(found) for found in turns.take(1, 5, 3)] == [{OURS}] * 3
    assert left_out == {"other": "it fell over"}
    assert [set(found) for found in turns.take(1, 5, 1)] == [{OURS}]


def test_a_side_of_ours_that_fails_ends_it() -> None:
    with pytest.raises(BurstFailed):
        Turns([Failing(OURS)], lambda n: [(1,)] * n, {}).take(1, 5, 1)


ANSWER = Outcome("", 0, End.ANSWER, True, 200, 10.0, 10.0, 11.2, (10.5, 10.75, 11.0), finish_reasons=("length",))


def test_a_burst_counts_from_the_first_request_to_the_last_token() -> None:
    found = burst_of("x", [ANSWER, replace(ANSWER, started_s=10.25, due_s=10.25)], 3, 0.5)
    assert (found.n_tokens, found.total_s, found.cpu_s) == (6, 1.0, 0.5)
    assert found.ttft_ms == pytest.approx((500.0, 250.0))
    assert found.pace_ms == pytest.approx(250.0)


@pytest.mark.parametrize(
    "wrong",
    [
        replace(ANSWER, end=End.REFUSED, token_s=()),
        replace(ANSWER, finish_reasons=("stop",)),
        replace(ANSWER, completion_tokens=2),
    ],
)
def test_an_answer_that_is_not_what_was_asked_for_is_no_sample(wrong: Outcome) -> None:
    with pytest.raises(BurstFailed):
        burst_of("x", [wrong], 3, None)
