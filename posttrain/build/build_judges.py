"""The judges that `env.rewards=judge:PATH` names: a policy that learned to judge, with an engine of its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
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
    """The judge that `judge:PATH` of a reward names, with the weights of that run's last checkpoint.

    Args:
        run: the run whose answers it judges.
        resolution: relative noise of a probability that the judge computes.
        member: loads a reward model from a path, for a given policy. Its `renderer` is None where it reads the policy's
            own tokens.

    Raises:
        ConfigError: the run did not learn to judge; or the meta reward model has another tokenizer.
    """
    folder = Path(reward.judge_run).expanduser()
    # The judge's environment is made only to read what it judges (`_judging`). It may be code, so a folder that came
    # from elsewhere is refused.
    judge_run = admitted(folder, parts=("env", "model"), allow=False)
    judging, sampling = _judging(judge_run, reward.judge_run), _sampling(judge_run)
    policy = kept_policy(folder, allow=False)
    load_weights(find(folder, "last").folder, HFLearner(policy))
    policy.module.requires_grad_(False).eval()
    tokenizer: Any = policy.tokenizer
    renderer = Renderer(tokenizer, policy.stop_ids, policy.context)
    engine = embedded_engine(replace(judge_run, slots=SLOTS), Embedded(), policy, renderer.decode)
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
    """Returns the judge itself if it judges whole answers. If it judges steps, returns it as a process reward model.

    Args:
        ends: finds the tokens of the policy at which steps end.

    Raises:
        ConfigError: steps are asked of a judge of whole answers, or single steps are measured.
    """
    if not judge.judging.separator:
        if (reward.steps, reward.progress) != ("score", False):  # the defaults
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


def _judging(judge_run: Run, path: str) -> Judging:
    """What the judge's run learned to judge. `path`: its folder, for the message."""
    with closing(make_environment(judge_run)) as environment:
        judging = declared(environment).judging
    if judging is None:
        raise ConfigError(
            f"judge:{path}: that run learned environment {judge_run.env.name!r}, which is no judging. Train a judge"
            " first (posttrain run judge), and name its folder"
        )
    return judging


def _sampling(judge_run: Run) -> Sampling:
    """The sampling settings of the run's last stage that samples; the defaults where no stage samples."""
    contracts = [s.contract for s in judge_run.stages if s.contract is not None]
    return contracts[-1] if contracts else Sampling()


def _meta(run: Run, path: str, policy: Policy, member: Callable[[Run, str, Policy], JudgeMember]) -> JudgeMember:
    """The meta reward model, which judges the votes of a judge. `policy`: the judge's."""
    meta = member(run, path, policy)
    if meta.renderer is not None:
        raise ConfigError(
            f"meta={path}: its tokenizer or chat template is not the judge's, whose tokens it must read. Train it from"
            " the judge's weights (model=RUN of the judge)"
        )
    return meta


def _resolution(reward: Reward, judging: Judging, model_noise: float) -> float:
    """The relative noise of the judge's scores. `model_noise`: that of a probability which a model computes.

    A judge of single answers (`sides` 1) scores with the probability of Yes, which a model computes with rounding.
    Comparisons give counts of votes, which are exact.
    """
    if reward.resolution is not None:
        return reward.resolution
    return model_noise if judging.sides == 1 else RESOLUTION


def _line(name: str, reward: Reward, judging: Judging) -> str:
    """A line for people about the judge."""
    paid = "measured, not paid" if reward.measured else f"weight {reward.weight:g}"
    meta = "" if reward.meta is None else f"; {reward.meta} keeps the better half of the votes"
    if judging.separator:
        return (
            f"verifier {name} ({paid}) reads each answer up to each step, votes {reward.votes}{meta}: {paid_by(reward)}"
        )
    rivals = "all others" if not reward.rivals else f"{2 * reward.rivals} others"
    work = (
        "judges each answer"
        if judging.sides == 1
        else f"compares each answer with {rivals} of its group, in both orders"
    )
    return f"judge {name} ({paid}) {work}, votes {reward.votes}{meta}"
