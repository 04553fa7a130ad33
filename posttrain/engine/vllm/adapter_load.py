"""Adapters in vLLM. The weights beneath are read once, at the start; each update then loads the files of one adapter.

What vLLM adds to a layer is B A x, so B is sent with the scale already in it: B is float32, and the engine holds A and
B in the dtype of the model. After each update both are read back from vLLM's layers, as are the weights beneath.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from posttrain.config.model_settings import Lora
from posttrain.engine.adapters.adapter_modules import adapter_tensors, base_tensors, target_names
from posttrain.engine.adapters.saved_adapter import CONFIG, PREFIX, WEIGHTS, written_name
from posttrain.engine.files.fingerprint import digest_of, fingerprints
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.vllm.sampler_requests import ReadBack
from posttrain.engine.vllm.worker_parts import served
from posttrain.system.errors import ConfigError, EngineError

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM reserves memory."""
BASE = "model.safetensors"


class HotLoad:
    """What an engine needs to serve the adapters of one policy in the model's dtype, and to know that it does."""

    def __init__(self, policy: Policy, lora: Lora) -> None:
        self.lora = lora
        self._dtype = policy.dtype
        # The names by which PEFT and vLLM find the layers with an adapter.
        self._targets = target_names(policy.module)
        adapter = adapter_tensors(policy.module)
        self.shapes = {n: tuple(t.shape) for n, t in adapter.items()}
        # The policy's own tensors beneath the adapter. Of several workers each serves parts of them.
        self._base = {n: t.detach() for n, t in named_tensors(policy.module) if n not in adapter}
        self.beneath = fingerprints(self._base.items())
        # With every -0.0 as 0.0: a layer's products cannot tell these apart.
        self.served_beneath = fingerprints((n, without_negative_zeros(t)) for n, t in self._base.items())

    @staticmethod
    def of(policy: Policy) -> HotLoad | None:
        """None where all weights train."""
        return None if policy.lora is None else HotLoad(policy, policy.lora)

    def write(self, folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> int:
        """Write the files of one adapter, which only this user can read. Returns the bytes of its weights."""
        folder.mkdir(mode=0o700)
        sent = {PREFIX + written_name(n): t.contiguous().cpu() for n, t in self.sent(tensors).items()}
        save_file(sent, folder / WEIGHTS, metadata={"format": "pt"})
        # alpha = rank makes vLLM's own scale 1, because the scale is in B already.
        rank = self.lora.rank
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": self._targets, "bias": "none"}
        (folder / CONFIG).write_text(json.dumps(config))
        return sum(t.nbytes for t in sent.values())

    def sent(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """The adapter as the engine should hold it: the scale is in B, in the engine's dtype."""
        scale = self.lora.scale
        # Scaled in float32 and then rounded, so that each number of B is rounded once.
        return {n: (t.detach() * scale if ".lora_B." in n else t.detach()).to(self._dtype) for n, t in tensors}

    def wanted(self) -> ReadBack:
        """Every tensor that is read back from the engine."""
        beneath = [(n, _dtype_name(t.dtype), list(t.shape)) for n, t in self._base.items()]
        return [*beneath, *((n, _dtype_name(self._dtype), list(shape)) for n, shape in self.shapes.items())]

    def refuse(self, missing: list[str]) -> None:
        """EngineError where some layers of the adapter have no place in the engine."""
        if missing:
            layers = ", ".join(dict.fromkeys(n.partition(".lora_")[0].rpartition(".")[2] for n in missing))
            raise EngineError(
                f"vLLM serves no adapters on the layers {layers} of this model ({len(missing)} tensors). Name others by"
                " model.lora.targets, or set engine=embedded"
            )

    def confirm(self, answers: Sequence[Mapping[str, Any]], tensors: list[tuple[str, Tensor]]) -> str:
        """Check what the engine serves by the digests that were read back, of each worker. Returns the fingerprint of
        the learner's weights; EngineError where the engine serves other ones."""
        # Computed again from what was given, not taken from the files that were written.
        adapter = {n: without_negative_zeros(t) for n, t in self.sent(tensors).items()}

        def expected(name: str) -> Tensor | None:
            beneath = self._base.get(name)
            return adapter.get(name) if beneath is None else without_negative_zeros(beneath)

        wanted = {**self.served_beneath, **fingerprints(adapter.items())}
        read_back, workers = served(answers, expected, wanted)
        wrong = sorted(n for n, digest in wanted.items() if read_back.get(n) != digest)
        if wrong:
            kind = "adapter" if set(wrong) <= set(adapter) else "weights beneath the adapter"
            raise EngineError(
                f"it serves another {kind} than was sent: {len(wrong)} tensors differ, such as {wrong[0]!r}"
                f"{f' ({workers})' if workers else ''}. Set engine=embedded for this model"
            )
        # Of the learner's own tensors, from which follows what is served: the trainer compares it with its own.
        return digest_of({**self.beneath, **fingerprints(tensors)})


def lora_arguments(lora: Lora | None) -> dict[str, Any]:
    """vLLM's engine arguments for adapters; none where all weights train."""
    if lora is None:
        return {}
    return {"enable_lora": True, "max_lora_rank": rank_for(lora), "load_format": "safetensors"}


def rank_for(lora: Lora) -> int:
    """The smallest of vLLM's ranks that has room for the adapter. ConfigError where there is none."""
    if lora.rank > RANKS[-1]:
        raise ConfigError(
            f"model.lora.rank={lora.rank}: vLLM serves ranks up to {RANKS[-1]}. Lower it, or set engine=embedded"
        )
    return next(r for r in RANKS if r >= lora.rank)


def write_base(policy: Policy, folder: Path) -> None:
    """Write the weights beneath the adapter into the folder of the model's description, for the start of the engine."""
    weights = {n: t.detach().contiguous().cpu() for n, t in base_tensors(policy.module).items()}
    save_file(weights, folder / BASE, metadata={"format": "pt"})


def check_served(policy: Policy) -> None:
    """ConfigError where vLLM has no such model, or none with adapters, before it starts."""
    if policy.lora is None:
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    name = type(policy.module).__name__
    entry = ModelRegistry.models.get(name)
    if entry is None or not supports_lora(entry.load_model_cls()):
        raise ConfigError(
            f"model.lora with engine=vllm: vLLM serves no adapters of {name}. Set engine=embedded, or train all weights"
            " with model.lora=none"
        )


def without_negative_zeros(tensor: Tensor) -> Tensor:
    """Every -0.0 as 0.0. Products of a layer cannot tell them apart."""
    return tensor.detach() + 0.0 if tensor.is_floating_point() else tensor.detach()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
