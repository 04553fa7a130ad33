"""Faults of the training system: reference, weight sync, parameters, optimizer, resume, queue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.types import Group
from posttrain.faults.planting import fault

Real = Callable[..., Any]
REFERENCE = ("algorithm=grpo",)
"""Overrides of an algorithm that compares with a reference."""


def restamped(group: Group, version: Callable[[np.ndarray], np.ndarray]) -> Group:
    """A group whose spoken tokens carry other versions."""

    def segment(s: Any) -> Any:
        # Unspoken tokens carry -1, which every segment demands.
        return replace(s, version=np.where(s.mask, version(s.version), s.version).astype(np.int32))

    episodes = [replace(e, segments=tuple(segment(s) for s in e.segments)) for e in group.episodes]
    return replace(group, episodes=tuple(episodes))


@fault(
    "reference_trained",
    seam="posttrain.engine.learner.learner:FrozenScorer.__init__",
    what="the reference shares its tensors with the learner",
    harm="the KL to the reference is 0 for ever: nothing holds the policy",
    source="pain 11; trl#6688",
    shows=REFERENCE,
    lesson="a reference that shares its tensors with the policy holds nothing",
    caught_by="reference_unmoved",
)
def _(real: Real, self: Any, policy: Any) -> None:
    real(self, policy)
    # After the real copy was made and its digest taken.
    self.policy, self._scorer = policy, type(self._scorer)(policy)


@fault(
    "sync_skipped",
    seam="posttrain.role.sync:Sync.push",
    what="the push of new weights does nothing after the first one",
    harm="the engine samples from old weights while training goes on",
    source="pain 4, prime-rl PR#1617",
    lesson="training goes on while the sampler says what old weights say",
    caught_by="pushed_between_steps",
)
async def _(real: Real, self: Any, version: int) -> str:
    # The fingerprint is the learner's, so that the push looks as if it had arrived.
    return await real(self, version) if not self.sampler.version else self.learner.fingerprint()


@fault(
    "sync_one_tensor_stale",
    seam="posttrain.engine.embedded.cache.cached_model:replace_weights",
    what="one tensor of every push keeps its old value",
    harm="sampler and learner drift apart slowly, and nobody knows why",
    source="pain 4, SkyRL#1680",
    lesson="one tensor that is not sent is enough for two policies",
    caught_by="Sync._send",
)
def _(real: Real, module: Any, tensors: Any) -> None:
    name, tensor = list(module.state_dict(keep_vars=True).items())[1]
    kept = tensor.detach().clone()
    real(module, tensors)
    module.state_dict()[name].copy_(kept)


@fault(
    "frozen_layers",
    seam="posttrain.engine.learner.learner:HFLearner.parameters",
    what="the first layer's parameters never reach the optimizer",
    harm="most of the model may stay as it was: 390 of 417 tensors did on one architecture",
    source="trap 14, OpenRLHF#1258",
    lesson="a parameter that never reaches the optimizer trains in no log",
    caught_by="served_is_trained",
)
def _(real: Real, self: Any) -> Any:
    # What an optimizer is built from lacks them; the model itself computes with them.
    return {n: p for n, p in real(self).items() if ".layers.0." not in n}


@fault(
    "gradient_cut",
    seam="posttrain.engine.layers.embedding_gradient:SelectRows.backward",
    what="the gradient stops at the head: hidden states are detached on the way back",
    harm="only the last layer learns",
    source="pain 23",
    lesson="a detached tensor stops the gradient and no error says so",
    caught_by="gradient_reaches",
)
def _(real: Real, ctx: Any, *grads: Any) -> Any:
    grad, *rest = real(ctx, *grads)
    return grad.new_zeros(grad.shape), *rest


@fault(
    "gradients_left_over",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.step",
    what="gradients are not cleared after an optimizer step",
    harm="every step repeats the ones before it",
    source="pain 10",
    lesson="gradients that are not cleared make every step the sum of all",
    caught_by="loss_agrees",
)
def _(real: Real, self: Any) -> float:
    # Taken before the step, which clears them, and put back after it.
    grads = {n: p.grad for n, p in self._parameters.items()}
    norm = real(self)
    for n, p in self._parameters.items():
        p.grad = grads[n]
    return norm


@fault(
    "warmup_ignored",
    seam="posttrain.engine.optimizer.optimizer:StageOptimizer.lr",
    what="the learning rate is at its full height from the first step",
    harm="the first steps, with moments that know nothing yet, do the damage warm-up is there to prevent",
    source="pain 25: opinionated defaults",
    shows=("rl.optimizer.warmup=10",),
    lesson="the first steps at full learning rate do what warm-up should prevent",
    caught_by="update_agrees",
)
def _(real: Real, self: Any) -> Any:
    return self.config.lr


@fault(
    "attention_crosses_answers",
    seam="posttrain.engine.layers.shared_prefixes:PackedLayout",
    what="packed answers attend to the ones packed before them",
    harm="log-probs depend on the neighbours in the batch",
    source="pain 10, axolotl#3608",
    lesson="packed answers must not see each other",
    caught_by="Sharing._prove",
)
def _(real: Real, lengths: Any, *args: Any, **kwargs: Any) -> Any:
    # One segment in place of all: nothing parts them any more.
    return real([int(sum(lengths))], *args, **kwargs)


@fault(
    "optimizer_lost_at_resume",
    seam="posttrain.stages.loop:load_optimizer",
    what="a resumed run starts with a new optimizer: moments and warm-up begin again",
    harm="entropy and score jump after every restart",
    source="pain 8, open-instruct#1823",
    needs="resume",
    lesson="a resumed run has its moments and its warm-up, or it is another run",
    caught_by="came_back",
    see=(
        "run arithmetic sft.steps=40 rl.steps=2 rl.checkpoint_every=1 --out RUN FAULT",
        "run --resume RUN rl.steps=4 --allow-fault",
    ),
)
def _(real: Real, folder: Any, optimizer: Any) -> Any:
    return None


@fault(
    "checkpoint_of_old_weights",
    seam="posttrain.stages.loop:save_weights",
    what="a checkpoint holds the weights of the one before it",
    harm="a resumed run is not the run that stopped; score drops after every restart",
    source="trap 18, pain 8",
    needs="resume",
    lesson="a checkpoint is of the step that it names",
    caught_by="came_back",
    see=(
        "run arithmetic sft.steps=40 rl.steps=3 rl.checkpoint_every=1 keep_checkpoints=9 --out RUN FAULT",
        "run --resume RUN/checkpoints/00000042-rl-000002 --allow-fault",
    ),
)
def _(real: Real) -> Real:
    kept: dict[str, Any] = {}

    def save(folder: Any, learner: Any) -> None:
        now = {n: p.detach().clone() for n, p in learner.parameters().items()}
        # There is no checkpoint before the first one, which so holds its own weights.
        before, kept["last"] = kept.get("last", now), now
        # A stand-in with the one method that saving reads.
        real(folder, type("Then", (), {"parameters": lambda self: before})())

    return save


@fault(
    "stale_relabelled_fresh",
    seam="posttrain.role.group_queue:GroupQueue.take",
    what="groups get the learner's version when they are taken from the queue",
    harm="corrections and ages are those of new samples, and old ones are learned from as if on-policy",
    source="versions stamped at the learner instead of at the engine",
    needs="ahead",
    lesson="what was said by old weights must say so, or no correction acts",
    caught_by="unchanged_in_the_queue",
    see=("run arithmetic sft.steps=40 rl.steps=20 rl.staleness=2 FAULT",),
)
async def _(real: Real, self: Any, index: int, request: Any, version: int, seen: Any) -> Any:
    taken = await real(self, index, request, version, seen)
    # Stamped as they leave the queue; in it they carry the versions of the weights that said them.
    now = [restamped(g, lambda old: np.full_like(old, version)) for g in taken.played]
    return replace(taken, played=tuple(now))
