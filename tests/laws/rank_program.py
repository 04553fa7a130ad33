"""A whole program over ranks (docs/design/shards.md): `torchrun --standalone --nproc-per-node 2 rank_program.py`."""

from __future__ import annotations

import numpy as np

from posttrain.algorithm.loss.losses import Likelihood
from posttrain.config.run import Model, Optimizer
from posttrain.core.batch import Batch
from posttrain.core.sampling import Sampling
from posttrain.core.streams import WEIGHT
from posttrain.core.types import Segment
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.ranks.process_ranks import joined
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.role.sync import whole_tensors
from posttrain.role.trainer import Trainer


def segment(ids: list[int], prompt: int) -> Segment:
    mask = np.arange(len(ids)) >= prompt
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    return Segment(np.array(ids, np.int32), mask, logp, np.where(mask, 0, -1).astype(np.int32), Sampling())


with joined() as ranks:
    policy = load_policy(Model(hidden=32, layers=2, heads=2, kv_heads=1, ffn=64, context=64), "0123456789+= ", seed=0)
    learner = ShardedLearner(policy, ranks)
    optimizer = StageOptimizer(learner.parameters(), Optimizer(lr=1e-2, warmup=0), ranks=ranks)
    trainer = Trainer(learner, optimizer, micro_tokens=16, ranks=ranks)
    texts = [f"{a}+{b}={a + b}" for a in range(4) for b in range(4)]
    segments = [segment(policy.tokenizer(text)["input_ids"], prompt=4) for text in texts]
    spoken = sum(s.spoken for s in segments)
    batch = Batch.of(segments, streams={WEIGHT: np.full(spoken, 1 / spoken)})
    for _ in range(5):
        seen = trainer.step(batch, Likelihood())
    weights = dict(whole_tensors(gathered(learner.shards(), ranks, trainer.version)))  # on rank 0
    own = sum(p.numel() for p in learner.parameters().values())
    loss, there = seen["sft/loss"].mean, f"version {trainer.version}, {len(weights)} weights"
    print(f"rank {ranks.rank}: loss {loss:.6f}, {there}, {own} of {policy.size} numbers here")
