"""Layers of a learner with fewer passes over memory: norms, rotation of heads and the gate as one operation each.

Between its matrix products a layer of the Llama family only reads and writes memory, in some forty operations of
transformers. At 1 M parameters they take 40 % of a step. Here each is a compiled operation (`native_code/training.h`),
which also keeps less for the backward. The products are the layer's own modules, with their adapters; plain ones of one
input are made together (`products`). The model's methods are replaced only while it runs, so that neither the engine,
which reads the same module where the policy has an adapter, nor what is saved sees them.

Axis letters: N packed positions, E hidden width, H heads, D head width, F feed-forward width.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.config.engines import KernelChoice
from posttrain.engine.cpu.compile_native import addresses, library
from posttrain.engine.embedded.cache.fused_decoder import FAMILIES, window_of
from posttrain.engine.head.kernel_table import Kernel, add_forms, in_c, kernel
from posttrain.engine.head.readout import CANARY, ReadOut, canary, read_out
from posttrain.engine.layers import attention
from posttrain.engine.layers.attention import Layout, PackedLayout
from posttrain.engine.layers.embedding_gradient import SelectRows, rows_at
from posttrain.engine.layers.layer_products import added, is_product, linear, products, summed
from posttrain.system.errors import EngineError

CHUNK = 256
"""Rows whose gradients of a weight are summed together (`native_code/training.h`)."""
BOUND = 1e-4
"""Largest difference from the plain layers that counts as rounding, of hidden states and of gradients, relative to the
largest number."""
ROUNDINGS = 8
"""A difference above `BOUND` is accepted where the fused layers are off from float64 by at most this many times the
rounding of the plain layers, which is how far these are off from float64."""
READ = np.array([5, 6, 9, 9, *range(12, CANARY - 1)])
"""Positions of the canary which are read once more by `hidden_at`. One of them stands twice."""


def _chunks(rows: int) -> int:
    """Number of chunks of `CHUNK` rows, the last perhaps shorter."""
    return -(-rows // CHUNK)


class RMSNorm(torch.autograd.Function):
    """x / rms(x) * weight over the last axis."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, width = x.contiguous(), x.shape[-1]
        out, inverse = torch.empty_like(x), x.new_empty(x.numel() // width)
        library().rms_rows(*addresses(x, weight), eps, *addresses(out, inverse), len(inverse), width)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        g, dx, width = grads[0].contiguous(), torch.empty_like(x), x.shape[-1]
        # C sums each chunk of rows in order, and the chunks are added here: the bits do not depend on the threads.
        parts = x.new_empty(_chunks(len(inverse)), width)
        library().rms_rows_back(*addresses(g, x, weight, inverse, dx, parts), len(inverse), width)
        return dx, parts.sum(0) if ctx.needs_input_grad[1] else None, None


class Heads(torch.autograd.Function):
    """Heads [..., H, D] by their root mean square, times the weight if there is one, rotated by cosine and sine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, cosine: Tensor, sine: Tensor) -> Tensor:
        x = x.contiguous()
        heads, width = x.shape[-2:]
        rows = x.numel() // (heads * width)
        out, inverse = torch.empty_like(x), x.new_empty(rows * heads if weight is not None else 0)
        tables = addresses(cosine, sine, out, inverse)
        library().heads_rows(*addresses(x, weight), eps, *tables, rows, heads, width)
        # without a norm the rotation is linear, and its backward reads nothing of x
        ctx.save_for_backward(None if weight is None else x, weight, inverse, cosine, sine)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
        x, weight, inverse, cosine, sine = ctx.saved_tensors
        g = grads[0].contiguous()
        dx = torch.empty_like(g)
        heads, width = g.shape[-2:]
        rows = g.numel() // (heads * width)
        parts = g.new_empty(_chunks(rows) if weight is not None else 0, width)
        tensors = addresses(g, x, weight, inverse, cosine, sine, dx, parts)
        library().heads_rows_back(*tensors, rows, heads, width)
        return dx, parts.sum(0) if weight is not None and ctx.needs_input_grad[1] else None, None, None, None


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up, times W where given. The backward computes it again: kept, it is a sixth of a layer's memory."""

    @staticmethod
    def _gated(gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        out = torch.empty_like(gate)
        library().gate_rows(*addresses(gate, up, out), out.numel())
        return out

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        gated = SwiGLU._gated(gate, up)
        return gated if weight is None else linear(gated, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        needed, of_weight, of_bias, g = ctx.needs_input_grad, None, None, grads[0].contiguous()
        if weight is not None:
            rows = g.view(-1, g.shape[-1])
            g = added(None, rows, weight).view_as(gate)
            of_bias = rows.sum(0) if needed[3] else None
            if needed[2]:
                of_weight = summed([rows], SwiGLU._gated(gate, up).view(-1, gate.shape[-1]))[0]
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        library().gate_rows_back(*addresses(g, gate, up, dgate, dup), g.numel())
        return dgate, dup, of_weight, of_bias


# --- the modules' methods ---------------------------------------------------------------------------------------------


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    """Stands in place of a norm's forward."""
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    """Stands in place of a feed-forward layer's forward."""
    inner, down = products(x, self.gate_proj, self.up_proj), self.down_proj
    if x.dtype == torch.float32 and is_product(down):
        return SwiGLU.apply(*inner, down.weight, down.bias)  # pyright: ignore[reportReturnType]
    gated: Any = SwiGLU.apply(*inner)
    return products(gated, down)[0]


def _attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    *args: Any,
    read: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Returns the output of the attention, at the positions `read` alone where they are given."""
    shape = hidden_states.shape[:-1]
    # C reads one row of the tables for each position, so a table that all rows share is written out.
    cosine, sine = (x.expand(*shape, -1).contiguous() for x in position_embeddings)

    def rotated(projected: Tensor, norm: Any | None) -> Tensor:
        heads = projected.view(*shape, -1, self.head_dim)
        scale = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        out: Any = Heads.apply(heads, *scale, cosine, sine)
        return out.transpose(1, 2)

    q, k, v = products(hidden_states, self.q_proj, self.k_proj, self.v_proj)
    query = rotated(q, getattr(self, "q_norm", None))
    key = rotated(k, getattr(self, "k_norm", None))
    value = v.view(*shape, -1, self.head_dim).transpose(1, 2)
    attended, _ = attention.attend(self, query, key, value, None, self.scaling, sliding_window=window_of(self))
    attended = attended.reshape(*shape, -1)
    return products(attended if read is None else _selected(attended, read), self.o_proj)[0], None


def _selected(x: Tensor, read: Tensor) -> Tensor:
    """The rows `read` [R] of x [1, N, E]: [1, R, E]."""
    return SelectRows.apply(x[0], read, None).unsqueeze(0)  # pyright: ignore[reportOptionalMemberAccess]


def _last_layer(self: Any, read: Tensor, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """A layer after which only the positions `read` count. Keys and values are made of all."""
    attended = self.self_attn(self.input_layernorm(hidden_states), read=read, **kwargs)[0]
    hidden_states = _selected(hidden_states, read) + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


METHODS = {"RMSNorm": _norm, "MLP": _feed_forward, "Attention": _attention}
"""The forward method of each part of a layer, by its class's name without the family. Products are modules of their
own: they may have an adapter, or be quantised."""


# --- the read-out -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FusedReadOut(ReadOut):
    """A read-out whose layers run with `methods`: parts of layers, each with the forward that stands in for its own."""

    methods: tuple[tuple[nn.Module, MethodType], ...] = ()

    def hidden_at(self, input_ids: Tensor, position_ids: Tensor, layout: Layout, at_M: np.ndarray) -> Tensor:
        """Returns the hidden states as the base method does. For positions that are not read, such as prompts, the last
        layer computes keys and values only."""
        # Segments that begin alike read one position several times: it is computed once, and repeated at the end.
        read_R, place_M = np.unique(at_M, return_inverse=True)
        last = self.layers[-1]
        # The plain pass runs where these methods do not, where somebody else has replaced the last layer's forward (it
        # must run), and where all positions are read, or none: there is then nothing to leave out.
        if not self._uses_methods() or "forward" in last.__dict__ or len(read_R) in (0, input_ids.numel()):
            return super().hidden_at(input_ids, position_ids, layout, at_M)
        read = torch.from_numpy(read_R.astype(np.int64)).to(input_ids.device)
        # An attribute of the instance hides the method of its class, and deleting it brings the method back.
        last.__dict__["forward"] = partial(_last_layer, last, read)
        try:
            states = self.hidden(input_ids, position_ids, layout)
        finally:
            del last.__dict__["forward"]
        return states if np.array_equal(read_R, at_M) else rows_at(states, place_M)

    def _run(self, ids: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        if not self._uses_methods():
            return super()._run(ids, positions, layout)
        with self.replaced():
            return super()._run(ids, positions, layout)

    def _uses_methods(self) -> bool:
        """Returns whether a pass runs with these methods."""
        weights = (p for part, _ in self.methods for p in part.parameters(recurse=False))
        return all(w.dtype == torch.float32 for w in weights) and not any(map(_bypasses_replacement, self.layers))

    @property
    def layers(self) -> Any:
        """The decoder's layers."""
        decoder: Any = self.decoder
        return decoder.layers

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Inside, the modules have these methods."""
        for part, method in self.methods:
            part.__dict__["forward"] = method
        try:
            yield
        finally:
            for part, _ in self.methods:
                del part.__dict__["forward"]


def _bypasses_replacement(layer: Any) -> bool:
    """Returns whether a layer's forward runs where the replaced methods are not seen: compiled by torch, or computed
    again in the backward pass, outside of `_run`."""
    return layer._compiled_call_impl is not None or (layer.training and getattr(layer, "gradient_checkpointing", False))


def training_read_out(module: PreTrainedModel, kernels: KernelChoice) -> ReadOut:
    """The read-out of a model that a learner runs, with the layers that its kernels choose.

    A model on `meta` cannot run here. Its fused layers are compared once its weights are read
    (`engine.parallel.sharded_proofs`).
    """
    plain = read_out(module)
    device = torch.device("cpu") if plain.weight.is_meta else plain.weight.device
    return kernel("layers", device, module.dtype, kernels).function(module, plain)


def fused_read_out(module: PreTrainedModel, plain: ReadOut) -> ReadOut:
    """The read-out with fused layers; `plain` itself where the model's layers are of another kind. Both are compared,
    except for a model on `meta`.

    Raises:
        EngineError: fused and plain layers differ by more than rounding.
    """
    prefix, config = FAMILIES.get(type(module).__name__), module.config
    if prefix is None or config.hidden_act != "silu":
        return plain
    names = {prefix + ending: method for ending, method in METHODS.items()}
    parts = [p for p in plain.decoder.modules() if type(p).__name__ in names]
    # `replaced` would overwrite a forward that somebody else has put there, and delete it at the end.
    if any(p._forward_hooks or p._forward_pre_hooks or "forward" in p.__dict__ for p in parts):
        return plain
    methods = tuple((p, MethodType(names[type(p).__name__], p)) for p in parts)
    fused = FusedReadOut(**{f.name: getattr(plain, f.name) for f in fields(ReadOut)}, methods=methods)
    if not plain.weight.is_meta:
        _compare(module, plain, fused)
    return fused


def _compare(module: PreTrainedModel, plain: ReadOut, fused: FusedReadOut) -> None:
    """EngineError where hidden states of one sequence, or gradients of the first layer, differ by more than rounding:
    by more than `BOUND` and by more than `ROUNDINGS` times what the plain layers differ from themselves in float64."""
    ours, theirs = _sample(fused), _sample(plain)
    gap = _gap(ours, theirs)
    if gap <= BOUND:
        return
    # Some models enlarge rounding from layer to layer. The plain layers in float64 show how far float32 alone is off.
    exact = _sample(read_out(copy.deepcopy(module).double()))
    error, rounding = _gap(ours, exact), _gap(theirs, exact)
    # Written as `not <=`, so that NaN is refused as well.
    if not error <= max(ROUNDINGS * rounding, BOUND):
        raise EngineError(
            f"fused layers of {type(module).__name__} differ from its own by {gap:.3g} (bound {BOUND}), and from them"
            f" in float64 by {error:.3g} where rounding is {rounding:.3g}: report it, and set model.kernels=reference"
            " meanwhile"
        )


def sample_states(out: ReadOut) -> Tensor:
    """Hidden states of one sequence: of all its positions, and once more of the positions `READ`."""
    inputs = *canary(out.weight), PackedLayout([CANARY])
    return torch.cat([out.hidden(*inputs), out.hidden_at(*inputs, READ)])


def _sample(out: ReadOut) -> list[Tensor]:
    """`sample_states`, and the gradients of the first layer's weights that train."""
    decoder: Any = out.decoder
    # The gradient of the first layer has come through the backward pass of all the others.
    trained = [p for p in decoder.layers[0].parameters() if p.requires_grad]
    with torch.enable_grad():
        hidden = sample_states(out)
        # Factors of both signs for the sum, the same in every run and without a random generator.
        factors = torch.arange(hidden.numel(), dtype=hidden.dtype, device=hidden.device).sin().view_as(hidden)
        grads = torch.autograd.grad((hidden * factors).sum(), trained) if trained else ()
    return [hidden.detach(), *grads]


def _gap(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest difference of hidden states, relative to their largest number, or of gradients, relative to the
    largest number of all of them. Gradients that are zero but for rounding are compared with the hidden states."""

    def largest(parts: Sequence[Tensor]) -> float:
        return float(np.max([float(x.abs().max()) for x in parts], initial=0.0))  # `max` would pass over NaN

    differences = [a.double() - b.double() for a, b in zip(ours, theirs, strict=True)]
    states = max(largest(theirs[:1]), 1e-30)
    # One scale for all gradients: a weight whose gradient is zero but for rounding would fail by a scale of its own.
    gradients = max(largest(theirs[1:]), 1e-6 * states)
    return float(np.max([largest(differences[:1]) / states, largest(differences[1:]) / gradients]))


add_forms(
    "layers",
    in_c(fused_read_out, BOUND),
    Kernel("reference", lambda module, plain: plain),
)
