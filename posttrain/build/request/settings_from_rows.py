"""Settings that follow from the user's rows: stages and rewards for which they have nothing, and passes as steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from posttrain.build.build_environments import REWARD_LINE
from posttrain.build.request.input_measures import DataSize
from posttrain.config.env import Env
from posttrain.config.run import Run, Supervised
from posttrain.config.stages.stage import LearnsRows
from posttrain.core.ports import Environment
from posttrain.environment.rows.columns import Columns
from posttrain.environment.rows.row_reader import source_rows
from posttrain.record.runtime_objects import RuntimeObjects, is_inline
from posttrain.role.prompt_order import RevisitingTasks
from posttrain.system.errors import ConfigError


def rewards_for_rows(run: Run, given: Collection[str], objects: RuntimeObjects) -> tuple[Run, tuple[str, ...]]:
    """(the run, a line about its rewards) where the user gave rows and no rewards; else the run and ().

    The recipe's rewards, made for the recipe's own rows, judge the user's where each of these has an answer; else they
    are left out. ConfigError where a stage samples and would have no reward left.
    """
    env = run.env
    if env.mix and "env.prompts" not in given:
        raise ConfigError("env.mix is mixed with env.prompts, which is the example of the recipe: give env.prompts")
    only_rows_given = "env.prompts" in given and not any(g.split(".")[:2] == ["env", "rewards"] for g in given)
    if env.name != "prompts" or env.prompts is None or not only_rows_given or not env.rewards:
        return run, ()
    args = {k: v for k, v in env.args.items() if k in ("answer_column", "split")}  # those that are read here
    columns, named, with_solution = replace(Columns(), **args), ", ".join(r.function for r in env.rewards), ""
    for place, row in _rows(env, columns, objects):
        answer = row.get(columns.answer_column)
        # The first row without an answer decides; rows after it need not be read.
        if answer is None:
            lacks = f"{place} has no column {columns.answer_column!r}"
            if sampled := [s.name for s in run.stages if s.env is None and s.contract is not None]:
                raise ConfigError(f"{lacks}, so nothing judges what {sampled[0]} samples. {REWARD_LINE}")
            line = f"env.rewards: none, because {lacks}. Nothing is sampled and judged; the measure is on held-out rows"
            return replace(run, env=replace(env, rewards=())), (line,)
        if "####" in str(answer) or "\\boxed" in str(answer):
            with_solution = with_solution or place
    line = f"env.rewards: {named}, the recipe's, on column {columns.answer_column!r}"
    if with_solution and "exact" in named:
        line += f". {with_solution} has a solution there, which an answer never equals whole: set env.rewards=math"
    return run, (line,)


def _rows(env: Env, columns: Columns, objects: RuntimeObjects) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(place, row) of each row of the data that is a JSON object. Other rows raise later, where the data is read."""
    for path, _ in env.data:
        rows = objects.rows(path) if is_inline(path) else source_rows(path, columns.split)
        yield from ((place, row) for place, row in rows if isinstance(row, Mapping))


def with_epochs(
    run: Run, given: Collection[str] | None, environment: Environment, others: Mapping[str, Environment]
) -> tuple[Run, tuple[str, ...]]:
    """(the run with `steps` computed from `epochs`, in each stage that has `epochs`, lines about changed batches).

    There a falling learning rate without a given horizon falls until the last step, and a batch of more rows than there
    are becomes all of them, unless the user gave it: a step would be several passes.

    Args:
        given: full paths of the user's settings; None: the whole run was given.
        others: environments of stages that have their own, by the stage's name.

    Raises:
        ConfigError: the stage's tasks are made without end, both lengths are given, or the learning rate reaches 0
            before the last step.
    """
    stages, lines = list(run.stages), list[str]()
    for i, stage in enumerate(stages):
        if not isinstance(stage, LearnsRows) or (epochs := stage.epochs) is None:
            continue
        env = environment if stage.env is None else others[stage.name]
        source = env.train
        # A mixture of data sets has no end: a pass over it has as many draws as all the sets have rows together.
        count = sum(n for _, n in source.passes(1)) if isinstance(source, RevisitingTasks) else source.count
        if not count:
            raise ConfigError(
                f"{stage.name}.epochs={stage.epochs:g}: environment {env.name!r} makes its tasks"
                f" without end, so no pass ends: set {stage.name}.steps"
            )
        if given is not None and f"{stage.name}.steps" in given:
            raise ConfigError(
                f"{stage.name}.steps={stage.steps} and {stage.name}.epochs={epochs:g} are two lengths; keep one"
            )
        if given is not None and f"{stage.name}.batch" not in given and stage.batch > count:
            stage = replace(stage, batch=count)
            lines.append(f"{stage.name}.batch: {count}, because a pass has {count} rows")
        steps, optimizer = max(1, math.ceil(epochs * count / stage.batch)), stage.optimizer
        if optimizer.schedule != "constant" and optimizer.horizon is None:
            # The rate is to reach its floor at the last step, whose number is known only here.
            optimizer = replace(optimizer, horizon=steps * stage.optimizer_steps)
        stages[i] = replace(stage, steps=steps, optimizer=optimizer)
        stages[i].check_horizon()
    return replace(run, stages=tuple(stages)), tuple(lines)


def without_completions(run: Run, given: frozenset[str], data: DataSize | None) -> tuple[Run, list[str]]:
    """Leaves out stages that imitate completions, if the data has none, the user gave no setting of these stages, and
    other stages are left. Returns (the run, lines that say so)."""
    if data is None or data.completions:
        return run, []
    imitating = [s for s in run.stages if isinstance(s, Supervised) and s.env is None and s.style == "completion"]
    named = {g.partition(".")[0] for g in given}
    left_out = [s for s in imitating if s.name not in named]
    stages = tuple(s for s in run.stages if s not in left_out)
    if not left_out or not stages:
        return run, []
    data_name = "the data" if is_inline(run.env.prompts) else run.env.prompts
    lines = [f"{s.name}: left out, because {data_name} has no completions to imitate" for s in left_out]
    return replace(run, stages=stages), lines
