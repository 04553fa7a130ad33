"""Checks before the first step that the rows of a run's data fit its model; a row that does not is named by file and
line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from posttrain.config.run import Run, Supervised
from posttrain.config.stages.stage import Stage
from posttrain.core.abilities import DataRow
from posttrain.core.ports import Environment
from posttrain.engine.head.readout import positions
from posttrain.engine.model.policy_model import Policy
from posttrain.environment.rows.row_reader import placed
from posttrain.environment.templates.renderer import Renderer, TooLongError
from posttrain.role.learning.demonstrations import conversation_of, imitating
from posttrain.stages.preference.judged_batches import FittingTasks
from posttrain.system.errors import DataError


def check_judgements(run: Run, env: Environment, policy: Policy, stages: Sequence[Stage]) -> None:
    """Raises DataError, with file and line, for a judged completion that does not fit into the context. Stages that
    leave such rows out are passed over."""
    tokenizer: Any = policy.tokenizer
    render = Renderer(tokenizer, policy.stop_ids, policy.context, run.model.history)
    for stage in stages:
        if stage.judged is None:
            continue
        fitting = FittingTasks.of(env, stage.judged, render, policy.context)
        if fitting is None or not fitting.left_out or stage.leaves_out_long:
            continue
        raise DataError(
            f"{fitting.first}, and the context is {policy.context}; it is one of {fitting.left_out} judgements that do"
            f" not fit. Shorten them{_or_raise(run, policy)}, or leave them out with {stage.name}.too_long=skip"
        )


def check_prompts(run: Run, env: Environment, policy: Policy, stages: Sequence[Stage]) -> None:
    """DataError, with file and line, for a row whose prompt or demonstration cannot be encoded or does not fit the
    context, and then with the number of such rows."""
    if (rows := env.abilities.rows) is None:
        return
    tools_of = env.abilities.tools
    tokenizer: Any = policy.tokenizer
    advice = f"shorten it{_or_raise(run, policy)}"
    render = Renderer(tokenizer, policy.stop_ids, policy.context, run.model.history, advice)
    imitating_stages = [stage for s in stages if (stage := imitating(s)) is not None]
    too_long: list[TooLongError] = []
    for row in rows:
        task = row.task
        tools = task.tools if tools_of is None else tuple(tools_of(task))
        with _collected(too_long), placed(row.place):
            # The row's own tools alone: `tools` may be the environment's instead, of which the row says nothing.
            if task.tools and not render.offers(task.prompt, task.tools):
                raise DataError(
                    "the row offers tools, and this model's chat template writes none: take a model whose template"
                    " knows tools, or set env.args.tools_column= and write them into the prompt"
                )
            # Where no stage imitates this row, only its prompt must fit. `render.prompt` raises where it does not.
            if not imitating_stages or (row.completion is None and row.conversation is None):
                render.prompt(task.prompt, task.id, tools)
                continue
            length = max(_length(render, env, stage, row, tools) for stage in imitating_stages)
            if length > policy.context:
                subject = "the prompt and its completion have" if len(task.prompt) else "the text has"
                raise TooLongError(f"{subject} {length} tokens, and the context is {policy.context}: {advice}")
    if too_long:
        raise DataError(f"{too_long[0]} (rows that are too long: {len(too_long)} of {len(rows)})")


@contextmanager
def _collected(errors: list[TooLongError]) -> Iterator[None]:
    """Appends an error of the block to these."""
    try:
        yield
    except TooLongError as error:
        errors.append(error)


def _or_raise(run: Run, policy: Policy) -> str:
    """The words after "shorten it": a model that is loaded has no more positions than its config says."""
    bound = None if run.model.path is None else positions(policy.module)
    return ", as the model has no more positions" if policy.context == bound else " or raise model.context"


def _length(
    render: Renderer, env: Environment, stage: Supervised, row: DataRow, tools: Sequence[Mapping[str, Any]]
) -> int:
    """Tokens of the longest sequence that a stage learns of a row."""
    task = row.task
    if (talk := conversation_of(env, stage, task)) is not None:
        return max(len(ids) for ids, _ in render.conversation(talk, task.id, tools, stage.tool_arguments))
    return sum(map(len, render.pair(task.prompt, row.completion or "", task.id, tools)))
