"""The time of a step: five times, one for each role, and how the topology puts them together.

A time is that of arithmetic or of reading, at the share of the peaks that the machine reaches. For decoding it is the
larger of the two, for lengths that differ. While many answers are sampled, each reading of the weights serves many. At
the end a few long answers are sampled alone: the long tail.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from posttrain.plan.machines import Hardware
from posttrain.plan.serving import Decoding
from posttrain.plan.work import Work
from posttrain.system.errors import ConfigError

Topology = Literal["colocated", "disaggregated", "asynchronous"]
"""colocated: all devices sample, then all learn. disaggregated: some sample and some learn, in turn. asynchronous:
both at once, with samples of earlier weights."""
ROLES = ("rollout", "reward", "reference", "learn", "sync")
SCORES = 8.0
"""Bytes that are read and written for each score of the head."""
NARROW = 100.0
"""Width at which the rest of a layer (norms, gates, rotations) takes a processor as long as its products. Products grow
with the square of the width, the rest with the width. Measured (docs/research/plans-measured.md)."""
READS = 1.7
"""Times as long as a plain sum that products of few rows take to read the weights on a processor."""
DRAWN, PUSHED = 38.0, 55.0
"""What takes a processor as long as reading so many bytes: drawing a token, for each score it is drawn from; the
fingerprints of both sides of a push, for each byte of the weights."""
WATCHED, WATCHED_EPISODES = 512, 16
"""Spoken tokens after which a run scores no further episodes to see how far a step moved the policy, and most episodes
(`checks.sampling.policy_change`). Only a step on a processor is so short that it counts."""
PIECES = 64
"""Parts of the tail in which the number of sequences is taken as constant."""


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """Values that a plan needs and no config has."""

    reward: float = 0.0
    """Seconds to judge one answer."""
    judges: int = 1
    """Answers that are judged at once."""
    kept: float = 1.0
    """Share of groups that a filter keeps (dynamic sampling); the others are sampled for nothing."""
    accepted: float = 0.0
    """Chance that a drafted token is accepted."""
    drafts: int = 0
    """Tokens drafted a pass."""
    draft_cost: float = 0.1
    """Time of a pass of the draft model, in passes of the policy."""
    forwards: int = 0
    """Further passes without gradient (`ladder.algorithm_cost`), beside the reference's."""
    watched: bool = False
    """Whether a run scores some answers again to see how far a step moved the policy."""
    factors: Mapping[str, float] = field(default_factory=dict[str, float])
    """Measured / predicted time of each role (`plan.of_run.against`). The predicted time is multiplied by it."""

    def __post_init__(self) -> None:
        if not 0 < self.kept <= 1:
            raise ConfigError(f"kept={self.kept:g}: a share of groups in (0, 1]")
        if not 0 <= self.accepted < 1:
            raise ConfigError(f"accepted={self.accepted:g}: a chance in [0, 1)")
        if not (0 <= self.reward < math.inf and 0 <= self.draft_cost < math.inf) or self.judges < 1 or self.drafts < 0:
            raise ConfigError("reward, drafts and draft_cost must be >= 0, judges >= 1")

    @property
    def tokens_a_pass(self) -> float:
        """1 + a + ... + a^k: the expected tokens of a pass with k drafts, each accepted with chance a.

        >>> round(Assumed(accepted=0.7, drafts=4).tokens_a_pass, 2)
        2.77
        """
        return math.fsum(self.accepted**i for i in range(self.drafts + 1)) if self.accepted else 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of each role in one step."""

    rollout: float
    reward: float
    reference: float
    learn: float
    sync: float

    @property
    def total(self) -> float:
        """Seconds of all roles one after the other."""
        return self.rollout + self.reward + self.reference + self.learn + self.sync

    @property
    def slowest(self) -> str:
        """The role that takes longest."""
        return max(ROLES, key=lambda r: getattr(self, r))

    def step(self, topology: Topology, *, hidden_sync: bool = False) -> float:
        """Seconds of a step.

        With asynchronous sampling only the longer of sampling and learning counts. Weights are sent after it, or with
        `hidden_sync` while sampling goes on.

        >>> Times(30, 1, 3, 8, 1).step("asynchronous")
        32
        >>> page = Times(20, 0, 0, 8, 3)
        >>> page.step("colocated"), page.step("asynchronous"), page.step("asynchronous", hidden_sync=True)
        (31, 23, 20)
        """
        if topology != "asynchronous":
            return self.total
        # The engines and the verifiers are one side, the learner with its passes for the reference the other.
        longer = max(self.rollout + self.reward, self.reference + self.learn)
        return longer if hidden_sync else longer + self.sync


@dataclass(frozen=True)
class Throughput:
    """A stage on a machine. `engines` and `learners` are numbers of devices, both of them all if it is colocated."""

    work: Work
    machine: Hardware
    topology: Topology
    engines: int
    learners: int
    assumed: Assumed = Assumed()

    def __post_init__(self) -> None:
        if min(self.engines, self.learners) < 1:
            devices = f"{self.machine.count} devices for {self.topology} roles"
            raise ConfigError(f"{devices}: each of engines and learner needs at least 1")

    @property
    def processor(self) -> bool:
        """Whether the stage runs on a processor, where more was measured than a plan of an accelerator counts."""
        return not self.machine.device.accelerator

    # --- the five times ----------------------------------------------------------------------------------------------

    @cached_property
    def times(self) -> Times:
        """The five times, multiplied by the assumed factors."""
        a, plain = self.assumed, Times(0, 0, self.reference, self.learn, 0)
        if self.work.samples_answers:
            # A filter that keeps a share of the groups has 1 / kept times as many played, and judged.
            reward = a.reward * (self.work.sequences / a.kept) / a.judges
            plain = replace(plain, rollout=(self.prefill + self.decode) / a.kept, reward=reward, sync=self.sync)
        scaled = {role: getattr(plain, role) * a.factors.get(role, 1.0) for role in ROLES}
        return replace(plain, **scaled) if a.factors else plain

    @property
    def prefill(self) -> float:
        """Seconds to read the prompts, each one once for all its siblings."""
        w = self.work
        tokens = w.prompts * w.lengths.prompt
        # Attention is causal: a token reads half of the prompt in the mean.
        operations = 2 * w.shape.active + w.shape.attending(w.lengths.prompt) / 2
        return tokens * operations / (self.machine.flops * self.engines)

    def decoding(self, sequences: float, length: float) -> float:
        """Seconds of one decoding step of `sequences` sequences, each with `length` tokens so far."""
        m, w, drafts = self.machine, self.work, self.assumed.drafts
        # Each engine reads its own copy of the weights.
        copies = max(1, w.engines)
        devices, running = max(1, self.engines // copies), max(1, round(sequences / copies))
        at_peaks = Decoding(w.shape, m.device, devices, running, max(1, round(length)), bytes_each=w.width)
        reading, drawn = at_peaks.reading / m.reading, 0.0
        if self.processor:
            reading *= READS
            drawn = 0.0 if w.vllm else sequences * w.shape.vocabulary * DRAWN / m.bandwidth
        # Drafts are checked in the same pass: more arithmetic, and no more reading. That is why they pay where
        # a pass waits for reading.
        busy = max(reading, (1 + drafts) * at_peaks.arithmetic / m.compute) + drawn
        return (busy + m.latency) * (1 + drafts * self.assumed.draft_cost)

    @property
    def together(self) -> int:
        """Answers that all engines sample at once."""
        w = self.work
        return min(w.slots * max(1, min(w.engines, self.engines)), w.sequences)

    @cached_property
    def decode(self) -> float:
        """Seconds to sample the answers.

        As long as answers wait for a slot, all slots are full. Then the tail begins: fewer and fewer are sampled at
        once, at last only the longest.
        """
        w, slots = self.work, self.together
        full_slots = (w.sequences - slots) * w.lengths.answer / slots * self._full_pass
        # The tail's answers are taken as begun at once; between two edges a share of 1 / PIECES of them ends.
        edges = [0.0, *(w.lengths.quantile((i + 0.5) / PIECES) for i in range(PIECES)), w.lengths.longest(slots)]
        tail, begun = 0.0, 0.0
        for i, end in enumerate(edges[1:]):
            running = max(1.0, slots * (1 - i / PIECES))
            if end > begun:
                tail += (end - begun) * self.decoding(running, w.lengths.prompt + (begun + end) / 2)
                begun = end
        return (full_slots + tail) / self.assumed.tokens_a_pass

    @property
    def flat(self) -> float:
        """Seconds of decoding if all answers had the mean length: what the long tail adds is `decode` less this."""
        w = self.work
        return w.sequences / self.together * w.lengths.answer / self.assumed.tokens_a_pass * self._full_pass

    @property
    def _full_pass(self) -> float:
        """Seconds of a decoding step with full slots, whose answers have half of their length in the mean."""
        return self.decoding(self.together, self.work.lengths.prompt + self.work.lengths.answer / 2)

    @property
    def _body(self) -> float:
        """Seconds of a pass of the layers without gradient over every token of the step."""
        narrow = NARROW / self.work.shape.hidden if self.processor else 0.0
        return (1 + narrow) * self.tokens * self._token_operations / (self.machine.flops * self.learners)

    @property
    def _token_operations(self) -> float:
        """Operations of a forward pass for one token, without the head."""
        s, length = self.work.shape, self.work.lengths.prompt + self.work.lengths.answer
        # Only tokens that are learned from reach the head. Half of the length, as attention is causal.
        return 2 * (s.active - s.vocabulary * s.hidden) + s.attending(round(length)) / 2

    def _head(self, products: int, touched: int) -> float:
        """Seconds of `products` products with the head's weight over the tokens that are learned from, whose scores are
        read and written `touched` times."""
        # A reward model has no head.
        s, spoken = self.work.shape, self.tokens * self.work.spoken_tokens / self.work.pass_tokens * self.work.head
        arithmetic = 2 * s.vocabulary * s.hidden / self.machine.flops
        traffic = SCORES * s.vocabulary / self.machine.bandwidth
        return spoken * (products * arithmetic + touched * traffic) / self.learners

    @property
    def _forward(self) -> float:
        """Seconds of a pass without gradient."""
        return self._body + self._head(1, 2)  # scores are written by the product, and read to be normalised

    @property
    def tokens(self) -> float:
        """Tokens that the learner computes in a step, shared beginnings once. Not those that are sampled (`said`)."""
        return self.work.prompts * self.work.group_tokens * self.work.learned

    @property
    def reference(self) -> float:
        """Seconds of the passes without gradient."""
        w = self.work
        watched = 0.0
        if self.processor and self.assumed.watched:
            # Whole episodes, until the tokens are enough.
            episodes = min(WATCHED_EPISODES, math.ceil(WATCHED / w.lengths.answer))
            watched = min(1.0, episodes / (w.sequences * w.learned))
        return self._forward * (self.assumed.forwards + w.reference + watched)

    @property
    def learn(self) -> float:
        """Seconds of forward and backward passes and of the optimizer.

        A backward pass makes two products where the forward makes one, a gradient of the input and one of the weight;
        frozen weights beneath an adapter have only the first. So both passes take as long as 3 forward passes, or 2.
        Checkpointing adds up to one more, for layers that are computed again.
        """
        w = self.work
        passes = (2 if w.lora is not None else 3) + {"none": 0.0, "selective": 0.1, "full": 1.0}[w.checkpointing]
        # Of the head: scores, scores again for the backward pass, the gradient of the input, and that of the weight.
        products = 3 if w.lora is not None else 4
        computed = passes * self._body + self._head(products, products)
        # 28 bytes in float32: the weight and two moments read and written (24), the gradient read (4).
        moved = w.trained_parameters * 28.0 / (self.machine.bandwidth * self.learners)
        # Ranks that hold rows of the weights bring them together twice a pass and sum gradients once. It goes on at the
        # same time as the arithmetic, so the longer of the two counts.
        sent = 3 * w.shape.parameters * w.width * w.passes * w.minibatches * w.cut_in_rows
        return (max(computed, sent / self.machine.between(w.copy_ranks)) + moved * w.minibatches) * w.epochs

    @property
    def sync(self) -> float:
        """Seconds to bring the weights to the engines: within a device, or from one to another."""
        w = self.work
        sent = (w.adapter_parameters or w.shape.parameters) * w.width
        if self.topology == "colocated":
            # Read once and written once, in the memory of the same device.
            fingerprints = PUSHED * w.shape.parameters * w.width if self.processor else 0.0
            return (2 * sent + fingerprints) / (self.machine.bandwidth * self.learners)
        return sent / self.machine.between(self.machine.count)

    # --- the step ----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> float:
        """Seconds of a step."""
        t = self.times
        # In one process asking ahead hides no learning. It hides verifiers, which judge while others are said.
        hidden = min(t.rollout, t.reward) if self.topology == "colocated" and self.work.staleness else 0.0
        return t.step(self.topology) - hidden

    @property
    def said(self) -> float:
        """Tokens of a step that are learned from."""
        return self.work.sequences * self.work.lengths.answer

    @property
    def tokens_per_second(self) -> float:
        return self.said / self.step

    @property
    def idle(self) -> float:
        """The share of all devices' time in which they do nothing."""
        t, step = self.times, self.step
        used = t.rollout / step * self.engines + (t.reference + t.learn) / step * self.learners
        return max(0.0, 1 - used / self.machine.count)

    @property
    def utilisation(self) -> float:
        """The operations that learning and sampling need, as a share of what all devices could do at their peaks."""
        w = self.work
        head = 2 * w.shape.vocabulary * w.shape.hidden * w.spoken_tokens / w.pass_tokens * w.head
        # What the mathematics asks for alone: 3 forwards of learning and one of sampling. What is computed again, and
        # attention of sampling, count as nothing.
        needed = self.tokens * (self._token_operations + head) * 3 * w.epochs + self.said * 2 * w.shape.active
        return needed / (self.step * self.machine.device.flops * self.machine.count)

    def hours(self, steps: int) -> float:
        """Returns the device hours of these steps: the hours of all devices together."""
        return steps * self.step * self.machine.count / 3600

    def cost(self, steps: int) -> float:
        """The price of these steps in the machine's currency; 0 where it has no price."""
        return self.hours(steps) * self.machine.price


def throughput(
    work: Work, machine: Hardware, assumed: Assumed = Assumed(), engines: int | None = None, workers: int = 1
) -> Throughput:
    """A stage on the devices of a machine.

    Args:
        engines: devices that sample. None: those of the engines that `work` names, or all devices where it names none.
        workers: devices of each engine, where `work` names engines.
    """
    # Without devices of their own the engines share all of them with the learner.
    if not work.engines or machine.count == 1:
        # vLLM samples in a thread or a process of its own, the embedded engine in the learner's thread.
        topology: Topology = "asynchronous" if work.staleness and (work.engines or work.vllm) else "colocated"
        return Throughput(work, machine, topology, engines or machine.count, machine.count, assumed)
    sampling = engines or max(1, min(work.engines * workers, machine.count - 1))
    topology = "asynchronous" if work.staleness else "disaggregated"
    return Throughput(work, machine, topology, sampling, machine.count - sampling, assumed)
