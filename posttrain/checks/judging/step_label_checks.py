"""Checks that labels belong to their steps: what was completed, what was judged, what is learned and what is paid.

Everything is computed a second time, from the tokens and the verdicts alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence

import numpy as np

from posttrain.checks.judging.reward_model_scores import APART, holds_what_was_trained, read_alone
from posttrain.checks.judging.verdict_checks import enough_judged
from posttrain.checks.stage_history import due
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Batch
from posttrain.core.gauge import Gauge, Step
from posttrain.core.judgements import Judgement, StepLabels
from posttrain.core.streams import STEP
from posttrain.core.types import Episode
from posttrain.core.verdict import State
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.role.events import Event, LabelledEvent, LearnedEvent, Observer, ObserverReport, PlayedEvent
from posttrain.role.judges.step_completion import LabelledAnswer
from posttrain.role.judges.step_judge import StepJudge, step_scores
from posttrain.role.roles import LabelRoles, ReinforceRoles, RewardRoles
from posttrain.system.errors import InvariantError

FILE = "steps.jsonl"
"""The rows of a stage that labels steps, in the folder kept as STAGE-rows."""
Text = Callable[[np.ndarray], str]


def said(e: Episode) -> np.ndarray:
    """The ids of the spoken tokens of an episode's last segment."""
    return e.segments[-1].ids[e.segments[-1].mask]


def token_ends(text: Text, ids: np.ndarray, lengths: Sequence[int]) -> list[int]:
    """The number of tokens up to the end of each step.

    Every beginning of the text is decoded. A step ends with the first token that reaches the step's last character; the
    last step ends with the last token, and so does a step that lies beyond the text.

    Args:
        lengths: characters up to the end of each step.
    """
    # The border of a step may lie inside a token. The step then ends with the first token that reaches it.
    # U+FFFD at an end may stand for the bytes of a character that the next tokens complete.
    so_far = [len(text(ids[:n]).rstrip("\ufffd")) for n in range(len(ids) + 1)]
    # The last step takes every token that is left: a stop token may add no characters.
    return [*(next((n for n, c in enumerate(so_far) if c >= want), len(ids)) for want in lengths[:-1]), len(ids)]


def labels_are_of_their_steps(answer: LabelledAnswer, text: Text) -> None:
    """The completions of a step go on from its end, and its label is how they were judged.

    Raises:
        InvariantError: names the step.
    """
    # The record has the words of the steps, and a label belongs to a token: the tokens are found again from the words.
    e, spoken = answer.episode, said(answer.episode)
    lengths = np.cumsum([len(s) for s in answer.steps]).tolist()
    ends = token_ends(text, spoken, lengths)
    if "".join(answer.steps) != text(spoken) or list(answer.tokens) != ends:
        raise InvariantError(
            f"the steps of an answer to task {e.task.id!r} are {list(answer.steps)} and end at tokens"
            f" {list(answer.tokens)}, and it says {text(spoken)!r}, whose steps end at {ends}: a label would be of"
            " another step"
        )
    # The walk over steps below reads all of these at one place.
    if not len(answer.steps) == len(answer.completions) == len(answer.values.right) == len(answer.values.asked):
        raise InvariantError(f"an answer to task {e.task.id!r} has {len(answer.steps)} steps and other many labels")
    for k, completions in enumerate(answer.completions):
        for c in completions:
            # A completion repeats the answer's own tokens up to the end of the step, not only its words.
            if c.task.id != e.task.id or said(c)[: ends[k]].tolist() != spoken[: ends[k]].tolist():
                raise InvariantError(
                    f"a completion from step {k + 1} of an answer to task {e.task.id!r} begins with"
                    f" {text(said(c)[: ends[k]])!r}, and the answer with {text(spoken[: ends[k]])!r}: it is a"
                    " completion from the end of another step"
                )
        # Completions that nobody could judge leave the share. Counted as wrong they would lower the label.
        judged = [c.right.of(c.figure) for c in completions if c.figure is not None]
        right = sum(judged)
        if (answer.values.right[k], answer.values.asked[k]) != (right, len(judged)):
            raise InvariantError(
                f"step {k + 1} of an answer to task {e.task.id!r} has {answer.values.right[k]} right completions of"
                f" {answer.values.asked[k]}, and {right} of {len(judged)} were judged right: the label of another step,"
                " or an outage that counts as wrong"
            )


class StepLabelCheck(Observer):
    """In a stage that labels steps: the labels of every answer, and the rows that are written of them."""

    def __init__(self) -> None:
        self._answers: tuple[LabelledAnswer, ...] = ()

    def on_event(self, roles: LabelRoles, event: Event) -> ObserverReport | None:
        if isinstance(event, PlayedEvent):
            played = event.experience.played
            enough_judged("answers of this step", played, roles.run, roles.stage, roles.book.folder, "figure")
        if isinstance(event, LabelledEvent):
            self._answers = event.answers
            for answer in event.answers:
                labels_are_of_their_steps(answer, roles.labeler.ends.text)
        return None

    async def after(self, roles: LabelRoles, step: Step) -> ObserverReport | None:
        # Read back from the file: what is trained on later is the file, not what is in memory.
        path = roles.book.kept(f"{roles.stage.name}-rows") / FILE
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        step_rows = [r for r in rows if r["step"] == step.index]
        if len(step_rows) != len(self._answers):
            raise InvariantError(
                f"step {step.index} labelled {len(self._answers)} answers, and wrote {len(step_rows)} rows"
            )
        for row, answer in zip(step_rows, self._answers, strict=True):
            judged = [[c.right.of(c.figure) for c in of_step if c.figure is not None] for of_step in answer.completions]
            # The hard label asks for one right completion. The soft one is the chance of a prover that has several
            # tries.
            hard = [any(of_step) for of_step in judged]
            soft = [_share(of_step, roles.stage.prover) for of_step in judged]
            same = len(row["values"]) == len(soft) and np.allclose(row["values"], soft, rtol=0, atol=1e-12)
            if row["completions"] != list(answer.steps) or row["labels"] != hard or not same:
                raise InvariantError(
                    f"the row of an answer to task {answer.episode.task.id!r} has the labels {row['labels']} and values"
                    f" {row['values']}, and its completions say {hard} and {soft}: labels belong to other steps, or a"
                    " share to another number of completions"
                )
        return None


def _share(right: Sequence[bool], prover: int) -> float:
    """The chance that at least one of `prover` completions is right, drawn from these without replacement."""
    count, wrong, none_right = len(right), list(right).count(False), 1.0
    # 1 - prod_i (wrong - i) / (n - i): 1 less the chance that all draws without return are wrong.
    for i in range(min(prover, count)):
        none_right *= max(wrong - i, 0) / (count - i)
    return 1 - none_right


# --- what is learned --------------------------------------------------------------------------------------------------


def steps_are_as_judged(roles: RewardRoles, batch: Batch, judged: Sequence[Judgement]) -> None:
    """The label of every step is at its last token, and no other token has one.

    Raises:
        InvariantError: names the completion and the token.
    """
    stage, label_M = roles.stage, batch[STEP]
    for s, j in enumerate(judged):
        assert isinstance(j, StepLabels)
        of_this = batch.segment_M == s
        ids = batch.target_M[of_this]
        # NaN marks a token without a label, since 0 is a label.
        want = np.full(len(ids), math.nan)
        for end, value in zip(_ends_of(j, roles.ends.text, ids), _learned(j, stage), strict=True):
            want[end - 1] = value
        if not np.array_equal(label_M[of_this], want, equal_nan=True):
            # NaN differs from itself, so two missing labels are compared apart.
            t = int(np.flatnonzero(~((label_M[of_this] == want) | (np.isnan(label_M[of_this]) & np.isnan(want))))[0])
            raise InvariantError(
                f"token {t + 1} of the completion of task {j.task.id!r}, after {roles.ends.text(ids[: t + 1])!r}, has"
                f" the label {label_M[of_this][t]:g}, and the steps {list(j.steps)} say {want[t]:g} there (nan: none)."
                " A label belongs to the last token of its step"
            )


def _ends_of(j: StepLabels, text: Text, ids: np.ndarray) -> list[int]:
    """The number of tokens up to the end of each labelled step."""
    lengths, at = list[int](), 0
    for i, step in enumerate(j.steps):
        at += len(step)
        # The separator belongs to the step before it, unless the step ends with it already.
        at += 0 if i == len(j.steps) - 1 or step.endswith(j.separator) else len(j.separator)
        lengths.append(at)
    return token_ends(text, ids, lengths)


def _learned(j: StepLabels, stage: RewardModel) -> list[float]:
    """Returns the value that is learned of each step; NaN for nothing."""
    # The hard label 0 is neutral: nothing is learned of such a step.
    return list(j.values) if stage.soft else [math.nan if x == 0 else float(x > 0) for x in j.labels]


def expected_step_loss(roles: RewardRoles, batch: Batch, judged: Sequence[Judgement]) -> float:
    """The loss of a minibatch by its definition, from the scores before the step."""
    chance_M, total = step_scores(roles.learner, batch), 0.0
    for s, j in enumerate(judged):
        assert isinstance(j, StepLabels)
        of_this = batch.segment_M == s
        # Rounded to 0 or 1 a chance has no logarithm.
        chance, ids = np.clip(chance_M[of_this], 1e-300, 1 - 2**-53), batch.target_M[of_this]
        ends_and_labels = zip(_ends_of(j, roles.ends.text, ids), _learned(j, roles.stage), strict=True)
        # Cross entropy of the chance at the last token of each step. log1p keeps the digits of a chance near 0.
        losses = [
            -y * math.log(chance[n - 1]) - (1 - y) * math.log1p(-chance[n - 1])
            for n, y in ends_and_labels
            if not math.isnan(y)
        ]
        # A mean over the steps of an answer, then over answers: an answer of many steps counts no more than one of few.
        # An answer without a labelled step never comes here: `step_labels` refuses its row.
        total += sum(losses) / len(losses)
    return total / len(judged)


# --- what is paid -----------------------------------------------------------------------------------------------------


def step_verdicts_hold(judge: StepJudge, e: Episode, dtype: str) -> float:
    """The recorded scores of an answer's steps are those of its own tokens, read alone. Returns the largest difference.

    Raises:
        InvariantError: one is another score, or at another token.
    """
    recorded = [j for j in e.verdicts if j.source == judge.name]
    # Where a step has no score the answer failed or was abstained from, so there is nothing to compare.
    if not recorded or any(j.verdict.state is not State.VALUE for j in recorded):
        return 0.0
    ids, text = said(e), judge.ends.text
    ends = token_ends(text, ids, step_lengths(text(ids), judge.separator))
    tokens = judge.scorer.tokens(read_alone(e))
    if judge.reward.steps == "outcome":
        return _outcome_holds(judge, e, [float(tokens[n - 1]) for n in ends], dtype)
    # With steps=pay a score of a step is a reward; else only a baseline that compares steps reads it.
    if [j.end for j in recorded] != ends or any(j.paid is not (judge.reward.steps == "pay") for j in recorded):
        raise InvariantError(
            f"reward model {judge.name} scored steps of an answer to task {e.task.id!r} that end at tokens"
            f" {[j.end for j in recorded]}, and its steps end at {ends} ({text(ids)!r})"
        )
    apart = before = 0.0
    for j, end in zip(recorded, ends, strict=True):
        now = float(tokens[end - 1])
        want = now - before if judge.reward.progress else now
        before = now
        off = abs((j.verdict.score or 0.0) - want)
        # Written so that a NaN is wrong.
        if not off <= APART[dtype]:
            raise InvariantError(
                f"reward model {judge.name} gave {j.verdict.score:.6g} to the step of task {e.task.id!r} that ends at"
                f" token {end}, after {text(ids[:end])!r}, and gives {want:.6g} to the same tokens read alone. A score"
                " belongs to the last token of its step"
            )
        apart = max(apart, off)
    return apart


def step_lengths(text: str, separator: str) -> list[int]:
    """Characters up to the end of each step.

    A blank piece belongs to the step before it. At the start of the text it belongs to the first step.
    """
    out: list[int] = []
    at = 0
    for piece in text.split(separator):
        at = min(at + len(piece) + len(separator), len(text))
        # A blank piece makes no step. Its characters are added to the step before it.
        if piece.strip():
            out.append(at)
        elif out:
            out[-1] = at
    return out


def _outcome_holds(judge: StepJudge, e: Episode, scores: Sequence[float], dtype: str) -> float:
    """The recorded score of the answer is the aggregate of its steps' `scores`. Returns the difference."""
    want = {
        "min": float(np.min(scores)),
        # The product is a sum of logarithms. A score of 0 has none, so it is raised to the least number that has.
        "product": math.exp(math.fsum(math.log(max(x, 1e-300)) for x in scores)),
        "mean": sum(scores) / len(scores),
        "last": scores[-1],
    }[judge.reward.aggregate]
    [got] = [j.verdict.score or 0.0 for j in e.verdicts if j.source == judge.name]
    if not abs(got - want) <= APART[dtype]:
        raise InvariantError(
            f"reward model {judge.name} gave {got:.6g} to an answer to task {e.task.id!r}, and the"
            f" {judge.reward.aggregate} of its steps' scores {[round(x, 4) for x in scores]} is {want:.6g}: look at how"
            " they become one number (env.rewards.N.aggregate)"
        )
    return abs(got - want)


class StepJudgeCheck(Observer):
    """Process reward models that judge score as they were trained.

    At every step: one answer's steps have the scores of its own tokens. At `due` steps: no weight has changed.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}

    async def begin(self, roles: ReinforceRoles) -> None:
        self._digests = _digests(roles)
        for judge in _judges(roles):
            if judge.member.stage:
                holds_what_was_trained(judge.member, roles.book.folder)

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e) if _judges(roles):
                group = e.played[e.index % len(e.played)]
                if judged := [x for x in group.episodes if x.figure is not None]:
                    chosen = judged[e.index % len(judged)]
                    noise = [step_verdicts_hold(j, chosen, roles.run.model.dtype) for j in _judges(roles)]
                    return ObserverReport({"canary/reward_noise": Gauge(max(noise), 1)})
            # A digest reads all weights, so it is taken at due steps only.
            case LearnedEvent(packed, _, _) if self._digests and due(packed.index):
                if self._digests != _digests(roles):
                    raise InvariantError(
                        "the weights of a process reward model have changed since the stage began. It must stay as it"
                        " was trained: look for tensors that it shares with the policy"
                    )
        return None


def _judges(roles: ReinforceRoles) -> list[StepJudge]:
    return [j for j in roles.rollout.judges if isinstance(j, StepJudge)]


def _digests(roles: ReinforceRoles) -> dict[str, str]:
    """The digest of each judge's weights, by its name."""
    return {j.name: fingerprint(j.member.scorer.tensors().items()) for j in _judges(roles)}
