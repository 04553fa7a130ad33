"""The judges that `env.rewards=judge:PATH` names: a policy that learned to judge, with an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.build.build_engines import embedded_engine
from posttrain.build.build_environments import make_environment
from posttrain.build.open_model import kept_policy
from posttrain.build.request.trust_prompt import admitted
from posttrain.config.engines import Embedded
from posttrain.config.env import Reward
from posttrain.config.run import Run
from posttrain.core.abilities import Judging, declared
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.sampling import Sampling
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.environment.templates.renderer import Renderer
from posttrain.record.checkpoint import find
from posttrain.role.judges.generative_judge import GenerativeJudge
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.judges.reward_judge import JudgeMember
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import paid_by
from posttrain.role.weights.saved_weights import load_weights
from posttrain.system.errors import ConfigError

SLOTS = 256
"""Judgements that are sampled at once."""


def generative_judge(
    run: Run, reward: Reward, resolution: float, member: Callable[[Run, str, Policy], JudgeMember]
) -> GenerativeJudge:
    """The judge of a reward, with the weights of its run's last checkpoint.

    Args:
        run: the run that it pays.
        resolution: relative noise of a probability that it computes.
        member: loads a reward model, and says whether it reads the tokens of this policy.

    Raises:
        ConfigError: the run did not learn to judge; or the meta reward model has another tokenizer.
    """
    folder = Path(reward.judge_run).expanduser()
    # Its environment is made for the judging alone, and may be code: of a folder from elsewhere it is refused.
    own = admitted(folder, parts=("env", "model"), allow=False)
    judging, sampling = _judging(own, reward.judge_run), _sampling(own)
    policy = kept_policy(folder, allow=False)
    load_weights(find(folder, "last").folder, HFLearner(policy))
    policy.module.requires_grad_(False).eval()
    tokenizer: Any = policy.tokenizer
    renderer = Renderer(tokenizer, policy.stop_ids, policy.context)
    engine = embedded_engine(replace(own, slots=SLOTS), Embedded(), policy, renderer.decode)
    name = folder.resolve().name
    return GenerativeJudge(
        name=name,
        weight=reward.weight,
        judging=judging,
        sampler=engine,
        renderer=renderer,
        sampling=sampling.resolve(policy.stop_ids, renderer.spell),
        seed=run.seed,
        votes=reward.votes,
        rivals=reward.rivals,
        meta=None if reward.meta is None else _meta(run, reward.meta, policy, member),
        resolution=_resolution(reward, judging, resolution),
        measured=reward.measured,
        line=_line(name, reward, judging),
    )


def by_its_form(judge: GenerativeJudge, reward: Reward, ends: TokenEnds) -> GenerativeJudge | GenerativeStepJudge:
    """The judge itself, where it judges whole answers. One that judges steps, as a process reward model.

    Args:
        ends: of the policy's tokenizer, whose tokens steps end at.

    Raises:
        ConfigError: steps are asked of a judge of whole answers, or single steps are measured.
    """
    if not judge.judging.separator:
        if (reward.steps, reward.progress) != ("score", False):
            raise ConfigError(
                f"judge {judge.name} judges whole answers, and steps and progress are for one that judges steps"
                " (posttrain run judge env=verify): leave them out"
            )
        return judge
    if reward.measured and reward.steps != "outcome":
        raise ConfigError(
            f"judge {judge.name}: what is measured is about the whole answer; set env.rewards.N.steps=outcome"
        )
    return GenerativeStepJudge(judge, reward, ends, judge.resolution, judge.line)


def _judging(own: Run, path: str) -> Judging:
    environment = make_environment(own)
    try:
        found = declared(environment).judging
    finally:
        # Only its declaration was wanted.
        environment.close()
    if found is None:
        raise ConfigError(
            f"judge:{path}: that run learned environment {own.env.name!r}, which is no judging. Train a judge first"
            " (posttrain run judge), and name its folder"
        )
    return found


def _sampling(own: Run) -> Sampling:
    """The settings with which its last stage that samples sampled; the defaults where none does."""
    found = [s.contract for s in own.stages if s.contract is not None]
    return found[-1] if found else Sampling()


def _meta(run: Run, path: str, policy: Policy, member: Callable[[Run, str, Policy], JudgeMember]) -> JudgeMember:
    found = member(run, path, policy)
    if found.renderer is not None:
        raise ConfigError(
            f"meta={path}: its tokenizer or chat template is not the judge's, whose tokens it must read. Train it from"
            " the judge's weights (model=RUN of the judge)"
        )
    return found


def _resolution(reward: Reward, judging: Judging, model: float) -> float:
    """The probability of Yes is a model's number; votes are counted exactly."""
    if reward.resolution is not None:
        return reward.resolution
    return model if judging.sides == 1 else RESOLUTION


def _line(name: str, reward: Reward, judging: Judging) -> str:
    paid = "measured, not paid" if reward.measured else f"weight {reward.weight:g}"
    meta = "" if reward.meta is None else f"; {reward.meta} keeps the better half of the votes"
    if judging.separator:
        return (
            f"verifier {name} ({paid}) reads each answer up to each step, votes {reward.votes}{meta}: {paid_by(reward)}"
        )
    rivals = "all others" if not reward.rivals else f"{2 * reward.rivals} others"
    how = (
        "judges each answer"
        if judging.sides == 1
        else f"compares each answer with {rivals} of its group, in both orders"
    )
    return f"judge {name} ({paid}) {how}, votes {reward.votes}{meta}"
