"""Faults between the model and the transcript: sampling, recording, and attribution of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.types import Segment, Stop, TruncationSets
from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "temperature_one_side",
    seam="posttrain.engine.learner.packed_reader:PackedReader.head",
    what="the sampler draws at its temperature, the learner scores at temperature 1",
    harm="every importance ratio is that of another distribution; T=0.6 gave first-token ratios of 2",
    source="pain 2, trl#4159",
    shows=("rl.sampling.temperature=0.7",),
)
def _(real: Real) -> Real:
    def head(self: Any, packed: Any, *args: Any, **kwargs: Any) -> Any:
        return real(self, replace(packed, sampling=replace(packed.sampling, temperature=1.0)), *args, **kwargs)

    return head


@fault(
    "top_p_one_side",
    seam="posttrain.engine.learner.packed_reader:PackedReader.head",
    what="the sampler cuts the distribution at top_p, the learner scores under the whole one",
    harm="ratios sit at the kept mass instead of 1 and gradients shrink by a tenth",
    source="pain 1, trl#6789",
    shows=("rl.sampling.top_p=0.8",),
)
def _(real: Real) -> Real:
    def head(self: Any, packed: Any, *args: Any, **kwargs: Any) -> Any:
        whole = replace(packed.sampling, top_p=1.0, top_k=0, min_p=0.0)
        return real(self, replace(packed, sampling=whole, kept=None), *args, **kwargs)

    return head


@fault(
    "sampler_colder_than_it_says",
    seam="posttrain.engine.embedded.token_sampler:pick",
    what="the engine draws from a sharper distribution than the one whose log-prob it reports",
    harm="exploration is lost while every log-prob agrees, so no comparison of log-probs can see it",
    source="pain 2; NeMo PR#935",
)
def _(real: Real) -> Real:
    return lambda logp, *args: real((2 * logp).log_softmax(-1), *args)


@fault(
    "siblings_share_seed",
    seam="posttrain.role.rollout:Rollout.episode",
    what="the random numbers of all siblings are those of the first",
    harm="a group is one answer repeated: no spread, no credit, nothing is learned",
    source="pain 25: seeds identical across workers",
)
def _(real: Real) -> Real:
    async def episode(self: Any, task: Any, visit: int, sibling: int, *args: Any, **kwargs: Any) -> Any:
        return replace(await real(self, task, visit, 0, *args, **kwargs), sibling=sibling)

    return episode


@fault(
    "version_off_by_one",
    seam="posttrain.engine.embedded.schedule.slots:Slots.say",
    what="the engine stamps its tokens with the version before the one it serves",
    harm="staleness, corrections and canaries are computed for other weights",
    source="pain 4",
)
def _(real: Real) -> Real:
    return lambda self, at, drawn, version: real(self, at, drawn, max(version - 1, 0))


@fault(
    "stop_reason_lost",
    seam="posttrain.engine.embedded.schedule.slots:Slots.turn",
    what="an answer that was cut off is reported as finished",
    harm="overlong filters and shaping never act, and truncation looks like a wrong answer",
    source="pain 17",
    shows=("rl.sampling.max_tokens=2",),
)
def _(real: Real) -> Real:
    return lambda *args, **kwargs: replace(real(*args, **kwargs), stop=Stop.SAID)


@fault(
    "eos_dropped",
    seam="posttrain.core.transcript:Transcript.say",
    what="the stop token that ended a turn is left out of the transcript",
    harm="stopping is never rewarded: answers grow until they are cut off",
    source="pain 22",
)
def _(real: Real) -> Real:
    def say(self: Any, said: Any) -> None:
        short = (
            said
            if said.stop is not Stop.SAID
            else replace(said, ids=said.ids[:-1], logp=said.logp[:-1], version=said.version[:-1], kept=_cut(said.kept))
        )
        real(self, short)

    return say


@fault(
    "eos_twice",
    seam="posttrain.core.transcript:Transcript.say",
    what="the stop token that ended a turn is written twice",
    harm="the policy learns to go on after the end, and every length is off by one",
    source="pain 22, trl#4481",
)
def _(real: Real) -> Real:
    def say(self: Any, said: Any) -> None:
        twice = np.append(np.arange(len(said.ids)), len(said.ids) - 1)
        again = said.stop is Stop.SAID and said.kept is None
        real(
            self,
            replace(said, ids=said.ids[twice], logp=said.logp[twice], version=said.version[twice]) if again else said,
        )

    return say


@fault(
    "mask_shifted",
    seam="posttrain.core.transcript:Transcript.segment",
    what="the mask of spoken tokens is one position late",
    harm="the last prompt token is trained on and the stop token is not",
    source="pain 14, verl PR#7322",
)
def _(real: Real) -> Real:
    def segment(self: Any) -> Segment:
        s = real(self)
        return replace(s, mask=np.roll(s.mask, 1))

    return segment


@fault(
    "logp_shifted",
    seam="posttrain.core.transcript:Transcript.say",
    what="the sampler's log-probs belong to the neighbouring token",
    harm="every ratio divides two unrelated numbers",
    source="pain 3",
)
def _(real: Real) -> Real:
    return lambda self, said: real(self, replace(said, logp=np.roll(said.logp, 1)))


@fault(
    "observation_unmasked",
    seam="posttrain.core.transcript:Transcript.see",
    what="what a tool showed counts as said by the policy",
    harm="the policy is trained to predict the tool's output",
    source="pain 14, verl#3720",
    needs="tool",
)
def _(real: Real) -> Real:
    def see(self: Any, ids: Any) -> None:
        if not len(self):
            return real(self, ids)
        n = len(ids)
        return self._append(
            ids, np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32) + self._version[-1][-1]
        )

    return see


@fault(
    "labels_shifted",
    seam="posttrain.core.batch:Packed.of",
    what="labels are shifted once too often, so every token is predicted from itself",
    harm="log-probs near 0 for everything: loss falls at once and nothing is learned",
    source="trap 13, pain 10",
)
def _(real: Real) -> Real:
    def of(cls: Any, *args: Any, **kwargs: Any) -> Any:
        packed = real(cls, *args, **kwargs)
        return replace(packed, source_M=np.minimum(packed.source_M + 1, len(packed.ids_N) - 2))

    return of


@fault(
    "state_leaks",
    seam="posttrain.engine.model.recurrent_state:SeparateRows.hidden",
    what="sequences with a recurrent state are packed one behind the other",
    harm="every sequence but the first begins in the state of another one's end",
    source="pain 10",
    needs="state",
)
def _(real: Real) -> Real:
    def hidden(self: Any, packed: Any, at: Any = None, routing: Any = None) -> Any:
        from posttrain.engine.model.recurrent_state import rows_alone

        whole = np.array([len(packed.ids_N)])
        return rows_alone(self._out, packed.ids_N, whole, packed.source_M if at is None else at, self._layout)

    return hidden


def _cut(kept: TruncationSets | None) -> TruncationSets | None:
    return None if kept is None else TruncationSets.of(kept.sets()[:-1])
