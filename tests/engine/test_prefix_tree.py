"""Blocks and the prefix tree: what is found is what was put in, under its own version, and nothing is lost or owned
twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.engine.embedded.cache.cache_blocks import BLOCK, Blocks, blocks_for
from posttrain.engine.embedded.cache.prefix_tree import PrefixTree
from posttrain.system.errors import InvariantError


def tokens(n: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + n, dtype=np.int32)


def made(most: int = 32) -> tuple[Blocks, PrefixTree]:
    blocks = Blocks(most)
    blocks.grow(most)
    return blocks, PrefixTree(blocks, 0)


def put(blocks: Blocks, tree: PrefixTree, ids: np.ndarray) -> np.ndarray:
    """A sequence comes, is cached, and goes."""
    own = blocks.take(blocks_for(len(ids)))
    tree.insert(ids, own)
    blocks.release(own)
    return own


def test_a_continuation_finds_its_beginning_to_the_token() -> None:
    blocks, tree = made()
    own = put(blocks, tree, tokens(37))
    assert (blocks.in_use, blocks.spare) == (0, 3)
    found = tree.match(np.concatenate([tokens(37), tokens(9, 500)]), 45)
    assert found.blocks.tolist() == own[:2].tolist()
    assert (found.tail, found.extra, found.tokens) == (own[2], 5, 37)


def test_a_prompt_is_never_found_whole_where_its_last_token_must_be_computed() -> None:
    blocks, tree = made()
    put(blocks, tree, tokens(32))
    assert tree.match(tokens(32), 31).tokens == 31
    assert tree.match(tokens(32), 32).tokens == 32


def test_other_tokens_share_nothing_after_the_first_difference() -> None:
    blocks, tree = made()
    put(blocks, tree, tokens(48))
    other = tokens(48)
    other[20] = 999
    assert tree.match(other, 47).tokens == 20
    other[0] = 999
    assert tree.match(other, 47).tokens == 0


def test_no_block_is_found_across_versions() -> None:
    blocks, tree = made()
    put(blocks, tree, tokens(32))
    tree.renew(1)
    assert tree.match(tokens(32), 32).tokens == 0
    assert (len(tree), blocks.spare, blocks.free) == (0, 0, 32)


def test_the_least_recently_used_goes_first_and_nothing_in_use() -> None:
    blocks, tree = made()
    for start in (0, 1000, 2000):
        put(blocks, tree, tokens(32, start))
    tree.match(tokens(32), 32)
    held = tree.match(tokens(32, 2000), 32).blocks
    blocks.share(held)
    assert tree.evict(2) == 2
    assert [tree.match(tokens(32, s), 32).tokens for s in (0, 1000, 2000)] == [32, 0, 32]
    assert tree.evict(99) == 2
    assert [tree.match(tokens(32, s), 32).tokens for s in (0, 2000)] == [0, 32]
    blocks.release(held)
    assert tree.evict(99) == 2
    assert blocks.free == 32


def test_who_caches_what_is_cached_learns_where() -> None:
    blocks, tree = made()
    first = put(blocks, tree, tokens(32))
    mine = blocks.take(3)
    assert tree.insert(tokens(48), mine).tolist() == [*first.tolist(), mine[2]]
    assert blocks.owners(mine[0]) == 1 and blocks.owners(mine[2]) == 2


def test_a_block_is_released_as_often_as_it_is_owned() -> None:
    blocks, _ = made()
    own = blocks.take(2)
    blocks.release(own)
    with pytest.raises(InvariantError, match="more often"):
        blocks.release(own)
    with pytest.raises(InvariantError, match="free"):
        blocks.take(33)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(0, 3)), max_size=30))
def test_any_history_keeps_the_books(history: list[tuple[int, int, int]]) -> None:
    """Sequences over few beginnings come, share what is found, are cached and go; blocks always add up, and what is
    found is exactly what some cached sequence began with."""
    blocks, tree = made(64)
    cached: list[np.ndarray] = []
    for beginning, length, evicted in history:
        ids = np.concatenate([tokens(24, beginning // 2 * 100), tokens(length, beginning * 1000)])
        found = tree.match(ids, len(ids))
        longest = max((_common(ids, c) for c in cached), default=0)
        assert found.tokens <= longest
        blocks.share(found.blocks)
        need = blocks_for(len(ids)) - len(found.blocks)
        tree.evict(max(0, need - blocks.free))
        own = np.concatenate([found.blocks, blocks.take(need)])
        tree.insert(ids, own)
        assert tree.match(ids, len(ids)).tokens == len(ids)
        blocks.release(own)
        cached.append(ids)
        tree.evict(evicted)
        assert blocks.in_use == 0
        assert blocks.spare == len(tree)
        assert blocks.free + blocks.spare == blocks.capacity
    tree.renew(1)
    assert blocks.free == 64
    assert len(np.unique(blocks.take(64))) == 64


def _common(a: np.ndarray, b: np.ndarray) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def test_a_block_holds_so_many_rows() -> None:
    assert [blocks_for(n) for n in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]
