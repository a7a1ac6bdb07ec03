"""What the RAM and disk tiers call a piece of KV: a hash chain over everything that shapes it.

A block is `kv_block_tokens` consecutive positions of a sequence (the last one of a sequence may be
shorter), or a whole state where an engine's state cannot be cut. Its key stands for the engine, the
root (adapter set and isolation salt), every token before it and its own tokens, so equal keys mean
equal KV. Keys are keyed hashes: without the user's secret they say nothing about the tokens.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from localllm.runtime.types import Tokens

KEY_BYTES = 16
MARK_BYTES = 8
"""Of the mark that stands for each token of a block, and all that precede it."""

BLOCK_TOKENS = 64
_TOKEN_BYTES = 4  # of an id, where it is hashed

Key: TypeAlias = bytes
Root: TypeAlias = tuple[str, str]
"""What two requests must have in common to share KV: the adapter set and the isolation salt."""

NO_ROOT: Root = ("", "")


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of KV by name: positions [start, start + n_tokens) after all that `parent` stands for.

    `key`: KEY_BYTES; so is `parent`, the root's own key for the first block. `marks`: MARK_BYTES a token,
    so that a sequence which leaves the block in the middle still knows how much of it is its own; empty
    where a state is only usable whole. `is_bare`: its window cells were gone when it was exported, so a
    prefix may only end a whole window beyond it.
    """

    key: Key
    parent: Key
    start: int
    n_tokens: int
    marks: bytes = b""
    is_bare: bool = False

    @property
    def end(self) -> int:
        """The position after its last one."""
        return self.start + self.n_tokens

    def n_common(self, marks: bytes) -> int:
        """Return how many leading tokens this block has in common with what `marks` were made of."""
        low, high = 0, min(len(marks), len(self.marks)) // MARK_BYTES
        while low < high:  # a mark stands for all tokens up to its own
            middle = (low + high + 1) // 2
            at = slice((middle - 1) * MARK_BYTES, middle * MARK_BYTES)
            if marks[at] == self.marks[at]:
                low = middle
            else:
                high = middle - 1
        return low


class KeyMaker:
    """Makes the keys of one engine's KV. Immutable, so any thread may use it."""

    def __init__(self, fingerprint: str, secret: bytes, block_tokens: int = BLOCK_TOKENS) -> None:
        self.block_tokens = block_tokens
        self._secret = hashlib.blake2b(fingerprint.encode(), key=secret[:64], digest_size=32).digest()

    def root_key(self, root: Root) -> Key:
        """Return what the first block of a root's sequences has as its parent."""
        text = "\0".join((str(len(root[0])), *root)).encode("utf-8", "surrogatepass")
        return self._hash(b"root", text)

    def key(self, parent: Key, tokens: Tokens) -> Key:
        """Return the key of the block of `tokens` after `parent`."""
        return self._hash(parent, _packed(tokens))

    def beginnings(self, parent: Key, tokens: Tokens, lengths: Iterable[int]) -> dict[int, Key]:
        """Return the keys of the blocks that are the first n of `tokens`, for all n of `lengths`, in one pass."""
        keys, done, packed = dict[int, Key](), 0, _packed(tokens)
        state = hashlib.blake2b(parent, key=self._secret, digest_size=KEY_BYTES)
        for n_tokens in sorted(n for n in set(lengths) if 0 < n <= len(tokens)):
            state.update(packed[done * _TOKEN_BYTES : n_tokens * _TOKEN_BYTES])
            keys[n_tokens], done = state.copy().digest(), n_tokens
        return keys

    def marks(self, parent: Key, tokens: Tokens) -> bytes:
        """Return the marks of the block of `tokens` after `parent`: MARK_BYTES a token."""
        state = hashlib.blake2b(parent, key=self._secret, digest_size=KEY_BYTES)
        packed, marks = _packed(tokens), list[bytes]()
        for at in range(0, len(packed), _TOKEN_BYTES):
            state.update(packed[at : at + _TOKEN_BYTES])
            marks.append(state.copy().digest()[:MARK_BYTES])
        return b"".join(marks)

    def _hash(self, first: bytes, rest: bytes) -> bytes:
        state = hashlib.blake2b(first, key=self._secret, digest_size=KEY_BYTES)
        state.update(rest)
        return state.digest()


class Chain:
    """The keys of one sequence's whole blocks, made as far as they are asked for. One thread at a time."""

    def __init__(self, maker: KeyMaker, root: Hashable) -> None:
        assert isinstance(root, tuple)
        self._maker = maker
        self.root_key = maker.root_key(root)
        self.keys: list[Key] = []

    def extend(self, tokens: Tokens) -> None:
        """Make the keys of all whole blocks of `tokens`, which begin with the tokens that were given before."""
        size = self._maker.block_tokens
        for start in range(len(self.keys) * size, len(tokens) - size + 1, size):
            self.keys.append(self._maker.key(self.parent(start), tokens[start : start + size]))

    def cut(self, n_tokens: int) -> None:
        """Forget the keys of blocks beyond `n_tokens`."""
        del self.keys[n_tokens // self._maker.block_tokens :]

    def parent(self, start: int) -> Key:
        """Return the parent's key of the block that begins at `start`, all before which has been made."""
        return self.keys[start // self._maker.block_tokens - 1] if start else self.root_key

    def block(self, tokens: Tokens, start: int, end: int) -> Block:
        """Return the block of positions [start, end) of `tokens`; `start` is where a block begins."""
        self.extend(tokens[:start])
        parent, own = self.parent(start), tokens[start:end]
        return Block(self._maker.key(parent, own), parent, start, end - start, self._maker.marks(parent, own))

    def whole(self, tokens: Tokens, n_tokens: int) -> Block:
        """Return the block that is all of the first `n_tokens`, for a state that cannot be cut."""
        return Block(self._maker.key(self.root_key, tokens[:n_tokens]), self.root_key, 0, n_tokens)


def _packed(tokens: Tokens) -> bytes:
    return array("i", tokens).tobytes()
