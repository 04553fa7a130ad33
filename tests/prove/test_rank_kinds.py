"""Whole runs over ranks with what a learner over ranks can cut or leave out: adapters, copies of the weights, layers
computed again. Each is the run of one process. And runs below float32, whose passes round other numbers."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from posttrain.api import main
from posttrain.config.model_settings import Lora
from posttrain.config.run import Optimizer
from posttrain.record import run_reader
from posttrain.system.errors import InvariantError
from tests.killing import cut_run
from tests.over_ranks import BOUND, apart, drawn, run_of, said, same_bits, tensors

pytestmark = pytest.mark.prove


@dataclass(frozen=True)
class Kind:
    """A run and its ranks."""

    model: dict[str, Any]
    over: dict[str, Any] = field(default_factory=lambda: dict[str, Any](nproc=2))
    rl: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further settings of the reinforcement."""


EPS = {"optimizer": Optimizer(lr=1e-3, warmup=2, eps=1e-5)}
"""In the first step nobody is right, and its gradient is that of the distance from a reference that is the policy
itself: 0, and where layers are computed again rounding of 2e-8. Adam would make whole moves of that."""
KINDS = {
    "lora": Kind({"lora": Lora(rank=2)}),
    "dora": Kind({"lora": Lora(rank=2, dora=True)}),
    "copies": Kind({}, {"nproc": 4, "replicas": 2}),
    "computed again": Kind({"gradient_checkpointing": "full"}, rl=EPS),
    "computed again in part": Kind({"gradient_checkpointing": "selective"}, {"nproc": 4}, EPS),
}


PARTS = drawn(["in float32", "below", "other seeds", "wrong sums"], 1)
"""What is played here."""


@pytest.mark.skipif("in float32" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("word", drawn(KINDS, 1))
def test_it_is_the_run_of_one_process(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is cut: what ranks wrote is gone on with by one process, and the other way round."""
    kind = KINDS[word]
    run = run_of(kind.model, **kind.rl)
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "over", quiet=True, **kind.over)
    alone = dict[str, Any]()
    for folder, first, then in ((tmp_path / "to one", kind.over, alone), (tmp_path / "to ranks", alone, kind.over)):
        cut_run(run, folder, monkeypatch, **first)
        main.run(resume=folder, quiet=True, **then)
    types = {n: t.dtype for n, t in tensors(tmp_path / "one").items()}
    for how in ("over", "to one", "to ranks"):
        gap = apart(tmp_path / "one", tmp_path / how)
        print(f"{word}, {how}: a weight differs by at most {gap:.2g} (bound {BOUND:.2g})")
        assert gap <= BOUND
        assert said(tmp_path / "one") == said(tmp_path / how) != []
        assert types == {n: t.dtype for n, t in tensors(tmp_path / how).items()}
        assert not [n for s in run_reader.steps(tmp_path / how) for n in s.notes if n.startswith(("stopped", "rule "))]


NARROW: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "an adapter over bfloat16": {"dtype": "bfloat16", "lora": Lora(rank=2)},
    "an adapter over float16": {"dtype": "float16", "lora": Lora(rank=2)},
}
SUMS = NARROW | {"dora": {"lora": Lora(rank=2, dora=True)}}
"""Whose sums over ranks are compared layer by layer."""
DRAWS = 10


@pytest.mark.skipif("below" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("word", drawn(NARROW, 1))
def test_below_float32_it_learns_and_goes_on(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss falls as in one process. A run that was cut ends with the bits of one that was not, and one process goes
    on with what ranks wrote."""
    run = run_of(NARROW[word])
    main.run(run, out=tmp_path / "one", quiet=True)
    main.run(run, out=tmp_path / "over", quiet=True, nproc=2)
    cut_run(run, tmp_path / "again", monkeypatch, nproc=2)
    shutil.copytree(tmp_path / "again", tmp_path / "to one")
    main.run(resume=tmp_path / "again", quiet=True, nproc=2)
    same_bits(tmp_path / "over", tmp_path / "again")
    main.run(resume=tmp_path / "to one", quiet=True)
    types = {n: t.dtype for n, t in tensors(tmp_path / "one").items()}
    for how in ("over", "to one"):
        assert types == {n: t.dtype for n, t in tensors(tmp_path / how).items()}
        assert not [n for s in run_reader.steps(tmp_path / how) for n in s.notes if n.startswith(("stopped", "rule "))]
    losses = {how: imitated(tmp_path / how) for how in ("one", "over")}
    print(f"{word}: {losses}; weights {apart(tmp_path / 'one', tmp_path / 'over'):.2g} apart")
    assert all(loss[-1] < 0.9 * loss[0] for loss in losses.values())
    assert all(abs(a - b) < 0.02 * a for a, b in zip(*losses.values(), strict=True))


@pytest.mark.skipif("other seeds" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("seed", drawn(map(str, range(1, DRAWS + 1)), 1))
def test_no_check_is_disturbed(seed: str, tmp_path: Path) -> None:
    """Of other weights, tasks and answers, each kind in turn: nothing stops, and no rule speaks."""
    run = replace(run_of([*SUMS.values()][int(seed) % len(SUMS)]), seed=int(seed))
    main.run(run, out=tmp_path / "run", quiet=True, nproc=2)
    assert not [n for s in run_reader.steps(tmp_path / "run") for n in s.notes if n.startswith(("stopped", "rule "))]


LOST = ("gradients_averaged_over_ranks", "gradients_reduced_twice", "rank_not_in_the_sum")


@pytest.mark.skipif("wrong sums" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("word", drawn(["bfloat16", "an adapter over float16", "dora"], 1))
@pytest.mark.parametrize("fault", drawn(LOST, 1))
def test_a_wrong_sum_is_found(fault: str, word: str, tmp_path: Path) -> None:
    """Before the first step, though a small move of the weights would be rounded away."""
    run = replace(run_of(SUMS[word]), fault=fault)
    with pytest.raises(InvariantError, match="averaged over ranks, summed twice, or lacks a rank's part"):
        main.run(run, out=tmp_path / "run", quiet=True, nproc=2, allow_fault=True)
    assert not run_reader.steps(tmp_path / "run")


SMALL = "model.hidden=32 model.ffn=64 rl.steps=1 rl.prompts=4 rl.siblings=4 env.heldout=8 seed=1"
HEALTHY = {
    "a trained DoRA": "model.lora.rank=2 model.lora.dora=true sft.optimizer.lr=0.01 sft.steps=40 sft.batch=16",
    "bfloat16 whose beginnings are shared": "model.dtype=bfloat16 sft.steps=2 sft.batch=8",
}


@pytest.mark.skipif("wrong sums" not in PARTS, reason="not drawn")
@pytest.mark.parametrize("words", HEALTHY.values(), ids=[*HEALTHY])
def test_a_sum_that_is_right_is_not_called_wrong(words: str, tmp_path: Path) -> None:
    """PEFT's gradient of DoRA leaves the norm out, so it is not that of the log-probs. A first pass compares what is
    shared by passes of its own, whose products are no part of the sum."""
    main.run("verifiable", *f"{words} {SMALL}".split(), out=tmp_path / "run", quiet=True, nproc=2)


@pytest.mark.skipif("wrong sums" not in PARTS, reason="not drawn")
def test_a_scale_left_in_the_gradient_is_found_over_ranks(tmp_path: Path) -> None:
    run = replace(run_of(NARROW["float16"]), fault="scale_left_in_gradient")
    with pytest.raises(InvariantError, match="Take the scale out where gradients are gathered"):
        main.run(run, out=tmp_path / "run", quiet=True, nproc=2, allow_fault=True)


def imitated(folder: Path) -> list[float]:
    """The loss of each step of imitation."""
    return [s.gauges["sft/loss"].mean for s in run_reader.steps(folder) if s.stage == "sft"]
