"""The pool of cached keys and values, and attention through tables of its rows.

Attention here is ragged: a query reads exactly the rows of its own sequence, whatever the lengths of the others. On a
CPU with a C compiler it is one call of compiled code (`native_code/attention.h`). Elsewhere scores are a sampled matrix
product over a CSR pattern, with one entry per query, head and visible row, and weights times values are an embedding
bag over the same indices: no key or value is copied or read for padding. Only the softmax works on a padded matrix.

Axis letters: B ragged queries, H query heads, K key-value heads (H = K * groups), D head width, T visible rows summed
over the queries, E = H * T entries in the order (head, query, row), N positions of the forward pass.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.config.engines import KernelChoice
from posttrain.core.exchange.expert_choices import UNKNOWN
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded.cache.cache_blocks import BLOCK
from posttrain.engine.head.kernel_table import Kernel, add_forms, check_compiled, in_c, kernel
from posttrain.engine.layers.attention import AttentionCall, PackedLayout
from posttrain.engine.layers.expert_routing import Routing, as_array
from posttrain.engine.model.supported_models import LayerShape
from posttrain.system.errors import EngineError

LANES = 64
"""The width of the score matrix is padded to a multiple of this, so that a row is always summed in the same way."""
RESERVE = 2
"""On a CPU the pool reserves this many rows of address space for each row that is asked for. Growth within them copies
nothing, and a page takes memory only when it is first written."""


class CachePool:
    """Keys and values of every layer, float32 (float64 for a float64 model): [blocks * K * BLOCK, D].

    A block holds its rows head after head, so that the data of one head is contiguous. Head k of row r is at
    `(r // BLOCK * K + k) * BLOCK + r % BLOCK`.

    Narrower dtypes are cached as float32 too: products are then exact, and the ragged kernels take nothing narrower.

    Args:
        kernels: the choice of kernels (`Model.kernels`).

    Raises:
        EngineError: compiled kernels were chosen and cannot be used here.
    """

    def __init__(
        self, shapes: list[LayerShape], dtype: torch.dtype, device: torch.device, kernels: KernelChoice = "auto"
    ) -> None:
        self.shapes = shapes
        self.kernels: KernelChoice = kernels
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        if kernels == "compiled":
            check_compiled("paged_attention", device, self.dtype)
        self.kernel = kernel("paged_attention", device, self.dtype, kernels)
        self.device = device
        self.rows = 0
        self._reserved_rows = 0
        self._reserved_memory: list[tuple[Tensor, Tensor]] = []
        self.keys = [self._zeros(0, s.key) for s in shapes]
        self.values = [self._zeros(0, s.value) for s in shapes]
        # torch warns once a process, at its first CSR tensor. That first one is made here, where the warning can be
        # dropped without hiding others.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
            torch.sparse_csr_tensor(
                torch.zeros(2, dtype=torch.int32),
                torch.zeros(0, dtype=torch.int32),
                torch.zeros(0),
                size=(1, 1),
                check_invariants=False,
            )

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(s.heads * (s.key + s.value) for s in self.shapes) * self.dtype.itemsize

    def grow(self, blocks: int) -> None:
        """Make room for `blocks` blocks. Cached tokens keep their rows."""
        rows = blocks * BLOCK
        # A block's place does not depend on how many there are, so views of the reserved memory grow without a copy.
        if rows > self._reserved_rows:
            self._reserved_rows = rows * RESERVE if self.device.type == "cpu" else rows
            self._reserved_memory = [
                (self._zeros(self._reserved_rows * s.heads, s.key), self._zeros(self._reserved_rows * s.heads, s.value))
                for s in self.shapes
            ]
            for reserved, *pools in zip(self._reserved_memory, self.keys, self.values, strict=True):
                for fresh, old in zip(reserved, pools, strict=True):
                    fresh[: len(old)] = old
        for i, (shape, (keys, values)) in enumerate(zip(self.shapes, self._reserved_memory, strict=True)):
            self.keys[i], self.values[i] = keys[: rows * shape.heads], values[: rows * shape.heads]
        self.rows = rows

    def release(self) -> None:
        """Free all memory of the pool. It holds nothing until it grows again."""
        self.rows = self._reserved_rows = 0
        self._reserved_memory = []
        self.keys = [self._zeros(0, s.key) for s in self.shapes]
        self.values = [self._zeros(0, s.value) for s in self.shapes]

    def copy(self, source: np.ndarray, to: np.ndarray) -> None:
        """Copy rows, before one of the owners of their block writes to it."""
        # Per tensor every source is read before a row is written: a row may be both (`Stepper._copy`).
        a, b = (torch.from_numpy(x).to(self.device) for x in (source, to))
        for shape, *pools in zip(self.shapes, self.keys, self.values, strict=True):
            for pool in pools:
                pool.index_copy_(0, self.places(b, shape.heads), pool.index_select(0, self.places(a, shape.heads)))

    def write(self, layer: int, rows_N: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value, both [K, N, D] with N >= len(rows_N). Surplus positions are idle and are not stored."""
        places = self.places(rows_N, len(key))
        for pool, x in ((self.keys[layer], key), (self.values[layer], value)):
            pool.index_copy_(0, places, x[:, : len(rows_N)].flatten(0, 1).to(self.dtype))

    @staticmethod
    def places(rows_N: Tensor, heads: int) -> Tensor:
        """int64 [K * N]: the pool positions of these rows, head after head."""
        head = torch.arange(heads, device=rows_N.device)[:, None]
        return ((rows_N // BLOCK * heads + head) * BLOCK + rows_N % BLOCK).flatten()

    def _zeros(self, n: int, width: int) -> Tensor:
        """[n, width]: zeros. On a CPU they take no memory before they are written."""
        size = n * width * self.dtype.itemsize
        if self.device.type != "cpu" or not size:
            return torch.zeros(n, width, dtype=self.dtype, device=self.device)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=self.dtype).view(n, width)


class RoutedPool(CachePool):
    """`CachePool` of a mixture of experts, which also keeps the experts that computed each cached token. They lie in
    the rows of the pool, so they are shared, copied and kept with the keys and values that they made."""

    _routed = np.zeros((0, 0, 0), np.int16)
    """int16 [rows, R, K]: in R routers, the K experts of each cached token."""

    def grow(self, blocks: int) -> None:
        super().grow(blocks)
        self._grow_choices()

    def release(self) -> None:
        super().release()
        self._routed = self._routed[:0]

    def copy(self, source: np.ndarray, to: np.ndarray) -> None:
        super().copy(source, to)
        self._routed[to] = self._routed[source]

    def keep(self, rows: np.ndarray, routing: Routing) -> None:
        """Store what the routers chose for the positions cached in these rows. Idle positions come after them."""
        chosen = as_array(routing.stacked(routing.used))[: len(rows)]
        # How many routers and experts there are is seen at the first pass.
        if self._routed.shape[1:] != chosen.shape[1:]:
            self._routed = np.zeros((0, *chosen.shape[1:]), np.int16)
        self._grow_choices()
        self._routed[rows] = chosen

    def routed(self, rows: np.ndarray) -> np.ndarray:
        """int16 [T, R, K]: the choices of the tokens in these rows."""
        return self._routed[rows]

    def _grow_choices(self) -> None:
        """Give `_routed` as many rows as the pool has. New rows hold UNKNOWN."""
        if (missing := self.rows - len(self._routed)) > 0:
            unknown = np.full((missing, *self._routed.shape[1:]), UNKNOWN, np.int16)
            self._routed = np.concatenate([self._routed, unknown])


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The entries for one (H, K, window). An entry is one score, of a query head with a row that the query sees."""

    csr: Tensor
    """[H * B, rows * K]; every layer overwrites its values."""
    rows_E: Tensor
    """int32: the place in the pool (`CachePool.places`) that each entry reads."""
    starts: Tensor
    """int32 [H * B]: first entry of each bag; a bag has the entries of one head and one query."""
    places_E: Tensor
    """The place of each entry in the padded scores [H * B, width], flat."""
    width: int


AttendLayer = Callable[[int, float, int | None], None]
"""Attends in one layer: (index of the layer, scaling of the scores, window; None: no window)."""


class CachedLayout:
    """One forward pass over cached sequences: B ragged queries, then starts of prompts, then later chunks of prompts.

    Args:
        rows_N: pool row of every stored position: ragged, dense and chunk positions, without idle ones.
        visible_T: pool rows. Ragged query b sees `lengths_B[b]` of them (0: it is idle), from `starts_B[b]` on, or
            after the rows of the query before it.
        dense: layout of the starts of prompts; None where there are none.
        chunks: for each later chunk, the pool rows of its prompt so far, and how many at the end are queries.
    """

    routing: Any = None
    """The `Routing` in which the routers of this pass note their choices; None: nothing is noted."""

    def __init__(
        self,
        pool: CachePool,
        rows_N: np.ndarray,
        visible_T: np.ndarray,
        lengths_B: np.ndarray,
        dense: PackedLayout | None,
        chunks: Sequence[tuple[np.ndarray, int]] = (),
        starts_B: np.ndarray | None = None,
    ) -> None:
        self.pool, self.dense = pool, dense
        self._chunks = [Chunk(pool, rows, n) for rows, n in chunks]
        self._rows_N = torch.from_numpy(rows_N).to(pool.device)
        self._visible_T, self._lengths_B = visible_T, lengths_B
        self._starts_B = np.cumsum(lengths_B) - lengths_B if starts_B is None else starts_B
        # For the compiled code, which reads them by their addresses.
        self._ragged_tables = [
            torch.from_numpy(np.ascontiguousarray(x)) for x in (visible_T, self._starts_B, lengths_B)
        ]
        self._patterns: dict[tuple[int, int, int | None], _Pattern] = {}
        self._seen = torch.zeros(0)
        """[B, H, D]: the result of the layer that attended last, by compiled code."""

    def attend(self, call: AttentionCall) -> Tensor:
        """[1, N, H, D]: the output of one layer: ragged queries first, then starts of prompts, then later chunks."""
        # the ragged form also stores the keys and values of all positions, so it runs where no query is ragged too
        b = len(self._lengths_B)
        attended = self.pool.kernel.function(self, call)
        out: list[Tensor] = [attended] if b else []
        if self.dense is not None:
            out.append(self.dense.attend(call.part(b, b + self.dense.tokens)))
            b += self.dense.tokens
        for chunk in self._chunks:
            out.append(chunk.attend(call, b))
            b += chunk.length
        return out[0] if len(out) == 1 else torch.cat(out, dim=1)

    def by_compiled(self, call: AttentionCall) -> Tensor:
        """Store the keys and values of all positions, then attend with the ragged queries, each over its own rows ->
        [1, B, H, D]. The result is overwritten when the next layer attends."""
        layer, dtype = _layer(call), call.query.dtype
        query, key, value = (
            # C reads float32 with adjacent last elements. The strides of positions
            # and heads are passed on, so a transposed tensor is not copied.
            x if x.stride(-1) == 1 and x.dtype == torch.float32 else x.float().contiguous()
            for x in (self._ragged(call), call.key[0], call.value[0])
        )
        attend = self._bound(query, key, value, call.softcap)
        attend(self.pool.keys[layer], self.pool.values[layer], call.scaling, call.window)
        return self._seen.to(dtype).unsqueeze(0)

    def _ragged(self, call: AttentionCall) -> Tensor:
        """[H, B, D]: the ragged queries, which are the first ones."""
        return call.query[0, :, : len(self._lengths_B)]

    def every_layer(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[AttendLayer | None, int]:
        """For layers that all write their heads to the same three float32 tensors, shaped as for `attend`: the function
        that attends in one layer, and the address of its result [N, H, D]. None for dense pieces or chunks."""
        if self.pool.kernel.form != "compiled" or self.dense is not None or self._chunks:
            return None, 0
        attend, keys, values = self._bound(query[0], key[0], value[0], None), self.pool.keys, self.pool.values

        def attend_layer(layer: int, scaling: float, window: int | None) -> None:
            attend(keys[layer], values[layer], scaling, window)

        return attend_layer, self._seen.data_ptr()

    def _bound(self, query: Tensor, key: Tensor, value: Tensor, softcap: float | None) -> compile_native.Attend:
        """The compiled attention, bound to these tensors. A call of it attends in one layer and writes `_seen`."""
        shape = query.shape[1], query.shape[0], value.shape[-1]
        # One result for all layers: each has been read by the time the next layer attends.
        if self._seen.shape != shape:
            self._seen = torch.empty(shape)
        visible_T, starts_B, lengths_B = self._ragged_tables
        return compile_native.library().attend(
            key, value, self._rows_N, query, visible_T, starts_B, lengths_B, self._seen, softcap
        )

    def by_sparse_product(self, call: AttentionCall) -> Tensor:
        """`by_compiled` with torch's sparse product and embedding bag."""
        layer, query, softcap = _layer(call), self._ragged(call), call.softcap
        self.pool.write(layer, self._rows_N, call.key[0], call.value[0])
        heads, count, width = query.shape
        # Keys and values are stored all the same: a pass may consist of pieces of prompts alone.
        if not count:
            return query.new_empty(1, 0, heads, call.value.shape[-1])
        pattern = self._pattern(heads, self.pool.shapes[layer].heads, call.window)
        csr = pattern.csr
        # Only the scores of the pattern are computed: one for each entry, and none for rows that a query does not see.
        torch.sparse.sampled_addmm(
            csr,
            query.reshape(-1, width).to(self.pool.dtype),
            self.pool.keys[layer].t(),
            beta=0.0,
            alpha=call.scaling,
            out=csr,
        )
        scores_E = csr.values()
        if softcap is not None:
            scores_E = softcap * torch.tanh(scores_E / softcap)
        # A row of padding alone, of an idle query, becomes nan. No entry reads it, and its bag is empty: output 0.
        padded = scores_E.new_full((heads * count, pattern.width), float("-inf"))
        padded.view(-1).scatter_(0, pattern.places_E, scores_E)
        weights_E = padded.softmax(-1).view(-1).index_select(0, pattern.places_E)
        values = self.pool.values[layer]
        out = torch.embedding_bag(values, pattern.rows_E, pattern.starts, False, 0, False, weights_E)[0]  # mode 0: sum
        return out.view(heads, count, -1).transpose(0, 1).unsqueeze(0).to(query.dtype)

    def by_definition(self, call: AttentionCall) -> Tensor:
        """`by_compiled` by its definition: over copies of all that each query sees, padded to the longest."""
        layer, query, softcap = _layer(call), self._ragged(call), call.softcap
        self.pool.write(layer, self._rows_N, call.key[0], call.value[0])
        heads, count, _ = query.shape
        longest = int(self._lengths_B.max(initial=0))
        if not longest:
            return query.new_zeros(1, count, heads, call.value.shape[-1])
        at_T, lengths_B = np.arange(longest), self._lengths_B[:, None]
        # Places behind the last row of a query are masked; they are clamped so that they are valid.
        rows_BT = self._visible_T[np.minimum(self._starts_B[:, None] + at_T, len(self._visible_T) - 1)]
        seen_BT = torch.from_numpy((at_T < lengths_B) & (at_T >= lengths_B - (call.window or longest))).to(query.device)
        kv_heads = self.pool.shapes[layer].heads
        places = self.pool.places(torch.from_numpy(rows_BT.ravel()).to(query.device), kv_heads)
        k_HBTD, v_HBTD = (
            x[layer][places].view(kv_heads, count, longest, -1).repeat_interleave(heads // kv_heads, 0)
            for x in (self.pool.keys, self.pool.values)
        )
        scores = (k_HBTD @ query.to(self.pool.dtype)[..., None])[..., 0] * call.scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen_BT, float("-inf")).softmax(-1).masked_fill(~seen_BT.any(-1, keepdim=True), 0)
        return (weights[..., None, :] @ v_HBTD)[:, :, 0].transpose(0, 1).unsqueeze(0).to(query.dtype)

    def _pattern(self, heads: int, kv_heads: int, window: int | None) -> _Pattern:
        """The indices for all layers of one shape. They are made once per forward pass."""
        shape = (heads, kv_heads, window)
        if shape not in self._patterns:
            self._patterns[shape] = self._build_pattern(*shape)
        return self._patterns[shape]

    def _build_pattern(self, heads: int, kv_heads: int, window: int | None) -> _Pattern:
        """The indices by which the sparse product and the embedding bag find their rows in the pool."""
        # With a window a query sees its last rows only: fewer of them, from a later place on.
        lengths_B = self._lengths_B if window is None else np.minimum(self._lengths_B, window)
        before_B = self._starts_B + self._lengths_B - lengths_B
        visible_T = self._visible_T[np.repeat(before_B, lengths_B) + ragged_arange(lengths_B)]
        starts_B = np.cumsum(lengths_B) - lengths_B
        total, count = len(visible_T), len(lengths_B)
        # The indices below are int32.
        if max(total * heads, self.pool.rows * kv_heads) >= 2**31:
            raise EngineError(f"a step attends to {total * heads} entries: use fewer slots or a shorter context")
        # Rounded up, since -(-a // b) rounds up: the softmax then sums rows of few different widths.
        width = -(-int(lengths_B.max(initial=1)) // LANES) * LANES
        head = np.arange(heads)[:, None]
        # The place of key-value head 0 of each row; head k of it lies k * BLOCK further, and H / K query heads share
        # it. Entries stand in the order (head, query, row): the bag of head h and query b begins at h * T + starts[b].
        first_T = visible_T // BLOCK * (kv_heads * BLOCK) + visible_T % BLOCK
        rows_E = (first_T.astype(np.int32) + (head // (heads // kv_heads) * BLOCK).astype(np.int32)).ravel()
        places_T = np.repeat(np.arange(count) * width - starts_B, lengths_B) + np.arange(total)
        places_E = (places_T + head * (count * width)).ravel()
        crow = np.append((starts_B + head * total).ravel(), heads * total).astype(np.int32)
        rows, places, crow_ = (torch.from_numpy(x).to(self.pool.device) for x in (rows_E, places_E, crow))
        values = torch.zeros(heads * total, dtype=self.pool.dtype, device=self.pool.device)
        csr = torch.sparse_csr_tensor(
            crow_, rows, values, size=(heads * count, self.pool.rows * kv_heads), check_invariants=False
        )
        return _Pattern(csr, rows, crow_[:-1], places, width)


add_forms(
    "paged_attention",
    in_c(CachedLayout.by_compiled, 1e-5),
    Kernel("torch", CachedLayout.by_sparse_product, bounds={torch.float32: 1e-5, torch.float64: 1e-13}),
    Kernel("reference", CachedLayout.by_definition),
)


class Chunk:
    """Dense attention of the queries at the end of one cached sequence over all of it."""

    def __init__(self, pool: CachePool, rows_T: np.ndarray, length: int) -> None:
        self._pool, self.length = pool, length
        self._rows_T = torch.from_numpy(rows_T).to(pool.device)
        # [n, T]: depth of the query minus depth of the key. The queries are the last n of the sequence.
        depth = torch.arange(len(rows_T), device=pool.device)
        self._distance = depth[len(rows_T) - length :, None] - depth

    def attend(self, call: AttentionCall, begin: int) -> Tensor:
        """[1, n, H, D]: the output of the queries from position `begin` of the pass on."""
        layer, window, query = _layer(call), call.window, call.query[:, :, begin : begin + self.length]
        mask = self._distance >= 0 if window is None else (self._distance >= 0) & (self._distance < window)
        heads = self._pool.shapes[layer].heads
        places = self._pool.places(self._rows_T, heads)
        key, value = (
            x.index_select(0, places).view(1, heads, len(self._rows_T), -1).to(query.dtype)
            for x in (self._pool.keys[layer], self._pool.values[layer])
        )
        attention = kernel("attention", query.device, query.dtype, self._pool.kernels)
        return attention.function(query, key, value, mask, call.scaling, call.softcap).transpose(1, 2)


def _layer(call: AttentionCall) -> int:
    """The index of the layer that calls."""
    layer: Any = call.module.layer_idx
    return layer


def ragged_arange(lengths: np.ndarray) -> np.ndarray:
    """0..n-1 for each n, joined: [2, 0, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
