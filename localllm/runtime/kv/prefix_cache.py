"""The device tier's index: a radix tree over token ids that finds which slots hold a prefix.

It indexes what slots hold *or are about to compute* (a running sequence's whole prompt), so a
newcomer also finds the sequence that is computing its prefix right now. How much of it a slot
holds is the ledger's knowledge (`slots.py`).
Source: SGLang RadixAttention, arXiv:2312.07104.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from localllm.runtime.slots import common_prefix
from localllm.runtime.types import Tokens


@dataclass(slots=True, eq=False)
class Node:
    """An edge of the tree: `tokens` from its parent, and every slot whose path runs through its end."""

    tokens: list[int]
    parent: Node | None = None
    slots: set[int] = field(default_factory=set)
    children: dict[int, Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Slot `slot` shares its first `n_common` tokens with what was looked for."""

    slot: int
    n_common: int


class PrefixCache:
    """Maps token paths to slots; one root per (adapter set, isolation salt)."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, Node] = {}
        self._ends: dict[int, tuple[Hashable, Node]] = {}

    def insert(self, root: Hashable, slot: int, tokens: Tokens) -> None:
        """Index `slot` under `tokens`, instead of where it was before."""
        self.remove(slot)
        node = self._roots.setdefault(root, Node([]))
        rest = list(tokens)
        while rest:
            child = node.children.get(rest[0])
            if child is None:
                child = node.children[rest[0]] = Node(rest, node)
                rest = []
            else:
                n_common = common_prefix(child.tokens, rest)
                if n_common < len(child.tokens):
                    child = self._split(child, n_common)
                rest = rest[n_common:]
            child.slots.add(slot)
            node = child
        self._ends[slot] = (root, node)

    def remove(self, slot: int) -> None:
        """Forget the slot; nodes that no slot runs through go with it, and an empty root. Idempotent."""
        if slot not in self._ends:
            return
        root, node = self._ends.pop(slot)
        while node.parent is not None:
            node.slots.discard(slot)
            if not node.slots:
                del node.parent.children[node.tokens[0]]
            node = node.parent
        if not node.children and self._roots.get(root) is node:
            del self._roots[root]

    def match(self, root: Hashable, tokens: Tokens) -> list[PrefixHit]:
        """Return every slot that shares a prefix with `tokens`, the longest first.

        Shapes: tokens [n]; each slot once, with all it shares (the caller keeps one token back to run).
        """
        node: Node | None = self._roots.get(root)
        depth, hits = 0, dict[int, int]()
        while node is not None and depth < len(tokens):
            node = node.children.get(tokens[depth])
            if node is None:
                break
            n_common = common_prefix(node.tokens, tokens[depth : depth + len(node.tokens)])
            depth += n_common
            hits.update(dict.fromkeys(node.slots, depth))
            if n_common < len(node.tokens):
                break
        return [PrefixHit(slot, n) for slot, n in sorted(hits.items(), key=lambda hit: (-hit[1], hit[0]))]

    def _split(self, node: Node, n_tokens: int) -> Node:
        """Cut an edge after `n_tokens`; return the new upper half."""
        assert node.parent is not None
        upper = Node(node.tokens[:n_tokens], node.parent, set(node.slots), {node.tokens[n_tokens]: node})
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[n_tokens:], upper
        return upper
