"""A model's own decoder with a third of the calls, for sampling from float32 models of the Llama family.

At the sizes that run on a CPU, the calls of a decode step cost as much time as its arithmetic. Here queries, keys and
values are one matrix product, and gate and up are another. Norms, rotations and residuals work in place. The weights
are stored once: the module's own parameters become views of the joined ones. Of layers with an adapter the joined
weights hold a merged copy, which `refresh` makes again after a load.

With the compiled kernels, one call computes half a layer. Activations are then feature-major. W @ x reads each weight
once in memory order, and the bits of a position do not depend on the number of other positions.

Axis letters: N positions, E hidden width, H query heads, K key-value heads, D head width, F feed-forward width.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.engine.adapters.adapter_modules import effective, is_adapted, layers
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded.cache.key_value_cache import CachedLayout
from posttrain.engine.head.kernel_table import Kernel, add_forms, in_c
from posttrain.engine.head.readout import CANARY, ReadOut, canary
from posttrain.engine.layers.attention import AttentionCall, Layout, PackedLayout
from posttrain.system.errors import EngineError

FAMILIES = {
    "LlamaForCausalLM": "Llama",
    "MistralForCausalLM": "Mistral",
    "Qwen2ForCausalLM": "Qwen2",
    "Qwen3ForCausalLM": "Qwen3",
}
"""Architectures whose layers are exactly what `FusedDecoder` computes, and the prefix of their classes' names."""
BOUND = 1e-4
"""Largest relative difference allowed between fused and original hidden states."""


@dataclass(frozen=True, eq=False)
class _Layer:
    """Weights of one decoder layer. `before` and `after` are the norms before its attention and before its feed-forward
    part; `out` and `down` are the last products of these two."""

    attention: nn.Module
    index: int
    scaling: float
    window: int | None
    before: Any
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Any | None
    k_norm: Any | None
    out: Plain
    after: Any
    gate_up: Tensor
    down: Plain


@dataclass(frozen=True, eq=False)
class MergedLinear:
    """The plain layer that computes what a layer with an adapter does."""

    weight: Tensor
    bias: Tensor | None


Plain = nn.Linear | MergedLinear


class FusedDecoder:
    """`ReadOut.hidden` for a model that `fusable` accepts. `read_out` is that model's.

    Args:
        compiled: use the compiled kernels, which this machine must have.
    """

    def __init__(self, module: PreTrainedModel, read_out: ReadOut, context: int, compiled: bool) -> None:
        self._kernels = compile_native.library() if compiled else None
        decoder: Any = read_out.decoder
        config = module.config
        self._memory = none = torch.zeros(0)
        self._head_memory = none, none, none, none
        self._merged: list[tuple[nn.Module, Tensor]] = []
        """Each layer with an adapter, and the merged copy of its weight, which `refresh` writes again."""
        self._embed, self._norm = decoder.embed_tokens, decoder.norm
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._width: int = decoder.layers[0].self_attn.head_dim
        self._features: int = config.intermediate_size
        with torch.no_grad():
            self._layers = [self._join(layer) for layer in decoder.layers]
            # Cosine and sine of all positions, once. transformers computes them in every pass.
            every = torch.arange(context, device=read_out.weight.device)
            cos, sin = decoder.rotary_emb(read_out.weight[:1, None], every[None])
        self._sizes = compile_native.Sizes(
            read_out.weight.shape[1], self._features, self._heads, self._kv_heads, self._width
        )
        # C gets the addresses alone, and they are valid as long as the structures live.
        self._structures = [self._address(layer) for layer in self._layers]
        self._addresses = [ctypes.addressof(x) for x in self._structures]
        half = self._width // 2
        # transformers rotates by x cos + [-x2, x1] sin, where x1 and x2 are the halves of a head. With the sign of the
        # first half in the table, [x2, x1] is a plain roll by half a head.
        self._cos = cos[0, :, None].contiguous()
        self._sin = torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)
        self._check(read_out, min(CANARY, context))

    @property
    def lanes(self) -> int:
        """The compiled kernels compute positions in groups of this size; 1 without them."""
        return 1 if self._kernels is None else compile_native.LANES

    def refresh(self) -> None:
        """Merge the adapters again after their weights have changed. All other joined weights are the module's own."""
        for layer, place in self._merged:
            # In place: the addresses that the compiled code has stay valid.
            place.copy_(effective(layer)[0])

    def hidden(self, input_ids: Tensor, position_ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states [N, E] of `input_ids` [N] at `position_ids` [N]."""
        if self._kernels is not None:
            return self._compiled(self._kernels, input_ids, position_ids, layout)
        x_NE = self._embed(input_ids)
        cos, sin = self._cos.index_select(0, position_ids), self._sin.index_select(0, position_ids)
        h, k, d, count = self._heads, self._kv_heads, self._width, len(input_ids)
        for layer in self._layers:
            # One product for queries, keys and values, in this order of heads. The first two are rotated together.
            qkv = nn.functional.linear(_norm(x_NE, layer.before), layer.qkv, layer.qkv_bias).view(count, h + 2 * k, d)
            qk = qkv[:, : h + k]
            if layer.q_norm is not None and layer.k_norm is not None:
                qk = qk * _inverse_rms(qk, layer.q_norm.variance_epsilon)
                qk[:, :h].mul_(layer.q_norm.weight)
                qk[:, h:].mul_(layer.k_norm.weight)
            qk = (qk * cos).addcmul_(qk.roll(d // 2, -1), sin)
            query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (qk[:, :h], qk[:, h:], qkv[:, h + k :]))
            attended = layout.attend(AttentionCall(layer.attention, query, key, value, layer.scaling, layer.window))
            x_NE = _add(x_NE, attended.reshape(count, h * d), layer.out)
            gate_up = nn.functional.linear(_norm(x_NE, layer.after), layer.gate_up)
            inner = nn.functional.silu(gate_up[:, : self._features]).mul_(gate_up[:, self._features :])
            x_NE = _add(x_NE, inner, layer.down)
        return _norm(x_NE, self._norm)

    def _compiled(
        self, kernels: compile_native.Kernels, input_ids: Tensor, position_ids: Tensor, layout: Layout
    ) -> Tensor:
        """`hidden` with compiled kernels. Activations are [features, N], `compile_native.stride(N)` floats a row."""
        s, count = self._sizes, len(input_ids)
        wide = compile_native.stride(count)
        h, k, d = s.H, s.K, s.D
        heads, query, key, value = self._head_matrices(count)
        # In the order of the fields of `struct pass`: x, normed, qkv, seen, both, inner.
        matrices = self._matrix_addresses((s.E, s.E, (h + 2 * k) * d, h * d, 2 * s.F, s.F), wide)
        tables = self._cos.data_ptr(), self._sin.data_ptr(), input_ids.data_ptr(), position_ids.data_ptr()
        pass_memory = compile_native.Pass(*matrices, heads.data_ptr(), *tables, count, wide)
        sizes, pass_address = ctypes.addressof(s), ctypes.addressof(pass_memory)
        kernels.begin(sizes, pass_address, self._embed.weight.data_ptr())
        # Queries, keys and values lie at the same addresses in every layer, so attention is bound once a pass.
        attend, seen_at = layout.every_layer(query, key, value) if isinstance(layout, CachedLayout) else (None, 0)
        for layer, weights in zip(self._layers, self._addresses, strict=True):
            kernels.before(sizes, weights, pass_address)
            if attend is not None:
                attend(layer.index, layer.scaling, layer.window)
            else:
                seen = layout.attend(AttentionCall(layer.attention, query, key, value, layer.scaling, layer.window))
                seen = seen.contiguous()
                seen_at = seen.data_ptr()
            kernels.after(sizes, weights, pass_address, seen_at)
        out = torch.empty(count, s.E)
        kernels.end(sizes, pass_address, self._norm.weight.data_ptr(), self._norm.variance_epsilon, out.data_ptr())
        return out

    def _head_matrices(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Memory [N, heads, D], reused if it fits, and views of queries, keys and values [1, heads, N, D]."""
        if len(self._head_memory[0]) != count:
            h, k, d = self._heads, self._kv_heads, self._width
            heads = torch.empty(count, h + 2 * k, d)
            query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in heads.split([h, k, k], 1))
            self._head_memory = heads, query, key, value
        return self._head_memory

    def _matrix_addresses(self, features: tuple[int, ...], wide: int) -> list[int]:
        """Addresses of matrices [features, wide]. Their memory is reused: new memory costs more than small products."""
        if self._memory.numel() < sum(features) * wide:
            self._memory = torch.zeros(sum(features) * wide + compile_native.LANES)
        # Every matrix begins at a vector of 64 bytes: `wide` is a multiple of one; 4 is the size of a float. The LANES
        # more above (16 floats, 64 bytes) are what rounding the start up may take.
        start = -(-self._memory.data_ptr() // 64) * 64
        return [start + 4 * wide * before for before in itertools.accumulate((0, *features[:-1]))]

    def _address(self, layer: _Layer) -> compile_native.Layer:
        """The addresses of a layer's weights. The layer keeps the weights alive."""
        q, k = layer.q_norm, layer.k_norm
        attention = layer.before.weight, layer.qkv, layer.qkv_bias, q and q.weight, k and k.weight
        products = layer.out.weight, layer.out.bias, layer.after.weight, layer.gate_up, layer.down.weight
        eps = layer.before.variance_epsilon, q.variance_epsilon if q else 0.0, layer.after.variance_epsilon
        return compile_native.Layer(*compile_native.addresses(*attention, *products), *eps)

    def _join(self, layer: Any) -> _Layer:
        """The joined weights of a layer."""
        a, m = layer.self_attn, layer.mlp
        qkv = [a.q_proj, a.k_proj, a.v_proj]
        return _Layer(
            attention=a,
            index=a.layer_idx,
            scaling=a.scaling,
            window=window_of(a),
            before=layer.input_layernorm,
            qkv=self._join_weights(qkv),
            qkv_bias=_biases(qkv),
            q_norm=getattr(a, "q_norm", None),
            k_norm=getattr(a, "k_norm", None),
            out=self._plain(a.o_proj),
            after=layer.post_attention_layernorm,
            gate_up=self._join_weights([m.gate_proj, m.up_proj]),
            down=self._plain(m.down_proj),
        )

    def _join_weights(self, layers: list[Any]) -> Tensor:
        """The weights of several layers as one. Without adapters the layers' own parameters become views of it."""
        if not any(map(is_adapted, layers)):
            return _joined([layer.weight for layer in layers])
        weights = [effective(layer)[0] for layer in layers]
        joined_weight = torch.cat(weights)
        self._merged += zip(layers, joined_weight.split([len(w) for w in weights]), strict=True)
        return joined_weight

    def _plain(self, layer: Any) -> Plain:
        """The layer, or what stands for one with an adapter."""
        if not is_adapted(layer):
            return layer
        weight, bias = effective(layer)
        self._merged.append((layer, weight))
        return MergedLinear(weight, bias)

    @torch.no_grad()
    def _check(self, read_out: ReadOut, length: int) -> None:
        """EngineError where the hidden states of a sequence differ from the original decoder's by more than `BOUND`."""
        ids, at = canary(read_out.weight, length)
        theirs = read_out.hidden(ids, at, PackedLayout([length]))
        gap = float((self.hidden(ids, at, PackedLayout([length])) - theirs).abs().max() / theirs.abs().max())
        # Written as `not <=`, so that NaN is refused as well.
        if not gap <= BOUND:
            raise EngineError(
                f"the fused {type(read_out.decoder).__name__} differs from the original by {gap:.3g} (bound {BOUND}):"
                " this version of transformers computes it otherwise. Set model.kernels=reference"
            )


def fusable(module: PreTrainedModel) -> bool:
    """Returns whether the fused decoder computes what the model does: float32, and every layer a plain one of a known
    family, without hooks or other parts. Linear layers may have an adapter."""
    prefix = FAMILIES.get(type(module).__name__)
    config = module.config
    if (
        prefix is None
        or module.dtype != torch.float32
        or config.hidden_act != "silu"
        or getattr(config, "mlp_bias", False)
    ):
        return False
    allowed = {"Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding", "ForCausalLM"}
    # Every part must be known by name: one more module, or one with a hook, may compute something that the fused layers
    # leave out. Of an adapter the parts are not looked at, since only its merged weight is used.
    names = {prefix + x for x in allowed} | {"Linear", "Embedding", "ModuleList", "SiLUActivation", "SiLU"}
    adapted = {n: x for n, x in layers(module).items() if type(getattr(x, "base_layer", None)) is nn.Linear}
    inside = tuple(f"{n}." for n in adapted)
    parts = [p for n, p in module.named_modules() if n not in adapted and not n.startswith(inside)]
    hooked = any(p._forward_hooks or p._forward_pre_hooks or p.__dict__.get("forward") for p in parts)
    return not hooked and all(type(p).__name__ in names for p in parts)


def window_of(layer: Any) -> int | None:
    """The sliding window of an attention layer; None: it sees everything."""
    if type(layer).__name__ == "MistralAttention":
        return layer.config.sliding_window
    return getattr(layer, "sliding_window", None)


def _biases(layers: list[Any]) -> Tensor | None:
    """The biases of several layers as one. No adapter changes a bias."""
    parts = [getattr(layer, "base_layer", layer).bias for layer in layers]
    return None if parts[0] is None else _joined(parts)


def _joined(parts: list[Tensor]) -> Tensor:
    """The parts concatenated along the first axis. Each part becomes a view of its place in the result."""
    joined_weight = torch.cat([p.detach() for p in parts])
    for part, view in zip(parts, joined_weight.split([len(p) for p in parts]), strict=True):
        # The parameter keeps its name and its owner, so new weights that are copied into it are in both.
        part.data = view
    return joined_weight


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def _norm(x_NE: Tensor, module: Any) -> Tensor:
    """The RMS norm of a module: x / rms(x) * weight."""
    return (x_NE * _inverse_rms(x_NE, module.variance_epsilon)).mul_(module.weight)


def _add(x_NE: Tensor, inner: Tensor, linear: Plain) -> Tensor:
    """x + linear(inner)"""
    out = torch.addmm(x_NE, inner, linear.weight.t())
    return out if linear.bias is None else out.add_(linear.bias)


add_forms(
    "decoder",
    in_c(partial(FusedDecoder, compiled=True), BOUND),
    Kernel("torch", partial(FusedDecoder, compiled=False), bounds={torch.float32: BOUND}),
    Kernel("reference", lambda module, read_out, context: read_out),
)
