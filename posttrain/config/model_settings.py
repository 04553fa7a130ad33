"""Settings of parts of the model: its adapter, its device, its routers; and what they cannot do together."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.system.errors import ConfigError

ALL_LINEAR = "all-linear"
"""Every linear layer of the decoder. The language-model head is not one of them."""
MOST_RANK = 65_536
"""More than the rows or columns of a layer of any model."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA (2106.09685): each chosen layer computes W x + scale * B A x. W stays as it was loaded, A and B train.

    B begins at 0, so the policy begins as the model that was loaded. A and B are float32 whatever the dtype of W. There
    is no dropout, because sampler and learner must be the same function.
    """

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """scale = alpha / rank."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Last words of the names of the layers that get an adapter, such as q_proj,v_proj; all-linear: every linear layer
    of the decoder."""
    rslora: bool = False
    """scale = alpha / sqrt(rank) instead (2312.03732), which keeps the size of updates equal over ranks."""
    dora: bool = False
    """Train also the norm of each output of the layer (DoRA, 2402.09353). Slower."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= MOST_RANK:
            raise ConfigError(
                f"model.lora.rank={self.rank}: must be 1 to {MOST_RANK:,}, and 8 to 256 are usual; model.lora=none"
                " trains all weights"
            )
        if not self.alpha > 0 or not math.isfinite(self.alpha):
            raise ConfigError(f"model.lora.alpha={self.alpha:g}: must be > 0")
        if not self.targets or not all(self.targets):
            raise ConfigError(f"model.lora.targets: name at least one layer, or {ALL_LINEAR}")
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            raise ConfigError(f"model.lora.targets={','.join(self.targets)}: {ALL_LINEAR} holds the others; keep one")

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def words(self) -> str:
        names = dict.fromkeys(t.rpartition(".")[2] for t in self.targets)
        kind = "DoRA" if self.dora else "rsLoRA" if self.rslora else "LoRA"
        return f"{kind} of rank {self.rank}, scale {self.scale:g}, on {', '.join(names)}"


def goes_on(asked: Lora | None, saved: Lora, where: str) -> Lora:
    """The adapter of a model that has one already: that one goes on.

    Raises:
        ConfigError: another one is asked for.
    """
    if asked not in (None, saved):
        raise ConfigError(
            f"{where}: there is an adapter already ({saved.words()}), and it is trained further. Leave model.lora out;"
            " or merge it first and give the merged model"
        )
    return saved


def check_frozen(lora: Lora | None, quantize: str | None) -> None:
    """ConfigError where weights are to be held in few bits, and all of them train."""
    if quantize is not None and lora is None:
        raise ConfigError(
            f"model.quantize={quantize} is for the frozen weights beneath an adapter, and here all weights train: set"
            " model.lora.rank=16, or leave it out"
        )


DEVICE = re.compile(r"cpu|(cuda|mps|xpu)(:\d{1,3})?")
"""Pattern of a device as torch names it. mps is for a torch that has float64 there. The processor has one name, by
which it is told from accelerators."""


def check_device(device: str, offload_activations: bool, offload_optimizer: bool) -> None:
    """Refuse a device that does not exist, and settings that move tensors to the CPU where the device is the CPU.

    Raises:
        ConfigError: it says what to set.
    """
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"model.device={device!r} is no device: use cpu, cuda (cuda:1 for the second GPU) or xpu")
    if offload_activations and device == "cpu":
        raise ConfigError(
            "model.offload_activations=true moves activations from an accelerator to the memory of the CPU; with"
            " model.device=cpu they are there. Set it to false, or keep fewer with"
            " model.gradient_checkpointing=selective"
        )
    if offload_optimizer and device == "cpu":
        raise ConfigError(
            "model.offload_optimizer=true moves the optimizer's state from an accelerator to the memory of the CPU;"
            " with model.device=cpu it is there. Set it to false, or keep less with optimizer.kind=adamw8bit"
        )


RouterReplay = Literal["none", "sampler", "start"]
"""The source of the expert choices that the learner follows: see `Model.router_replay`."""


def router_refusals(replay: RouterReplay, balanced: str, records: bool) -> Iterator[str]:
    """Yields a message about each thing that a run cannot do with routers. Each message says what to change.

    Args:
        balanced: the name of a stage with a load-balance loss; '' where none has one.
        records: whether its engine records the routers' choices.
    """
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
