"""Faults between the model and the transcript: sampling, recording, and attribution of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.types import Stop, TruncationSets
from posttrain.faults.planting import fault

Real = Callable[..., Any]


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
