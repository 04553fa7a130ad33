"""The environments of a run. They are made before torch is imported, so that a wrong setting is refused at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from posttrain.config.env import Env
from posttrain.config.run import Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.core.abilities import DataRow, declared, hints, judgements
from posttrain.core.ports import Environment
from posttrain.environment.judged.judged_rows import misread
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.record.runtime_objects import RuntimeObjects
from posttrain.system.errors import ConfigError, DataError

REWARD_LINE = (
    "Add env.rewards=mine.py:reward, your own function, or a built-in: exact, last_integer, contains or math (each"
    " reads a column answer); from Python rewards=[my_function]"
)
"""Advice on what to add where a reward is missing."""


def check_environment(env: Environment, stages: Sequence[Stage], config: Env) -> None:
    """Raises ConfigError for a stage that needs demonstrations, judgements or verdicts which its environment cannot
    give.

    Verdicts may also come from the reward models of the environment's configuration.
    """
    abilities = declared(env)
    texts = abilities.demonstrations
    styles = texts.styles if texts is not None else ()
    for stage in stages:
        if why := stage.refuses(env.name, styles):
            raise ConfigError(why + ("" if styles else _other_columns(env)))
        if stage.hinted:
            hints(env)  # raises where it writes none
        if isinstance(stage, Rejection) and stage.method.regenerate is not None:
            for reward in config.rewards:
                # A completion from the middle of an answer is judged by the environment alone. With a model that pays,
                # whole answers and such completions would have different rewards. Settings do not tell a process
                # reward model from another one (`model:PATH`); that is refused when it is loaded.
                if reward.judge_run or reward.steps != "score":
                    raise ConfigError(stage.judged_alone(reward.function))
        # Told by the first row: a column that looks like a judgement, and was not read as one.
        if stage.judged is not None and isinstance(env, PromptsEnv) and (why := misread(env.rows[0], env)):
            raise DataError(why)
        if stage.judged is not None and stage.judged not in judgements(env).kinds:
            offered = ", ".join(judgements(env).kinds)
            raise ConfigError(
                f"{stage.name} learns from judgements of kind {stage.judged!r}, and environment {env.name!r} gives"
                f" {offered}. Use another algorithm, or data with the columns that it needs"
            )
        if isinstance(stage, Preference | RewardModel) and stage.judged == "pair":
            _refuse_missing_margins(stage, abilities.rows or ())
        if stage.contract is not None and not (abilities.judges or config.has_reward_models):
            raise ConfigError(
                f"{stage.name} needs verdicts on what it samples, and nothing judges it: environment {env.name!r}"
                f" needs env.rewards. {REWARD_LINE}"
            )


def _other_columns(env: Environment) -> str:
    """A sentence about columns with text from which completions could be read; '' where the rows have none."""
    if not isinstance(env, PromptsEnv):
        return ""
    beside = ({**r.task.info, env.answer_column: r.task.answer} for r in env.rows)
    columns = dict.fromkeys(k for row in beside for k, v in row.items() if isinstance(v, str) and v.strip())
    advice = "Set env.args.completion_column=COLUMN where a column has the completions"
    return f". {advice} (the rows have also: {', '.join(columns)})" if columns else ""


def _refuse_missing_margins(stage: Preference | RewardModel, rows: Sequence[DataRow]) -> None:
    """DataError for the first pair without a margin, where the loss reads the margins of pairs."""
    without_margin = [r for r in rows if r.judged is not None and r.judged.kind == "pair" and r.judged.margin is None]
    if isinstance(stage, RewardModel):
        # A reward model needs the margins of all pairs, or of none: with none at all it learns without them.
        reads, override = stage.margin and len(without_margin) < len(rows), "margin=false"
    else:
        reads, override = stage.algorithm.reads_margin, "algorithm.margin=none"
    if without_margin and reads:
        raise DataError(
            f"{without_margin[0].place}: the pair has no margin, which {stage.name} reads ({len(without_margin)} of"
            f" {len(rows)} have none): give each row a margin, or set {stage.name}.{override}"
        )


def make_environment(run: Run, objects: RuntimeObjects = RuntimeObjects()) -> Environment:
    """The run's environment, used by all stages that have none of their own. `objects`: what a program handed."""
    env = environment(run.env, run.seed, objects)
    check_environment(env, [s for s in run.stages if s.env is None], run.env)
    return env


def own_environments(run: Run, env: Environment, objects: RuntimeObjects = RuntimeObjects()) -> dict[str, Environment]:
    """The environments of stages that have their own, by the stage's name.

    Stages with equal settings share one object, which may also be `env`. So two stages have the same environment
    exactly if their objects are identical.
    """
    built: list[tuple[Env, Environment]] = [(run.env, env)]
    out: dict[str, Environment] = {}
    try:
        for stage in run.stages:
            if stage.env is None:
                continue
            stage_env = next((e for settings, e in built if settings == stage.env), None)
            if stage_env is None:
                try:
                    stage_env = environment(stage.env, run.seed, objects)
                except (ConfigError, DataError) as error:
                    raise type(error)(f"{stage.name}.env (called env here): {error}") from error
                built.append((stage.env, stage_env))
            out[stage.name] = stage_env
            check_environment(stage_env, [stage], stage.env)
    except BaseException:
        # All but the first, which belongs to the caller.
        for _, built_env in built[1:]:
            built_env.close()
        raise
    return out


def distinct(env: Environment, others: Mapping[str, Environment]) -> list[Environment]:
    """Every environment of a run once, the run's own first."""
    return list({id(e): e for e in (env, *others.values())}.values())
