"""Gauges of what was played in a step, words about what could not be judged, and definitions of held-out gauges."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from posttrain.core.exchange.experience import Experience
from posttrain.core.gauge import Gauge, Gauges, merge
from posttrain.core.measure.right import Grades, Right
from posttrain.core.scored import Credit
from posttrain.core.types import Episode, Group
from posttrain.core.verdict import State, failed, figure_failed
from posttrain.diagnose.gauges.gauge_definition import Definition


def components(episodes: Sequence[Episode]) -> Gauges:
    """Gauges of each source's raw scores (one number per episode), of its abstentions, and of the kinds of verdicts."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    kinds: Counter[str] = Counter()
    abstained: Counter[str] = Counter()
    judged = 0
    for e in episodes:
        by_source: defaultdict[str, list[float]] = defaultdict(list)
        for j in e.verdicts:
            judged += 1
            family = "failed" if j.verdict.state is State.FAILED else "verdict"
            # A verdict without a kind adds 0. Names whose sum stays 0 get no gauge.
            kinds[f"{family}/{j.verdict.kind}"] += bool(j.verdict.kind)
            abstained[f"abstained/{j.source}"] += j.counts and j.verdict.state is State.ABSTAIN
            if j.counts and j.verdict.score is not None:
                by_source[j.source].append(j.verdict.score)
        # A source that pays for turns has several scores in an episode: their sum is what the episode got of it.
        for source, of_episode in by_source.items():
            scores[source].append(sum(of_episode))
    gauges = {f"reward/{source}": Gauge.of(x) for source, x in sorted(scores.items())}
    gauges |= {name: Gauge(n, len(episodes)) for name, n in sorted(abstained.items()) if n}
    return gauges | {name: Gauge(n, judged) for name, n in sorted(kinds.items()) if n}


def ages(behind: np.ndarray, most: int) -> Gauges:
    """Gauges of by how many steps each token is older than the weights that learn from it.

    They are the mean and, where samples may be up to `most` steps older, the largest and the share of each number.
    """
    out = {"rollout/versions_behind": Gauge.of(behind)}
    if not most or not len(behind):
        return out
    shares = {f"rollout/behind_{n}": Gauge(float(np.sum(behind == n)), len(behind)) for n in range(most + 1)}
    return out | {"rollout/most_behind": Gauge(float(behind.max()), 1)} | shares


def _lengths(credit: Credit, experience: Experience) -> Gauge:
    """Mean length of the policy's answers that have a gradient for the first time, over that of all that were asked."""
    # Groups that are learned from again were counted in the step that played them.
    replayed = {id(g) for g in experience.replayed}
    trained = [c for g in credit.groups if id(g.group) not in replayed for c in g.episodes]
    # Over all that were asked: a ratio away from 1 shows that what is learned from was chosen by its length.
    mean = Gauge.of([e.spoken for g in experience.played for e in g.episodes if e.own]).mean
    lengths = [c.episode.spoken for c in trained if c.episode.own and not c.dropped]
    # As (sum, count), so that the gauge's mean is their ratio.
    return Gauge(Gauge.of(lengths).mean, mean) if lengths and mean else Gauge(0, 0)


def _solved(episodes: Sequence[Episode]) -> Gauge:
    """The share of right answers. An answer's figure is what is measured, or its reward where nothing is.

    Nothing is counted where outcomes are grades and no right one is named: rules that read it are about pass and fail.
    """
    judged = [e for e in episodes if e.figure is not None]
    right = judged[0].right if judged else Right()
    # Outcomes that are not all 0 and 1 have no share of right ones, unless the user names what is right.
    counts = right.named or not Grades.of([e.figure for e in judged if e.figure is not None], right).graded
    return Gauge.of([e.right.of(e.figure) for e in judged] if counts else [])


def rollout_gauges(experience: Experience, credit: Credit) -> Gauges:
    """Gauges of a step's rollout and credit, with the groups that the filter refused."""
    played, refused, spare = experience.played, len(experience.refused), len(experience.spare)
    # Demonstrations and opponents' episodes are not the policy's.
    episodes = [e for g in played for e in g.episodes if e.own]
    rewards = np.array([e.reward for e in episodes if e.reward is not None], np.float64)
    truths = np.array([e.truth for e in episodes if e.truth is not None], np.float64)
    credited = [e for g in credit.groups for e in g.episodes]
    by_segment = [s.version[s.mask] for e in episodes for s in e.segments]
    versions = np.concatenate(by_segment) if by_segment else np.zeros(0, np.int32)
    advantages = [a for e in credited for a in e.advantage]
    logp = [s.logp[s.mask] for e in episodes for s in e.segments]
    return {
        **components(episodes),
        **merge(*(g.logged for g in played)),
        "rollout/reward": Gauge.of(rewards),
        "rollout/reward_std": Gauge(float(rewards.std()), 1) if len(rewards) else Gauge(0, 0),
        # Absent, and not 0, where nothing is measured: rules ask whether the gauge is there.
        **({"rollout/truth": Gauge.of(truths)} if len(truths) else {}),
        "rollout/solved": _solved(episodes),
        "rollout/mixed": Gauge.of([g.mixed for g in played]),
        "rollout/unjudged": Gauge.of([e.reward is None for e in episodes]),
        "rollout/failed": Gauge.of([failed(e.verdicts) for e in episodes]),
        "rollout/abstained": Gauge.of([e.reward is None and not failed(e.verdicts) for e in episodes]),
        "rollout/tokens": Gauge.of([e.spoken for e in episodes]),
        "rollout/truncated": Gauge.of([e.stop.cut for e in episodes]),
        # The mean of -log p over tokens that were drawn from p has the entropy as its expectation.
        "rollout/entropy": Gauge.of(-np.concatenate(logp).astype(np.float64) if logp else np.zeros(0)),
        "rollout/aborted": Gauge(sum(g.aborted for g in played), len(episodes) + sum(g.aborted for g in played)),
        "rollout/groups": Gauge(len(credit.groups), 1),
        "rollout/refused": Gauge(refused, len(played)),
        # It is told beside refused groups although it may be 0 then, so that a reader can relate the two.
        **({"rollout/spare": Gauge(spare, len(played))} if refused or spare else {}),
        # More than one promised version: the stage allows samples that are older than the learner (staleness).
        **ages(experience.behind(versions), len(experience.promised) - 1),
        **({"rollout/trained_length": _lengths(credit, experience)} if len(experience.promised) > 1 else {}),
        "credit/silent": Gauge.of([g.silent for g in credit.groups]),
        "credit/shaped": Gauge.of([e.shaped for e in credited]),
        "credit/dropped": Gauge.of([bool(e.dropped) for e in credited]),
        "credit/advantage_abs": Gauge.of(np.abs(np.concatenate(advantages)) if advantages else np.zeros(0)),
    }


def unjudged_words(played: Sequence[Group]) -> str:
    """Returns in words which episodes could not be judged and why; '' where all were judged.

    For example "2 failed: mine: raised x 2 (line 3: ...). 1 abstained: no source gave a score".
    """
    episodes = [e for g in played for e in g.episodes]
    broken = [failed(e.verdicts) or figure_failed(e.verdicts) for e in episodes]
    # What is measured has a figure even where no reward is paid.
    silent = sum(e.reward is None and e.figure is None and not b for e, b in zip(episodes, broken, strict=True))
    kinds = "; ".join(
        f"{name} x {n} ({why})" if why else f"{name} x {n}" for name, (n, why) in failures(played).items()
    )
    out = [f"{sum(broken)} failed: {kinds}"] if any(broken) else []
    return ". ".join([*out, f"{silent} abstained: no source gave a score"] if silent else out)


def failures(played: Sequence[Group]) -> dict[str, tuple[int, str]]:
    """Failed verdicts by source and kind: their number, and the reason of the first one."""
    out: dict[str, tuple[int, str]] = {}
    for group in played:
        for episode in group.episodes:
            for j in episode.verdicts:
                if j.verdict.state is State.FAILED:
                    name = f"{j.source}: {j.verdict.kind}"
                    count, why = out.get(name, (0, j.verdict.why))
                    out[name] = (count + 1, why)
    return out


EVALUATION: dict[str, Definition] = {
    "eval/accuracy": Definition(
        "share of answers to held-out tasks that are right (env.right), sampled: pass@1; not of grades that tell none",
        "share",
        "rises",
    ),
    "eval/reward": Definition(
        "mean raw outcome on held-out tasks, sampled; it leads where outcomes are not 0 and 1", "reward", "rises"
    ),
    "eval/proxy": Definition(
        "mean of what is paid on held-out tasks, where something else is measured (env.measured)",
        "reward",
        "rises with eval/reward; alone: the reward is exploited",
    ),
    "eval/greedy": Definition("share of held-out tasks whose argmax answer is right", "share", "rises"),
    "eval/greedy_reward": Definition("mean raw outcome on held-out tasks, argmax", "reward", "rises"),
    "eval/unjudged": Definition("held-out episodes without a reward: failed and abstained", "episodes", "0"),
    "eval/failed": Definition("held-out episodes that a source failed to judge", "episodes", "0"),
    "eval/abstained": Definition("held-out episodes about which every source abstained", "episodes", "as meant"),
    "eval/tokens": Definition("spoken tokens a held-out episode", "tokens", "steady"),
    "eval/truncated": Definition(
        "share of held-out episodes cut off by a limit on tokens or time, or by the context", "share", "< 0.1"
    ),
    "eval/pass_at_K": Definition(
        "unbiased estimate of P(at least one of K samples of a held-out task solves it)",
        "share",
        "rises; far above accuracy: RL has room",
    ),
    "eval/first_chosen": Definition(
        "share of a judge's verdicts on held-out pairs, each in both orders, that name the first side",
        "share",
        "0.5; away from it: position bias",
    ),
    "eval/length_bias": Definition(
        "share of a judge's verdicts that name the longer side, minus the share of pairs in which it is the better one",
        "share",
        "0; above it: length pays",
    ),
    "eval/both_orders": Definition(
        "share of held-out pairs that a judge judges right in both orders", "share", "rises; at most the accuracy"
    ),
    "eval/unread": Definition("share of a judge's held-out answers without a verdict that can be read", "share", "0"),
    "heldout/loss": Definition(
        "mean negative log-prob of a learned token in the demonstrations of held-out tasks",
        "nats",
        "falls; rising while sft/loss falls: the rows are learned by heart",
    ),
    "heldout/perplexity": Definition("exp of heldout/loss", "tokens", "falls"),
    "eval/metric/NAME": Definition("the same on held-out tasks", "its own", "its own"),
}
