"""Reward models: the judges that `env.rewards=model:PATH` names, and the one that a run trains or trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.api.reward_paths import trained_model
from posttrain.api.target import kept_policy
from posttrain.core.env import Env, Reward
from posttrain.core.errors import ConfigError
from posttrain.core.reader import is_run, run_file
from posttrain.core.reward_model import head_of
from posttrain.core.run import Run
from posttrain.engine.heads import RewardHead
from posttrain.engine.learner import HFLearner
from posttrain.engine.models import Policy
from posttrain.engine.readout import read_out
from posttrain.engine.reward_folder import read_reward_model
from posttrain.engine.transform import logit_dtype
from posttrain.environment.render import Renderer
from posttrain.role.reward_judge import JudgeMember, RewardModelJudge
from posttrain.role.weights import load_weights

RESOLUTIONS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 3e-2}
"""Relative difference up to which two scores count as equal, by the dtype they are computed in: its rounding, over the
layers of a model."""


def with_reward_head(run: Run, policy: Policy) -> Policy:
    """The policy, with a new reward head where a stage of the run trains one."""
    if (shape := head_of(run.stages)) is None:
        return policy
    width = read_out(policy.module).weight.shape[1]
    dtype = logit_dtype(policy.dtype)
    return replace(policy, reward_head=RewardHead(shape, width, dtype=dtype, device=policy.device, seed=run.seed))


def reward_policy(folder: Path, checkpoint: str = "last", trust: bool = False) -> Policy:
    """The reward model of a run folder, with the weights of a checkpoint, as a policy with a reward head."""
    _, found = trained_model(folder, checkpoint)
    policy = with_reward_head(run_file(folder).run, kept_policy(folder, allow=trust))
    load_weights(found.folder, HFLearner(policy))
    return policy


def make_judges(run: Run, env: Env, policy: Policy) -> tuple[RewardModelJudge, ...]:
    """The judges of an environment's rewards that are models, in order.

    Raises:
        ConfigError: a path is no reward model, or one whose context is too short.
    """
    out: list[RewardModelJudge] = []
    for reward in (r for r in env.rewards if r.models):
        members = tuple(_member(run, path, policy) for path in reward.models)
        name = "+".join(m.name for m in members)
        resolution = RESOLUTIONS[run.model.dtype] if reward.resolution is None else reward.resolution
        anew = [m.name for m in members if m.renderer is not None]
        reads = f"; {' and '.join(anew)} read the conversation anew, in their own tokens" if anew else ""
        how = "" if len(members) == 1 else f", {_words(reward)}"
        line = f"reward model {name} (weight {reward.weight:g}{how}) reads the policy's tokens{reads}"
        if len(anew) == len(members):
            line = (
                f"reward model {name} (weight {reward.weight:g}{how}) has another tokenizer or chat template than the"
            )
            line += " policy: it reads each conversation anew, in its own tokens"
        out.append(RewardModelJudge(name, reward.weight, members, reward.combine, reward.pessimism, resolution, line))
    names = [j.name for j in out]
    if twice := [n for n in names if names.count(n) > 1]:
        raise ConfigError(
            f"reward model {twice[0]!r} is given twice: give it once, with the weight you want, or rename one of the"
            " directories"
        )
    return tuple(out)


def _words(reward: Reward) -> str:
    return "the worst of them" if reward.combine == "worst" else f"mean - {reward.pessimism:g} standard deviations"


def _member(run: Run, path: str, policy: Policy) -> JudgeMember:
    folder = Path(path).expanduser()
    if is_run(folder):
        found = reward_policy(folder)
    else:
        found = read_reward_model(path, replace(run.model, compile=False, gradient_checkpointing="none"))
    found.module.requires_grad_(False).eval()
    name = folder.resolve().name if folder.is_dir() else path
    alike = (found.tokenizer_digest, found.template_digest) == (policy.tokenizer_digest, policy.template_digest)
    if alike and found.context < policy.context:
        raise ConfigError(
            f"model:{path}: its context of {found.context} tokens is shorter than the policy's {policy.context}: lower"
            f" model.context to {found.context}, or use another reward model"
        )
    tokenizer: Any = found.tokenizer
    return JudgeMember(
        name, HFLearner(found), found.context, None if alike else Renderer(tokenizer, found.stop_ids, found.context)
    )
