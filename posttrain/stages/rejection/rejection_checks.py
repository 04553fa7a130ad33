"""Checks that a rejection sampling stage imitates right answers, each once, under its own prompt, from the right
weights.

The kept candidates are compared with the episodes that were played. Whether one may be kept is decided a second time,
without the stage's code (`may_be_kept`). Whether a prompt has any to keep is not: `nothing_is_lost` asks the rule
(`Keep.chosen`), as the stage does, so a rule that keeps nothing where it should is not found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.checks.data_checks import demonstration_ends_once
from posttrain.checks.judging.verdict_checks import VerifierCheck, failures_stay_out
from posttrain.checks.resume_checks import goes_on
from posttrain.checks.sampling.sampler_checks import sampler_agrees
from posttrain.checks.stage_history import StageHistory
from posttrain.config.stages.keep_rule import Best, Keep, Passing, Rising, TopShare
from posttrain.config.stages.rejection import Rejection, RejectionMethod
from posttrain.core.batch import Batch, Packed
from posttrain.core.gauge import Gauges, Step
from posttrain.core.types import Episode, Group
from posttrain.core.verdict import outcome
from posttrain.role.events import Event, KeptEvent, Observer, ObserverReport, PackedEvent, PlayedEvent, RegeneratedEvent
from posttrain.role.learning.logprob_tolerance import as_sampled
from posttrain.role.learning.rejection_selection import HINTED, Candidate
from posttrain.role.roles import RejectionRoles
from posttrain.stages.rejection.regeneration_checks import goes_on_from_its_step, said_anew
from posttrain.system.errors import InvariantError

Place = tuple[str, int, int, bool, tuple[int, int] | None]
"""Names a completion of a round: prompt, visit, sibling, whether it had a hint, and the answer and step that it goes on
from (`Candidate.begun`)."""
Row = tuple[bytes, bytes]
"""(ids of a sequence's prompt, ids after it followed by as many flags: 1 for an id that counts, else 0)."""
SCORED = 4096
"""Most sampled tokens of a round that the learner scores too, to compare its log-probs with the sampler's."""


def may_be_kept(keep: Keep, reward: float, others: Sequence[float], improvement: int) -> bool | None:
    """Returns whether the rule `keep` may keep a completion with this reward; None for a rule that is not shipped.

    Args:
        others: the rewards of all completions of its prompt, its own included.
        improvement: how many earlier rounds imitated from the same candidates.
    """
    # A reward that misses the threshold only by rounding passes.
    slack = 1e-6 * max(1.0, abs(reward))
    match keep:
        case Passing(at=at):
            return reward > at - slack
        case Rising(at=at):
            return reward > at[min(improvement, len(at) - 1)] - slack
        case Best(above=above):
            return reward >= max(others) and (above is None or reward > above)
        case TopShare(share=share, above=above):
            # Of equal rewards any may be kept, so only the completions with a higher reward count. At least one
            # completion is always kept. 1e-6: in floats .29 * 100 is a bit less than 29.
            better = sum(x > reward for x in others)
            return better < max(1, int(share * len(others) + 1e-6)) and (above is None or reward > above)
        case _:
            return None


def place(c: Candidate) -> Place:
    """The name of a candidate as `Place`."""
    return c.prompt, c.visit, c.sibling, c.hinted, c.begun


def kept_was_played(kept: Sequence[Candidate], played: Mapping[Place, Episode]) -> None:
    """Checks that every kept completion was played, judged and not cut off, and has the reward of its verdicts."""
    for c in kept:
        e = played.get(place(c))
        if e is None:
            raise InvariantError(
                f"a completion of task {c.prompt!r} (visit {c.visit}, sibling {c.sibling}) is kept, and this round"
                " played none such: completions of other rounds or prompts must not be imitated"
            )
        reward = outcome(e.verdicts)
        if reward is None or reward != c.reward:
            fact = "was not judged" if reward is None else f"earned {reward:g}"
            raise InvariantError(
                f"a completion of task {c.prompt!r} is kept with reward {c.reward:g}, and it {fact}: {e.text!r:.80}."
                " What nobody could judge is neither right nor wrong, and stays out"
            )
        if e.stop.cut:
            raise InvariantError(
                f"a completion of task {c.prompt!r} that was cut off ({e.stop.value}) is kept: imitating it teaches"
                " never to stop"
            )


def kept_passes(kept: Sequence[Candidate], rewards: Mapping[str, Sequence[float]], m: RejectionMethod, i: int) -> None:
    """Checks that every kept completion passes the method's rule among those of its prompt, at improvement `i`."""
    for c in kept:
        if may_be_kept(m.keep, c.reward, rewards[c.prompt], i) is False:
            raise InvariantError(
                f"a completion of task {c.prompt!r} with reward {c.reward:g} is kept, and the rule is"
                f" {m.keep.words()} (the prompt's rewards: {', '.join(f'{x:g}' for x in rewards[c.prompt])}): the"
                " policy would imitate its own mistakes. Look at what selects, and at what it reads as reward"
            )
        if c.hinted and not m.rationalise:
            raise InvariantError(f"a completion of task {c.prompt!r} was given its answer, and rationalise=false")


def nothing_is_lost(
    kept: Sequence[Candidate], rewards: Mapping[str, Sequence[float]], m: RejectionMethod, i: int
) -> None:
    """Checks that no prompt is lost: if one of its completions passes the method's rule, at least one is kept."""
    # `may_be_kept` cannot tell what must be kept: it forgives rounding at a threshold, and knows only shipped rules.
    lost = sorted(
        {name for name, of_prompt in rewards.items() if m.keep.chosen(of_prompt, i)} - {c.prompt for c in kept}
    )
    if lost:
        raise InvariantError(
            f"nothing of task {lost[0]!r} is kept, and it has a completion that passes the rule {m.keep.words()} (its"
            f" rewards: {', '.join(f'{x:g}' for x in rewards[lost[0]])}): what is right is lost, most of all of prompts"
            " that are hard. Look at what becomes a candidate, and at what selects"
        )


def kept_once(kept: Sequence[Candidate], m: RejectionMethod) -> None:
    """Checks that no prompt has more kept completions than allowed, nor equal ones if distinct ones are wanted."""
    # Equal means the same spoken tokens under the same prompt.
    said = Counter((c.prompt, b"".join(s.ids[s.mask].tobytes() for s in c.segments)) for c in kept)
    if m.distinct and (twice := [k for k, n in said.items() if n > 1]):
        raise InvariantError(
            f"{len(twice)} completions are kept several times, such as one of task {twice[0][0]!r}"
            f" ({said[twice[0]]} times), and the method keeps equal ones once: easy prompts, which give the same answer"
            " again and again, would outweigh all others"
        )
    most_kept = Counter(c.prompt for c in kept).most_common(1)
    if m.most is not None and most_kept and most_kept[0][1] > m.most:
        raise InvariantError(
            f"task {most_kept[0][0]!r} has {most_kept[0][1]} kept completions, and method.most={m.most}"
        )


def begins_with_its_weights(stage: Rejection, round: int, now: str, start: str, asked: str, taken: int) -> None:
    """Checks that a round trains the weights that the method names.

    With `weights=start` these are the weights with which the stage started, with a new optimizer. With `weights=last`
    they are the weights that sampled the round.

    Args:
        now, start, asked: fingerprints of the present weights, of those at the start of the stage, and of those that
            sampled the round ('': the round did not sample).
        taken: steps that the optimizer has taken.
    """
    if stage.method.weights == "start" and (now != start or taken):
        trained = "other weights" if now != start else f"an optimizer that has taken {taken} steps"
        raise InvariantError(
            f"round {round} trains {trained}, and method.weights=start begins every round with the weights that stage"
            f" {stage.name!r} started from and a new optimizer: rounds would add up, and what the first one kept would"
            " be imitated again and again"
        )
    if stage.method.weights == "last" and asked and now != asked:
        raise InvariantError(
            f"round {round} trains other weights than those that were asked, and method.weights=last goes on with them:"
            " what was learned before is lost"
        )


def imitates_kept(batch: Batch, rows: Mapping[Row, int], kept: int, stage: Rejection, text: Any) -> None:
    """Checks that a minibatch has kept completions, each under the prompt of its task, and then demonstrations.

    Args:
        rows: how often each sequence may be in the minibatch.
        kept: how many completions the round kept. They are divided into steps of nearly equal size.
        text: decodes token ids.
    """
    if batch.sampling.temperature != 1 or batch.sampling.truncated:
        raise InvariantError(
            f"kept completions are imitated at temperature {batch.sampling.temperature:g}"
            f"{' of a truncated distribution' if batch.sampling.truncated else ''}: what is learned would be another"
            " model than the one that is sampled. Imitate under the model's own distribution"
        )
    # A pass over the kept completions has ceil(kept / own) steps, whose sizes differ by at most 1: of 7 completions
    # with own = 3, the 3 steps get 2, 2 and 3.
    steps = -(-kept // stage.own)
    sizes = {kept * (i + 1) // steps - kept * i // steps for i in range(steps)}
    # Number of all sequences of a step -> number of the kept ones among them, which come before the demonstrations.
    kept_of = {k + (stage.shown_beside(k) if stage.style is not None else 0): k for k in sizes}
    if batch.episodes not in kept_of:
        wanted = " or ".join(f"{k} + {n - k}" for n, k in sorted(kept_of.items()))
        raise InvariantError(
            f"the minibatch has {batch.episodes} sequences, and {wanted} kept completions and demonstrations belong to"
            f" a step ({kept} are kept, {stage.name}.batch={stage.batch}, {stage.name}.general={stage.general:g}): some"
            " are lost or doubled"
        )
    imitated = [r for r, e in zip(rows_of(batch), batch.sequence_S, strict=True) if e < kept_of[batch.episodes]]
    # The difference of two multisets. A sequence that is in the minibatch more often than it was kept remains too.
    strange = Counter(imitated) - Counter(dict(rows))
    if strange:
        prompt, said = next(iter(strange))
        # The first half of the second part are ids, the other half flags (`Row`).
        ids = np.frombuffer(said, np.int32)
        raise InvariantError(
            f"{strange.total()} of {len(imitated)} imitated sequences are no kept completion under the prompt of its"
            f" task, such as {text(ids[: len(ids) // 2])!r} after {text(np.frombuffer(prompt, np.int32))!r}. A"
            " completion was moved to another prompt, changed, doubled, or taken from elsewhere; one that was sampled"
            " with a hint is imitated without it"
        )


def rows_of(batch: Batch | Packed) -> list[Row]:
    """Each sequence of a batch as `Row`."""
    ends = np.cumsum(batch.lengths_S)
    said_N = np.zeros(len(batch.ids_N), bool)
    # A source is the position before a token that counts.
    said_N[batch.source_M + 1] = True
    return [_row(batch.ids_N[b - n : b], said_N[b - n : b]) for b, n in zip(ends, batch.lengths_S, strict=True)]


def _row(ids: np.ndarray, mask: np.ndarray) -> Row:
    """A sequence as `Row`. Its prompt ends before the first token that counts."""
    first = int(np.argmax(mask))
    after = np.concatenate([ids[first:], mask[first:].astype(np.int32)]).astype(np.int32)
    return ids[:first].astype(np.int32).tobytes(), after.tobytes()


def expected_rows(
    kept: Sequence[Candidate], played: Mapping[Place, Episode], prompts: Mapping[str, np.ndarray]
) -> Counter[Row]:
    """How often each sequence is to be imitated, made from the played episodes. A completion that was sampled with a
    hint is imitated after the prompt without it."""
    counts: Counter[Row] = Counter()
    for c in kept:
        for s in played[place(c)].segments:
            head, said = _row(s.ids, s.mask)
            counts[(prompts[c.prompt].astype(np.int32).tobytes() if c.hinted else head, said)] += 1
    return counts


class RejectionCheck(Observer):
    """Checks the rounds of a rejection sampling stage.

    The kept candidates must have been played and judged, and must pass the rule. The minibatches must imitate them. The
    weights must be those that the method names. In a stage that is resumed inside a round, the played episodes are no
    longer in memory: then the minibatches are compared with the candidates on disk.
    """

    def __init__(self, history: StageHistory, start: str) -> None:
        self._history = history
        self._start = start
        """Fingerprint of the weights that the stage started from; '' before its first round."""
        self._asked_with = ""
        """Fingerprint of the weights that sampled the round; '' in a stage that is resumed inside it."""
        self._played: dict[Place, Episode] = {}
        # By the id of a task: its prompt without a hint, and the rewards of its completions that may be kept.
        self._prompts: dict[str, np.ndarray] = {}
        self._rewards: dict[str, list[float]] = {}
        self._rows: Counter[Row] = Counter()
        """How often each sequence may be in a minibatch of this round."""
        self._kept = 0
        """Number of completions that this round kept."""

    async def begin(self, roles: RejectionRoles) -> None:
        self._start = self._start or roles.learner.fingerprint()
        steps = self._history.steps
        if not steps:
            return
        # Only steps that sampled have the gauge rollout/walked. Only steps that opened a round and kept something have
        # a count in reject/reward. With weights=start each such step began with a new optimizer, so its steps are
        # counted from the last of them.
        walked = [s.gauges["rollout/walked"].sum for s in steps if "rollout/walked" in s.gauges]
        rounds = [i for i, s in enumerate(steps) if (g := s.gauges.get("reject/reward")) is not None and g.count]
        first = rounds[-1] if rounds and roles.stage.method.weights == "start" else 0
        taken = sum(s.gauges["optim/steps"].sum for s in steps[first:] if "optim/steps" in s.gauges)
        goes_on(walked[-1] if walked else None, roles.prompts.cursor, taken, steps_taken(roles))

    def state(self) -> dict[str, Any]:
        return {"rejection": {"start": self._start}}

    def on_event(self, roles: RejectionRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e):
                return ObserverReport(self._take(roles, e.played))
            case RegeneratedEvent():
                self._take_regenerated(roles, event)
            case KeptEvent():
                self._check_kept(roles, event)
            case PackedEvent(batch=batch):
                self._check_batch(roles, batch)
            case _:
                pass
        return None

    def _take(self, roles: RejectionRoles, groups: Sequence[Group]) -> Gauges:
        """Note what a round played: first its plain groups, for which the gauges of `_same_distribution` are returned,
        and then those with a hint."""
        hinted = is_hinted(groups)
        if not hinted:
            # A new round. Hinted groups come after the plain ones of the same round, and are added to them.
            self._played, self._prompts, self._rewards = {}, {}, {}
            self._asked_with = roles.learner.fingerprint()
        for g in groups:
            name = g.task.id.removesuffix(HINTED) if hinted else g.task.id
            for e in g.episodes:
                self._played[name, e.visit, e.sibling, hinted, None] = e
                self._note_reward(name, e)
                if not hinted and e.segments and e.segments[0].mask.any():
                    self._prompts[name] = e.segments[0].ids[: int(np.argmax(e.segments[0].mask))]
        return {} if hinted else self._same_distribution(roles, groups)

    def _note_reward(self, name: str, e: Episode) -> None:
        """Note the reward of a completion, if it may be kept: judged, not empty, not cut off, not shown."""
        reward = outcome(e.verdicts)
        if reward is not None and e.spoken and not (e.stop.cut or e.cut or e.shown):
            self._rewards.setdefault(name, []).append(reward)

    def _take_regenerated(self, roles: RejectionRoles, event: RegeneratedEvent) -> None:
        """Note the regenerated completions as played, but only those that go on from the last right step. So
        `kept_was_played` raises if another one is kept."""
        settings = roles.stage.method.regenerate
        assert settings is not None  # nothing else makes the event
        text = roles.rollout.dialogue("").text
        # Wrong answers of one group that begin alike share the completions of that beginning (`Regenerator`).
        noted: set[Episode] = set()
        for a in event.answers:
            goes_on_from_its_step(a, settings, text)
            for c in said_anew(a, settings):
                if c in noted:
                    continue
                noted.add(c)
                self._played[c.task.id, c.visit, c.sibling, False, (a.episode.sibling, a.kept)] = c
                self._note_reward(c.task.id, c)

    def _same_distribution(self, roles: RejectionRoles, groups: Sequence[Group]) -> Gauges:
        """Checks that sampler and learner have the same weights when a round samples: their log-probs agree."""
        chosen: list[Any] = []
        # The first segments up to `SCORED` tokens, but at least one, however long.
        for s in (s for g in groups for e in g.episodes for s in e.segments if s.mask.any()):
            if sum(len(x.ids) for x in chosen) + len(s.ids) > SCORED and chosen:
                break
            chosen.append(s)
        if not chosen:
            return {}
        packed = Packed.of(chosen)
        version = np.concatenate([s.version[s.mask] for s in chosen])
        mu = np.concatenate([s.logp[s.mask] for s in chosen])
        learner = as_sampled(roles.learner)
        return sampler_agrees(
            packed,
            mu,
            learner.score(packed),
            version == roles.trainer.version,
            dtype=roles.run.model.dtype,
            exact=lambda: learner.exact(packed),
            text=roles.text,
            same=roles.run.exact,
        )

    def _check_kept(self, roles: RejectionRoles, event: KeptEvent) -> None:
        m, kept = roles.stage.method, event.kept
        kept_once(kept, m)
        self._kept = len(kept)
        if self._played:
            kept_was_played(kept, self._played)
            kept_passes(kept, self._rewards, m, event.improvement)
            nothing_is_lost(kept, self._rewards, m, event.improvement)
            self._rows = expected_rows(kept, self._played, self._prompts)
        else:  # resumed: what was played is not in memory
            self._rows = Counter(_row(s.ids, s.mask) for c in kept for s in c.segments)
        if kept and event.selects:
            taken = steps_taken(roles) or 0
            # A later improvement trains what the one before has learned, which are not the weights that were asked.
            asked = self._asked_with if event.improvement == 0 else ""
            begins_with_its_weights(roles.stage, event.round, roles.learner.fingerprint(), self._start, asked, taken)

    def _check_batch(self, roles: RejectionRoles, batch: Batch) -> None:
        imitates_kept(batch, self._rows, self._kept, roles.stage, roles.text)
        if not roles.sampling.stop:  # a stop string ends a turn without a stop token
            demonstration_ends_once(batch, roles.stop_ids, roles.text)


def steps_taken(roles: RejectionRoles) -> int | None:
    """Steps that the optimizer remembers; None where it counts none."""
    remembered = roles.trainer.optimizer.state_tensors().get("steps")
    return None if remembered is None else int(remembered)


class RoundVerifierCheck(VerifierCheck):
    """`VerifierCheck` for a stage in which only the first step of a round samples."""

    def on_event(self, roles: Any, event: Event) -> ObserverReport | None:
        # With the answer in the prompt, right answers say nothing about policy or judge. Only failures are looked for.
        if isinstance(event, PlayedEvent) and is_hinted(event.experience.played):
            failures_stay_out(event.experience.played)
            return None
        return super().on_event(roles, event)

    async def after(self, roles: Any, step: Step) -> ObserverReport | None:
        report = await super().after(roles, step)
        self._experience = None  # later steps of the round ask nothing
        return report


def is_hinted(groups: Sequence[Group]) -> bool:
    """Returns whether these groups were asked with a hint."""
    return bool(groups) and all(g.task.id.endswith(HINTED) for g in groups)
