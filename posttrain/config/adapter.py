"""The settings of an adapter, small matrices that train beside frozen weights, and how one is tried out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.system.errors import ConfigError

if TYPE_CHECKING:
    pass

ALL_LINEAR = "all-linear"
"""Every linear layer of the decoder. The language-model head is not one of them."""
MOST_RANK = 65_536
"""More than the rows or columns of a layer of any model."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA (2106.09685): each chosen layer computes W x + scale * B A x. W stays as it was loaded, A and B train. B
    begins at 0, so the policy begins as the model that was loaded. A and B are float32 whatever the dtype of W. There
    is no dropout, because sampler and learner must be the same function."""

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
        """The factor of B A x."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def words(self) -> str:
        """As a line of a report says it."""
        names = dict.fromkeys(t.rpartition(".")[2] for t in self.targets)
        kind = "DoRA" if self.dora else "rsLoRA" if self.rslora else "LoRA"
        return f"{kind} of rank {self.rank}, scale {self.scale:g}, on {', '.join(names)}"


def goes_on(asked: Lora | None, there: Lora, where: str) -> Lora:
    """The adapter of a model that has one already: that one goes on. Raises ConfigError: another one is asked for."""
    if asked not in (None, there):
        raise ConfigError(
            f"{where}: there is an adapter already ({there.words()}), and it is trained further. Leave model.lora out;"
            " or merge it first and give the merged model"
        )
    return there


def check_frozen(lora: Lora | None, quantize: str | None) -> None:
    """ConfigError where weights are to be held in few bits, and all of them train."""
    if quantize is not None and lora is None:
        raise ConfigError(
            f"model.quantize={quantize} is for the frozen weights beneath an adapter, and here all weights train: set"
            " model.lora.rank=16, or leave it out"
        )


def refuse_dora(lora: Lora | None, quantize: str | None) -> None:
    """ConfigError for DoRA over weights in few bits."""
    if quantize is not None and lora is not None and lora.dora:
        raise ConfigError(
            f"model.quantize={quantize} with model.lora.dora=true: PEFT computes DoRA's norms from float weights. Set"
            " one of them off"
        )


def check_served_elsewhere(lora: Lora | None, quantize: str | None) -> None:
    """ConfigError for what vLLM cannot serve."""
    if lora is not None and lora.dora:
        raise ConfigError(
            "model.lora.dora=true with engine=vllm: vLLM serves no DoRA adapters. Set engine=embedded, or"
            " model.lora.dora=false"
        )
    if quantize is not None:
        raise ConfigError(
            f"model.quantize={quantize} with engine=vllm: vLLM would answer from other weights than the learner's. Set"
            " engine=embedded, or leave it out"
        )
