"""Simulates a loop of engines, verifiers and a learner, event by event: how old samples are, and who waits for whom.

Groups are asked and taken as `role.group_queue` does it, by the same `plan.staleness.capacity`. In a pass an engine
adds one token to each answer that it holds. When a turn has ended, the learner's process has to handle it; while that
process computes, ended turns wait.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any, Literal

from posttrain.plan.simulation.simulated_loop import LoopOutcome, SimulatedLoop
from posttrain.plan.staleness import capacity
from posttrain.system.errors import ConfigError

MOST_EVENTS = 500_000
"""A simulation with more events than this is taken to have no end."""
MOST_PLAYED = 8
"""As `ladder.rollout_request.RolloutRequest.most`: a step plays at most this many times its groups."""


@dataclass(eq=False)
class _Siblings:
    """A group."""

    refused: bool
    """Whether the filter will refuse it. Nobody in the loop reads it before the group has ended."""
    begun: list[_Turns] = field(default_factory=list[Any])
    ended: list[_Turns] = field(default_factory=list[Any])
    whole: bool = False
    """Whether it has as many ended answers as are wanted."""


@dataclass(eq=False)
class _Turns:
    """An answer: the `lengths` in tokens of the turns that are left, and the `waits` of tools between them."""

    group: _Siblings
    lengths: list[float]
    waits: list[float]
    first: bool
    """Whether its next turn has to read its prompt."""
    engine: _Slots | None = None
    """The engine that has its present turn."""
    mark: float = 0.0
    """`passes` of its engine when its tokens were last counted."""
    turn: list[tuple[int, float]] = field(default_factory=list[Any])
    """(version of the weights, tokens) of the present turn."""
    said: list[tuple[int, float]] = field(default_factory=list[Any])
    """The same of the turns that have ended."""
    gone: bool = False
    """Whether it was given up."""


@dataclass(eq=False)
class _Slots:
    """An engine, with its `passes` up to the time `at`."""

    active: list[tuple[float, int, _Turns]] = field(default_factory=list[Any])
    """A heap of (the pass in which the turn ends, a number that orders equal passes, the answer). It has passes and no
    times, so that a change of speed changes no entry."""
    queue: deque[_Turns] = field(default_factory=deque[Any])
    """Turns that wait for a slot."""
    passes: float = 0.0
    at: float = 0.0
    debt: float = 0.0
    """Time for reading prompts that it works before its next pass."""
    stands: int = 0
    """Number of reasons for which it stands still; 0: it works."""
    plan: int = 0
    """Number of the latest event that was planned for the end of a turn. Earlier ones are void."""


class _Simulation:
    """The state of a simulation. Its methods: of engines, of what follows a turn, of the queue, of the learner."""

    def __init__(self, loop: SimulatedLoop, steps: int, seed: int) -> None:
        # The first steps find empty queues. As many as may be on their way, and two, are played and not measured.
        self.o, self.settle, self.last = loop, 2 + loop.staleness, 2 + loop.staleness + steps
        # Three streams of random numbers, so that what is asked, how long the learner takes and what fails do not
        # change each other: loops that differ in one setting are compared on the same draws.
        self.rng, self.pace, self.fate = (Random(f"{seed}/{what}") for what in ("asked", "learn", "deaths"))
        # The time; when the learner's present wait began; when measuring began.
        self.now = self.since = self.began = 0.0
        # `taken`: groups that the present step has and learns from. `played`: the same with refused ones. `count`
        # numbers events and turns. `judging`: answers that are being judged.
        self.version = self.taken = self.played = self.count = self.judging = 0
        self.events = list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]()
        # `touched`: engines that changed since their next event was planned.
        self.engines, self.touched = [_Slots() for _ in range(loop.engines)], dict[_Slots, None]()
        # Groups that were asked and not taken; answers that wait for a verifier; turns held back for new weights.
        self.waiting, self.to_judge, self.held = deque[_Siblings](), deque[_Turns](), list[_Turns]()
        # What the learner's process has to handle: (function, answer, seconds that it takes).
        self.hands = deque[tuple[Callable[[_Turns], None], _Turns, float]]()
        self.state: Literal["takes", "learns", "waits", "sends"] = "takes"
        self.handling = False
        # Times of the pushes of weights; totals by name, and of tokens by their age (an int).
        self.pushed, self.sums = list[float](), defaultdict[str | int, float](float)

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        """Call `what` when this time has passed."""
        self.count += 1
        # The count orders events of one time as they were made, so a loop is the same at every play. Methods have no
        # order.
        heapq.heappush(self.events, (self.now + seconds, self.count, what, given))

    def run(self) -> LoopOutcome:
        """Play all steps."""
        for e in self.engines if self.o.deaths < math.inf else ():
            self.after(self.fate.expovariate(1 / self.o.deaths), self._dies, e)
        self._take()
        while len(self.pushed) <= self.last:
            # Only now, after whatever happened at this moment: an engine may have changed several times.
            self._plan()
            if not self.events or self.count > MOST_EVENTS:
                raise ConfigError("these times let no step end: engines die faster than they answer, or times are 0")
            self.now, _, what, given = heapq.heappop(self.events)
            what(*given)
        self._advance(*self.engines)
        s, measured, n = self.sums, self.now - self.began, len(self.engines)
        idle = {"learner": s["learner"], "engines": s["idle"] / n, "judges": measured - s["judged"] / self.o.judges}
        return LoopOutcome(
            seconds=tuple(b - a for a, b in pairwise(self.pushed[self.settle :])),
            ages={a: s[a] / s["kept"] for a in sorted(x for x in s if isinstance(x, int))},
            idle={role: seconds / measured for role, seconds in idle.items()},
            slots_used=s["used"] / measured / n / self.o.slots,
            lost=max(0.0, round(1 - s["kept"] / s["spoken"], 9)),
        )

    def _advance(self, *engines: _Slots) -> None:
        """Bring engines up to the present time."""
        self.touched.update(dict.fromkeys(engines))
        for e in engines:
            # It is called before anything about an engine changes. So it had the same answers since the last call, and
            # went on evenly: first what it owes for prompts, then passes at the rate for its number of answers.
            seconds, e.at = self.now - e.at, self.now
            self.sums["idle"] += seconds * (not e.active and not e.queue)
            self.sums["used"] += seconds * len(e.active)
            if e.active and not e.stands:
                reading = min(seconds, e.debt)
                e.debt -= reading
                e.passes += (seconds - reading) / self.o.passes(len(e.active))

    def _plan(self) -> None:
        """For each engine that has changed, plan the event at which its next turn ends."""
        for e in self.touched:
            # The end that was planned before is void, and passed over when its time comes (`_turn_ends`).
            e.plan += 1
            if e.active and not e.stands:
                until_end = max(0.0, e.active[0][0] - e.passes) * self.o.passes(len(e.active))
                self.after(e.debt + until_end, self._turn_ends, e, e.plan)
        self.touched.clear()

    def _stand(self, change: int) -> None:
        """Let all engines stand still (1), or take that reason away (-1)."""
        self._advance(*self.engines)
        for e in self.engines:
            e.stands += change

    def _give(self, answer: _Turns) -> None:
        """Give a turn to the engine with the fewest turns. While new weights come it is held back."""
        if self.state == "sends" or (self.state == "waits" and self.o.update == "drain"):
            self.held.append(answer)
        elif not answer.gone:
            e = min(self.engines, key=lambda e: (e.stands, len(e.active) + len(e.queue)))
            self._advance(e)
            answer.engine = e
            e.queue.append(answer)
            self._fill(e)

    def _fill(self, e: _Slots) -> None:
        """Give free slots of an engine to turns of its queue."""
        while e.queue and len(e.active) < self.o.slots:
            answer = e.queue.popleft()
            answer.mark, self.count = e.passes, self.count + 1
            # Only the first of the siblings pays for their prompt.
            e.debt += self.o.prefill * answer.first
            heapq.heappush(e.active, (e.passes + answer.lengths[0], self.count, answer))

    def _say(self, e: _Slots, answer: _Turns, active: bool = True) -> None:
        """Count an answer's tokens under the present version: before it changes, or where a turn ends or breaks off."""
        tokens, answer.mark = (e.passes - answer.mark) * active, e.passes
        answer.turn.append((self.version, tokens))
        self.sums["spoken"] += tokens

    def _turn_ends(self, e: _Slots, plan: int) -> None:
        """The event at which an engine's next turn ends. It is void if the engine has a newer plan."""
        if plan != e.plan:
            return
        self._advance(e)
        # The number of passes is a sum of floats, so a turn may be short of its end by a rounding.
        while e.active and e.active[0][0] <= e.passes + 1e-6:
            answer = heapq.heappop(e.active)[2]
            self._say(e, answer)
            answer.said, answer.turn, answer.engine = answer.said + answer.turn, [], None
            answer.lengths.pop(0)
            self.hands.append((self._heard, answer, self.o.handle))
        self._fill(e)
        self._go_on()

    def _leave(self, answer: _Turns) -> None:
        """Give an answer up."""
        answer.gone, e = True, answer.engine
        if e is not None:
            self._advance(e)
            self._say(e, answer, answer not in e.queue)
            e.queue = deque(x for x in e.queue if x is not answer)
            e.active = [x for x in e.active if x[2] is not answer]
            heapq.heapify(e.active)
            self._fill(e)

    def _dies(self, e: _Slots) -> None:
        """The event of an engine's death."""
        self._advance(e)
        for _, _, answer in e.active:
            self._say(e, answer)
        # What was said of these turns is lost, and they are given out again in the order of their ends.
        turns = [x[2] for x in sorted(e.active)] + list(e.queue)
        e.active, e.queue, e.debt, e.stands = [], deque(), 0.0, e.stands + 1
        self.after(self.o.restart, self._revives, e)
        for answer in turns:
            answer.turn = []
            self._give(answer)
        self._go_on()

    def _revives(self, e: _Slots) -> None:
        """The event at which another engine stands in its place."""
        self._advance(e)
        e.stands -= 1
        self.after(self.fate.expovariate(1 / self.o.deaths), self._dies, e)

    def _go_on(self) -> None:
        """The learner's process handles what has ended, one after the other, and then goes on with its step."""
        # What ends while the learner computes waits in `hands` until it is done.
        while self.hands and not self.handling and self.state != "learns":
            what, answer, seconds = self.hands.popleft()
            if not seconds:
                what(answer)
                continue
            self.handling = True
            self.sums["learner"] += (self.now - self.since) * (self.state in ("takes", "waits"))
            self.after(seconds, self._later, what, answer, True)
        if not self.handling and self.state in ("takes", "waits"):
            (self._taking if self.state == "takes" else self._sending)()

    def _later(self, what: Callable[[_Turns], None], answer: _Turns, handled: bool = False) -> None:
        """Let the learner's process call `what`. `handled`: its time was spent already."""
        if handled:
            self.handling, self.since = False, self.now
        # What was being handled goes first, and takes no more time.
        self.hands.insert(0 if handled else len(self.hands), (what, answer, 0.0))
        self._go_on()

    def _heard(self, answer: _Turns) -> None:
        """A turn of an answer has ended."""
        if answer.lengths:  # another turn follows after its tool, and reads a prompt
            answer.first = True
            self.after(answer.waits.pop(), self._later, self._give, answer)
        elif self.o.reward:
            self.to_judge.append(answer)
            self._judge()
        else:
            self._ends(answer)

    def _judge(self) -> None:
        """Give answers to free verifiers."""
        while self.to_judge and self.judging < self.o.judges:
            self.judging += 1
            self.sums["judged"] += self.o.reward
            self.after(self.o.reward, self._later, self._judged, self.to_judge.popleft())

    def _judged(self, answer: _Turns) -> None:
        """An answer has its verdict."""
        self.judging -= 1
        self._judge()
        self._ends(answer)

    def _ends(self, answer: _Turns) -> None:
        """An answer has ended and is judged."""
        group = answer.group
        if answer.gone:
            return
        group.ended.append(answer)
        # With `extra` more siblings were begun than are wanted. The first to end make the group.
        if len(group.ended) == self.o.siblings:
            group.whole = True
            for other in group.begun:
                if other not in group.ended:
                    self._leave(other)
            # A refused group counts no longer, so another may be asked before any is taken.
            if group.refused:
                self._admit()

    def _admit(self) -> None:
        """Ask groups until as many are on their way as are allowed."""
        o, draw = self.o, self.rng.choice
        while True:
            # What a filter refuses is not known before the group has ended.
            counted = sum(not (g.whole and g.refused) for g in self.waiting)
            room = capacity(staleness=o.staleness, prompts=o.prompts, left=o.staleness + 1,
                            taken=self.taken, waiting=counted)  # fmt: skip
            # The second bound ends a loop whose filter refuses nearly all.
            if min(room, (MOST_PLAYED + o.staleness) * o.prompts - self.played - len(self.waiting)) <= 0:
                return
            group = _Siblings(self.rng.random() >= o.kept)
            self.waiting.append(group)
            for i in range(o.siblings + o.extra):
                lengths = [max(1.0, draw(o.lengths)) for _ in range(o.turns)]
                group.begun.append(_Turns(group, lengths, [draw(o.waits) for _ in lengths[1:]], i == 0))
            for answer in group.begun:
                self._give(answer)

    def _take(self) -> None:
        """Begin a step: it asks for its groups."""
        self.state, self.since, self.taken, self.played = "takes", self.now, 0, 0
        self._admit()
        self._go_on()

    def _taking(self) -> None:
        """Take the groups of a step that have ended. When it has all, the learner begins."""
        o = self.o
        while self.taken < o.prompts and self.played < MOST_PLAYED * o.prompts:
            # Groups are taken in the order in which they were asked, although later ones may have ended.
            if not self.waiting[0].whole:
                return
            group = self.waiting.popleft()
            self.played, self.taken = self.played + 1, self.taken + (not group.refused)
            for answer in () if group.refused else group.ended:
                if self.fate.random() >= o.failed:
                    for version, tokens in answer.said:
                        self.sums[self.version - version] += tokens
                        self.sums["kept"] += tokens
            self._admit()
        if not o.apart and any(e.active or e.queue for e in self.engines):
            return  # in one process sampling comes before learning
        self.sums["learner"] += self.now - self.since
        self.state = "learns"
        # In one process engines stand still while the learner computes.
        self._stand(not o.apart)
        self.after(self.pace.choice(o.learn), self._learned)

    def _learned(self) -> None:
        """The learner has finished its step."""
        self._stand(-(not self.o.apart))
        self.state, self.since = "waits", self.now
        self._go_on()

    def _sending(self) -> None:
        """Send new weights, once what they wait for has ended."""
        busy = self.o.update == "drain" and any(e.active or e.queue for e in self.engines)
        if busy or (self.o.update == "rest" and not all(g.whole for g in self.waiting)):
            return
        self.sums["learner"] += self.now - self.since
        self.state = "sends"
        standing = self.o.sync if self.o.install is None else min(self.o.install, self.o.sync)
        # Most of the sending goes on beside the engines. They stand for its last part, in which they load what came.
        self.after(self.o.sync - standing, self._stand, 1)
        self.after(self.o.sync, self._push)

    def _push(self) -> None:
        """The engines have the new weights. The next step begins."""
        self._stand(-1)
        for e in self.engines:
            # What was said up to here belongs to the old version.
            for _, _, answer in e.active:
                self._say(e, answer)
        self.version += 1
        self.pushed.append(self.now)
        if len(self.pushed) == self.settle + 1:  # what was counted before is forgotten
            self.began = self.now
            self.sums.clear()
        # Held turns begin under the new version, before the next step asks for more.
        self.state, held, self.held = "takes", self.held, []
        for answer in held:
            self._give(answer)
        self._take()


def simulate(loop: SimulatedLoop, steps: int = 24, seed: int = 0) -> LoopOutcome:
    """Plays `steps` steps that are measured, after those that the loop needs to settle. ConfigError: none would end.

    >>> even = SimulatedLoop(prompts=4, lengths=(100,), passes=lambda n: 0.01, learn=(2.0,), staleness=2)
    >>> found = simulate(even)
    >>> found.step, round(found.idle["engines"], 6), found.behind
    (2.0, 0.5, 2.0)
    """
    if steps < 1:
        raise ConfigError(f"{steps} steps to simulate: must be at least 1")
    return _Simulation(loop, steps, seed).run()
