"""Runs inside vLLM's worker: loads new weights, and reads back the weights that the worker computes with.

`DirectLoad` is a weight transfer backend in vLLM's own registry. It takes named Hugging Face tensors, in process or in
a safetensors file. `ServedWeights` is a worker extension. It recovers every tensor, under its Hugging Face name, from
what the layers multiply with now, so the fingerprint is that of the served weights, not of a copy of what was sent. One
of several workers takes its part of each tensor (vLLM's own loader cuts it), and reads back that part (`worker_parts`).

Importing this module registers the backend. A server imports it because `--worker-extension-cls` names the extension.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import current_process, parent_process
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.vllm.launch import GRACE
from posttrain.engine.vllm.layer_cuts import cut_of
from posttrain.engine.vllm.start_vllm import BACKEND
from posttrain.engine.vllm.worker_parts import WorkerPart

ROWS = 512
"""Rows of the identity matrix in one probe of a layer. It bounds the memory of a probe; what is read is the same."""
TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
"""Endings of the names of GPT-2's Conv1D weights. They are [in, out], and vLLM transposes them to [out, in]."""
ADAPTER = re.compile(r"(.+)\.lora_([AB])\.default\.weight")
"""(layer, A or B) of an adapter's tensor: `layers.0.q_proj.lora_A.default.weight` is (`layers.0.q_proj`, `A`)."""
_ZEROS = "_posttrain_negative_zeros"
"""Attribute of the model: by tensor, a mask of the sent weights that were -0.0, which products cannot tell from 0.0."""


@dataclass
class DirectInit(WeightTransferInitInfo):
    """vLLM requires this type; it has no fields."""


@dataclass
class DirectUpdate(WeightTransferUpdateInfo):
    """One chunk of weights: tensors of this process, or a safetensors file."""

    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    path: str | None = None


class DirectLoad(WeightTransferEngine[DirectInit, DirectUpdate]):
    """Loads whole Hugging Face tensors into vLLM's layers. vLLM's own loader repacks them."""

    init_info_cls = DirectInit
    update_info_cls = DirectUpdate

    def init_transfer_engine(self, init_info: DirectInit) -> None:
        pass

    def start_weight_update(self) -> None:
        """Prepare vLLM's layers for whole new weights."""
        initialize_layerwise_reload(self.model)
        setattr(self.model, _ZEROS, {})

    def receive_weights(self, update_info: DirectUpdate) -> None:
        """Load one chunk of weights, and note which of them were -0.0."""
        sent = update_info.tensors
        if update_info.path is not None:
            with safe_open(update_info.path, framework="pt") as file:
                sent = [(name, file.get_tensor(name)) for name in file.keys()]  # noqa: SIM118
        zeros = getattr(self.model, _ZEROS)
        for name, tensor in sent:
            if tensor.is_floating_point() and bool((where := (tensor == 0) & tensor.signbit()).any()):
                zeros[name] = where
        self.model.load_weights(iter(sent))

    def finish_weight_update(self) -> None:
        """Let vLLM pack the new weights as its layers need them."""
        finalize_layerwise_reload(self.model, self.model_config)
        # No tensor comes for a head that is tied to the embedding, so vLLM's reload leaves its packed copy as it was.
        for layer in self.model.modules():
            if isinstance(layer, ParallelLMHead) and _packed(layer):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        pass


class ServedWeights:
    """Methods added to vLLM's worker class; `collective_rpc` calls them by name."""

    def posttrain_facts(self) -> dict[str, Any]:
        """Settings that a client checks before it uses this server's log-probs."""
        config = self.vllm_config  # type: ignore[attr-defined]
        model, lora = config.model_config, config.lora_config
        return {
            "logprobs_mode": model.logprobs_mode,
            "generation_config": model.generation_config,
            "max_logprobs": model.max_logprobs,
            "max_model_len": model.max_model_len,
            "dtype": str(model.dtype).removeprefix("torch."),
            "vocabulary": model.get_vocab_size(),
            "workers": config.parallel_config.world_size_across_dp,
            "tensor_parallel": config.parallel_config.tensor_parallel_size,
            "max_loras": 0 if lora is None else lora.max_loras,
            "max_lora_rank": 0 if lora is None else lora.max_lora_rank,
        }

    def posttrain_digests(self, wanted: str) -> dict[str, Any]:
        """{"digests": name -> digest of each served tensor, "parts": name -> this worker's part of a cut tensor}, under
        the names, dtypes and shapes of the learner; {"error": why} where a tensor cannot be recovered. The digest of a
        tensor that is cut among workers is that of this worker's part. `wanted`: JSON list of [name, dtype, shape]."""
        reader = _TensorReader(self.get_model(), json.loads(wanted))  # type: ignore[attr-defined]
        try:
            digests = fingerprints(reader.tensors())
        except LookupError as error:
            return {"error": str(error)}
        return {"digests": digests, "parts": {name: part.plain() for name, part in reader.parts.items()}}

    def posttrain_places(self, names: str) -> dict[str, Any]:
        """{"missing": the tensors of an adapter for which no layer has a place}. `names`: JSON list of its tensors."""
        reader = _TensorReader(self.get_model(), [])  # type: ignore[attr-defined]
        return {"missing": [n for n in json.loads(names) if reader.stack(n) is None]}


class _TensorReader:
    """Reads Hugging Face tensors from a vLLM model on one worker."""

    def __init__(self, model: nn.Module, wanted: list[tuple[str, str, list[int]]]) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._wanted = {name: (getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wanted}
        self._fused = {
            # vLLM's mapping is from its fused layer to the Hugging Face ones; this is the other way round.
            shard: (fused, shards)
            for fused, shards in getattr(model, "packed_modules_mapping", {}).items()
            for shard in shards
        }
        self._zeros: dict[str, Tensor] = getattr(model, _ZEROS, {})
        self._heads = [m for m in self._modules.values() if isinstance(m, ParallelLMHead)]
        self._adapted = any(ADAPTER.fullmatch(name) for name in self._wanted)
        self.parts: dict[str, WorkerPart] = {}
        """By name: the part that this worker holds of a tensor that is cut among workers."""

    def tensors(self) -> list[tuple[str, Tensor]]:
        """(name, values) of every wanted tensor, or of this worker's part of it (`parts`)."""
        read = [(name, self._tensor(name, dtype, shape)) for name, (dtype, shape) in self._wanted.items()]
        if self._adapted:
            self._check_others()
        return read

    def stack(self, name: str) -> Tensor | None:
        """[rows, columns]: the room for a tensor of the one adapter that is served; None where there is none."""
        named = ADAPTER.fullmatch(name)
        if named is None:
            return None
        path, matrix = named.groups()
        module, index = self._place(path)
        stacks = getattr(module, f"lora_{matrix.lower()}_stacked", None)
        at = index or 0
        # [adapters, 1, rows, columns] for each fused matrix; there is one adapter.
        return stacks[at][0, 0] if isinstance(stacks, tuple) and at < len(stacks) else None

    def _place(self, path: str) -> tuple[nn.Module | None, int | None]:
        """The module of a learner's layer, and which of its fused matrices that is; None: it is not fused."""
        parent, _, last = path.rpartition(".")
        module = self._modules.get(path)
        if module is None and last in self._fused:
            fused, shards = self._fused[last]
            return self._modules.get(f"{parent}.{fused}"), shards.index(last)
        return module, None

    def _adapter_part(self, name: str) -> WorkerPart | None:
        """This worker's part of an adapter's tensor; None: it holds all of it. A is cut with the layer's input, that is
        where the weight is cut by columns; B is cut with the output, where it is cut by rows."""
        named = ADAPTER.fullmatch(name)
        module, index = self._place(named[1]) if named else (None, None)
        cut = None if module is None else cut_of(getattr(module, "base_layer", module), "weight")
        cut_one = "A" if cut is not None and cut.axis else "B"
        return None if cut is None or named is None or named[2] != cut_one else cut.part(index)

    def _adapter(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The values of an adapter's tensor. The rest of the room that vLLM keeps for it must hold zeros."""
        room = self.stack(name)
        if (part := self._adapter_part(name)) is not None:
            self.parts[name], shape = part, part.shape(shape)
        if room is None or len(shape) != 2 or any(a > b for a, b in zip(shape, room.shape, strict=True)):
            raise LookupError(f"{name} has no place in vLLM's {type(self._model).__name__}")
        value = room[: shape[0], : shape[1]]
        # The room is as large as the greatest rank. Numbers beside the adapter's own would be added to every output.
        if int(value.count_nonzero()) != int(room.count_nonzero()):
            raise LookupError(f"beside {name} vLLM's layer holds numbers of another adapter")
        return value

    def _check_others(self) -> None:
        """LookupError where no adapter is served, or where layers add something that was not sent."""
        manager: Any = self._model.lora_manager
        if None in manager.lora_index_to_id:
            raise LookupError("vLLM serves no adapter")
        # By address, because several names may stand for views of one fused layer.
        addresses = {s.data_ptr() for n in self._wanted if (s := self.stack(n)) is not None}
        for path, module in self._modules.items():
            stacks = getattr(module, "lora_b_stacked", ())
            for b in stacks if isinstance(stacks, tuple) else (stacks,):
                # B alone: where it is 0, A adds nothing.
                if b[0, 0].data_ptr() not in addresses and bool(b[0].any()):
                    raise LookupError(f"vLLM's layer {path} adds an adapter's output, and none was sent for it")

    def _tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The values of a tensor, or of this worker's part of it, in the learner's dtype. LookupError where that dtype
        cannot hold them, or the shapes differ."""
        adapter = ADAPTER.fullmatch(name) is not None
        value = self._adapter(name, shape) if adapter else self._value(name, shape)
        part = self.parts.get(name)
        if tuple(value.shape) != (wanted_shape := shape if part is None else part.shape(shape)):
            raise LookupError(f"{name} is {wanted_shape} in the learner and {tuple(value.shape)} in vLLM")
        # The dtypes may differ where one holds the other's numbers exactly, which turning the value back shows.
        in_dtype = value.to(dtype)
        if in_dtype.dtype != value.dtype and not torch.equal(in_dtype.to(value.dtype), value):
            raise LookupError(f"{name} is {dtype} in the learner; vLLM serves it in {value.dtype} with other values")
        if name in self._zeros:
            # What the product gives as 0 is given the sign that was sent. Only zeros: a weight that is not 0 there
            # stays wrong, and the digest tells.
            zeros = self._zeros[name] if part is None else part.of(self._zeros[name])
            in_dtype = torch.where(zeros.to(in_dtype.device) & (in_dtype == 0), -0.0, in_dtype)
        # vLLM read the weights beneath an adapter from a file, so their -0.0 were not noted. Adding 0.0 makes each 0.0,
        # as in the digests that they are compared with (`HotLoad.served_beneath`).
        return in_dtype + 0.0 if self._adapted and in_dtype.is_floating_point() else in_dtype

    def _value(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Returns the values of a tensor that this worker holds; `parts` then says which part that is."""
        plain = name.replace(".base_layer.", ".")
        path, _, leaf = plain.rpartition(".")
        parent, _, last = path.rpartition(".")
        # The learner's layer is one of vLLM's, under the same path, or one of several that vLLM has fused into one.
        if (module := self._without_adapter(path)) is not None and hasattr(module, leaf):
            whole = self._leaf(module, leaf)
            # A head that is tied to this embedding may multiply with a packed copy, which is what counts.
            if leaf == "weight" and any(h.weight is module.weight for h in self._heads):
                whole = self._tied(module, whole)
            turned = type(self._model).__name__.startswith("GPT2") and plain.endswith(TRANSPOSED)
            if (cut := cut_of(module, leaf)) is not None:
                part = cut.part()
                self.parts[name] = WorkerPart(1 - part.axis, part.ranges) if turned else part
                shape = self.parts[name].shape(shape)
            whole = whole.t() if turned else whole
            # vLLM fills embeddings up to a round number of rows.
            return whole[: shape[0]] if hasattr(module, "org_vocab_size") else whole
        if last in self._fused:
            fused, shards = self._fused[last]
            module = self._without_adapter(f"{parent}.{fused}")
            if module is not None and (cut := cut_of(module, leaf)) is not None:
                index = shards.index(last)
                self.parts[name], (begin, end) = cut.part(index), cut.place(index)
                return self._leaf(module, leaf)[begin:end]
            if module is not None:
                # Not cut: the fused matrices lie one below the other, in the order of the mapping, and the learner's
                # shapes say how many rows each has.
                begin = sum(self._rows(f"{parent}.{s}", leaf) for s in shards[: shards.index(last)])
                return self._leaf(module, leaf)[begin : begin + shape[0]]
        raise LookupError(
            f"{name} has no place of its own in vLLM's {type(self._model).__name__}, so what is served cannot be"
            " compared with what was sent. Use engine=embedded for this architecture"
        )

    def _without_adapter(self, path: str) -> nn.Module | None:
        """The module at a path. Of a layer that vLLM has wrapped for adapters it is the layer inside."""
        module = self._modules.get(path)
        return getattr(module, "base_layer", module)

    def _rows(self, path: str, leaf: str) -> int:
        """Rows of a layer's tensor, whose name says whether it lies beneath an adapter."""
        name = f"{path}.{leaf}" if f"{path}.{leaf}" in self._wanted else f"{path}.base_layer.{leaf}"
        return self._wanted[name][1][0]

    def _leaf(self, module: nn.Module, leaf: str) -> Tensor:
        """A module's weight or bias, as the module multiplies with it."""
        if leaf == "weight" and isinstance(module, LinearBase | ParallelLMHead) and _packed(module):
            return _multiplied(module)
        return getattr(module, leaf).detach()

    def _tied(self, module: nn.Module, whole: Tensor) -> Tensor:
        """The embedding's weight where the head multiplies with the same numbers; else the head's, which differs."""
        for head in self._heads:
            if head.weight is module.weight and _packed(head):
                weight = _multiplied(head)
                if not torch.equal(weight, whole):
                    return weight
        return whole


def _packed(layer: nn.Module) -> bool:
    """Returns whether the layer multiplies with a packed copy of its weight. vLLM for CPU keeps only this copy."""
    return hasattr(layer, "cpu_linear")


def _multiplied(layer: Any) -> Tensor:
    """[out, in]: the matrix that the layer multiplies with, from its products with the rows of the identity. This is
    exact, because each output is one weight times one plus zeros."""
    if layer.weight.numel():
        out, size, dtype = *layer.weight.shape, layer.weight.dtype
    else:
        out, size, dtype = layer.output_size_per_partition, layer.input_size_per_partition, layer.params_dtype
    matrix = torch.empty((out, size), dtype=dtype)
    for begin in range(0, size, ROWS):
        # Rows begin to begin + ROWS of the identity. Their product is [ROWS, out]: these columns of the weight, turned.
        rows = torch.zeros((min(ROWS, size - begin), size), dtype=dtype)
        rows.diagonal(begin).fill_(1)
        matrix[:, begin : begin + len(rows)] = layer.cpu_linear(rows, layer.weight, None).t()
    return matrix


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, DirectLoad)


def _end_with(engine: Any) -> None:
    """End this worker when the process of its engine has ended. vLLM's worker looks for that only between two calls,
    and inside of one can spin for ever, where another worker that it waits for was killed too."""
    engine.join()
    time.sleep(GRACE)
    os._exit(1)


# Only in a worker's own process: the engine in one process imports this module too, and has no engine above it.
if current_process().name.startswith("VllmWorker") and (_engine := parent_process()) is not None:
    threading.Thread(target=_end_with, args=(_engine,), name="looks for its engine", daemon=True).start()
