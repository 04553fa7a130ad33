"""The learner and the optimizers of a run: of its policy, and of a second model that learns beside it."""

from __future__ import annotations

import torch

from posttrain.config.run import Model, Optimizer, Run
from posttrain.engine.embedded.exact_replay import SamplerReplay
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.optimizer.optimizer import StageOptimizer


def learner_of_one_process(run: Run, policy: Policy) -> HFLearner:
    """The learner of a run in one process; over ranks it is `lead_learner`."""
    return HFLearner(
        policy,
        gradient_checkpointing=run.model.checkpointing,
        offload_activations=run.model.offload_activations,
        sampled=SamplerReplay(policy, run.slots).values if run.exact else None,
        replays=run.model.router_replay != "none",
    )


def make_optimizer(model: Model, learner: HFLearner, config: Optimizer) -> StageOptimizer:
    """The optimizer of a stage."""
    # The device of the optimizer's state; None: that of the parameters.
    home = torch.device("cpu") if model.offload_optimizer else None
    # In float16 losses are scaled.
    return StageOptimizer(learner.parameters(), config, model.kernels, model.dtype == "float16", home)


def trained_copy(run: Run, learner: HFLearner, config: Optimizer) -> tuple[HFLearner, StageOptimizer]:
    """A second model that trains, with its optimizer: a copy of the learner as it is now. Weights that never train are
    shared."""
    policy = learner.policy.twin()
    # A copy has the gradients of the original too, if there are any.
    policy.module.zero_grad(set_to_none=True)
    # Nothing is sampled from it, so it has no sampler's numbers and no sampler's experts to replay.
    second = HFLearner(
        policy, gradient_checkpointing=run.model.checkpointing, offload_activations=run.model.offload_activations
    )
    return second, make_optimizer(run.model, second, config)
