"""Checks that a minibatch of judged completions is what was judged: which side, how much it counts, and every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from posttrain.algorithm.preference.preference_minibatch import unit_of_each
from posttrain.checks.stage_history import due
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core import abilities, seeds
from posttrain.core.batch import Batch
from posttrain.core.judgements import Judgement, Label, Pair, Ranking, StepLabels
from posttrain.core.streams import MARGIN, SIDE, WEIGHT
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.prompt_order import Prompts
from posttrain.role.roles import PreferenceRoles, RewardRoles
from posttrain.stages.preference.preference_gradient import JudgedRows
from posttrain.system.errors import InvariantError


def judged_again(roles: PreferenceRoles | RewardRoles, index: int) -> list[Judgement]:
    """The judgements of step `index` (from 1), drawn again: a function of the seed, the stage and the step."""
    stage, seed = roles.stage, roles.run.seed
    # Written a second time: the order and the random numbers of `judged_batches` are what is checked.
    prompts = Prompts(
        roles.source, seeds.torch_seed(seed, f"judgements/{stage.name}"), cursor=(index - 1) * stage.batch
    )
    draw = abilities.judgements(roles.environment).draw
    tasks = [next(prompts) for _ in range(stage.batch)]
    kind = stage.judgement if isinstance(stage, RewardModel) else stage.judged
    return [draw(t, kind, seeds.generator(seed, f"judgement/{stage.name}/{t.id}", visit)) for t, visit in tasks]


def told(judgement: Judgement) -> list[tuple[str, int]]:
    """Each completion of a judgement with its side, in the order in which a unit of a minibatch has them."""
    if isinstance(judgement, Pair):
        return [(judgement.chosen, 1), (judgement.rejected, 0)]
    if isinstance(judgement, Label):
        return [(judgement.completion, 1 if judgement.good else 0)]
    if isinstance(judgement, StepLabels):
        # Written a second time, without `joined`, which made the text of the minibatch.
        text = "".join(s if s.endswith(judgement.separator) else s + judgement.separator for s in judgement.steps[:-1])
        return [(text + judgement.steps[-1], int(all(x > 0 for x in judgement.labels)))]
    assert isinstance(judgement, Ranking)
    return list(zip(judgement.completions, reversed(range(len(judgement.completions))), strict=True))


def rows_of(judged: Sequence[Judgement]) -> JudgedRows:
    """Returns how the completions of a minibatch were judged, read off the judgements alone."""
    sides = [[side for _, side in told(j)] for j in judged]
    margins = [j.margin for j in judged if isinstance(j, Pair) and j.margin is not None]
    return JudgedRows(
        side_E=np.array([s for unit in sides for s in unit]),
        unit_E=np.array([u for u, unit in enumerate(sides) for _ in unit]),
        weight_U=np.array([j.weight if isinstance(j, Pair) else 1.0 for j in judged]),
        margin_U=np.array(margins) if len(margins) == len(judged) else None,
    )


def sides_are_as_judged(batch: Batch, rows: JudgedRows) -> None:
    """Checks that the side, the weight and the margin of every completion are those of its judgement."""
    if not np.array_equal(unit_of_each(batch), rows.unit_E):
        raise InvariantError(
            f"the minibatch has {batch.episodes} completions in {batch.units} units, and {len(rows.weight_U)}"
            f" judgements with {len(rows.unit_E)} completions were drawn: some are lost, doubled or in another unit"
        )
    want = {SIDE: rows.side_E.astype(np.float64), WEIGHT: rows.weight_E}
    if rows.margin_U is not None:
        want[MARGIN] = rows.margin_U[rows.unit_E]
    for stream, want_E in want.items():
        wrong_M = ~np.isclose(batch[stream], want_E[batch.sequence_M], rtol=1e-9, atol=1e-12)
        if wrong_M.any():
            m = int(np.argmax(wrong_M))
            e = int(batch.sequence_M[m])
            raise InvariantError(
                f"{stream.name} of completion {e} (judgement {rows.unit_E[e]}) is {batch[stream][m]:g}, and it was"
                f" judged {want_E[e]:g} ({int(wrong_M.sum())} of {batch.spoken} tokens differ). If sides differ, chosen"
                " and rejected are swapped; weights are normalised once, over the whole minibatch"
            )


def completion_ends_once(batch: Batch, stop_ids: Sequence[int], text: Callable[[np.ndarray], str]) -> None:
    """Checks that every token of a judged completion counts, and that its last token is its only stop token."""
    ends_S = np.cumsum(batch.lengths_S) - 1
    # A source is the position before a token that counts. first_M: whether it is the first of its completion. gaps_M:
    # whether the token before it is inside the completion and does not count. last_S: the last position that counts.
    first_M = np.append(True, np.diff(batch.segment_M) != 0) if batch.spoken else np.zeros(0, bool)
    gaps_M = ~first_M & (np.diff(batch.source_M, prepend=0) != 1)
    last_S = np.full(len(ends_S), -1)
    np.maximum.at(last_S, batch.segment_M, batch.source_M + 1)
    stops_M = np.isin(batch.target_M, list(stop_ids))
    stops_S = np.bincount(batch.segment_M, stops_M, len(ends_S)).astype(int)
    # A model without stop tokens cannot end a completion with one, so there the ends are not checked.
    ends = np.isin(batch.ids_N[ends_S], list(stop_ids)) & (stops_S == 1) if stop_ids else np.ones(len(ends_S), bool)
    whole = (last_S == ends_S) & (np.bincount(batch.segment_M, gaps_M, len(ends_S)) == 0)
    wrong = np.flatnonzero(~(ends & whole))
    if len(wrong):
        s = int(wrong[0])
        shown = text(batch.ids_N[ends_S[s] + 1 - batch.lengths_S[s] : ends_S[s] + 1])
        problem = (
            "is masked in its middle or at its end" if not whole[s] else f"has {stops_S[s]} stop tokens that count"
        )
        raise InvariantError(
            f"judged completion {shown!r} {problem} ({len(wrong)} of {len(ends_S)}): it counts from its first token to"
            " exactly one stop token, its last. Look for a template that adds its own, for truncation of one side, and"
            " for padding that is masked by its value"
        )


def sides_share_a_prompt(batch: Batch, text: Callable[[np.ndarray], str]) -> None:
    """Checks that the completions of one judgement follow the same prompt tokens."""
    prompts = prompts_of(batch)
    unit_E = unit_of_each(batch)
    for e in range(1, batch.episodes):
        if unit_E[e] == unit_E[e - 1] and not np.array_equal(prompts[e], prompts[e - 1]):
            one, other = prompts[e - 1], prompts[e]
            raise InvariantError(
                f"the completions of judgement {unit_E[e]} have different prompts: {text(one)!r} ({len(one)} tokens)"
                f" and {text(other)!r} ({len(other)} tokens). Encode the prompt once for all sides; look for a token"
                " that begins one of the texts, and for a prompt that is cut on one side"
            )


def prompts_of(batch: Batch) -> list[np.ndarray]:
    """The prompt of each completion: its tokens before the first one that counts."""
    # A judged completion is one sequence, so [S] and [E] count the same.
    starts_E = np.cumsum(batch.lengths_S) - batch.lengths_S
    first_E = np.searchsorted(batch.sequence_M, np.arange(batch.episodes))
    return [batch.ids_N[s : batch.source_M[m] + 1] for s, m in zip(starts_E, first_E, strict=True)]


def tokens_are_as_judged(
    roles: PreferenceRoles | RewardRoles, batch: Batch, judged: Sequence[Judgement], units: Sequence[int]
) -> None:
    """Checks that a completion has the tokens of the judged text, after the prompt that a rollout of its task would
    get.

    Args:
        units: the numbers of the judgements that are compared.
    """
    prompts, unit_E = prompts_of(batch), unit_of_each(batch)
    for unit in units:
        judgement = judged[unit]
        task = judgement.task
        asked = np.asarray(roles.dialogue(task.id).see(task.prompt, task.tools))
        # The completions of a unit stand in the order of `told`, the better one first.
        for e, (words, side) in zip(np.flatnonzero(unit_E == unit).tolist(), told(judgement), strict=True):
            _, want = roles.renderer.pair(task.prompt, words, task.id, task.tools)
            ids, prompt = batch.ids_of(e), prompts[e]
            if prompt.tolist() != asked.tolist():
                raise InvariantError(
                    f"judged completions and rollouts are asked differently: before the completion of task {task.id!r}"
                    f" stands {roles.text(prompt)!r} ({len(prompt)} tokens that do not count), and a rollout of the"
                    f" same task is shown {roles.text(asked)!r} ({len(asked)} tokens). Use one template for both, and"
                    " mask exactly the prompt"
                )
            if ids[len(prompt) :].tolist() != np.asarray(want).tolist():
                raise InvariantError(
                    f"the completion of task {task.id!r} on side {side} is {roles.text(ids[len(prompt) :])!r} in the"
                    f" minibatch, and {words!r} was judged: the sides are swapped, or one is cut or changed on the way"
                )


class JudgementCheck(Observer):
    """Checks that a minibatch is what was judged. Sides, weights and ends are compared at every step. Tokens are
    compared for all judgements at `due` steps, and for one judgement at other steps. For preference stages: those of a
    reward model have checks of their own, which call the same functions."""

    def on_event(self, roles: PreferenceRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return
        batch, judged = event.batch, judged_again(roles, event.index)
        sides_are_as_judged(batch, rows_of(judged))
        completion_ends_once(batch, roles.stop_ids, roles.text)
        sides_share_a_prompt(batch, roles.text)
        units = range(len(judged)) if due(event.index) else [event.index % len(judged)]
        tokens_are_as_judged(roles, batch, judged, units)
