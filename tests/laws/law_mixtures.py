"""Small mixtures of experts that compute in float64 throughout, for laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.config.run import Model
from posttrain.engine.model.policy_model import Policy, load_policy
from tests.engine.engine_parts import ALPHABET

ARCHS = ("qwen3_moe", "mixtral")


def mixture(arch: str = "qwen3_moe", seed: int = 0, **changes: Any) -> Policy:
    sizes = {"hidden": 32, "layers": 3, "heads": 2, "kv_heads": 1, "ffn": 24, "experts": 6, "experts_per_token": 2}
    return load_policy(Model(arch=arch, context=96, **{**sizes, **changes}), ALPHABET, seed)  # type: ignore[arg-type]


def plain_norms(module: nn.Module) -> None:
    """Norms that compute in the model's own type. Those of transformers go through float32."""
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            eps, weight = part.variance_epsilon, part.weight  # type: ignore[union-attr]
            part.forward = lambda x, w=weight, e=eps: w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + e)  # type: ignore[assignment]


def plain_routers(module: nn.Module) -> None:
    """Routers that compute in the model's own type. Those of transformers take their softmax in float32."""
    for part in module.modules():
        if type(part).__name__.endswith("Router"):
            part.forward = lambda x, router=part: _routed(router, x)  # type: ignore[assignment]


def _routed(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = hidden.reshape(-1, hidden.shape[-1]) @ router.weight.T
    weights, chosen = torch.softmax(logits, -1).topk(router.top_k, -1)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def in_float64(made: Policy) -> Policy:
    made.module.double()
    made.module.set_experts_implementation("eager")
    plain_norms(made.module)
    return replace(made, kernels="reference", share_prefixes=False)
