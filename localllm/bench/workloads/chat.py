"""`chat`: a conversation that grows turn by turn, its answers scripted so that every server gets the same prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from localllm.bench.workloads.ask import Ask, Message, Session
from localllm.bench.workloads.draws import Draws
from localllm.bench.workloads.lengths import Lengths
from localllm.bench.workloads.parameters import count, spread, tokens, words
from localllm.bench.workloads.prose import Prose
from localllm.bench.workloads.recipe import Recipe, Shared, Sharing


@dataclass(frozen=True, slots=True)
class ChatParameters:
    """Lengths of a conversation."""

    turns: int = count(4, 1, 200, "requests of one conversation, each with all turns before it")
    system: int = words(60, "the system prompt, the same in all conversations; 0: none", least=0)
    user: int = words(40, "what the user says in a turn")
    reply: int = words(60, "what the assistant said in an earlier turn")
    answer: int = tokens(64, "an answer")
    spread: float = spread(0.4)


def _sessions(of: ChatParameters, seed: int) -> Iterator[Session]:
    prose = Prose()
    lengths = _lengths(of)
    shared = Draws(seed, "chat")
    system = prose.text(shared, shared.pick(prose.trades), of.system, "rule")
    at = 0
    while True:
        draws = Draws(seed, "chat", at)
        trade = draws.pick(prose.trades)
        chat: list[Message] = [{"role": "system", "content": system}] if system else []
        asks: list[Ask] = []
        for turn in range(of.turns):
            chat.append({"role": "user", "content": _said(prose, draws, trade, lengths["user"].draw(draws), turn)})
            asks.append(Ask("chat", lengths["answer"].draw(draws), messages=tuple(chat)))
            reply = prose.text(draws, trade, lengths["reply"].draw(draws), "advice")
            chat.append({"role": "assistant", "content": reply})
        yield tuple(asks)
        at += 1


def _said(prose: Prose, draws: Draws, trade: str, n_words: int, turn: int) -> str:
    """Return a user's turn: what it is about, some facts, a question at the end."""
    question = prose.sentence(draws, trade, "question")
    opening = prose.sentence(draws, trade, "about" if turn == 0 else "statement")
    left = n_words - question.count(" ") - opening.count(" ") - 2
    if left < -3:
        return question
    return " ".join(part for part in (opening, prose.text(draws, trade, left), question) if part)


def _lengths(of: ChatParameters) -> Mapping[str, Lengths]:
    return {
        "user": Lengths(of.user, of.spread),
        "reply": Lengths(of.reply, of.spread),
        "answer": Lengths(of.answer, of.spread, "tokens"),
    }


def _sharing(of: ChatParameters) -> Sharing:
    lengths = _lengths(of)
    user, turn = lengths["user"].mean, lengths["user"].mean + lengths["reply"].mean
    prompts = sum(of.system + at * turn + user for at in range(of.turns))
    before_last = sum(of.system + at * turn for at in range(of.turns))
    earlier = of.system + sum(of.system + (at - 1) * turn + user for at in range(1, of.turns))
    parts = (
        Shared("the system prompt", "all requests", "1"),
        Shared("all turns so far", "the later requests of a conversation", "1 a conversation"),
    )
    return Sharing(parts if of.system else parts[1:], earlier / prompts, before_last / prompts)


CHAT = Recipe(
    name="chat",
    effect="conversations that grow turn by turn, with scripted answers",
    parameters=ChatParameters,
    sessions=_sessions,
    n_asks=lambda of: of.turns,
    lengths=_lengths,
    sharing=_sharing,
)
