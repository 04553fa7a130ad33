"""The source of the expert choices that a run's learner follows, and what a run cannot do about them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

RouterReplay = Literal["none", "sampler", "start"]
"""The source of the expert choices that the learner follows: see `Model.router_replay`."""


def router_refusals(replay: RouterReplay, balanced: str, records: bool) -> Iterator[str]:
    """Yields a message about each thing that a run cannot do with routers. Each message says what to change.
    `balanced`: the name of a stage with a load-balance loss; '' where none has one. `records`: whether its engine
    records the routers' choices."""
    if replay == "sampler" and not records:
        yield (
            "model.router_replay=sampler reads the experts that the sampler chose, which this library reads from its"
            " own engine alone: vLLM can return them, and that is not built here. Set engine=embedded, or"
            " model.router_replay=start (the learner's own choices at the start of the step)"
        )
    if balanced and replay != "start" and not records:
        yield (
            f"{balanced}.router_aux_loss_coef reads which experts were chosen, and this engine records none: set"
            f" engine=embedded, model.router_replay=start, or {balanced}.router_aux_loss_coef=0"
        )
