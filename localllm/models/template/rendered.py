"""A prompt as text, and where in it messages end and earlier answers stand."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from localllm.models.template.neutralise import Spellings, mark, unused_mark
from localllm.models.template.text import Text, message_of


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where an assistant's message stands in a prompt: offsets into its text, marks counted.

    What its model was given when it wrote the message ended in [`earliest`, `first`]; the caller's characters of
    it are all in [`first`, `last`). At `until` the next message's words begin, or a mark stands.
    """

    earliest: int
    first: int
    last: int
    until: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as text.

    `mark` stands in `text` inside every control spelling that the caller wrote (`n_neutralised` of
    them) and nowhere else. `boundaries`: offsets into `text`, ascending, where a message (or the
    tool list) ends. `unseen`: messages with content of which the template wrote nothing. `answers`: the
    assistant's messages, in order, each whole and once.
    """

    text: str
    boundaries: tuple[int, ...]
    mark: str
    n_neutralised: int = 0
    unseen: tuple[int, ...] = ()
    answers: tuple[Stretch, ...] = ()

    @property
    def plain(self) -> str:
        """The prompt as the template wrote it, without marks."""
        return self.text.replace(self.mark, "")


def rendered(text: str, spellings: Spellings, *, with_content: Sequence[int], assistants: Container[int]) -> Rendered:
    """Return what a template wrote, the caller's control spellings cut.

    `with_content`: the messages of which something must be seen; `assistants`: those of the assistant.
    """
    cuts = spellings.cuts(text)
    character = unused_mark(text)
    spans = text.spans if isinstance(text, Text) else ()
    seen = {message_of(origin) for _, _, origin in spans if origin >= 0}

    def marked(at: int) -> int:
        return at + bisect.bisect_left(cuts, at)

    def stretch(earliest: int, first: int, last: int, until: int) -> Stretch:
        n_before = bisect.bisect_left(cuts, first)
        until = min([until, *cuts[n_before : n_before + 1]])
        return Stretch(marked(earliest), marked(first), marked(last), until + n_before)

    return Rendered(
        text=mark(text, cuts, character),
        boundaries=tuple(map(marked, _boundaries(text, spellings))),
        mark=character,
        n_neutralised=len(cuts),
        unseen=tuple(i for i in with_content if i not in seen),
        answers=tuple(stretch(*ends) for ends in _answers(text, assistants)),
    )


def _answers(text: str, assistants: Container[int]) -> list[tuple[int, int, int, int]]:
    """Return the four offsets of each assistant's message whose characters stand together and nowhere else."""
    spans = text.spans if isinstance(text, Text) else ()
    groups = [(owner, list(group)) for owner, group in groupby(spans, lambda span: message_of(span[2]))]
    n_groups = Counter(owner for owner, _ in groups)
    found = []
    for at, (owner, group) in enumerate(groups):
        words = [span for span in group if span[2] >= 0]  # the role's name is not the caller's
        if not words or owner not in assistants or n_groups[owner] > 1:
            continue
        earliest = groups[at - 1][1][-1][1] if at else 0
        until = groups[at + 1][1][0][0] if at + 1 < len(groups) else len(text)
        found.append((earliest, words[0][0], words[-1][1], until))
    return found


def _boundaries(text: str, spellings: Spellings) -> list[int]:
    """Return where each message's part ends: after the end of turn and the white space that follow its words.

    There is none between messages whose words do not stand in their order (hoisted, reversed, repeated).
    """
    spans = text.spans if isinstance(text, Text) else ()
    plain = str.__str__(text)
    owners = [message_of(origin) for _, _, origin in spans]
    before = list(accumulate((-1 if owner is None else owner for owner in owners), max))
    behind = list(accumulate((len(plain) if owner is None else owner for owner in reversed(owners)), min))[::-1]
    gaps = [
        (spans[at - 1][1], spans[at][0])
        for at in range(1, len(spans))
        if before[at - 1] < behind[at] and owners[at] is not None
    ]
    if spans:
        gaps.append((spans[-1][1], len(plain)))
    ends: set[int] = set()
    for start, stop in gaps:
        end = spellings.first_end(plain, start, stop)
        end = start if end is None or end > stop else end
        ends.add(end + len(plain[end:stop]) - len(plain[end:stop].lstrip()))
    return sorted(ends)
