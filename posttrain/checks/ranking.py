"""Whether a reward model is trained on what was judged: its head gets a gradient and is read at the end, the sides of a
judgement share their prompt, and each ends in one stop token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from posttrain.checks.data import demonstration_ends_once
from posttrain.core.batch import Batch
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Learner
from posttrain.role.events import Event, Observer, ObserverReport, PackedEvent
from posttrain.role.probe import packed_text
from posttrain.role.roles import RewardRoles

HEAD = "reward_head."
FELT = 1e-6
"""By how much a score must change, relative to its size, where the token changes at which it is read."""


def score_reaches(learner: Learner, ids: np.ndarray) -> None:
    """The reward head and the weights beneath it get a gradient from the score of a fixed text.

    Raises:
        InvariantError: names those that get none.
    """
    learner.train_mode(True)
    text = packed_text(ids, prompt=len(ids) // 2)
    rewards = learner.forward(text, entropy=False, value=False, rewards=True, logp=False).rewards
    assert rewards is not None
    score: torch.Tensor = rewards.score
    parameters = dict(learner.parameters())
    head = {n: p for n, p in parameters.items() if n.startswith(HEAD)}
    deaf = [n for n, p in head.items() if not p.requires_grad]
    if not deaf and score.requires_grad:
        found = torch.autograd.grad(score.sum(), list(parameters.values()), allow_unused=True)
        heard = {n for n, g in zip(parameters, found, strict=True) if g is not None and bool(g.any())}
        deaf = [n for n in head if n not in heard]
        beneath = any(n not in head for n in heard)
    else:
        deaf, beneath = list(head), True
    learner.train_mode(False)
    if deaf or not head:
        raise InvariantError(
            f"{', '.join(deaf) or 'the reward head'} gets no gradient from the score that it makes: it would stay as it"
            " was drawn. Look for a detach, a hook, or requires_grad=False in the reward head"
        )
    if not beneath:
        raise InvariantError(
            "no weight beneath the reward head gets a gradient from its score: the model would stay as it was loaded."
            " Look for a detach between the hidden states and the head"
        )


def sides_share_their_prompt(batch: Batch, text: Any) -> None:
    """The completions of a judgement follow the same prompt, and are not all the same.

    Raises:
        InvariantError: names the first judgement whose prompts or completions are wrong.
    """
    ends = np.cumsum(batch.lengths_S)
    begin = np.searchsorted(batch.segment_M, np.arange(len(batch.lengths_S)))
    for unit in range(batch.units):
        own = batch.members(unit)
        prompts = {batch.ids_N[ends[s] - batch.lengths_S[s] : batch.source_M[begin[s]] + 1].tobytes() for s in own}
        if len(prompts) > 1:
            s = int(own[-1])
            raise InvariantError(
                f"the completions of judgement {unit} of the minibatch follow different prompts, such as"
                f" {text(batch.ids_N[ends[s] - batch.lengths_S[s] : ends[s]])[:80]!r}: the score would learn to tell"
                " prompts apart"
            )


def reads_the_end(learner: Learner, batch: Batch) -> None:
    """A head that reads the last token gives another score where that token is another one, and the same one where only
    a later sequence is.

    Raises:
        InvariantError: the score is read elsewhere.
    """
    two = batch.select(batch.members(0)) if batch.units < 2 else batch.select(np.r_[batch.members(0), batch.members(1)])
    ids = two.ids_N.copy()
    at = int(np.cumsum(two.lengths_S)[0]) - 1
    ids[at] = ids[at - 1] if ids[at - 1] != ids[at] else ids[0]
    changed = replace(two, ids_N=ids, target_M=ids[two.source_M + 1])
    before, after = learner.rewards(two), learner.rewards(changed)
    if ids[at] != two.ids_N[at] and abs(after[0] - before[0]) <= FELT * max(1.0, abs(float(before[0]))):
        raise InvariantError(
            "the score of a completion does not depend on its last token, at which this reward head reads: it is read"
            " at another token, or after another cut"
        )
    if np.abs(after[1:] - before[1:]).max(initial=0.0) > 1e-3 * max(1.0, float(np.abs(before).max())):
        raise InvariantError("the score of a completion depends on the sequence beside it in the minibatch")


class RankingCheck(Observer):
    """Before the first step and on every minibatch of a stage that trains a reward model."""

    def __init__(self, *, first: bool) -> None:
        self._first = first
        """Whether the stage starts here, not from a checkpoint."""

    async def begin(self, roles: RewardRoles) -> None:
        score_reaches(roles.learner, roles.sync.probe_ids)

    def on_event(self, roles: RewardRoles, event: Event) -> ObserverReport | None:
        if not isinstance(event, PackedEvent):
            return None
        demonstration_ends_once(event.batch, roles.stop_ids, roles.text)
        sides_share_their_prompt(event.batch, roles.text)
        if self._first:
            self._first = False
            if roles.stage.pool == "last":
                reads_the_end(roles.learner, event.batch)
        return None
