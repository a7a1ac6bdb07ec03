"""What the tiers hold of a prompt, looked at from outside: for people who ask, not for restoring.

Nothing is read but headers, nothing is changed. Not for the engine's thread: the disk is asked.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from localllm.runtime.kv.blocks import Block, Chain, KeyMaker, Root
from localllm.runtime.kv.disk_about import read_about
from localllm.runtime.kv.tiers import CutRule, Tier, Tiers
from localllm.runtime.types import Tokens

_MAX_FOLDERS = 64
_MAX_FILES = 4096  # looked at in one sub-folder


def held_tokens(tiers: Tiers, root: Root, tokens: Tokens) -> int:
    """Return how many leading tokens lie in blocks, whether or not the engine could use them."""
    chain = Chain(tiers.maker, root)
    if tiers.rule is CutRule.WHOLE:
        return _longest_state(tiers.followers(chain.root_key), tiers.maker, chain.root_key, tokens)
    chain.extend(tokens)
    for start in range(0, len(tokens), tiers.block_tokens):
        own, parent = tokens[start : start + tiers.block_tokens], chain.parent(start)
        followers = {block.key: block for block in tiers.followers(parent)}
        at = start // tiers.block_tokens
        if at < len(chain.keys) and chain.keys[at] in followers:
            continue
        marks = tiers.maker.marks(parent, own) if followers else b""
        return start + max((block.n_common(marks) for block in followers.values()), default=0)
    return len(tokens)


def kept_tokens(tiers: Tiers, root: Root, tokens: Tokens) -> dict[str, int]:
    """Return how many leading tokens each tier alone holds, on disk written ones: of a whole state, all or none."""
    blocks = list(_blocks(tiers, root, tokens))
    kept: dict[Tier, int] = {"ram": 0, "disk": 0}
    for tier in kept:
        for block in blocks:
            if tiers.places(block.key).get(tier) is None:  # not there, or still on its way
                break
            kept[tier] = block.end
    return {str(tier): n_tokens for tier, n_tokens in kept.items()}


def was_evicted(tiers: Tiers, root: Root, tokens: Tokens, n_known: int, ends: Iterable[int]) -> bool:
    """Say whether what follows the first `n_known` tokens was held and had to go.

    `ends`: where whole states of these tokens may have ended.
    """
    chain = Chain(tiers.maker, root)
    if tiers.rule is CutRule.WHOLE:
        wanted = sorted({end for end in ends if n_known < end <= len(tokens)})
        return any(tiers.was_evicted(chain.whole(tokens, end).key) for end in wanted)
    start = n_known // tiers.block_tokens * tiers.block_tokens
    end = min(len(tokens), start + tiers.block_tokens)
    return n_known < len(tokens) and tiers.was_evicted(chain.block(tokens, start, end).key)


def is_held_elsewhere(
    tiers: Tiers, fingerprint: str, model_name: str, root: Root, tokens: Tokens, n_least: int
) -> bool:
    """Say whether the disk holds the first `n_least` of these tokens for the same model under other settings."""
    disk = tiers.disk
    if disk is None or not 0 < n_least <= len(tokens):
        return False
    for folder, other in _other_folders(Path(disk.stats().folder), fingerprint, model_name):
        maker = KeyMaker(other, disk.secret, tiers.block_tokens)
        chain = Chain(maker, root)
        if tiers.rule is CutRule.WHOLE:
            states = _blocks_after(folder, chain.root_key)
            if _longest_state(states, maker, chain.root_key, tokens) >= n_least:
                return True
            continue
        start = (n_least - 1) // tiers.block_tokens * tiers.block_tokens
        chain.extend(tokens[:start])
        parent = chain.parent(start)
        marks = maker.marks(parent, tokens[start : start + tiers.block_tokens])
        if any(start + block.n_common(marks) >= n_least for block in _blocks_after(folder, parent)):
            return True
    return False


def _longest_state(states: Iterable[Block], maker: KeyMaker, root_key: bytes, tokens: Tokens) -> int:
    """Return the length of the longest whole state that is one of these tokens' beginnings."""
    ends = sorted({state.n_tokens for state in states if state.n_tokens <= len(tokens)}, reverse=True)
    keys = {state.key for state in states}
    return next((end for end in ends if maker.key(root_key, tokens[:end]) in keys), 0)


def _blocks(tiers: Tiers, root: Root, tokens: Tokens) -> Iterator[Block]:
    """Yield the blocks that hold exactly these tokens."""
    chain = Chain(tiers.maker, root)
    if tiers.rule is CutRule.WHOLE:
        yield chain.whole(tokens, len(tokens))
        return
    for start in range(0, len(tokens), tiers.block_tokens):
        yield chain.block(tokens, start, min(len(tokens), start + tiers.block_tokens))


def _other_folders(root: Path, fingerprint: str, model_name: str) -> Iterator[tuple[Path, str]]:
    """Yield the folders of the same model under other fingerprints, with those."""
    from localllm.runtime.kv.disk_room import engine_folders

    for folder in sorted(engine_folders(root))[:_MAX_FOLDERS]:
        about = read_about(folder)
        other = about.get("fingerprint", fingerprint)
        if about.get("model") == model_name and other != fingerprint:
            yield folder, other


def _blocks_after(folder: Path, parent: bytes) -> list[Block]:
    """Return the blocks that follow a parent, as their files say; what is no block is passed over."""
    from localllm.runtime.kv.disk_format import BadFile, read_header
    from localllm.runtime.kv.disk_index import block_names

    found, part = list[Block](), folder / f"{parent[0]:02x}"
    for path in [part / name for name in block_names(part)][:_MAX_FILES]:
        with contextlib.suppress(BadFile, OSError):
            block = read_header(path).block
            if block.parent == parent:
                found.append(block)
    return found
