"""What the processes of `test_ranks` compute: one step after another over ranks, beside the same in one process.

Four processes are started once and serve every case. Groups of one, two and four of them are the worlds.
"""

from __future__ import annotations

import math
import multiprocessing
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Starcoder2Config

from posttrain.algorithm.loss.losses import Likelihood, Loss, PolicyLoss
from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.algorithm.preference.reward_model_loss import RankingLoss
from posttrain.config.model_settings import Lora
from posttrain.config.run import Checkpointing, Model, Optimizer
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.batch import Batch
from posttrain.core.exchange.ranks import ALONE
from posttrain.core.gauge import Gauges
from posttrain.core.streams import ADVANTAGE, MU, REFERENCE, RETURN, SIDE, START, VALUE, VERSION, WEIGHT
from posttrain.core.types import Segment
from posttrain.engine.adapters.adapter_modules import attach
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.layers import attention
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model import policy_model
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.model.tiny_models import characters
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks, joined
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.tensor_parallel import TensorLearner
from posttrain.ladder.policy_rows import LADDER
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.role.trainer import Trainer
from tests.engine.engine_parts import ALPHABET, policy, segments

WORLDS = (1, 2, 4)
STEPS = 2
UNITS = 5
"""Fewer pairs than 2 x 4, more than 4: ranks have one or two, so not all have the same number of micro-batches."""
SMALL, LARGE, ALONE_IN_A_PASS = 24, 4096, 1
"""Room of a micro-batch: about one episode in each, all of a rank in one, or one unit in each."""
OPTIMIZERS = {
    "adamw": Optimizer(lr=1e-3, warmup=0, clip=0.05, eps=1e-6, weight_decay=0.01),
    "sgd": Optimizer(kind="sgd", lr=1e-2, warmup=0, clip=0.05, weight_decay=0.01),
}
LOSSES: dict[str, Loss] = {
    "policy": PolicyLoss(LADDER["grpo"]),
    "policy with values": PolicyLoss(LADDER["ppo"]),
    "preference": PreferenceLoss(PREFERENCES["dpo"]),
    "preference with a likelihood": PreferenceLoss(PREFERENCES["orpo"]),
    "ranking": RankingLoss(),
    "likelihood": Likelihood(),
}


@dataclass(frozen=True)
class Case:
    loss: str
    micro_tokens: int
    turned: bool = False
    """Whether the episodes come in the opposite order."""
    arch: str = "gpt2"
    dtype: torch.dtype = torch.float64
    optimizer: str = "adamw"
    units: int = UNITS
    lora: Lora | None = None
    replicas: int = 1
    """Copies of the weights."""
    checkpointing: Checkpointing = "none"
    offload: bool = False
    tensor: bool = False
    """Whether layers are cut by columns and rows, and every rank computes the whole minibatch."""
    shared: int = 0
    """Tokens with which all segments begin alike; the ranks compute them once in each pass."""


@dataclass(frozen=True, eq=False)
class Trained:
    """What came of a few steps: the gradient before the clip of each, its norm, gauges, and the weights at the end."""

    gradients: list[dict[str, Tensor]]
    norms: list[float]
    gauges: list[Gauges]
    weights: dict[str, Tensor]
    fingerprint: str


def minibatch(case: Case) -> Batch:
    """The case's minibatch, with its weights normalised over all of it."""
    pairs = case.loss.startswith(("preference", "ranking"))
    parts = segments(2 * case.units, seed=5, longest=24)
    begun = np.arange(case.shared, dtype=np.int32)
    parts = [_behind(begun, s) for s in parts]
    if case.turned:  # pairs keep their own order
        order = [2 * u + i for u in range(case.units) for i in (0, 1)][::-1] if not pairs else []
        order = order or [2 * u + i for u in reversed(range(case.units)) for i in (0, 1)]
        parts = [parts[i] for i in order]
    episode = np.arange(len(parts), dtype=np.int32)
    if not pairs:  # the first two segments of the first order are one episode
        joined_up = episode - (episode > 0) if not case.turned else np.minimum(episode, len(parts) - 2)
        episode = joined_up.astype(np.int32)
    spoken = [s.spoken for s in parts]
    number = np.concatenate([s.ids[s.mask] + 31.0 * np.flatnonzero(s.mask) for s in parts])  # of the token itself
    wave = np.sin(number)
    streams: dict[Any, np.ndarray] = {WEIGHT: (1.5 + wave) / float((1.5 + wave).sum())}
    if pairs:
        side = np.tile(np.array([1, 0], np.int32), case.units)
        streams |= {
            WEIGHT: np.full(len(wave), 1 / case.units),
            SIDE: np.repeat(side, spoken),
            REFERENCE: (-2 + wave).astype(np.float32),
        }
        unit_E = np.repeat(np.arange(case.units, dtype=np.int32), 2)
        batch = Batch.of(parts, unit_E=unit_E, streams=streams)
        loss = LOSSES[case.loss]
        return prepared(loss.algorithm, batch)[0] if isinstance(loss, PreferenceLoss) else batch
    streams |= {
        ADVANTAGE: np.cos(3 * number),
        RETURN: np.cos(5 * number),
        VALUE: wave.astype(np.float32),
        MU: (-2 + 0.3 * wave).astype(np.float32),
        START: (-2 + 0.3 * wave).astype(np.float32),
        REFERENCE: (-2 + 0.1 * wave).astype(np.float32),
        VERSION: np.zeros(len(wave), np.int32),
    }
    return Batch.of(parts, episode.tolist(), streams=streams)


def _behind(begun: np.ndarray, s: Segment) -> Segment:
    """The segment with these tokens before it, which nobody spoke."""
    n = len(begun)
    filled = {"mask": np.zeros(n, bool), "logp": np.full(n, np.nan, np.float32), "version": np.full(n, -1, np.int32)}
    return replace(
        s,
        ids=np.concatenate([begun, s.ids]),
        **{name: np.concatenate([x, getattr(s, name)]) for name, x in filled.items()},
    )


@cache
def built(arch: str) -> Policy:
    """A policy whose checks at load are made once in a process: each case takes a copy."""
    return starcoder() if arch == "starcoder2" else policy(arch)


def starcoder() -> Policy:
    """An architecture with a plan of columns and rows, biases, grouped heads, and norms that are exact in float64."""
    tokenizer = characters(ALPHABET)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
    }
    config = Starcoder2Config(
        vocab_size=len(tokenizer), num_key_value_heads=4, max_position_embeddings=64, sliding_window=None, **sizes
    )
    attention.register()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME, dtype=torch.float32)
    stops = (int(str(tokenizer.eos_token_id)),)
    made = policy_model.prepared(Model(context=64), module, tokenizer, stops, "built", [])
    with torch.no_grad():
        for p in made.module.parameters():
            p.mul_(8) if p.ndim > 1 else p.add_(0.1)
    return made


def model(case: Case) -> Policy:
    made = built(case.arch).clone()
    moved: Any = made.module
    made = replace(made, module=moved.to(case.dtype))
    if case.lora is not None:
        attach(made.module, case.lora, seed=1)
        made = replace(made, lora=case.lora)
        drawn = torch.Generator().manual_seed(2)
        for name, p in made.module.named_parameters():
            if "lora_B" in name:  # 0 at first, and no gradient would reach A
                p.data = 0.1 * torch.randn(p.shape, generator=drawn, dtype=torch.float64).to(p.dtype)
    if case.loss != "ranking":
        return made
    wide = torch.promote_types(case.dtype, torch.float32)
    return replace(made, reward_head=RewardHead(HeadShape(), 32, dtype=wide, seed=3))


class Seen(StageOptimizer):
    """Remembers the gradient that it is given."""

    gradients: list[dict[str, Tensor]]

    def step(self, share: float = 1.0) -> float:
        found = {n: t.grad.clone() for n, t in self.trained().items() if t.grad is not None}
        self.gradients = [*getattr(self, "gradients", []), found]
        return super().step(share)


def trainer(case: Case, ranks: ProcessRanks | None) -> Trainer:
    made = replace(model(case), share_prefixes=case.shared > 0 and ranks is not None)
    how: dict[str, Any] = {"gradient_checkpointing": case.checkpointing}
    if case.tensor and ranks is not None:
        return _tensor_trainer(case, made, ranks, how)
    learner = HFLearner(made, **how) if ranks is None else ShardedLearner(made, ranks, offload=case.offload, **how)
    _valued(learner)
    over = ranks or ALONE
    scaled = case.dtype == torch.float16
    optimizer = Seen(learner.parameters(), OPTIMIZERS[case.optimizer], scaled=scaled, ranks=over)
    if optimizer._scale is not None:
        optimizer._scale.value = 16.0  # the gradients here are large
    return Trainer(learner, optimizer, case.micro_tokens, ranks=over)


def _tensor_trainer(case: Case, made: Policy, ranks: ProcessRanks, how: dict[str, Any]) -> Trainer:
    """Of a rank that computes the whole minibatch."""
    learner = TensorLearner(made, ranks, **how)
    _valued(learner)
    optimizer = Seen(learner.parameters(), OPTIMIZERS[case.optimizer], parts=learner)
    return Trainer(learner, optimizer, case.micro_tokens)


def _valued(learner: HFLearner) -> None:
    with torch.no_grad():
        for name, p in learner.parameters().items():
            if name.startswith("value_head."):
                p.fill_(0.1)


def train(case: Case, ranks: ProcessRanks | None) -> Trained:
    """Masters that differ in their last bit may round to two float16 weights: of those the first step is compared."""
    return results(trained(case, ranks, 1 if case.dtype == torch.float16 else STEPS))


def trained(case: Case, ranks: ProcessRanks | None, steps: int) -> tuple[Trainer, list[Gauges]]:
    t, batch = trainer(case, ranks), minibatch(case)
    return t, [t.step(batch, LOSSES[case.loss]) for _ in range(steps)]


def results(found: tuple[Trainer, list[Gauges]]) -> Trained:
    t, gauges = found
    learner, optimizer = t.learner, t.optimizer
    assert isinstance(learner, HFLearner) and isinstance(optimizer, Seen)
    gradients = [{n: whole(learner, n, g) for n, g in one.items()} for one in optimizer.gradients]
    weights = {n: whole(learner, n, p.detach()).clone() for n, p in optimizer.trained().items()}
    norms = [g["optim/grad_norm"].sum for g in gauges]
    return Trained(gradients, norms, gauges, weights, learner.fingerprint())


def whole(learner: HFLearner, name: str, own: Tensor) -> Tensor:
    if not isinstance(learner, (ShardedLearner, TensorLearner)):
        return own
    found: Any = learner.like(name, own)
    return found.full_tensor() if isinstance(found, DTensor) else found


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference of any number; inf where the names differ or a number is none."""
    if a.keys() != b.keys():
        return math.inf
    gaps = [float((a[n].double() - b[n].double()).abs().max()) for n in a]
    return max(gaps) if all(map(math.isfinite, gaps)) else math.inf


@dataclass(frozen=True)
class Distance:
    """How far a sharded run ends from the one in one process."""

    gradient: float
    weights: float
    norm: float
    gauges: float
    size: float
    """The largest number of the gradient."""
    shared: float = 0.0
    """Share of the positions that were not computed, because another one begins alike."""


def distance(found: Trained, right: Trained) -> Distance:
    pairs = list(zip(found.gradients, right.gradients, strict=True))
    names = {n for g in right.gauges for n in g if not n.startswith("learner/")}
    gauges = [
        abs(a[n].sum - b[n].sum) / max(1.0, abs(b[n].sum)) if n in a and a[n].count == b[n].count else math.inf
        for a, b in zip(found.gauges, right.gauges, strict=True)
        for n in names & b.keys()
    ]
    return Distance(
        max(apart(a, b) for a, b in pairs),
        apart(found.weights, right.weights),
        max(abs(a - b) / b for a, b in zip(found.norms, right.norms, strict=True)),
        max(gauges),
        max(float(g.abs().max()) for g in right.gradients[0].values()),
        found.gauges[0]["learner/shared"].mean,
    )


# --- the processes ----------------------------------------------------------------------------------------------------

Groups = dict[int, ProcessRanks | None]
Task = Callable[[Groups, Path], Any]


def over_ranks(tasks: dict[str, Task], folder: Path, world: int = 4, seconds: float = 400.0) -> list[dict[str, Any]]:
    """What each task returned on each rank; an exception is returned as its text.

    Raises:
        RuntimeError: a process ended before it had finished.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=_serve, args=(r, world, folder, tasks)) for r in range(world)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(seconds)
    for p in processes:
        if p.is_alive():
            p.kill()
    if any(p.exitcode for p in processes):
        raise RuntimeError(f"ranks ended with {[p.exitcode for p in processes]}")
    return [pickle.loads((folder / f"rank-{r}.pickle").read_bytes()) for r in range(world)]


def _serve(rank: int, world: int, folder: Path, tasks: dict[str, Task]) -> None:
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    with joined(rank, world, f"file://{folder / 'meet'}", seconds=60) as everyone:
        groups: Groups = {w: everyone.part(range(w)) for w in WORLDS if w <= world}
        for name, task in tasks.items():
            begun = time.monotonic()
            try:
                out[name] = task(groups, folder)
            except Exception:
                out[name] = traceback.format_exc()
                print(f"rank {rank}, {name}: {out[name]}", flush=True)  # others may wait for this rank
            if rank == 0:
                print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
        (folder / f"rank-{rank}.pickle").write_bytes(pickle.dumps(out))
        everyone.every("finished")


@cache
def one_process(case: Case) -> Trained:
    return train(case, None)


@dataclass(frozen=True)
class Compare:
    """Cases over every world, each compared with one process that takes the minibatch in its first order and in one
    pass. Where a pass rounds its gradient to fewer digits than float32, both take each unit in a pass of its own, so
    that both round the same numbers. Returns {(case, world): Distance} on rank 0.

    Cases with copies of the weights run over four ranks alone."""

    cases: tuple[Case, ...]

    def __call__(self, groups: Groups, folder: Path) -> dict[tuple[Case, int], Distance]:
        out: dict[tuple[Case, int], Distance] = {}
        for case in self.cases:
            right = one_process(plainly(case)) if groups[1] is not None else None
            for world, ranks in self._worlds(case, groups).items():
                if ranks is not None and (found := train(case, ranks)) and right is not None:
                    out[case, world] = distance(found, right)
        return out

    @staticmethod
    def _worlds(case: Case, groups: Groups) -> Groups:
        if case.replicas == 1:
            return groups
        everyone = groups[4]
        assert everyone is not None
        return {4: everyone.part(range(4), case.replicas)}


def plainly(case: Case) -> Case:
    """The case as one process computes it."""
    whole = ALONE_IN_A_PASS if case.dtype.itemsize < 4 else LARGE
    return replace(
        case, turned=False, micro_tokens=whole, replicas=1, checkpointing="none", offload=False, tensor=False
    )
