"""`posttrain eval` of a reward model: how well its scores order judged completions, whether differences of scores are
probabilities, and how much of the scores is length or flattery."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.build.open_model import model_run
from posttrain.build.request.trust_prompt import admitted
from posttrain.build.reward_paths import trained_model
from posttrain.config import overrides as dotted
from posttrain.config.env import Env
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import trained_at
from posttrain.core import abilities
from posttrain.core.judgements import Kind
from posttrain.core.measure.interval import Score
from posttrain.diagnose.reward_quality import Calibration, Debiased, agrees, calibration, debias
from posttrain.engine.files.check_folder import form_of
from posttrain.environment.make import environment
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import is_run, run_file
from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    from posttrain.engine.model.policy_model import Policy

KINDS: tuple[Kind, ...] = ("pair", "ranking", "label")
"""The kinds of judgement that agreement is measured on. The first one that the data gives is used."""


@dataclass(frozen=True)
class RewardReport:
    """How good a reward model's scores of judged completions are."""

    name: str
    kind: Kind
    agreement: Score
    """Share of pairs that the scores order as they were judged."""
    longer: Score
    """Share of pairs that the length in tokens alone orders as they were judged, the longer the better."""
    calibration: Calibration
    flattering: Score
    """Share of pairs that the number of flattering phrases orders as they were judged. Such phrases agree with, praise
    or apologise to the user."""
    surface: Debiased
    """Part of the scores that a linear function of length and flattery explains."""
    without_surface: Score
    """`agreement` of the scores without that part."""

    def lines(self) -> list[str]:
        """The report in words."""
        return [
            f"{self.name}: orders {self.agreement} of {self.agreement.prompts} pairs as they were judged ({self.kind})",
            f"length alone, the longer the better: {self.longer}",
            f"flattery alone, the more the better: {self.flattering}",
            f"scores without what length and flattery explain: {self.without_surface}",
            *self.surface.lines(),
            *self.calibration.lines(),
        ]


def is_reward_model(target: str | Path, checkpoint: str = "last") -> bool:
    """True where a run's checkpoint, or a directory, holds a reward model."""
    if is_run(target):
        return trained_at(run_file(target).run.stages, find(Path(target), checkpoint).state) is not None
    if not Path(target).is_dir():
        return False
    try:
        # The files decide what a directory is: only a form that is known makes it a reward model.
        form_of(Path(target))
    except ConfigError:
        return False
    return True


def evaluate_reward_model(
    target: str | Path, *overrides: str, checkpoint: str = "last", trust: bool = False, ema: bool = False
) -> RewardReport:
    """Score judged completions: those of a run's held-out tasks, or all rows of a file that `env.prompts` names.

    Raises:
        ConfigError: there are no judged completions, or none that orders anything.
    """
    run = asked_run(target, overrides, trust)
    # A file of its own is no part of the split of a run, so all of its rows are measured.
    all_rows = any(word.partition("=")[0].strip() == "env.prompts" for word in overrides)
    # The rewards of the environment are left out: the judgements are what counts.
    with closing(environment(replace(run.env, rewards=(), measured=False), run.seed)) as world:
        kinds = abilities.judgements(world).kinds
        kind: Kind | None = next((k for k in KINDS if k in kinds), None)
        if kind is None:
            raise ConfigError(
                f"environment {world.name!r} gives judgements of kind {', '.join(kinds)}, and agreement is measured on"
                f" {', '.join(KINDS)}: give a file with the columns prompt, chosen and rejected (env.prompts=FILE)"
            )
        from posttrain.engine.learner.learner import HFLearner
        from posttrain.environment.templates.renderer import Renderer
        from posttrain.stages.reward_model.reward_model_batches import scored_judgements

        policy = loaded_policy(target, run, checkpoint, trust, ema)
        tokenizer: Any = policy.tokenizer
        renderer = Renderer(tokenizer, policy.stop_ids, policy.context)
        scored = scored_judgements(world, kind, HFLearner(policy), renderer, policy.context, whole=all_rows)
    better, worse = scored.pairs()
    if not len(better):
        raise ConfigError(f"{target}: no two of {len(scored.score)} judged completions were judged differently")
    surface = debias(scored.score, {"length": scored.tokens, "flattery": scored.flattery})
    return RewardReport(
        name=Path(target).absolute().name,
        kind=kind,
        agreement=agrees(scored.score[better], scored.score[worse]),
        longer=agrees(scored.tokens[better], scored.tokens[worse]),
        calibration=calibration(scored.score[better], scored.score[worse]),
        flattering=agrees(scored.flattery[better], scored.flattery[worse]),
        surface=surface,
        without_surface=agrees(surface.scores[better], surface.scores[worse]),
    )


def asked_run(target: str | Path, overrides: tuple[str, ...], trust: bool) -> Run:
    """The run whose environment has the judgements."""
    sets_prompts = any(word.partition("=")[0].strip() == "env.prompts" for word in overrides)
    names_env = any(word.partition("=")[0].strip() in ("env", "env.name") for word in overrides)
    # The settings of prompts make an environment of prompts, unless another one is named.
    words = ("env=prompts", *overrides) if sets_prompts and not names_env else overrides
    if is_run(target):
        if sets_prompts or names_env:  # the settings of the run's own environment mean nothing there
            run = run_file(target).run
            return dotted.apply(replace(run, env=Env(heldout=run.env.heldout)), list(words))
        return admitted(target, *words, parts=("env",), allow=trust)
    if not (sets_prompts or names_env):
        raise ConfigError(
            f"{target} is a reward model: say which judged completions it is to score, for example"
            f" posttrain eval {target} env.prompts=pairs.jsonl"
        )
    return dotted.apply(model_run(target), list(words))


def loaded_policy(target: str | Path, run: Run, checkpoint: str, trust: bool, ema: bool = False) -> Policy:
    """The reward model itself, as a policy with a reward head."""
    from posttrain.build.build_reward_models import reward_policy
    from posttrain.engine.files.reward_folder import read_reward_model

    if is_run(target):
        # Called only for its errors, which name the checkpoint, before anything is loaded.
        trained_model(Path(target), checkpoint)
        return reward_policy(Path(target), checkpoint, trust, ema)
    if ema:
        raise ConfigError(f"--ema is about a run folder, which keeps averages of its weights, and {target} is none")
    return read_reward_model(str(target), run.model)
