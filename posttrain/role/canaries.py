"""Canaries: invariants checked in every user's run. A violated one stops it, saying what it means and what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from posttrain.core.batch import Batch, Packed
from posttrain.core.errors import InvariantError
from posttrain.core.ports import Scorer, TaskSource
from posttrain.core.types import SHOWN, Gauge, Gauges, Group, Stop, Task
from posttrain.core.verdict import SOLVED, State, outcome
from posttrain.role.audit import same_outcome
from posttrain.role.evaluate import Report
from posttrain.role.rounding import Exact, Gap, allowed


def sampler_agrees(
    batch: Batch | Packed,
    mu_M: np.ndarray,
    learner_M: np.ndarray,
    fresh_M: np.ndarray,
    *,
    dtype: str,
    exact: Exact,
    text: Callable[[np.ndarray], str],
) -> Gauges:
    """Sampler and learner agree on every token said by the weights the learner holds now (so rho = 1 within the bound).

    Args:
        mu_M, learner_M: float32 log-probs of the sampler and of the learner.
        fresh_M: bool, which tokens were said by the weights the learner holds.
        exact: the learner's in float64, for `rounding.allowed`.
        text: decodes token ids, for the message.
    """

    def exactly() -> np.ndarray | None:
        exact_M = exact()
        return None if exact_M is None else exact_M[fresh_M]

    gap = Gap.of(mu_M[fresh_M], learner_M[fresh_M])
    bound = allowed(dtype, gap, learner_M[fresh_M], exactly, batch.sampling.temperature)
    count = float(fresh_M.sum())
    if not gap.within(bound):
        apart = np.where(fresh_M, np.abs(learner_M.astype(np.float64) - mu_M), 0.0)
        m = int(np.argmax(np.where(np.isfinite(apart), apart, np.inf)))
        at = int(batch.source_M[m]) + 1
        position = int(batch.positions_N[at])
        before = text(batch.ids_N[at - min(position, 12) : at])
        raise InvariantError(
            f"sampler and learner disagree about the same weights. Worst token: {text(batch.target_M[m : m + 1])!r} after {before!r} "
            f"(position {position}): sampler log-prob {mu_M[m]:.6f}, learner {learner_M[m]:.6f}. Worst gap {gap.worst:.3g} "
            f"(bound {bound.worst:.2g} in {dtype}), mean gap {gap.mean:.3g} (bound {bound.mean:.2g}) over {int(count)} tokens. "
            "The importance ratio is not 1 on-policy, so every gradient would be that of another distribution. Check that both sides "
            "use the same sampling transform (temperature, top-p), that the last weight sync arrived, and that the model has no dropout"
        )
    return {"canary/logp_gap": Gauge(gap.mean * count, count), "canary/logp_gap_worst": Gauge(gap.worst, 1)}


def reference_unmoved(reference: Scorer, digest: str) -> None:
    """The reference still has the digest it was born with."""
    now = reference.fingerprint()
    if now != digest:
        raise InvariantError(
            f"the reference has changed: its digest was {digest} at the start of the stage and is {now}. A trained or refreshed reference "
            "makes every KL term a lie. Look for code that shares its tensors with the learner or puts them in an optimizer"
        )


def no_distance_yet(learner_logp: np.ndarray, reference_logp: np.ndarray, dtype: str, exact: Exact, temperature: float) -> None:
    """KL to the reference is 0 while learner and reference are the same weights."""
    gap = Gap.of(reference_logp, learner_logp)
    bound = allowed(dtype, gap, learner_logp, exact, temperature)
    if not gap.worst <= bound.worst:
        raise InvariantError(
            f"the reference scores differently from the learner although both hold the same weights (worst log-prob gap {gap.worst:.3g}, "
            f"bound {bound.worst:.2g} in {dtype}). The KL term would start wrong. Check that the reference was loaded from the checkpoint "
            "the stage starts from, in the same dtype and without dropout"
        )


def masks_cover_what_was_said(groups: Sequence[Group], said_tokens: int) -> None:
    """The masks of a step's episodes cover exactly the tokens the engine says it sampled for them."""
    covered = sum(e.spoken for g in groups for e in (*g.episodes, *filter(None, [g.greedy])) if not e.shown)
    covered += sum(g.aborted_tokens for g in groups)
    if covered != said_tokens:
        raise InvariantError(
            f"the masks of this step cover {covered} tokens, but the engine said {said_tokens}. Some observation is trained on, or some "
            "spoken token is not. Tokens must enter a transcript through see() and say() only"
        )


# --- what a rollout must look like -----------------------------------------------------------------------------------


def said_by_these_weights(groups: Sequence[Group], version: int) -> None:
    """Every spoken token was said by the weights the learner holds (the loop is synchronous: no token may be older, or newer)."""
    for g in groups:
        for e in g.episodes:
            for s in e.segments:
                other = s.version[s.mask & (s.version != version) & (s.version != SHOWN)]
                if len(other):
                    raise InvariantError(
                        f"task {g.task.id!r} has tokens said by version {int(other[0])}, while the learner holds version {version}. Either a weight sync "
                        "did not happen, or tokens are stamped with another version than the one that said them; both make every ratio wrong"
                    )


def stops_are_true(groups: Sequence[Group], stop_ids: Sequence[int], max_tokens: int) -> None:
    """An episode that says it stopped ends in a stop token, and one that was cut off or completed a stop string does not."""
    stops = set(stop_ids)
    for g in groups:
        for e in g.episodes:
            s = e.segments[-1]
            if not stops or e.stop not in (Stop.SAID, Stop.STRING, Stop.LENGTH) or not s.mask.any() or s.shown:
                continue
            last = int(s.ids[-1] if s.mask[-1] else s.ids[np.flatnonzero(s.mask)[-1]]) in stops
            if last != (e.stop is Stop.SAID):
                raise InvariantError(
                    f"task {g.task.id!r} ended with reason {e.stop.value!r}, but its last token {'is' if last else 'is not'} a stop token "
                    f"({s.spoken} tokens said, at most {max_tokens} a turn). Length shaping and filters read the reason: find who drops the token or the reason"
                )


def failures_stay_out(groups: Sequence[Group]) -> None:
    """A verdict that failed on our side makes no reward of its episode."""
    for g in groups:
        for e in g.episodes:
            failed = [j for j in e.verdicts if j.counts and j.verdict.state is State.FAILED]
            if failed and e.reward is not None:
                raise InvariantError(
                    f"task {g.task.id!r}: source {failed[0].source!r} failed ({failed[0].verdict.why}) and the episode still has reward {e.reward:g}. "
                    "What nobody could judge leaves baseline and batch; it is no wrong answer"
                )


def filter_reads_outcomes(kept: Sequence[Group], refused: Sequence[Group]) -> None:
    """filter=mixed keeps exactly the groups whose raw outcomes differ by more than rounding, whatever shaping makes of them."""
    for groups, wanted in ((kept, True), (refused, False)):
        for g in groups:
            own = [e for e in g.episodes if not e.shown]
            if same_outcome(own) is wanted:
                raw = {outcome(e.verdicts) for e in own}
                raise InvariantError(
                    f"filter=mixed {'kept' if wanted else 'refused'} the group of task {g.task.id!r}, whose raw outcomes are {sorted(r for r in raw if r is not None)}. "
                    "It must look at outcomes before shaping: groups that differ in length alone teach length"
                )


def no_held_out_task(groups: Sequence[Group], held: Mapping[Hashable, str], key: Callable[[Task], Hashable]) -> None:
    """No task that is trained on is held out, up to the environment's own notion of sameness."""
    for g in groups:
        if (same := key(g.task)) in held:
            raise InvariantError(
                f"training task {g.task.id!r} ({g.task.prompt!r:.80}) is held-out task {held[same]!r}: held-out accuracy would measure memory. "
                "Take it out of one of the two"
            )


def goes_on(walked: float | None, cursor: int, taken: float | None, steps: int | None) -> None:
    """A resumed stage asks the prompts that come next, with an optimizer that remembers its steps."""
    if walked is not None and int(walked) != cursor:
        raise InvariantError(
            f"the stage stopped after {int(walked)} prompts and would go on at prompt {cursor}: tasks and random numbers would repeat or be skipped. "
            "The checkpoint's cursor was not restored"
        )
    if taken is not None and steps is not None and int(taken) != steps:
        raise InvariantError(
            f"the stage has taken {int(taken)} optimizer steps and the optimizer remembers {steps}: its moments and warm-up would begin again. "
            "The checkpoint's optimizer state was not loaded"
        )


def in_order_of_the_file(asked: Sequence[str], source: TaskSource) -> None:
    """Finite tasks are asked in a shuffled order: the first ones asked are not the first of the file (by chance: 1 in 12! at most,
    2.1e-9 a stage)."""
    n = len(asked)
    if source.count is not None and 12 <= n <= source.count and list(asked) == [source.task(i).id for i in range(n)]:
        raise InvariantError(
            f"the first {n} prompts asked are the first {n} of their source, in its order: they are not shuffled, so neighbouring rows are learned together. "
            "Look at who walks through the tasks"
        )


def came_back(what: str, saved: str, fingerprint: Callable[[], str]) -> None:
    """What a checkpoint gave back is what was saved into it. `saved` is '' where nothing was."""
    if saved and (now := fingerprint()) != saved:
        raise InvariantError(
            f"the checkpoint's {what} came back changed: fingerprint {saved} when it was saved, {now} now that it is loaded. What is saved and "
            "what is trained differ (merged adapters, a stale copy, a part that is not loaded): go on from an older checkpoint, and look at who writes and who reads"
        )


def measured_right(report: Report) -> None:
    """Held-out accuracy, mean reward and pass@k, counted a second way from the verdicts themselves."""
    solved: list[tuple[int, int]] = []
    means: list[float] = []
    right: list[float] = []
    for g in report.groups:
        raw = [r for e in g.episodes if (r := outcome(e.verdicts)) is not None]
        if raw:
            means.append(math.fsum(raw) / len(raw))
            right.append(len([r for r in raw if r >= SOLVED]) / len(raw))
            solved.append((len(raw), sum(r >= SOLVED for r in raw)))
    if not means:
        return
    wrong = {
        "mean reward": (report.reward.mean, math.fsum(means) / len(means)),
        "accuracy": (report.accuracy.mean, math.fsum(right) / len(right)),
    }
    for k, s in report.pass_at.items():
        missed = [math.prod((n - c - i) / (n - i) for i in range(k)) for n, c in solved]
        wrong[f"pass@{k}"] = (s.mean, 1 - math.fsum(missed) / len(missed))
    for name, (said, counted) in wrong.items():
        if not abs(said - counted) <= 1e-9:
            raise InvariantError(
                f"held-out {name} is reported as {said:.6g} and is {counted:.6g} when counted from the {sum(n for n, _ in solved)} verdicts: "
                "unjudged samples must not count as wrong, and pass@k must be the unbiased estimate"
            )
