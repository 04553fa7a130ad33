"""Runs the largest pass that a stage's settings allow before its first step, so too little memory is found in seconds.
Gradients are thrown away, and weights, optimizer and random numbers stay as they were."""

from __future__ import annotations

import time

import numpy as np
import torch

from posttrain.config.stages.stage import Stage
from posttrain.core.batch import Packed
from posttrain.core.exchange.scores import Reads
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.role.memory_peaks import PeakMemory, mebibytes, memory_suffices
from posttrain.role.trainer import Trainer


def largest(stage: Stage, context: int, ids: np.ndarray) -> Packed:
    """The largest micro-batch: `micro_tokens` of made-up text in the longest sequences.

    A sequence is never cut. So where one answer may be longer than `micro_tokens`, the micro-batch is one such
    sequence. Sequences that share a prompt may have more tokens together, but then the prompt is computed only once, so
    no pass computes more positions than this one.

    Args:
        context: most tokens of a sequence.
        ids: token ids from which the made-up text is drawn.
    """
    longest_answer = 0 if stage.contract is None else stage.contract.max_tokens
    # Two tokens at least: the first of a sequence is never spoken.
    longest = max(2, min(context, max(stage.micro_tokens, longest_answer)))
    full_sequences, tokens_left = divmod(max(stage.micro_tokens, longest), longest)
    # A generator of its own, so that the run's random numbers do not move.
    rng = np.random.default_rng(0)
    lengths = [longest] * full_sequences + [tokens_left] * (tokens_left >= 2)
    return Packed.of([_made_up(rng.choice(ids, n).astype(np.int32)) for n in lengths])


def warm_up(trainer: Trainer, packed: Packed, reads: Reads, peak: PeakMemory) -> str:
    """One forward and backward pass, while memory is held for what the optimizer's first step will add. Returns a line
    about time and memory; ConfigError says which setting to lower where memory does not suffice."""
    learner = trainer.learner
    parameters = [p for p in (*learner.parameters().values(), *trainer.trained().values()) if p.requires_grad]
    device = next(iter(learner.parameters().values())).device
    devices = [device] if device.type != "cpu" else []
    peak.reset()
    begun = time.perf_counter()
    with memory_suffices(packed, trainer.micro_tokens), torch.random.fork_rng(devices, device_type=device.type):
        # The optimizer's moments do not exist before the first update. This block of the same size stands in for them,
        # so that the peak of the pass includes them.
        stand_in = torch.empty(trainer.optimizer.pending_bytes(), dtype=torch.uint8, device=device)
        learner.train_mode(True)
        try:
            with trainer.frozen():
                scores = learner.forward(packed, reads)
                reward_scores = None if scores.rewards is None else scores.rewards.score
                # Every output that the stage reads is differentiated: the pass keeps the tensors of a real loss.
                outputs = (scores.logp, scores.entropy, scores.value, scores.candidates, reward_scores)
                torch.stack([x.sum() for x in outputs if x is not None]).sum().backward()
                trainer.optimizer.gather()
        finally:
            learner.train_mode(False)
            for p in parameters:
                # `parameters` has the master copies too, to which `gather` moved the gradients.
                p.grad = None
        del stand_in
    longest, count = int(packed.lengths_S.max()), len(packed.lengths_S)
    return (
        f"warm-up: a pass of {len(packed.ids_N):,} tokens, {count} sequence{'s' * (count > 1)} of up to {longest:,},"
        f" took {time.perf_counter() - begun:.1f} s and at most {mebibytes(peak.read())} ({peak.what})"
    )


def _made_up(ids: np.ndarray) -> Segment:
    """A sequence in which every token but the first counts as spoken."""
    mask = np.arange(len(ids)) > 0
    blank = np.where(mask, -1.0, np.nan).astype(np.float32)
    return Segment(ids, mask, blank, np.where(mask, 0, -1).astype(np.int32), Sampling())
