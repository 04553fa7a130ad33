"""`posttrain eval RM --answers POLICY`: how well a reward model orders a policy's answers, where the truth is known.

A reward model is right about answers like those from which it learned. A policy gives other answers, and RL moves it to
answers that the reward model overrates. So the agreement is measured on each policy's own answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.core import abilities
from posttrain.core.measure.interval import Score
from posttrain.core.ports import Learner, PairRenderer
from posttrain.core.types import Episode, Group
from posttrain.evaluation.reward_report import asked_run, loaded_policy
from posttrain.system.errors import ConfigError

SAMPLES = 8
"""Answers that a policy gives to each held-out prompt."""


@dataclass(frozen=True)
class TransferReport:
    """How well a reward model orders the answers of one policy, over prompts."""

    policy: str
    agreement: Score
    """Share of pairs of answers to a prompt that the scores order as their true worth does; equal scores count half.
    Prompts whose answers are all worth the same have no pair."""
    longer: Score
    """The agreement if answers were ordered by their length in tokens alone."""
    worth: Score
    """Mean true worth of the policy's answers."""
    answers: int
    """Answers that were scored."""
    left_out: int
    """Answers that were cut at the token limit, are empty, or could not be judged."""

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"answers of {self.policy}: orders {self.agreement} of the pairs of {self.agreement.prompts} prompts as"
            " they are worth",
            f"  length alone, the longer the better: {self.longer}",
            f"  {self.answers} answers, worth {self.worth} on average; {self.left_out} left out (cut, empty or not"
            " judged)",
        ]


def transfer(
    target: str | Path,
    policies: Sequence[str | Path],
    *overrides: str,
    checkpoint: str = "last",
    samples: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    trust: bool = False,
    ema: bool = False,
) -> list[TransferReport]:
    """Let each policy answer the held-out prompts of the reward model's environment; compare the scores with the truth:
    the worth of an answer that the environment knows (`Judgements.utility`), or else what its verifiers say.

    Args:
        target: a run that trained a reward model, or the directory of one.
        policies: run folders, checkpoints inside them, model directories or hub ids.
        overrides: dotted changes of the environment, as in `evaluate_reward_model`.
        samples: answers to each prompt, 2 at least.
        ema: score with the moving average of the reward model's weights.

    Raises:
        ConfigError: nothing says what an answer is worth; episodes have several turns; no two answers differ in worth.
    """
    samples = SAMPLES if samples is None else samples
    if samples < 2:
        raise ConfigError(f"--samples {samples}: answers of one prompt are compared, so sample 2 at least")
    from posttrain.api import main
    from posttrain.engine.learner.learner import HFLearner
    from posttrain.environment.make import environment
    from posttrain.environment.templates.renderer import Renderer

    run = asked_run(target, overrides, trust)
    # Reward models are taken out of the environment's judges. Else the scores could be compared with themselves.
    verifiers = tuple(r for r in run.env.rewards if not r.by_model)
    env = replace(run.env, rewards=verifiers, measured=False) if run.env.has_reward_models else run.env
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature, "quiet": True, "trust": trust}
    # All policies answer before the reward model is loaded, so that one model is in memory at a time.
    reports = [main.evaluate(p, f"seed={run.seed}", env=env, samples=samples, **options) for p in policies]
    reward = loaded_policy(target, run, checkpoint, trust, ema)
    tokenizer: Any = reward.tokenizer
    learner, renderer = HFLearner(reward), Renderer(tokenizer, reward.stop_ids, reward.context)
    with closing(environment(env, run.seed)) as world:
        worth = _truth(world)
        return [
            _of_policy(str(policy), report.groups, worth, learner, renderer, reward.context)
            for policy, report in zip(policies, reports, strict=True)
        ]


def _of_policy(
    policy: str,
    groups: Sequence[Group],
    worth: Callable[[Episode], float | None],
    learner: Learner,
    renderer: PairRenderer,
    context: int,
) -> TransferReport:
    """The report on the answers of one policy.

    Raises:
        ConfigError: no two answers to a prompt differ in worth.
    """
    from posttrain.stages.preference.judged_batches import AgreementReport
    from posttrain.stages.reward_model.reward_model_batches import scored_answers

    scored = scored_answers([_readable(g, worth) for g in groups], worth, learner, renderer, context)
    ordered = AgreementReport.of(scored.score, scored.worth, scored.unit)
    # For comparison: a reward model that orders no better than length alone may have learned nothing but length.
    longer = AgreementReport.of(scored.tokens, scored.worth, scored.unit)
    if ordered is None or longer is None:
        raise ConfigError(
            f"{policy}: no two of its answers to a prompt are worth different things, so nothing can be ordered. Sample"
            " more (--samples), or at a higher --temperature"
        )
    # The scale of the interval is 0 to 1, or wider where a prompt's mean lies outside.
    mean_worths = [float(np.mean(scored.worth[scored.unit == u])) for u in np.unique(scored.unit)]
    return TransferReport(
        policy=policy,
        agreement=ordered.accuracy,
        longer=longer.accuracy,
        worth=Score.of(mean_worths, min(0.0, *mean_worths), max(1.0, *mean_worths)),
        answers=len(scored.score),
        left_out=sum(len(g.episodes) for g in groups) - len(scored.score),
    )


def _truth(world: Any) -> Callable[[Episode], float | None]:
    """Returns a function that gives the worth of an answer; None where the worth is not known."""
    offered = abilities.declared(world).judgements
    utility = None if offered is None else offered.utility
    if utility is None:
        return lambda episode: episode.figure
    return lambda episode: utility(episode.task, episode.text)


def _readable(group: Group, worth: Callable[[Episode], float | None]) -> list[Episode]:
    """The answers of a prompt that can be read whole, and whose worth is known. ConfigError for several turns."""
    if episode := next((e for e in group.episodes if len(e.turns) > 1 or len(e.segments) > 1), None):
        raise ConfigError(
            f"task {group.task.id!r} was answered in {max(len(episode.turns), len(episode.segments))} turns, and"
            " agreement is measured on single answers: name an environment of one turn (env=...)"
        )
    return [e for e in group.episodes if not e.stop.cut and e.text.strip() and worth(e) is not None]
