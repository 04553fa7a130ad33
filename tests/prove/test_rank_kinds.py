"""Whole runs over ranks with what a learner over ranks can cut or leave out: adapters, and copies of the
weights. Each is the run of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from posttrain.api import main
from posttrain.core import reader
from posttrain.core.adapter import Lora
from posttrain.core.run import Optimizer
from tests.killing import cut_run
from tests.over_ranks import BOUND, apart, drawn, run_of, said, tensors

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
        assert not [n for s in reader.steps(tmp_path / how) for n in s.notes if n.startswith(("stopped", "rule "))]
