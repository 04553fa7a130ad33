"""Groups of earlier steps that later ones learn from again (`config.stages.reinforce.Replay`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from posttrain.config.stages.reinforce import Replay
from posttrain.core import seeds
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.types import Group
from posttrain.record.queued_groups import QueuedGroup


@dataclass(frozen=True, eq=False)
class BufferedGroup:
    """A group with the step that learned from it first."""

    group: Group
    step: int


@dataclass
class ReplayBuffer:
    """Holds groups, gives some of them to each step, and counts those that leave and why.

    What a step gets is a function of the seed, the step and what the buffer holds.
    """

    config: Replay
    seed: int
    stream: str
    held: list[BufferedGroup] = field(default_factory=list[BufferedGroup])
    """Oldest first."""
    _gauges: Gauges = field(default_factory=Gauges)

    def draw(self, step: int, apart: Callable[[Group], float]) -> tuple[Group, ...]:
        """The groups that a step learns from again, each with the discount of its age.

        Args:
            apart: the mean of |log(policy / sampler)| over a group's tokens, now.
        """
        count_by_reason = Counter[str]()
        # Age comes first, because it costs nothing. The ratio needs a forward pass for each group that
        # is tested, so groups are tested in random order only until enough are chosen.
        self._leave(count_by_reason, "age", [b for b in self.held if step - b.step > self.config.age])
        chosen = list[BufferedGroup]()
        for buffered in self._order(step):
            if len(chosen) == self.config.groups:
                break
            # A group whose policy is too far away now leaves for good: it is not tested again.
            if self.config.ratio is not None and apart(buffered.group) > self.config.ratio:
                self._leave(count_by_reason, "ratio", [buffered])
            else:
                chosen.append(buffered)
        ages = [step - b.step for b in chosen]
        self._gauges = {
            "replay/groups": Gauge(len(chosen), 1),
            "replay/held": Gauge(len(self.held), 1),
            "replay/age": Gauge.of(ages),
            "replay/left_by_age": Gauge(count_by_reason["age"], 1),
            "replay/left_by_ratio": Gauge(count_by_reason["ratio"], 1),
        }
        discounts = [self.config.discount**age for age in ages]
        return tuple(replace(b.group, again=True, discount=d) for b, d in zip(chosen, discounts, strict=True))

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Take in the groups that a step has learned from for the first time. The oldest ones leave for them."""
        count_by_reason = Counter[str]()
        self.held += [BufferedGroup(g, step) for g in groups if any(e.own for e in g.judged)]
        # `held` is in order of age, so the oldest stand first.
        self._leave(count_by_reason, "size", self.held[: max(0, len(self.held) - self.config.size)])
        self._gauges["replay/left_by_size"] = Gauge(count_by_reason["size"], 1)

    def gauges(self) -> Gauges:
        return dict(self._gauges)

    def rows(self) -> tuple[QueuedGroup, ...]:
        """Returns the groups that the buffer holds, as plain data. `begun` is the step. The episodes are written beside
        it."""
        # -1 and 0: no group of the buffer is asked again, so its task needs no index and no cursor.
        plain = [QueuedGroup(index=-1, visit=b.group.visit, cursor=0, begun=b.step) for b in self.held]
        return tuple(p.ended(b.group, Gauge(0, 0)) for p, b in zip(plain, self.held, strict=True))

    def restore(self, rows: Sequence[QueuedGroup], groups: Sequence[Group]) -> None:
        self.held = [BufferedGroup(g, r.begun) for r, g in zip(rows, groups, strict=True)]

    def _leave(self, count_by_reason: Counter[str], why: str, gone: Sequence[BufferedGroup]) -> None:
        """Remove these groups, and count them in `count_by_reason` under `why`."""
        count_by_reason[why] += len(gone)
        gone_ids = {id(b) for b in gone}
        self.held = [b for b in self.held if id(b) not in gone_ids]

    def _order(self, step: int) -> list[BufferedGroup]:
        """All that it holds in a random order. Balanced: round by round, one group of each prompt."""
        rng = seeds.generator(self.seed, f"replay/{self.stream}", step)
        shuffled = [self.held[i] for i in rng.permutation(len(self.held))]
        if not self.config.balanced:
            return shuffled
        before = Counter[str]()
        rounds = list[int]()
        for b in shuffled:
            # The round of a group is the number of groups of the same prompt before it. A stable sort by rounds takes
            # one group of each prompt, then a second of each. Within a round the random order stays.
            rounds.append(before[b.group.task.id])
            before[b.group.task.id] += 1
        return [shuffled[i] for i in np.argsort(np.array(rounds, np.int64), kind="stable")]
