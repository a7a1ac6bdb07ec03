"""`localllm tokens`: how a model cuts a text, as a count, as ids, or back from ids."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.options import Json, Model, TalkFlags, option
from localllm.errors import UsageError, pasteable

if TYPE_CHECKING:
    from localllm.models.tokenizer import Tokenizer

Text = Annotated[
    str | None, typer.Argument(metavar="[TEXT]", help="Text to count or encode, or ids to decode; else stdin.")
]
Encode = Annotated[bool, option("--encode", help="Print the ids instead of their number.")]
Decode = Annotated[bool, option("--decode", help="TEXT is ids (12 345 or 12,345): print what they spell.")]


def tokens(
    model: Model,
    talk: TalkFlags,
    text: Text = None,
    encode: Encode = False,
    decode: Decode = False,
    json: Json = False,
) -> None:
    """Count, encode or decode tokens.

    Special spellings are parsed, and BOS is added where the model asks for it, as for a raw prompt.
    """
    if encode and decode:
        raise UsageError(
            "--encode and --decode exclude each other.", pasteable("localllm", "tokens", model, "--encode")
        )
    from localllm.cli.prompt_input import argument_text

    given = argument_text(text, "TEXT") if text is not None else _stdin_text(model, talk.quiet)
    wanted = _parse_ids(given, model) if decode else None
    from localllm import compose
    from localllm.cli.signals import in_thread

    with closing(in_thread(lambda: compose.open_tokenizer(model))) as opened:
        if wanted is not None:
            _decode(opened.tokenizer, wanted, json)
        else:
            _encode(opened.tokenizer, given, ids_wanted=encode, json=json)


def _encode(tokenizer: Tokenizer, text: str, *, ids_wanted: bool, json: bool) -> None:
    from localllm.cli.output import Answer

    ids = tokenizer.encode(text, parse_special=True, add_bos=True)
    if json:
        pieces = [tokenizer.piece(token).decode("utf-8", "backslashreplace") for token in ids]
        Answer().document({"n_tokens": len(ids), "ids": ids, "pieces": pieces})
    else:
        Answer().write((" ".join(map(str, ids)) if ids_wanted else str(len(ids))) + "\n")


def _decode(tokenizer: Tokenizer, ids: Sequence[int], json: bool) -> None:
    from localllm.cli.output import Answer, give_up_stdout

    n_vocab = tokenizer.vocabulary.n_vocab
    outside = next((token for token in ids if not 0 <= token < n_vocab), None)
    if outside is not None:
        raise UsageError(f"{outside} is not a token id of this model.", f"use ids from 0 to {n_vocab - 1}")
    answer = Answer()
    if json:
        answer.document({"n_tokens": len(ids), "ids": list(ids), "text": tokenizer.decode(ids)})
    elif sys.stdout.isatty():
        answer.write(tokenizer.decode(ids) + "\n")
    else:
        # Exact bytes, so that `--encode` piped into `--decode` gives the text back as it was.
        try:
            sys.stdout.buffer.write(b"".join(tokenizer.piece(token) for token in ids))
            sys.stdout.buffer.flush()
        except OSError as error:
            raise give_up_stdout(error) from None


def _parse_ids(text: str, model: str) -> list[int]:
    words = [word for word in re.split(r"[\s,\[\]]+", text) if word]
    wrong = next((word for word in words if not re.fullmatch(r"[0-9]{1,10}", word)), None)
    if wrong is not None:
        raise UsageError(
            f"{wrong[:40]!r} is not a token id.", pasteable("localllm", "tokens", model, "--decode", "1 2 3")
        )
    return [int(word) for word in words]


def _stdin_text(model: str, quiet: bool) -> str:
    from localllm.cli.prompt_input import read_stdin

    text = read_stdin(quiet=quiet)
    if text is None:
        raise UsageError("There is no text.", pasteable("localllm", "tokens", model, "some text"))
    return text
