"""Weights in parts and other ways to carry them: what is put together is exact, and what does not fit is refused by
name."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from posttrain.core.exchange.shards import Shard
from posttrain.core.ports import Learner, Sampler
from posttrain.ladder.policy_rows import GRPO
from posttrain.record.run_reader import record_digest
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import InvariantError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


class Cut:
    """A learner that lies in `world` processes: of each weight, every one has some rows, the last ones fewer or
    none."""

    def __init__(self, inner: Learner, world: int) -> None:
        self._inner, self._world = inner, world

    def shards(self) -> Iterator[Shard]:
        for rank in range(self._world):
            for one in self._inner.shards():
                rows = -(-one.shape[0] // self._world)
                at = min(rank * rows, one.shape[0])
                yield Shard(one.name, one.tensor[at : at + rows], one.shape, (at, *one.offsets[1:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ByFile:
    """Carries the parts through a safetensors file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.sent = folder, 0

    async def send(self, version: int, shards: Iterable[Shard], sampler: Sampler) -> str:
        path = self._folder / f"{version}.safetensors"
        parts = {str(i): s for i, s in enumerate(shards)}
        about = {key: json.dumps([s.name, s.shape, s.offsets]) for key, s in parts.items()}
        save_file({key: s.tensor.contiguous() for key, s in parts.items()}, path, metadata=about)
        self.sent += len(parts)
        return await sampler.load(version, whole_tensors(self._read(path)))

    @staticmethod
    def _read(path: Path) -> Iterator[Shard]:
        with safe_open(path, "pt") as opened:
            about = opened.metadata()
        for key, tensor in load_file(path).items():
            name, shape, offsets = json.loads(about[key])
            yield Shard(name, tensor, tuple(shape), tuple(offsets))


@pytest.mark.prove
def test_a_run_whose_weights_travel_in_parts_by_file_is_the_same_run(tmp_path: Path) -> None:
    """Another learner and another transport, given to `Sync` from outside: the record and the weights are bit-equal."""
    run = only_rl(tiny_run(algorithm=GRPO))
    plain = tiny_parts(tmp_path / "plain", run)
    asyncio.run(play(plain))
    other = tiny_parts(tmp_path / "other", run)
    carry = ByFile(tmp_path)
    other.sync.learner, other.sync.transport = cast("Learner", Cut(other.learner, 3)), carry
    asyncio.run(play(other))
    assert carry.sent >= 3 * 3 * len(list(plain.learner.shards()))
    assert other.learner.fingerprint() == plain.learner.fingerprint()
    assert record_digest(tmp_path / "other") == record_digest(tmp_path / "plain")


def test_a_whole_weight_is_handed_over_as_it_is() -> None:
    tensor = torch.randn(4, 3)
    ((name, found),) = whole_tensors([Shard.of("w", tensor)])
    assert name == "w" and found is tensor
    assert [
        n for n, _ in whole_tensors([Shard.of("scalar", torch.tensor(1.0)), Shard.of("none", torch.zeros(0, 2))])
    ] == ["scalar", "none"]


@st.composite
def weights(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[Shard]]:
    """Some weights, and all of their parts in any order; cut along every axis at any places, so that some are empty."""
    full: dict[str, Tensor] = {}
    parts: list[Shard] = []
    for i in range(draw(st.integers(1, 3))):
        name, shape = f"w{i}", tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
        full[name] = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 100 * i
        boxes: list[tuple[slice, ...]] = [()]
        for size in shape:
            cuts = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=2))), size]
            boxes = [(*box, slice(a, b)) for box in boxes for a, b in itertools.pairwise(cuts)]
        parts += [Shard(name, full[name][box], shape, tuple(s.start for s in box)) for box in boxes]
    return full, draw(st.permutations(parts))


@given(weights())
def test_parts_in_any_order_are_the_weights(drawn: tuple[dict[str, Tensor], list[Shard]]) -> None:
    full, parts = drawn
    got = list(whole_tensors(parts))
    assert sorted(n for n, _ in got) == sorted(full)
    assert all(torch.equal(t, full[n]) for n, t in got)


@given(weights(), st.data())
def test_a_part_that_is_missing_or_came_twice_is_refused_by_its_name(
    drawn: tuple[dict[str, Tensor], list[Shard]], data: st.DataObject
) -> None:
    parts = [p for p in drawn[1] if p.tensor.numel()]
    odd = data.draw(st.sampled_from(parts))
    with pytest.raises(InvariantError, match=f"weight '{odd.name}'.*(twice|same numbers)"):
        list(whole_tensors([*parts, odd]))
    if not odd.whole:
        with pytest.raises(InvariantError, match=f"weight '{odd.name}'.*is not whole"):
            list(whole_tensors([p for p in parts if p is not odd]))


def test_what_does_not_fit_together_is_refused_by_its_name() -> None:
    w = torch.zeros(4, 2)
    top, low = Shard("w", w[:2], (4, 2), (0, 0)), Shard("w", w[2:], (4, 2), (2, 0))
    for wrong, says in (
        (Shard("w", w[2:].double(), (4, 2), (2, 0)), "torch.float64"),
        (Shard("w", w[2:], (5, 2), (2, 0)), r"\(5, 2\)"),
        (Shard("w", w[1:3], (4, 2), (1, 0)), "same numbers"),
    ):
        with pytest.raises(InvariantError, match=f"weight 'w'.*{says}"):
            list(whole_tensors([top, wrong]))
    with pytest.raises(InvariantError, match="weight 'w' was sent twice"):
        list(whole_tensors([top, low, low]))
    for offsets in ((3, 0), (0,), (-1, 0)):
        with pytest.raises(InvariantError, match="shard of 'w' .* does not lie inside"):
            Shard("w", w[:2], (4, 2), offsets)
