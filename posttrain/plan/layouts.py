"""Searches a layout for a model and its devices: which devices sample and which learn.

A layout also says over how many devices one copy of the weights is cut, how far samples run ahead, and which role is
the bottleneck. The search tries a few dozen layouts with the memory and the times of a plan, so it makes the same
assumptions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import get_args

from posttrain.config.run import Checkpointing
from posttrain.plan.machines import Hardware
from posttrain.plan.memory import places
from posttrain.plan.throughput import Assumed, Throughput, Times, Topology
from posttrain.plan.work import Work
from posttrain.system.errors import ConfigError

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""The shares of the devices that sample which are tried, where sampling and learning have devices of their own."""
AHEAD = (0, 1, 2, 4)
"""Steps by which samples may be old (K)."""
WORKERS = (1, 2, 4, 8)
"""Devices of one engine that are tried, at most those of one machine."""
CUTS = tuple(1 << i for i in range(10))
"""Devices over which one copy of the learner's weights may be cut."""
ROOM = 0.1
"""Least share of an engine's memory for the cache of keys and values."""
USABLE = 0.92
"""Share of a device's memory that is planned with."""
GAIN = 0.97
"""A larger K is taken where a step takes less than this share of the time with a smaller one."""
MOST_PROMPTS = 1024
"""Prompts of a step that a plan proposes, at most: twice those of DAPO (2503.14476)."""
DAY = 86_400.0


@dataclass(frozen=True)
class MachineLayout(Throughput):
    """One way to use all devices: a stage with the ranks, engines, slots and staleness of this layout."""

    workers: int = 1
    """Devices of one engine."""

    @cached_property
    def times(self) -> Times:
        """Seconds of the five roles in one step. With K steps ahead a free slot begins a later answer: the tail is
        shared by K + 1 steps."""
        t, ahead = super().times, self.work.staleness
        # The tail is what decoding takes beyond answers of equal length. `rollout` is decoding divided by the share
        # that the filter keeps, times a measured factor, so the tail is scaled alike.
        tail = (self.decode - self.flat) / self.assumed.kept * self.assumed.factors.get("rollout", 1.0)
        return replace(t, rollout=t.rollout - max(0.0, tail) * ahead / (ahead + 1))

    @property
    def bottleneck(self) -> str:
        """The role that a step waits for: the longest one. Where two sides work at once, the longest of the longer side
        and of the sync, which comes after both."""
        t = self.times
        if self.topology != "asynchronous":
            return t.slowest
        side = ("learn", "reference") if t.rollout + t.reward < t.reference + t.learn else ("rollout", "reward")
        return max(*side, "sync", key=lambda role: getattr(t, role))

    @property
    def summary(self) -> str:
        """Who works where, in words."""
        if self.topology == "colocated":
            return f"colocated: {self.engines} devices in turn, engines of {self.workers}"
        ahead = f", K={self.work.staleness}" if self.work.staleness else ""
        return f"{self.topology}{ahead}: {self.engines} sample in engines of {self.workers}, {self.learners} learn"

    def command_line(self, stage: str) -> str:
        """Overrides and options of `posttrain run` for the stage of this name."""
        w, count = self.work, self.engines // self.workers
        placement = f"placement=processes placement.engines={count} " if self.topology != "colocated" else ""
        engine = f"{placement}engine=vllm engine.workers={self.workers}"
        sizes = f"{stage}.prompts={w.prompts} {stage}.micro_tokens={w.micro_tokens} {stage}.staleness={w.staleness}"
        again = "" if w.checkpointing == "none" else f" model.gradient_checkpointing={w.checkpointing}"
        replicas = f" --replicas {w.replicas}" if w.replicas > 1 else ""
        return f"{engine} {sizes}{again} --nproc {self.learners}{replicas}"


def layouts(work: Work, machine: Hardware, assumed: Assumed = Assumed()) -> Iterator[MachineLayout]:
    """Every layout that fits, of each topology."""
    count = machine.count
    # Colocated: all devices sample, then all learn.
    yield from _of_split(work, machine, assumed, count, count)
    # From 8 devices on they are whole machines of 8.
    devices = (count * share for share in SHARES)
    for engines in dict.fromkeys(round(n / 8) * 8 if n >= 8 else round(n) for n in devices):
        if 0 < engines < count:
            yield from _of_split(work, machine, assumed, engines, count - engines)


def _of_split(work: Work, machine: Hardware, assumed: Assumed, engines: int, learners: int) -> Iterator[MachineLayout]:
    """The layouts with these numbers of devices. If both are all devices, roles take turns."""
    # On shared devices learner and engine divide the memory: the learner may take what the engine's weights and its
    # smallest cache leave, and the cache then gets the rest. Slots follow from the cache.
    memory, shared = USABLE * machine.device.memory, engines == learners == machine.count
    for workers in (w for w in WORKERS if engines % w == 0):
        weights = work.shape.parameters * work.width / workers
        room = memory - (weights + ROOM * memory if shared else 0.0)
        for with_learner, learner_bytes in _learner_fits(work, learners, room):
            for_cache = memory - weights - (learner_bytes if shared else 0.0)
            if for_cache < ROOM * memory:
                continue
            # Keys and values in 16 bits.
            bytes_a_sequence = work.shape.cache_bytes(2) * (work.lengths.prompt + work.lengths.answer)
            slots = max(1, min(work.slots, int(for_cache * workers / bytes_a_sequence)))
            fitting = replace(with_learner, engines=engines // workers, slots=slots, cache=for_cache * workers)
            for ahead in (0,) if shared else AHEAD:
                topology: Topology = "colocated" if shared else "asynchronous" if ahead else "disaggregated"
                placed = replace(fitting, staleness=ahead)
                yield MachineLayout(placed, machine, topology, engines, learners, assumed, workers)


def _learner_fits(work: Work, learners: int, room: float) -> Iterator[tuple[Work, float]]:
    """(the stage, bytes of a learner's device) for each way of checkpointing with which a learner fits into `room`.

    One copy of the weights is cut over the fewest devices with which it fits, since fewer ranks have less to bring
    together. Each way is tried because the more is computed again, the larger a pass may be, and the less often the
    weights are brought together.
    """
    for cut in (c for c in CUTS if learners % c == 0):
        fits = False
        for way in get_args(Checkpointing):
            fitted = replace(
                work, ranks=learners, replicas=learners // cut, engines=1, vllm=True, cache=0.0, checkpointing=way,
                micro_tokens=max(work.micro_tokens, work.longest), staleness=0,
            )  # fmt: skip
            if _peak_bytes(fitted) > room:
                continue
            # Larger passes until the memory or the minibatch ends it: the weights are brought together once a pass.
            while fitted.micro_tokens < fitted.minibatch_tokens:
                more = replace(fitted, micro_tokens=2 * fitted.micro_tokens)
                if _peak_bytes(more) > room:
                    break
                fitted = more
            fits = True
            yield fitted, _peak_bytes(fitted)
        if fits:
            return


@lru_cache(maxsize=1024)
def _peak_bytes(work: Work) -> float:
    """The peak of the memory of a learner's device, in bytes."""
    return places(work)[0].most


def best_layout(work: Work, machine: Hardware, assumed: Assumed = Assumed()) -> MachineLayout:
    """The layout with the shortest step; ConfigError where none fits.

    A larger K (steps that samples run ahead) is taken only if it shortens the step clearly (`GAIN`), because older
    samples cost quality that no plan counts.
    """
    by_staleness = sorted(layouts(work, machine, assumed), key=lambda x: x.work.staleness)
    if not by_staleness:
        raise ConfigError(
            f"--machines {machine.name}: {work.shape.parameters / 1e9:,.0f} billion parameters fit in no layout: take"
            " more devices, devices with more memory, model.lora.rank=16, or shorter sequences"
        )
    best = by_staleness[0]
    for layout in by_staleness[1:]:
        if layout.step < (best.step if layout.work.staleness == best.work.staleness else GAIN * best.step):
            best = layout
    return best


def of_each_topology(work: Work, machine: Hardware, assumed: Assumed) -> list[MachineLayout]:
    """The best layout of each topology and K."""
    best: dict[tuple[str, int], MachineLayout] = {}
    for layout in layouts(work, machine, assumed):
        key = (layout.topology, layout.work.staleness)
        best[key] = min(best.get(key, layout), layout, key=lambda x: x.step)
    return list(best.values())


def largest_batch(work: Work, machine: Hardware, assumed: Assumed, steps: int, days: float) -> MachineLayout:
    """The best layout of the largest batch with which the steps end within the days. The batch of the stage is doubled
    as long as they do. If not even the stage's own batch is fast enough, it is kept."""
    best = best_layout(work, machine, assumed)
    # Each size gets its own best layout, since a larger batch may ask for another one.
    while best.step * steps <= days * DAY and best.work.prompts < MOST_PROMPTS:
        more = best_layout(replace(work, prompts=best.work.prompts * 2), machine, assumed)
        if more.step * steps > days * DAY:
            break
        best = more
    return best


def other_assumptions(work: Work, machine: Hardware, assumed: Assumed) -> Sequence[tuple[str, MachineLayout | None]]:
    """The best layout under each of some other assumptions, with a name for the assumption; None where nothing fits."""
    lengths = work.lengths
    twice = replace(lengths, mean=2 * lengths.mean, most=2 * lengths.most)
    changed = {
        "answers twice as long": (replace(work, lengths=twice), machine, assumed),
        "all answers as long as the mean": (replace(work, lengths=replace(lengths, cv=0.0)), machine, assumed),
        "a filter keeps half of the groups": (work, machine, replace(assumed, kept=0.5)),
        "30 % of the peak arithmetic": (work, replace(machine, compute=0.3), assumed),
        "50 % of the peak bandwidth": (work, replace(machine, reading=0.5), assumed),
        "a network of a quarter": (work, replace(machine, network=machine.network / 4), assumed),
        "twice the batch": (replace(work, prompts=2 * work.prompts), machine, assumed),
        "half of the devices": (work, replace(machine, count=max(1, machine.count // 2)), assumed),
    }
    out: list[tuple[str, MachineLayout | None]] = []
    for name, given in changed.items():
        try:
            out.append((name, best_layout(*given)))
        except ConfigError:
            out.append((name, None))
    return out
