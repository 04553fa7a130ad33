"""One attention function for learner, reference and embedded engine, registered with transformers.

A Hugging Face model built with `attn_implementation=attention.NAME` passes every layer's queries, keys and values to
`attend` below. The layout in use (`using`) decides which positions see which; some architectures would drop it from the
model's own arguments. `PackedLayout` is the learner's layout: segments back to back. The embedded engine has its own.

Shapes: N packed positions, H query heads, K key-value heads (H = K * groups), D head width, S segments;
a bucket is B segments padded to L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from posttrain.config.engines import KernelChoice
from posttrain.engine.head import reference_ops
from posttrain.engine.head.kernel_table import Kernel, add_forms, in_c, kernel
from posttrain.engine.layers import packed_attention
from posttrain.engine.layers.packed_attention import Runs
from posttrain.engine.model.architecture_kinds import WANTED
from posttrain.system.errors import EngineError

NAME = "posttrain"
WASTE = 0.12
"""Most padding a bucket may hold, as a share of the positions it computes."""
HARMLESS = ("position_ids", "cache_position")
"""Tensors among an attention's keyword arguments that change no score. Any other one (sinks, biases) could."""


@dataclass(eq=False, slots=True)
class AttentionCall:
    """What one layer, whose attention is `module`, asks of a layout.

    Shapes: query [1, H, N, D], key [1, K, N, D], value [1, K, N, width of values].
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    """Most positions that one sees, itself included; None: all before it."""
    softcap: float | None = None
    """c of c tanh(score / c)."""

    def part(self, begin: int, end: int) -> AttentionCall:
        """The same call for the positions `begin` to `end` alone."""
        q, k, v = (x[:, :, begin:end] for x in (self.query, self.key, self.value))
        return AttentionCall(self.module, q, k, v, self.scaling, self.window, self.softcap)


class Layout(Protocol):
    """The layout of one forward pass: which positions attend to which."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, N, H, D]: the output of the layer's attention."""
        ...


_IN_USE: ContextVar[Layout | None] = ContextVar("layout", default=None)


@contextmanager
def using(layout: Layout) -> Iterator[None]:
    """Inside, every layer attends by this layout."""
    token = _IN_USE.set(layout)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def layout_in_use() -> Layout | None:
    """The layout of the forward pass that runs now; None outside of one."""
    return _IN_USE.get()


def keep_layout_in_recomputation(module: nn.Module) -> None:
    """Make layers that are computed again in the backward pass attend by the layout of their forward pass."""
    for part in module.modules():
        checkpoint = part.__dict__.get("_gradient_checkpointing_func")
        if checkpoint is not None:
            part.__dict__["_gradient_checkpointing_func"] = partial(_checkpoint_with_layout, checkpoint)


def _checkpoint_with_layout(checkpoint: Callable[..., Any], function: Callable[..., Any], *args: Any) -> Any:
    """Calls a checkpoint function of torch so that the layer attends by the layout of now, also when it is computed
    again."""
    # A layer is computed again in the backward pass. There `using` has ended, and on a GPU autograd works in a thread
    # of its own, where the context variable is not set. So the layout is bound while the forward pass runs.
    layout = _IN_USE.get()

    def again(*inputs: Any) -> Any:
        if layout is None:
            return function(*inputs)
        with using(layout):
            return function(*inputs)

    return checkpoint(again, *args)


def register() -> None:
    """Make `NAME` an attention implementation of transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, _registered[0])
    # No mask: the layout says the same.
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)


def stay_outside_graphs() -> None:
    """From now on torch.compile traces nothing of `attend`, because each pass has a layout of its own."""
    # Kept in the list, so that a later `register` does not bring the traced form back.
    _registered[0] = torch.compiler.disable(attend)
    register()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with transformers' signature. The layout computes it. Returns ([1, N, H, D], None).

    Raises EngineError for what a layout would silently ignore: a mask, attention dropout (sampler and learner would
    differ), score biases, attention that is not causal.
    """
    layout = _IN_USE.get()
    if layout is None:
        raise EngineError(
            f"attention {NAME!r} needs a layout: call the model inside attention.using(PackedLayout(lengths))"
        )
    if attention_mask is not None:
        raise EngineError(
            f"attention {NAME!r} takes no attention_mask: the layout says who attends to whom. Pass"
            f" attention_mask=None; a {type(module).__name__} that makes a mask of its own cannot be served."
            f" {WANTED}"
        )
    if dropout:
        raise EngineError(
            f"attention dropout {dropout}: sampler and learner would differ. Set the config's attention dropout to 0"
        )
    if unapplied := [n for n, x in kwargs.items() if isinstance(x, Tensor | tuple | list) and n not in HARMLESS]:
        raise EngineError(
            f"{type(module).__name__} changes its attention scores by {', '.join(unapplied)}, which {NAME!r} does not"
            f" apply. {WANTED}"
        )
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise EngineError(f"{type(module).__name__} is not causal: {NAME!r} serves decoder-only language models")
    scale = float(query.shape[-1] ** -0.5) if scaling is None else scaling
    return layout.attend(AttentionCall(module, query, key, value, scale, sliding_window, softcap)), None


_registered: list[Callable[..., Any]] = [attend]
"""The function that transformers calls: `attend`, or a form of it that no graph enters."""


def buckets(lengths_S: np.ndarray, waste: float = WASTE) -> list[np.ndarray]:
    """Segment indices grouped by similar length, longest first. At most `waste` of each padded group is padding.

    >>> [b.tolist() for b in buckets(np.array([10, 3, 9, 10]))]
    [[0, 3, 2], [1]]
    """
    order = np.argsort(-lengths_S, kind="stable")
    out: list[list[int]] = []
    tokens = 0
    for s in order.tolist():
        # With segment s the last group has n + 1 rows, each padded to its first one. A share of 1 - waste must be real.
        length = int(lengths_S[s])
        if out and tokens + length >= (1 - waste) * (len(out[-1]) + 1) * int(lengths_S[out[-1][0]]):
            out[-1].append(s)
            tokens += length
        else:
            out.append([s])
            tokens = length
    return [np.array(b, np.int64) for b in out]


class SpreadRows(torch.autograd.Function):
    """Rows [N, ...] to padded rows [R, ...]: `to` [R] is the row that each copies, and `back` [N] its inverse. No real
    position reads padding, so its gradient is exactly zero: the backward is a gather, no slow scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, to: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, to)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


class CollectRows(torch.autograd.Function):
    """The inverse of `SpreadRows`: padded rows [R, ...] to rows [N, ...]. Padding rows get gradient zero."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        ctx.rows = padded.shape[0]
        return padded.index_select(0, back)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (back,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros((ctx.rows, *grad.shape[1:])).index_copy_(0, back, grad), None


class RunsLayout:
    """A layout whose positions lie in runs (`packed_attention`), such as segments. `by_runs`: compiled code reads the
    runs as they lie. `by_buckets`: runs of similar length are padded and computed by one call of dense attention; it
    also serves scores with a soft-cap."""

    routing: Any = None
    """The `expert_routing.Routing` of the pass; None: routers do what they do in transformers."""

    def __init__(self, tokens: int, kernels: KernelChoice) -> None:
        self.tokens = tokens
        self._kernels: KernelChoice = kernels
        self._masks: dict[tuple[int, int, int | None, torch.device], Tensor] = {}

    @cached_property
    def runs(self) -> Runs:
        """The runs of the positions, as compiled code reads them."""
        raise NotImplementedError

    def by_buckets(self, call: AttentionCall) -> Tensor:
        """[1, N, H, D]: the attention of a layer by dense attention, one call for each bucket of similar runs."""
        raise NotImplementedError

    def by_runs(self, call: AttentionCall) -> Tensor:
        """[1, N, H, D]: the attention of a layer by compiled code, which reads the runs."""
        if call.softcap is not None:
            return self.by_buckets(call)
        # [1, heads, N, D] to rows [N, heads, D], so that one index selects all heads of a position.
        q, k, v = (x[0].transpose(0, 1) for x in (call.query, call.key, call.value))
        return packed_attention.attend(q, k, v, self.runs, call.scaling, call.window).unsqueeze(0)

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, N, H, D]: the attention of a layer by the form that this device, dtype and choice of kernels have."""
        query = call.query
        if query.shape[0] != 1 or query.shape[2] != self.tokens:
            raise EngineError(
                f"a layout of {self.tokens} packed positions met queries of shape {tuple(query.shape)}, not [1, H,"
                " N, D]"
            )
        return kernel("packed_attention", query.device, query.dtype, self._kernels).function(self, call)

    def _mask(self, longest: int, deep: int, window: int | None, device: torch.device) -> Tensor | None:
        """bool [L, A + L], with A = `deep` positions above each run: whether query i, at depth A + i, sees key j, at
        depth j. None: plainly causal."""
        window = window if window is not None and window < deep + longest else None
        if not deep and window is None:
            return None
        if (longest, deep, window, device) not in self._masks:
            depth = torch.arange(deep + longest, device=device)
            # Depth is the place in the sequence, so a window counts through what is shared.
            distance = depth[deep:, None] - depth
            self._masks[longest, deep, window, device] = (distance >= 0) & (distance < (window or deep + longest))
        return self._masks[longest, deep, window, device]


class PackedLayout(RunsLayout):
    """Causal attention within segments that are packed back to back. It is differentiable, and no position sees another
    segment. Segments of similar length share one batched call, padded on the right.

    Example: lengths [2, 4, 4] give buckets [1, 2] (4 positions each) and [0] (2 positions), no padding at all.
    """

    def __init__(
        self, lengths: Sequence[int] | np.ndarray, *, waste: float = WASTE, kernels: KernelChoice = "auto"
    ) -> None:
        lengths_S = np.asarray(lengths, np.int64)
        if lengths_S.ndim != 1 or len(lengths_S) == 0 or lengths_S.min() < 1:
            raise EngineError(
                f"a packed layout needs at least one segment and positive lengths, got {lengths_S.tolist()}"
            )
        super().__init__(int(lengths_S.sum()), kernels)
        self._lengths_S, self._groups = lengths_S, buckets(lengths_S, waste)
        self.shapes = [(len(group), int(lengths_S[group[0]])) for group in self._groups]
        """(B, L) of each bucket."""
        # Made by the first layer that attends by buckets, once for each device.
        self._placed: dict[torch.device, tuple[Tensor, Tensor] | None] = {}

    @cached_property
    def runs(self) -> Runs:
        return Runs(np.cumsum(self._lengths_S) - self._lengths_S, self._lengths_S)

    def by_buckets(self, call: AttentionCall) -> Tensor:
        """Segments of similar length by one call of dense attention each."""
        query = call.query
        places = self._places(query.device)
        q, k, v = (x[0].transpose(0, 1) for x in (query, call.key, call.value))
        if places is not None:
            q, k, v = (SpreadRows.apply(x, *places) for x in (q, k, v))
        attention = kernel("attention", query.device, query.dtype, self._kernels).function
        out: list[Tensor] = []
        parts = (x.split([count * longest for count, longest in self.shapes]) for x in (q, k, v))
        for (count, longest), *rows_qkv in zip(self.shapes, *parts, strict=True):
            q_BHLD, k_BKLD, v_BKLD = (x.unflatten(0, (count, longest)).transpose(1, 2) for x in rows_qkv)
            mask = self._mask(longest, 0, call.window, query.device)
            attended = attention(q_BHLD, k_BKLD, v_BKLD, mask, call.scaling, call.softcap)
            out.append(attended.transpose(1, 2).flatten(0, 1))
        rows = out[0] if len(out) == 1 else torch.cat(out)
        return (rows if places is None else CollectRows.apply(rows, places[1])).unsqueeze(0)

    def _places(self, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """(position that each padded row copies, padded row of each position); None where nothing has to be moved."""
        if device in self._placed:
            return self._placed[device]
        starts_S = np.cumsum(self._lengths_S) - self._lengths_S
        to, back, row = list[np.ndarray](), np.empty(self.tokens, np.int64), 0
        for group, (_, longest) in zip(self._groups, self.shapes, strict=True):
            length_B = self._lengths_S[group][:, None]
            # Rows behind a segment's end repeat its last position, which always exists. None before reads them.
            position_BL = starts_S[group][:, None] + np.minimum(np.arange(longest), length_B - 1)
            real_BL = np.arange(longest) < length_B
            # Row-major places in [B, L], behind the rows of the buckets before.
            back[position_BL[real_BL]] = row + np.flatnonzero(real_BL)
            to.append(position_BL.ravel())
            row += position_BL.size
        moved = not np.array_equal(back, np.arange(row))
        places = (torch.from_numpy(np.concatenate(to)).to(device), torch.from_numpy(back).to(device)) if moved else None
        self._placed[device] = places
        return places


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """q [B, H, L, D], k and v [B, K, T, D] -> [B, H, L, D] by torch's fused attention; causal where no mask [L, T] is
    given, which needs L == T. It has no soft-cap, so soft-capped scores are computed by definition."""
    if softcap is not None:
        return reference_ops.attention(q, k, v, mask, scaling, softcap)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
    )


add_forms(
    "attention",
    Kernel(
        "torch",
        dense_attention,
        bounds={torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2, torch.float16: 4e-3},
    ),
    Kernel("reference", reference_ops.attention),
)
add_forms(
    "packed_attention",
    in_c(RunsLayout.by_runs, 1e-5),
    Kernel("reference", lambda layout, call: layout.by_buckets(call)),
)
