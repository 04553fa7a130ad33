"""Checks that a reward model that pays a policy scores what was said, stays as it is, and is as exact as it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file

from posttrain.checks.stage_history import due
from posttrain.core.batch import Packed
from posttrain.core.gauge import Gauge
from posttrain.core.types import Episode, Group, Segment
from posttrain.core.verdict import State, Verdict
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.environment.templates import template_process
from posttrain.environment.templates.renderer import Renderer
from posttrain.record.checkpoint import kept_folder
from posttrain.role.events import Event, LearnedEvent, Observer, ObserverReport, PlayedEvent
from posttrain.role.judges.reward_judge import JudgeMember, RewardModelJudge
from posttrain.role.learning.logprob_tolerance import READ, packed_text
from posttrain.role.roles import ReinforceRoles
from posttrain.role.weights.saved_weights import REWARD_HEAD, WEIGHTS
from posttrain.system.errors import DataError, InvariantError
from posttrain.verifier.thoughts import whole

APART = {"float32": 1e-3, "float16": 3e-2, "bfloat16": 1e-1}
"""Largest difference of two scores of one episode, relative to the scores of its group and at least to 1, by the dtype
they are computed in. In float32 rounding makes about 1e-6."""
COARSE = 100.0
"""The noise of a judge's scores may be at most this many times the resolution that it declares."""


def read_alone(episode: Episode) -> Packed:
    """The tokens of an episode as a reward model should read them: all of its last segment, and nothing else."""
    # Earlier segments are histories that were rewritten: what is scored is the conversation as it ended.
    s = episode.segments[-1]
    # No log-prob is read of it. The numbers are those that `Segment` demands of spoken and unspoken tokens.
    logp = np.where(s.mask, 0.0, np.nan).astype(np.float32)
    return Packed.of([Segment(s.ids, s.mask, logp, np.where(s.mask, 0, -1).astype(np.int32), READ)])


def read_by(member: JudgeMember, episode: Episode) -> Packed | None:
    """Returns the sequence that one reward model should read of an episode.

    It is the episode's own tokens. A model with a tokenizer of its own reads the conversation as its chat template
    writes it. None if the conversation cannot be written so, or is longer than the model's context.
    """
    if member.renderer is None:
        packed = read_alone(episode)
    else:
        try:
            prompt, answer = _encoded_anew(cast("Renderer", member.renderer), episode)
        except DataError:
            return None
        packed = packed_text(np.append(prompt, answer), len(prompt))
    # A text that was cut to the context would be another one, so there is no score.
    return packed if len(packed.ids_N) <= member.context else None


def _encoded_anew(render: Renderer, episode: Episode) -> tuple[Sequence[int] | np.ndarray, np.ndarray]:
    """The ids of the prompt and of the answer. A prompt of messages is written by the tokenizer's own function."""
    task, tokenizer = episode.task, cast("Any", render.tokenizer)
    if isinstance(task.prompt, str) or any(
        s in str(m.get("content")) for m in task.prompt for s in tokenizer.all_special_tokens
    ):  # names of special tokens are written as text
        return render.pair(task.prompt, whole(episode.text), task.id, task.tools)
    text = template_process.apply(tokenizer, render.template.readable(task.prompt), generate=True, tools=task.tools)
    prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    return prompt_ids, render.completion_ids(whole(episode.text), chat=True, behind=prompt_ids)


def scored_again(judge: RewardModelJudge, episode: Episode) -> float | None:
    """The score of an episode by itself, as each model should read it; None where one cannot read it."""
    sequences = [read_by(m, episode) for m in judge.members]
    scores = [float(m.scorer.rewards(r)[0]) for m, r in zip(judge.members, sequences, strict=True) if r is not None]
    # A mean over fewer members than the judge has would be another score.
    if len(scores) < len(sequences) or not np.all(np.isfinite(scores)):
        return None
    spread = float(np.std(scores))
    return min(scores) if judge.combine == "worst" else float(np.mean(scores)) - judge.pessimism * spread


def scores_hold(judge: RewardModelJudge, group: Group, episode: Episode, dtype: str) -> float:
    """The recorded score of an episode is that of its own tokens, read alone.

    Returns the difference of the two scores, relative to the largest absolute score of the group.

    Raises:
        InvariantError: it is another score; or the difference is rounding, and is larger than the `resolution` that
            the judge declares.
    """
    verdict = verdict_of(judge, episode)
    if verdict is None or verdict.state is not State.VALUE or verdict.score is None:
        return 0.0
    again = scored_again(judge, episode)
    # Rounding is relative to the scores that are compared, which are the siblings'.
    group_scores = [v.score for e in group.episodes if (v := verdict_of(judge, e)) is not None and v.score is not None]
    largest = max(map(abs, group_scores))
    if again is None:
        # A model with a tokenizer of its own may be unable to read what the policy said. Then there is nothing to
        # compare.
        if any(m.renderer is not None for m in judge.members):
            return 0.0
        raise InvariantError(
            f"reward model {judge.name} gave {verdict.score:.6g} to an answer to task {episode.task.id!r} that it"
            " cannot read. What nobody could judge is failed (Verdict.failed), never a low score"
        )
    apart = abs(again - verdict.score)
    # Written so that a NaN is wrong.
    if not apart <= APART[dtype] * max(1.0, largest):
        raise InvariantError(
            f"reward model {judge.name} gave {verdict.score:.6g} to an answer to task {episode.task.id!r}, and gives"
            f" {again:.6g} to the same tokens read alone. Look at what it reads (another episode's tokens, padding, a"
            " text that was encoded anew, or without its chat template), at the order of its scores, and for an outage"
            " that became a number"
        )
    noise = apart / largest if largest else 0.0
    # Within the bound of the dtype; but siblings that differ by less than this noise would count as different.
    if noise > COARSE * judge.resolution:
        raise InvariantError(
            f"reward model {judge.name}: two scores of the same answer differ by {noise:.2g} of the group's largest,"
            f" and its resolution is {judge.resolution:.2g}, so noise between siblings would count as a difference to"
            " learn from. Leave env.rewards.N.resolution out, or set it to the noise of the scores (such as 1e-3)"
        )
    return noise


def verdict_of(judge: RewardModelJudge, episode: Episode) -> Verdict | None:
    """The judge's verdict about an episode; None if there is none."""
    return next((j.verdict for j in episode.verdicts if j.source == judge.name), None)


def reads_the_last_token(member: JudgeMember, probe: np.ndarray) -> None:
    """A head that reads the last token gives another score where that token is another one.

    Raises:
        InvariantError: the score does not depend on it.
    """
    blank = member.blank
    # The blank token must be nowhere in the probe: transformers reads the head at the token before it. The first token
    # of the probe takes its place, or the next id of the vocabulary where that one is blank itself.
    ids = probe.astype(np.int32).copy()
    if blank is not None:
        ids = np.where(ids == blank, ids[0] if ids[0] != blank else (blank + 1) % (int(ids.max()) + 1), ids)
    changed = ids.copy()
    # Another token of the same text, so that the vocabulary surely has it.
    changed[-1] = next(int(x) for x in ids[:-1] if x not in (ids[-1], blank))
    one, other = (float(member.scorer.rewards(packed_text(x))[0]) for x in (ids, changed))
    if abs(one - other) <= 1e-6 * max(1.0, abs(one)):
        raise InvariantError(
            f"reward model {member.name}: its score does not depend on the last token of a sequence, at which its head"
            " reads. It is read at another token, or before the end"
        )


def holds_what_was_trained(member: JudgeMember, folder: Path) -> None:
    """A reward model that a stage of this run trained has the weights that the stage kept, bit for bit.

    Raises:
        InvariantError: names the weights that differ.
    """
    saved = load_file(kept_folder(folder, member.stage) / WEIGHTS)
    # Only what the stage kept can be compared.
    loaded = {n: t for n, t in member.scorer.tensors().items() if n in saved}
    if not loaded or not any(n.startswith(REWARD_HEAD) for n in loaded):
        raise InvariantError(f"reward model {member.name} holds none of the weights that stage {member.stage} kept")
    if differing := [n for n, t in loaded.items() if not torch.equal(t.detach().cpu(), saved[n])]:
        raise InvariantError(
            f"{len(differing)} of {len(loaded)} weights of reward model {member.name} are not those that stage"
            f" {member.stage} trained, such as {differing[0]}: it was not loaded, or another checkpoint was"
        )


class RewardModelCheck(Observer):
    """Reward models that pay a policy score as they were trained.

    Before the first step: each has the weights that were trained. At every step: one answer has the score of its own
    tokens. At every `due` step: the weights have not changed.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self._template_noted = False

    async def begin(self, roles: ReinforceRoles) -> None:
        self._digests = self._present_digests(roles)
        for judge in _judges(roles):
            for member in judge.members:
                if member.stage:
                    holds_what_was_trained(member, roles.book.folder)
                # The probe has ids of the policy's tokenizer, which a model with a tokenizer of its own does not know.
                if member.reads_last and member.renderer is None:
                    reads_the_last_token(member, roles.sync.probe_ids)

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        judges = _judges(roles)
        if not judges:
            return None
        match event:
            case PlayedEvent(e):
                # Chosen by the number of the step, so that no answer decides whether it is looked at.
                group = e.played[e.index % len(e.played)]
                judged = [x for x in group.episodes if x.reward is not None or x.truth is not None]
                if not judged:
                    return None
                chosen = judged[e.index % len(judged)]
                noise = [scores_hold(j, group, chosen, roles.run.model.dtype) for j in judges]
                # Told once: whether a model has a template does not change from step to step.
                notes = () if self._template_noted else tuple(_without_template(judges, chosen))
                self._template_noted = True
                return ObserverReport({"canary/reward_noise": Gauge(max(noise), 1)}, notes)
            case LearnedEvent(packed, _, _) if due(packed.index):
                self._unmoved(roles)
            case _:
                pass
        return None

    def _unmoved(self, roles: ReinforceRoles) -> None:
        """InvariantError if weights of a reward model changed since the stage began."""
        now = self._present_digests(roles)
        if moved := [n for n, digest in self._digests.items() if now[n] != digest]:
            raise InvariantError(
                f"the weights of reward model {moved[0]} have changed since the stage began. It must stay as it was"
                " trained: look for tensors that it shares with the policy, or for an optimizer that holds them"
            )

    def _present_digests(self, roles: ReinforceRoles) -> dict[str, str]:
        """The digest of each reward model's weights, by its name."""
        return {m.name: fingerprint(m.scorer.tensors().items()) for j in _judges(roles) for m in j.members}


def _without_template(judges: Sequence[RewardModelJudge], episode: Episode) -> Iterator[str]:
    """A note on each model with a chat template of its own that reads prompts of text."""
    for m in (m for j in judges for m in j.members if m.renderer is not None):
        if isinstance(episode.task.prompt, str) and cast("Renderer", m.renderer).tokenizer.chat_template:
            yield (
                f"reward model {m.name} has a chat template, and prompts are text, so it reads them without it. Write"
                ' prompts as messages ([{"role": "user", "content": ...}]) if it was trained on conversations'
            )


def _judges(roles: ReinforceRoles) -> Sequence[RewardModelJudge]:
    return [j for j in roles.rollout.judges if isinstance(j, RewardModelJudge)]
