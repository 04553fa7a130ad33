"""Tests at load that a model computes the same for a learner and a sampler, and refuses other models.

In a decoder-only model, all that a layer keeps of the past must be the keys and values of one causal attention. A model
with a recurrent state is computed one sequence in a row (`recurrent_state`). Anything else (another state, a rope that
depends on the longest sequence of the batch, masks of the model's own) would silently make a token depend on other
sequences, or on how it was cached. So a sequence is computed packed with another one, and its last token over cached
keys and values; with a recurrent state, two sequences in one batch. All must equal what transformers computes for each
sequence alone.

Axis letters: N packed positions, H query heads, K key-value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.engine.head.readout import CANARY, ReadOut, check_read_out, positions, read_out
from posttrain.engine.layers import attention
from posttrain.engine.layers.attention import AttentionCall, PackedLayout, dense_attention
from posttrain.engine.layers.expert_routing import Routing, following, routers_of
from posttrain.engine.model.architecture_kinds import WANTED
from posttrain.engine.model.recurrent_state import RowLayout, is_stateful, rows_alone
from posttrain.system.errors import EngineError

TRIES = 3
"""Sequences tried before a model is refused. In a mixture of experts whose routers are not understood
(`expert_routing`), rounding alone may sometimes route a token to another expert."""
BOUNDS = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest |difference| / |hidden state| of the median position that counts as rounding; 0.1 in narrower types."""


@dataclass(frozen=True)
class LayerShape:
    """The shape of what one layer caches per token: K heads, D of keys, D of values."""

    heads: int
    key: int
    value: int


def accept(module: PreTrainedModel, context: int) -> tuple[ReadOut, list[LayerShape]]:
    """The read-out of a model, which from now on attends by `attention.attend`, and what each of its layers caches
    (nothing where it keeps a recurrent state). EngineError explains why a model cannot be used."""
    name, config = type(module).__name__, module.config.get_text_config(decoder=True)
    if module.config.is_encoder_decoder:
        raise EngineError(f"{name} is an encoder-decoder. {WANTED}")
    bound = positions(module)
    if bound is not None and context > bound:
        raise EngineError(
            f"context={context} exceeds the {bound} positions of {name}. Set model.context to at most {bound}"
        )
    # First the config, then the shapes of a pass, then numbers: so a message names the cause and not what follows.
    _check_rope(config, name, context)
    _use_attention(module)
    out = read_out(module)
    if is_stateful(module):
        check_read_out(module, out, context)
        _check(module, out, min(CANARY, context), _difference_of_rows)
        return out, []
    routers_of(module)  # from now on the routers follow the choices that a layout carries, in the passes below too
    shapes = _shapes(module, out, min(4, context))
    check_read_out(module, out, context)
    _check(module, out, min(CANARY, context), _difference)
    return out, shapes


def _use_attention(module: PreTrainedModel) -> None:
    """Make every layer of `module` attend by `attention.attend` from now on. EngineError where transformers offers no
    way to replace the attention of this architecture."""
    attention.register()
    if module.config.get_text_config(decoder=True)._attn_implementation != attention.NAME:
        try:
            module.set_attn_implementation(attention.NAME)
        except (ValueError, KeyError, ImportError, AttributeError) as error:
            raise EngineError(
                f"{type(module).__name__} computes attention in code of its own and takes no other"
                f" ({type(error).__name__}: {error}). {WANTED}"
            ) from error


@contextmanager
def as_built(module: PreTrainedModel) -> Iterator[None]:
    """Inside, `module` attends with transformers' own plain code, and the layout has no effect."""
    # Layers hold the config each by itself, and an inner config may be another object than the outer one.
    configs = {id(c): c for p in module.modules() if (c := getattr(p, "config", None)) is not None}
    ours = [c for c in configs.values() if getattr(c, "_attn_implementation", None) == attention.NAME]
    try:
        for config in ours:
            # The attribute behind the property: the setter would change inner configs that are not ours as well.
            config._attn_implementation_internal = "eager"
        yield
    finally:
        for config in ours:
            config._attn_implementation_internal = attention.NAME


class _ProbeLayout(PackedLayout):
    """A packed layout that records which layers attend, and what they would cache."""

    def __init__(self, length: int) -> None:
        super().__init__([length])
        self.seen: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        layer = getattr(call.module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.seen:
            raise EngineError(
                f"{type(call.module).__name__} has layer index {layer!r}, missing or used twice, so its cache has no"
                f" place. {WANTED}"
            )
        self.seen[layer] = LayerShape(call.key.shape[1], call.key.shape[-1], call.value.shape[-1])
        return super().attend(call)


def _shapes(module: PreTrainedModel, out: ReadOut, length: int) -> list[LayerShape]:
    """Returns the shape of what each layer caches. EngineError where one does not attend once through our attention."""
    name, config = type(module).__name__, module.config.get_text_config(decoder=True)
    probe = _ProbeLayout(length)
    with torch.no_grad():
        try:
            out.hidden(*_canary(out, length, 0), probe)
        except EngineError:
            raise
        except Exception as error:  # the model's own code may raise anything
            raise EngineError(
                f"{name} cannot run with packed segments ({type(error).__name__}: {error}). {WANTED}"
            ) from error
    layers = int(config.num_hidden_layers)
    # A layer that is missing computes its past in a way that neither packing nor the engine's cache knows.
    if sorted(probe.seen) != list(range(layers)):
        missing = sorted(set(range(layers)) - set(probe.seen))
        where = f"layers {missing}" if missing else f"{len(probe.seen)} attentions in {layers} layers"
        raise EngineError(
            f"{where} of {name} do not attend once through transformers' attention"
            f" interface{_described_parts(out, missing)}: they keep a recurrent state,"
            f" add biases, or compute attention in code of their own. {WANTED}"
        )
    return [probe.seen[i] for i in range(layers)]


def _described_parts(out: ReadOut, layers: list[int]) -> str:
    """` (their parts: ...)` for a message: the classes of the parts of the first of these layers; '' without layers."""
    for stack in out.decoder.modules():
        if layers and isinstance(stack, nn.ModuleList) and len(stack) > layers[0]:
            names = [type(part).__name__ for part in stack[layers[0]].children()]
            return f" (their parts: {', '.join(dict.fromkeys(n for n in names if 'Norm' not in n))})"
    return ""


def _check_rope(config: object, name: str, context: int) -> None:
    """EngineError where the rope's frequencies depend on the longest sequence and `context` is long enough for it."""
    rope = getattr(config, "rope_parameters", None) or {}
    # Models with several kinds of layers have one dict of rope settings for each kind.
    for kind in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        if kind.get("rope_type") not in ("dynamic", "longrope"):
            continue
        original = kind.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        original = original or getattr(config, "max_position_embeddings")  # noqa: B009
        if context > original:
            raise EngineError(
                f"{name} has {kind['rope_type']} rope: its frequencies change for all once one sequence passes"
                f" {original} tokens. Set model.context to at most {original}, up to which they are plain ones"
            )


class _GrowingCache:
    """A layout with a growing cache of one sequence: later positions see the keys and values of all calls before."""

    def __init__(self) -> None:
        self._past: dict[int, tuple[Tensor, Tensor]] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        layer: Any = call.module.layer_idx
        query, key, value = call.query, call.key, call.value
        if layer in self._past:
            past_key, past_value = self._past[layer]
            key, value = torch.cat([past_key, key], dim=2), torch.cat([past_value, value], dim=2)
        self._past[layer] = key, value
        # Keys are all positions so far, queries the last of them. [queries, keys]: how far back a key lies.
        at = torch.arange(key.shape[2], device=key.device)
        distance = at[-query.shape[2] :, None] - at
        mask = (distance >= 0) & (distance < (call.window or len(at)))
        return dense_attention(query, key, value, mask, call.scaling, call.softcap).transpose(1, 2)


Difference = Callable[[PreTrainedModel, ReadOut, int, int], str]
"""(model, read-out, length, seed): what differs from transformers' result for a sequence alone; '' where nothing."""


def _check(module: PreTrainedModel, out: ReadOut, length: int, difference: Difference) -> None:
    """EngineError where `difference` finds one for each of `TRIES` seeds. One seed without any is enough."""
    why = ""
    for seed in range(TRIES):
        with torch.no_grad():
            try:
                why = difference(module, out, length, seed)
            except EngineError:
                raise
            except Exception as error:  # the model's own code may raise anything
                why = f"it cannot be run so ({type(error).__name__}: {error})"
        if not why:
            return
    raise EngineError(f"{type(module).__name__} cannot be sampled and learned alike: {why}. {WANTED}")


def _difference(module: PreTrainedModel, out: ReadOut, length: int, seed: int) -> str:
    """Returns the difference that is found, as text; '' where nothing differs. In a mixture of experts the packed pass
    follows the experts that each sequence chose alone, since rounding may flip a choice between two nearly equal ones.
    Its own choices may differ by rounding only."""
    # `seed + TRIES`, so that no try reads the sequence of another one again.
    sequences = _canary(out, length, seed), _canary(out, max(1, length // 2), seed + TRIES)
    (ids, at), (other_ids, other_at) = sequences
    chosen = [Routing(), Routing()]  # without given choices they only record those of the routers
    with as_built(module):
        wanted = [
            out.hidden(*sequence, _routed(PackedLayout([len(sequence[0])]), routing))
            for sequence, routing in zip(sequences, chosen, strict=True)
        ]
    routing = following(chosen)
    layout = _routed(PackedLayout([len(ids), len(other_ids)]), routing)
    packed = out.hidden(torch.cat([ids, other_ids]), torch.cat([at, other_at]), layout)
    first, second = packed.split([len(ids), len(other_ids)])
    # The second sequence is the one that would see the first if the mask leaked.
    for name, ours, theirs in (("", first, wanted[0]), (" behind another one", second, wanted[1])):
        if (gap := _gap(ours, theirs)) > _bound(ours):
            return (
                f"a packed sequence{name} has other hidden states than alone with transformers' own attention (relative"
                f" gap {gap:.2g})"
            )
    if why := _chooses_otherwise(routing, packed.dtype, "packed with another sequence"):
        return why
    return "" if length < 2 else _over_a_cache(out, (ids, at), first, chosen[0])


def _over_a_cache(out: ReadOut, sequence: tuple[Tensor, Tensor], wanted: Tensor, chosen: Routing) -> str:
    """`_difference` of a sequence in two calls: all tokens but the last, and that one over what the first call cached.

    Args:
        sequence: (ids, positions).
        wanted: its hidden states by one pass.
        chosen: the experts of its tokens, which both calls follow.
    """
    memory, followed = _GrowingCache(), following([chosen])
    for situation, part in (("before its end", slice(None, -1)), ("over cached keys and values", slice(-1, None))):
        routing = None if followed is None or followed.given is None else Routing(followed.given[part], True)
        ours = out.hidden(sequence[0][part], sequence[1][part], _routed(memory, routing))
        if (gap := _gap(ours, wanted[part])) > _bound(ours):
            return f"hidden states {situation} differ from those of the whole sequence (relative gap {gap:.2g})"
        if why := _chooses_otherwise(routing, ours.dtype, situation):
            return why
    return ""


def _routed(layout: Any, routing: Routing | None) -> Any:
    """The layout itself, which from now on carries the choices of experts."""
    layout.routing = routing
    return layout


def _chooses_otherwise(followed: Routing | None, computed: torch.dtype, situation: str) -> str:
    """Returns text where the routers would have chosen other experts than they were given, by more than rounding."""
    lead = 0.0 if followed is None else followed.chosen_by_more(computed)
    if lead > 1:
        return f"its routers choose other experts for a token {situation} (by {lead:.2g} times rounding)"
    return ""


def _difference_of_rows(module: PreTrainedModel, out: ReadOut, length: int, seed: int) -> str:
    """`_difference` of a model with a state: two sequences in a batch."""
    sequences = [_canary(out, length, seed), _canary(out, max(1, length // 2), seed + TRIES)]
    lengths = np.array([len(ids) for ids, _ in sequences])
    packed = torch.cat([ids for ids, _ in sequences]).cpu().numpy()
    batch = rows_alone(out, packed, lengths, np.arange(len(packed)), RowLayout())
    with as_built(module):
        wanted = [out.hidden(*sequence, RowLayout()) for sequence in sequences]
    for name, ours, theirs in zip(("longer", "shorter"), batch.split(lengths.tolist()), wanted, strict=True):
        if (gap := _gap(ours, theirs)) > _bound(ours):
            return f"the {name} of two sequences in a batch has other hidden states than alone (relative gap {gap:.2g})"
    return ""


def _canary(out: ReadOut, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """(ids, positions) [length] of a made-up sequence, another one for each seed."""
    # Multiples of a prime spread the ids over the whole vocabulary, without a random generator.
    at = torch.arange(length, device=out.weight.device)
    return (at + seed * 131) * 7919 % out.weight.shape[0], at


def _gap(ours: Tensor, wanted: Tensor) -> float:
    """|difference| / |wanted| of the median position; inf where it is not a number."""
    gap_N = (ours - wanted).double().norm(dim=-1) / wanted.double().norm(dim=-1).clamp_min(1e-30)
    return float(gap_N.nan_to_num(nan=float("inf")).median())


def _bound(hidden: Tensor) -> float:
    """The largest gap of hidden states of this dtype that counts as rounding (`BOUNDS`)."""
    return BOUNDS.get(hidden.dtype, 0.1)
