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
class _LoopGroup:
    """The siblings of a prompt: all answers that were `begun`, and those of them that have `ended`."""

    refused: bool
    """Whether the filter will refuse it. Nobody in the loop reads it before the group has ended."""
    begun: list[_LoopAnswer] = field(default_factory=list[Any])
    ended: list[_LoopAnswer] = field(default_factory=list[Any])
    whole: bool = False
    """Whether `loop.siblings` of them have ended. Then it can be taken, or is refused."""


@dataclass(eq=False)
class _LoopAnswer:
    """An answer: the `lengths` in tokens of its present and later turns, and the `waits` of tools between them."""

    group: _LoopGroup
    lengths: list[float]
    waits: list[float]
    first: bool
    """Whether its next turn has to read its prompt."""
    engine: _LoopEngine | None = None
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
class _LoopEngine:
    """An engine, and the number of passes that it had made at the time `at`."""

    active: list[tuple[float, int, _LoopAnswer]] = field(default_factory=list[Any])
    """A heap of (the pass in which the turn ends, a number that orders equal passes, the answer). It has passes and no
    times, so that a change of speed changes no entry."""
    queue: deque[_LoopAnswer] = field(default_factory=deque[Any])
    """Turns that wait for a slot."""
    passes: float = 0.0
    at: float = 0.0
    debt: float = 0.0
    """Time for reading prompts that it works before its next pass."""
    stands: int = 0
    """Number of reasons for which it stands still (it is dead, new weights, the learner's process); 0: it works."""
    plan: int = 0
    """Number of the latest event that was planned for the end of a turn. Earlier ones are void."""


class _Simulation:
    """The state of a simulation. Its methods: of engines, of what follows a turn, of the queue, of the learner."""

    def __init__(self, loop: SimulatedLoop, steps: int, seed: int) -> None:
        # The first steps find empty queues. As many as may be on their way, and two, are played and not measured.
        # Measuring begins at the push of weights with the number `settle`, and ends at that with the number `last`.
        self.loop, self.settle, self.last = loop, 2 + loop.staleness, 2 + loop.staleness + steps
        # Three streams of random numbers, so that what is asked, how long the learner takes and what fails do not
        # change each other: loops that differ in one setting are compared on the same draws.
        self.rng, self.pace, self.fate = (Random(f"{seed}/{what}") for what in ("asked", "learn", "deaths"))
        # The time; when the learner's present wait began; when measuring began.
        self.now = self.since = self.began = 0.0
        # `taken`: groups that the present step has and learns from. `played`: the same with refused ones. `count`
        # numbers events and turns. `judging`: answers that are being judged.
        self.version = self.taken = self.played = self.count = self.judging = 0
        self.events = list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]()
        # `touched`: engines that changed since their next event was planned. A dict, as a set has no order.
        self.engines, self.touched = [_LoopEngine() for _ in range(loop.engines)], dict[_LoopEngine, None]()
        # Groups that were asked and not taken; answers that wait for a verifier; turns held back for new weights.
        self.waiting, self.to_judge, self.held = deque[_LoopGroup](), deque[_LoopAnswer](), list[_LoopAnswer]()
        # Calls that wait for the learner's process, which makes one at a time: (function, answer, seconds it takes).
        self.to_handle = deque[tuple[Callable[[_LoopAnswer], None], _LoopAnswer, float]]()
        # The learner takes groups, learns, waits to send weights, or sends. `handling`: it spends a call's seconds.
        self.state: Literal["takes", "learns", "waits", "sends"] = "takes"
        self.handling = False
        # Times of the pushes of weights; totals by name, and of tokens by their age (an int).
        self.pushed, self.sums = list[float](), defaultdict[str | int, float](float)

    def after(self, seconds: float, what: Callable[..., None], *given: Any) -> None:
        """Call `what` when this time has passed."""
        self.count += 1
        # The count orders events of one time as they were made: every play is the same, and no methods are compared.
        heapq.heappush(self.events, (self.now + seconds, self.count, what, given))

    def run(self) -> LoopOutcome:
        """Play all steps: call the next event, again and again."""
        for engine in self.engines if self.loop.deaths < math.inf else ():
            self.after(self.fate.expovariate(1 / self.loop.deaths), self._dies, engine)
        self._begin_step()
        while len(self.pushed) <= self.last:
            # Only now, after whatever happened at this moment: an engine may have changed several times.
            self._plan()
            if not self.events or self.count > MOST_EVENTS:
                raise ConfigError("these times let no step end: engines die faster than they answer, or times are 0")
            self.now, _, what, given = heapq.heappop(self.events)
            what(*given)
        self._advance(*self.engines)
        s, measured, n = self.sums, self.now - self.began, len(self.engines)
        idle = {"learner": s["learner"], "engines": s["idle"] / n, "judges": measured - s["judged"] / self.loop.judges}
        return LoopOutcome(
            seconds=tuple(b - a for a, b in pairwise(self.pushed[self.settle :])),
            ages={a: s[a] / s["kept"] for a in sorted(x for x in s if isinstance(x, int))},
            idle={role: seconds / measured for role, seconds in idle.items()},
            slots_used=s["used"] / measured / n / self.loop.slots,
            lost=max(0.0, round(1 - s["kept"] / s["spoken"], 9)),
        )

    def _advance(self, *engines: _LoopEngine) -> None:
        """Bring engines up to the present time."""
        self.touched.update(dict.fromkeys(engines))
        for engine in engines:
            # It is called before anything about an engine changes. So it had the same answers since the last call, and
            # went on evenly: first what it owes for prompts, then passes at the rate for its number of answers.
            seconds, engine.at = self.now - engine.at, self.now
            self.sums["idle"] += seconds * (not engine.active and not engine.queue)
            self.sums["used"] += seconds * len(engine.active)
            if engine.active and not engine.stands:
                reading = min(seconds, engine.debt)
                engine.debt -= reading
                engine.passes += (seconds - reading) / self.loop.passes(len(engine.active))

    def _plan(self) -> None:
        """For each engine that has changed, plan the event at which its next turn ends."""
        for engine in self.touched:
            # The end that was planned before is void, and passed over when its time comes (`_turn_ends`).
            engine.plan += 1
            if engine.active and not engine.stands:
                until_end = max(0.0, engine.active[0][0] - engine.passes) * self.loop.passes(len(engine.active))
                self.after(engine.debt + until_end, self._turn_ends, engine, engine.plan)
        self.touched.clear()

    def _add_stands(self, change: int) -> None:
        """Give every engine one more reason to stand still (1), take one away (-1), or neither (0)."""
        self._advance(*self.engines)
        for engine in self.engines:
            engine.stands += change

    def _give_turn(self, answer: _LoopAnswer) -> None:
        """Give a turn to the working engine with the fewest turns. While new weights come it is held back."""
        if self.state == "sends" or (self.state == "waits" and self.loop.update == "drain"):
            self.held.append(answer)
        elif not answer.gone:
            engine = min(self.engines, key=lambda engine: (engine.stands, len(engine.active) + len(engine.queue)))
            self._advance(engine)
            answer.engine = engine
            engine.queue.append(answer)
            self._fill(engine)

    def _fill(self, engine: _LoopEngine) -> None:
        """Give free slots of an engine to turns of its queue."""
        while engine.queue and len(engine.active) < self.loop.slots:
            answer = engine.queue.popleft()
            answer.mark, self.count = engine.passes, self.count + 1
            # Only the first of the siblings pays for their prompt.
            engine.debt += self.loop.prefill * answer.first
            heapq.heappush(engine.active, (engine.passes + answer.lengths[0], self.count, answer))

    def _count_tokens(self, engine: _LoopEngine, answer: _LoopAnswer, active: bool = True) -> None:
        """Count what an answer has said since its `mark`, under the present version: before that changes, or where a
        turn ends or breaks off. `active`: it has a slot; without one it says nothing."""
        tokens, answer.mark = (engine.passes - answer.mark) * active, engine.passes
        answer.turn.append((self.version, tokens))
        self.sums["spoken"] += tokens

    def _turn_ends(self, engine: _LoopEngine, plan: int) -> None:
        """The event at which an engine's next turn ends. It is void if the engine has a newer plan."""
        if plan != engine.plan:
            return
        self._advance(engine)
        # The number of passes is a sum of floats, so a turn may be short of its end by a rounding.
        while engine.active and engine.active[0][0] <= engine.passes + 1e-6:
            answer = heapq.heappop(engine.active)[2]
            self._count_tokens(engine, answer)
            answer.said, answer.turn, answer.engine = answer.said + answer.turn, [], None
            answer.lengths.pop(0)
            self.to_handle.append((self._turn_handled, answer, self.loop.handle))
        self._fill(engine)
        self._continue_learner()

    def _give_up(self, answer: _LoopAnswer) -> None:
        """Give an answer up: it leaves its engine, where its present turn has one."""
        answer.gone, engine = True, answer.engine
        if engine is not None:
            self._advance(engine)
            self._count_tokens(engine, answer, answer not in engine.queue)
            engine.queue = deque(x for x in engine.queue if x is not answer)
            engine.active = [x for x in engine.active if x[2] is not answer]
            heapq.heapify(engine.active)
            self._fill(engine)

    def _dies(self, engine: _LoopEngine) -> None:
        """The event of an engine's death."""
        self._advance(engine)
        for _, _, answer in engine.active:
            self._count_tokens(engine, answer)
        # What was said of these turns is lost, and they are given out again in the order of their ends.
        turns = [x[2] for x in sorted(engine.active)] + list(engine.queue)
        engine.active, engine.queue, engine.debt, engine.stands = [], deque(), 0.0, engine.stands + 1
        self.after(self.loop.restart, self._revives, engine)
        for answer in turns:
            answer.turn = []
            self._give_turn(answer)
        self._continue_learner()

    def _revives(self, engine: _LoopEngine) -> None:
        """The event at which another engine stands in its place."""
        self._advance(engine)
        engine.stands -= 1
        self.after(self.fate.expovariate(1 / self.loop.deaths), self._dies, engine)

    def _continue_learner(self) -> None:
        """Let the learner's process make the calls that wait for it, one at a time, and then go on with its step. While
        the learner computes they wait."""
        while self.to_handle and not self.handling and self.state != "learns":
            what, answer, seconds = self.to_handle.popleft()
            if not seconds:
                what(answer)
                continue
            self.handling = True
            # Until now the learner has waited. Its next wait begins when this call is handled.
            self.sums["learner"] += (self.now - self.since) * (self.state in ("takes", "waits"))
            self.after(seconds, self._when_free, what, answer, True)
        if not self.handling and self.state in ("takes", "waits"):
            (self._take_groups if self.state == "takes" else self._send_weights)()

    def _when_free(self, what: Callable[[_LoopAnswer], None], answer: _LoopAnswer, handled: bool = False) -> None:
        """Call `what` once the learner's process is free. `handled`: it has just spent the seconds of this call."""
        if handled:
            self.handling, self.since = False, self.now
        # A call whose seconds are spent goes before those that wait, and takes no more time.
        self.to_handle.insert(0 if handled else len(self.to_handle), (what, answer, 0.0))
        self._continue_learner()

    def _turn_handled(self, answer: _LoopAnswer) -> None:
        """The learner's process has handled a turn that ended."""
        if answer.lengths:  # another turn follows after its tool, and reads a prompt
            answer.first = True
            self.after(answer.waits.pop(), self._when_free, self._give_turn, answer)
        elif self.loop.reward:
            self.to_judge.append(answer)
            self._judge()
        else:
            self._answer_ends(answer)

    def _judge(self) -> None:
        """Give answers to free verifiers."""
        while self.to_judge and self.judging < self.loop.judges:
            self.judging += 1
            self.sums["judged"] += self.loop.reward
            self.after(self.loop.reward, self._when_free, self._judged, self.to_judge.popleft())

    def _judged(self, answer: _LoopAnswer) -> None:
        """An answer has its verdict."""
        self.judging -= 1
        self._judge()
        self._answer_ends(answer)

    def _answer_ends(self, answer: _LoopAnswer) -> None:
        """An answer has ended and is judged."""
        group = answer.group
        if answer.gone:
            return
        group.ended.append(answer)
        # With `extra` more siblings were begun than are wanted. The first to end make the group.
        if len(group.ended) == self.loop.siblings:
            group.whole = True
            for other in group.begun:
                if other not in group.ended:
                    self._give_up(other)
            # A refused group counts no longer, so another may be asked before any is taken.
            if group.refused:
                self._ask_groups()

    def _ask_groups(self) -> None:
        """Ask groups until as many are on their way as are allowed."""
        loop, draw = self.loop, self.rng.choice
        while True:
            # What a filter refuses is not known before the group has ended.
            counted = sum(not (g.whole and g.refused) for g in self.waiting)
            # `left`: no stage ends here, so the number of steps that are left is no bound.
            room = capacity(staleness=loop.staleness, prompts=loop.prompts, left=loop.staleness + 1,
                            taken=self.taken, waiting=counted)  # fmt: skip
            # The second bound ends a loop whose filter refuses nearly all.
            if min(room, (MOST_PLAYED + loop.staleness) * loop.prompts - self.played - len(self.waiting)) <= 0:
                return
            group = _LoopGroup(self.rng.random() >= loop.kept)
            self.waiting.append(group)
            for i in range(loop.siblings + loop.extra):
                lengths = [max(1.0, draw(loop.lengths)) for _ in range(loop.turns)]
                group.begun.append(_LoopAnswer(group, lengths, [draw(loop.waits) for _ in lengths[1:]], i == 0))
            for answer in group.begun:
                self._give_turn(answer)

    def _begin_step(self) -> None:
        """Begin a step: it asks for its groups."""
        self.state, self.since, self.taken, self.played = "takes", self.now, 0, 0
        self._ask_groups()
        self._continue_learner()

    def _take_groups(self) -> None:
        """Take the groups of a step that have ended. When it has all, the learner begins."""
        loop = self.loop
        while self.taken < loop.prompts and self.played < MOST_PLAYED * loop.prompts:
            # Groups are taken in the order in which they were asked, although later ones may have ended.
            if not self.waiting[0].whole:
                return
            group = self.waiting.popleft()
            self.played, self.taken = self.played + 1, self.taken + (not group.refused)
            for answer in () if group.refused else group.ended:
                if self.fate.random() >= loop.failed:
                    for version, tokens in answer.said:
                        self.sums[self.version - version] += tokens
                        self.sums["kept"] += tokens
            self._ask_groups()
        if not loop.apart and any(engine.active or engine.queue for engine in self.engines):
            return  # in one process sampling comes before learning
        self.sums["learner"] += self.now - self.since
        self.state = "learns"
        # In one process engines stand still while the learner computes (`not apart` counts as 1), else they do not (0).
        self._add_stands(not loop.apart)
        self.after(self.pace.choice(loop.learn), self._learned)

    def _learned(self) -> None:
        """The learner has finished its step."""
        self._add_stands(-(not self.loop.apart))
        self.state, self.since = "waits", self.now
        self._continue_learner()

    def _send_weights(self) -> None:
        """Send new weights, once what they wait for has ended."""
        busy = self.loop.update == "drain" and any(engine.active or engine.queue for engine in self.engines)
        if busy or (self.loop.update == "rest" and not all(g.whole for g in self.waiting)):
            return
        self.sums["learner"] += self.now - self.since
        self.state = "sends"
        standing = self.loop.sync if self.loop.install is None else min(self.loop.install, self.loop.sync)
        # Most of the sending goes on beside the engines. They stand for its last part, in which they load what came.
        self.after(self.loop.sync - standing, self._add_stands, 1)
        self.after(self.loop.sync, self._push)

    def _push(self) -> None:
        """The engines have the new weights. The next step begins."""
        self._add_stands(-1)
        for engine in self.engines:
            # What was said up to here belongs to the old version.
            for _, _, answer in engine.active:
                self._count_tokens(engine, answer)
        self.version += 1
        self.pushed.append(self.now)
        if len(self.pushed) == self.settle + 1:  # what was counted before is forgotten
            self.began = self.now
            self.sums.clear()
        # Held turns begin under the new version, before the next step asks for more.
        self.state, held, self.held = "takes", self.held, []
        for answer in held:
            self._give_turn(answer)
        self._begin_step()


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
