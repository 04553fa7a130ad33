"""Checks that the training data are right: which tasks are used, which groups are kept, and how demonstrations end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.checks.learning.credit_by_definition import same_outcome
from posttrain.config.run import Reinforce
from posttrain.core.ports import Environment, TaskSource
from posttrain.core.types import Group, Task
from posttrain.core.verdict import outcome
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent
from posttrain.role.roles import OnlineRoles, ReinforceRoles
from posttrain.system.errors import InvariantError

MOST_IN_ORDER = 16
"""The first tasks asked, at most this many, are compared with the first of their source."""
LATEST_START = 2
"""A sequence counts as a document where the hidden state that predicts its first learned token is at most at this
place, counted from 0. Then at most 3 tokens stand before that token: those that the tokenizer writes itself."""


def filter_reads_outcomes(kept: Sequence[Group], refused: Sequence[Group]) -> None:
    """filter=mixed keeps exactly the groups whose raw outcomes differ by more than rounding, before any shaping."""
    for groups, passed in ((kept, True), (refused, False)):
        for g in groups:
            # Demonstrations are no draws of the policy: the filter compares only what was sampled.
            sampled = [e for e in g.episodes if not e.shown]
            # Wrong are equal outcomes in a kept group, and different ones in a refused group.
            if same_outcome(sampled) is passed:
                raw = {outcome(e.verdicts) for e in sampled}
                raise InvariantError(
                    f"filter=mixed {'kept' if passed else 'refused'} the group of task {g.task.id!r}, whose raw"
                    f" outcomes are {sorted(r for r in raw if r is not None)}. It must look at outcomes before shaping:"
                    " groups that differ in length alone teach length"
                )


def no_held_out_task(groups: Sequence[Group], held: Mapping[Hashable, str], key: Callable[[Task], Hashable]) -> None:
    """No task that is trained on is held out. The environment defines when two tasks are the same."""
    for g in groups:
        # Found by the key and not by the id: the same question may stand in two files with other ids.
        if (same := key(g.task)) in held:
            raise InvariantError(
                f"training task {g.task.id!r} ({g.task.prompt!r:.80}) is held-out task {held[same]!r}: held-out"
                " accuracy would measure memory. Take it out of one of the two"
            )


def in_order_of_the_file(asked: Sequence[str], source: TaskSource) -> None:
    """Finite tasks are used in a shuffled order: the first ones used are not the first of the file.

    A shuffle gives that order by chance in at most 1 of 12! stages (2.1e-9).
    """
    n = len(asked)
    # Fewer than 12 prompts come in the order of the file by chance too often. A source without end has no such order.
    if source.count is not None and 12 <= n <= source.count and list(asked) == [source.task(i).id for i in range(n)]:
        raise InvariantError(
            f"the first {n} prompts asked are the first {n} of their source, in its order: they are not shuffled, so"
            " neighbouring rows are learned together. Look at who walks through the tasks"
        )


def demonstration_ends_once(
    packed: Any,
    stop_ids: Sequence[int],
    text: Callable[[np.ndarray], str],
    *,
    whole_turns: bool = True,
    documents: bool = False,
) -> None:
    """Every demonstrated turn is imitated up to exactly one stop token, its last. A demonstration ends with a turn.

    Args:
        packed: the demonstrations of a minibatch (`core.batch`).
        stop_ids: the tokens that end a turn.
        text: decodes token ids.
        whole_turns: whether turns are learned whole. Else parts of one may be masked, and end in no stop token.
        documents: whether a sequence learned from its beginning (see `LATEST_START`) may have stop tokens inside.
    """
    # Without stop ids nothing says where a turn ends.
    if not stop_ids:
        return
    # [S]: the packed place of the last token of each demonstration.
    ends = np.cumsum(packed.lengths_S) - 1
    stops_N = np.isin(packed.ids_N, list(stop_ids))
    # A spoken token stands one place behind the hidden state that predicts it.
    spoken_N = np.zeros(len(packed.ids_N), bool)
    spoken_N[packed.source_M + 1] = True
    # A turn ends where a spoken token has no spoken one behind it.
    turn_ends_N = spoken_N & ~np.append(spoken_N[1:], False)
    stops = np.bincount(packed.segment_M, weights=stops_N[packed.source_M + 1], minlength=len(ends))
    turns = np.bincount(packed.segment_M, weights=turn_ends_N[packed.source_M + 1], minlength=len(ends))
    # In a whole turn its stop token is its end. Where a part may be masked, only a stop inside is wrong.
    misplaced_N = (stops_N & ~turn_ends_N) | ((turn_ends_N & ~stops_N) if whole_turns else False)
    misplaced_S = np.bincount(packed.segment_M, weights=misplaced_N[packed.source_M + 1], minlength=len(ends))
    if documents:
        # [S]: the place of the hidden state that predicts the first learned token, counted in its own segment.
        first_S = np.full(len(ends), len(spoken_N))
        np.minimum.at(first_S, packed.segment_M, packed.source_M - (ends + 1 - packed.lengths_S)[packed.segment_M])
        misplaced_S[first_S <= LATEST_START] = 0
    # The last token must be a stop token and be learned, whatever `whole_turns` says.
    wrong_S = np.flatnonzero(~(stops_N[ends] & spoken_N[ends]) | (misplaced_S > 0))
    if len(wrong_S):
        s = int(wrong_S[0])
        decoded = text(packed.ids_N[ends[s] + 1 - packed.lengths_S[s] : ends[s] + 1])
        fault = f"has {int(stops[s])} stop tokens for {int(turns[s])} turn{'s' if turns[s] > 1 else ''}"
        if not stops_N[ends[s]]:
            fault = "does not end in a stop token"
        elif not spoken_N[ends[s]]:
            fault = "ends in a stop token that is masked"
        raise InvariantError(
            f"demonstration {decoded!r} {fault}, so the policy is taught"
            f" {'to go on after its end' if stops[s] > turns[s] else 'never to stop'}. A demonstrated turn is imitated"
            " up to and including exactly one stop token; look for a template that adds its own, or padding that is"
            " masked by its value"
        )


def same_question(shown: np.ndarray, asked: np.ndarray, text: Callable[[np.ndarray], str]) -> None:
    """The prompt before an imitated answer is the prompt that a rollout gets."""
    # Token by token: the same words with another space or another special token are another prompt.
    if shown.tolist() != asked.tolist():
        raise InvariantError(
            f"imitation and reinforcement ask differently: before the imitated answer stands {text(shown)!r}"
            f" ({len(shown)} tokens), and a rollout of the same task is shown {text(asked)!r} ({len(asked)} tokens)."
            " Use one template for both, and mask exactly the prompt"
        )


class TaskCheck(Observer):
    """Training tasks are not held out, are used once per visit, and not in the order of their file.

    A filter reads raw outcomes.
    """

    def __init__(self) -> None:
        self._held: Mapping[Hashable, str] = {}
        self._held_elsewhere: Mapping[Hashable, str] = {}
        self._asked: set[tuple[str, int]] = set()
        self._walk: list[str] = []

    async def begin(self, roles: ReinforceRoles) -> None:
        same = sameness(roles.rollout.environment)
        self._held = {same(t): t.id for t in roles.rollout.environment.heldout}
        # Two environments need not have comparable keys, so tasks of the others are compared by their prompts.
        self._held_elsewhere = {as_written(t): t.id for e in roles.other_environments for t in e.heldout}

    def on_event(self, roles: ReinforceRoles | OnlineRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PlayedEvent):
            return
        e = event.experience
        no_held_out_task(e.played, self._held, sameness(roles.rollout.environment))
        no_held_out_task(e.played, self._held_elsewhere, as_written)
        self._never_asked_before(e.played)
        # Only the beginning of the walk is kept. Refused groups were asked too, so they are a part of it.
        self._walk += [g.task.id for g in e.played][: MOST_IN_ORDER - len(self._walk)]
        in_order_of_the_file(self._walk, roles.prompts.source)
        if isinstance(roles.stage, Reinforce) and roles.stage.algorithm.filter == "mixed":
            # Groups that passed too late to be learned from went through the same filter.
            filter_reads_outcomes((*e.groups, *e.spare), e.refused)

    def _never_asked_before(self, played: Sequence[Group]) -> None:
        """Every (task, visit) is used once in a stage, since its random numbers must not be used twice."""
        for g in played:
            if (g.task.id, g.visit) in self._asked:
                raise InvariantError(
                    f"task {g.task.id!r} is asked a second time as visit {g.visit}: its answers would repeat the random"
                    " numbers of the first. Task ids must be unique, and the walk through the prompts must not turn"
                    " back"
                )
            self._asked.add((g.task.id, g.visit))


def sameness(environment: Environment) -> Callable[[Task], Hashable]:
    """Two tasks with the same key are the same task: the environment's own key, else `as_written`."""
    return environment.abilities.key or as_written


def as_written(task: Task) -> Hashable:
    """A key for tasks of any two environments: tasks with equal prompts are the same."""
    return repr(task.prompt)
