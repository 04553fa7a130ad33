"""A policy: a causal LM with its tokenizer. What other libraries decide silently is resolved and told in `notes`."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from posttrain.config.engines import KernelChoice
from posttrain.config.model_settings import Lora, check_frozen, goes_on
from posttrain.config.run import BUILT_CONTEXT, Model
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.adapters.adapter_modules import attach
from posttrain.engine.adapters.quantise import is_quantised, quantise, weights_of
from posttrain.engine.adapters.saved_adapter import load_saved, saved_adapter
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.files.pretrained_files import read_pretrained, read_tokenizer
from posttrain.engine.files.reload_export import same_tokenizer, same_weights
from posttrain.engine.head.readout import ReadOut, check_read_out, positions, read_out
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.layers.attention import PackedLayout
from posttrain.engine.model.disable_dropout import silence
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.engine.model.stop_tokens import resolve_stops, turn_end
from posttrain.engine.model.supported_models import accept
from posttrain.engine.model.tiny_models import build_module, characters, digest, quiet, raw_bytes
from posttrain.system.errors import ConfigError, DataError, InvariantError, first_line
from posttrain.system.files import share

__all__ = ["Policy", "ReadOut", "check_read_out", "load_policy", "named_tensors", "read_out"]

GREEDY_TOKENS = 16
"""Tokens generated to check a saved model that was read back."""


@dataclass(frozen=True, eq=False)
class Policy:
    """A causal LM ready to be trained, scored and sampled.

    No token is padding: sequences are packed, and masks never come from token values. Every embedding row learns, also
    where a tokenizer's pad token is its EOS. Dropout is off, because sampler and learner must be the same function.
    """

    module: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    stop_ids: tuple[int, ...]
    """Ids that end a turn: see `resolve_stops`."""
    context: int
    """Most tokens of a sequence: `model.context`, else the number of positions in the config."""
    tokenizer_digest: str
    template_digest: str
    source: str
    """Where it came from, as text for people."""
    notes: tuple[str, ...] = ()
    remote_code: bool = False
    """Whether the model's own Python code was trusted."""
    kernels: KernelChoice = "auto"
    lora: Lora | None = None
    """The settings of its adapter; None where all weights train."""
    rounded_from: str = ""
    """Fingerprint that weights in few bits had before they were rounded."""
    share_prefixes: bool = True
    """Whether learner and reference compute shared beginnings once."""
    reward_head: RewardHead | None = None
    """The head of a reward model, trained with the weights; None where no stage trains one."""

    @property
    def device(self) -> torch.device:
        return self.module.device

    @property
    def dtype(self) -> torch.dtype:
        return self.module.dtype

    @property
    def size(self) -> int:
        """Number of weights, ties counted once."""
        return weights_of(self.module)

    def describe(self) -> tuple[str, ...]:
        """Returns the lines about the model that a run prints at its start."""
        dtype = str(self.dtype).removeprefix("torch.")
        stops = ", ".join(f"{self.tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in self.stop_ids)
        rows = _embedding_rows(self.module)
        return (
            f"model: {type(self.module).__name__} {self.source}, {self.size:,} parameters, {dtype} on {self.device}",
            f"vocabulary: {len(self.tokenizer):,} tokens, {rows:,} embedding rows; context: {self.context:,} tokens",
            f"stop tokens: {stops}",
            *(() if self.lora is None else (adapter_modules.words(self.module, self.lora),)),
            *(f"note: {note}" for note in self.notes),
        )

    def numbers(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors with their values. A policy on `meta` overrides this and reads the values from files."""
        return iter(tensors)

    def clone(self) -> Policy:
        """The same policy with a copy of all weights."""
        return replace(self, module=copy.deepcopy(self.module))

    def twin(self) -> Policy:
        """The same policy with its own copy of the weights that train. Nothing may change the frozen ones it shares."""
        # The memo of deepcopy lists the frozen parameters as copied already.
        frozen = {id(p): p for p in self.module.parameters() if not p.requires_grad}
        return replace(self, module=copy.deepcopy(self.module, {**frozen}))

    def beside(self, lora: Lora, seed: int) -> Policy:
        """Another policy with a new adapter over the same frozen weights, which nothing may change. ConfigError where
        all weights of this policy train, or the adapter fits no layer."""
        return replace(self, module=adapter_modules.beside(self.module, lora, seed), lora=lora)

    def plain(self) -> Policy:
        """This policy where it has no adapter, else a copy of it with the adapter merged into the copy's weights."""
        return self if self.lora is None else replace(self, module=adapter_modules.merged(self.module), lora=None)

    @torch.no_grad()
    def greedy(self, ids: Tensor, count: int) -> Tensor:
        """`ids` [T] and `count` greedy tokens, each from the whole sequence without a cache: slow, and right by
        construction."""
        out = read_out(self.module)
        for _ in range(count):
            at = torch.arange(len(ids), device=ids.device)
            last = out.hidden(ids, at, PackedLayout([len(ids)]))[-1]
            ids = torch.cat([ids, out.logits(last).argmax()[None]])
        return ids

    def save(self, folder: Path | str) -> None:
        """Save model and tokenizer with `save_pretrained`, an adapter merged, then read both back as anybody does.
        InvariantError where what was read has other weights, another tokenizer, or other greedy tokens."""
        if self.lora is not None:
            self.plain().save(folder)
            return
        self.write(folder)
        with quiet():
            again: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, trust_remote_code=self.remote_code
            ).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=self.remote_code)
        # The last proof covers most: transformers' own forward pass also sees a config that does not fit the weights.
        same_weights(named_tensors(self.module), named_tensors(again), Path(folder))
        same_tokenizer(self.tokenizer, tokenizer, Path(folder))
        self._check_greedy(again.to(self.device), Path(folder))

    def write(self, folder: Path | str) -> None:
        """Write model and tokenizer with `save_pretrained`, an adapter merged, and compare nothing."""
        with quiet():
            self.plain().module.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
        share(Path(folder))

    @torch.no_grad()
    def _check_greedy(self, again: PreTrainedModel, folder: Path) -> None:
        """Check that transformers' own attention gives our greedy tokens the highest logits, up to rounding."""
        start = torch.arange(min(4, self.context - 1), device=self.device) % _embedding_rows(self.module)
        greedy_ids = self.greedy(start, min(GREEDY_TOKENS, self.context - len(start)))
        # Position t predicts token t + 1.
        logits = again(input_ids=greedy_ids[None], use_cache=False).logits[0, len(start) - 1 : -1].float()
        # The gap to the largest logit, since two nearly equal logits may change places by rounding.
        gap = logits.max(-1).values - logits.gather(-1, greedy_ids[len(start) :, None])[:, 0]
        bound = (1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1) * max(1.0, float(logits.abs().max()))
        # Written as `not <=`, so that NaN is refused as well.
        if not float(gap.max()) <= bound:
            raise InvariantError(
                f"{folder}: the model read back says other words than the one saved (logit gap {float(gap.max()):.3g},"
                f" bound {bound:.3g}). Its config does not describe what was trained; compare {folder}/config.json with"
                " the model the run started from"
            )


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Weights and persistent buffers under their state-dict names. A tied tensor comes once, under its first name."""
    seen_ids: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        # keep_vars gives the parameters themselves: a tied one is the same object under both names.
        if id(tensor) not in seen_ids:
            seen_ids.add(id(tensor))
            yield name, tensor


def served_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a learner sends to its engine: those of the adapter where there is one, else all."""
    if adapter_modules.is_adapted(module):
        return iter(adapter_modules.adapter_tensors(module).items())
    return named_tensors(module)


def base_digest(policy: Policy) -> str:
    """Exact digest of the weights beneath the adapter."""
    return fingerprint(policy.numbers(adapter_modules.base_tensors(policy.module).items()))


def load_policy(
    model: Model, alphabet: str | None, seed: int, most: int | None = None, tokenizer_files: Path | None = None
) -> Policy:
    """The policy a run starts from: `model.path`, read from disk or hub, or else a small `model.arch`, built here.

    Args:
        alphabet: characters of the built tokenizer; None: bytes. Ignored where `model.path` is given.
        tokenizer_files: a folder with the tokenizer of the built model, instead of an alphabet.
        seed: seed of the built weights.
        most: tokens of the longest sequence of the run, used where `model.context` is not set; None: as many as
            the model has positions.

    Raises:
        ConfigError: path or device do not exist, or the sizes do not fit together.
        DataError: the files hold no causal LM, or no tokenizer with an end token that fits the embeddings.
        EngineError: learner and sampler cannot compute the same (`accept`), or noise stays (`silence`).
    """
    _device(model.device)
    dtype = getattr(torch, model.dtype)
    saved = saved_adapter(model.path) if model.path is not None else None
    # A run that begins with a saved adapter goes on with its settings, or is refused.
    if saved is not None and model.lora != saved.lora:
        model = replace(model, lora=goes_on(model.lora, saved.lora, f"model={model.path}"))
    if model.path is None:
        tokenizer = _built_tokenizer(alphabet, tokenizer_files)
        module: PreTrainedModel = build_module(model, tokenizer, seed)
        notes: list[str] = []
        source = f"built with {model.layers} layers of width {model.hidden}"
    else:
        path = model.path if saved is None else saved.base
        module, tokenizer, notes = read_pretrained(path, dtype, model.trust_remote_code)
        source = f"from {path}" if saved is None else f"from {path} with the adapter {model.path}"
        notes += () if saved is None else saved.notes
    stops = resolve_stops(tokenizer, module.generation_config)
    policy = with_adapter(prepared(model, module, tokenizer, stops, source, notes, most), model, seed)
    if saved is not None:
        load_saved(policy, saved)
    return policy


def with_adapter(policy: Policy, model: Model, seed: int) -> Policy:
    """The policy with the adapter that `model.lora` asks for, attached in place, over weights as `model.quantize` asks.
    ConfigError where they do not fit."""
    check_frozen(model.lora, model.quantize)
    if model.lora is None:
        return policy
    # Before rounding: the digest of what the files hold, by which a run knows its base model again.
    if model.quantize is not None and not is_quantised(policy.module):
        policy = replace(policy, rounded_from=fingerprint(named_tensors(policy.module)))
        quantise(policy.module, model.quantize)
    attach(policy.module, model.lora, seed)
    return replace(policy, lora=model.lora)


PLAIN_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] or '' }}"
    "{{ eos_token if m['role'] == 'assistant' else '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""The chat template of a built model whose tokens are bytes: a message a line, behind its role."""


def _built_tokenizer(alphabet: str | None, files: Path | None) -> PreTrainedTokenizerFast:
    """The tokenizer of a built model."""
    if files is not None:
        return read_tokenizer(str(files))[0]
    tokenizer = raw_bytes() if alphabet is None else characters(alphabet)
    tokenizer.chat_template = PLAIN_CHAT if alphabet is None else None
    return tokenizer


def prepared(
    model: Model,
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    stop_ids: tuple[int, ...],
    source: str,
    notes: list[str],
    most: int | None = None,
) -> Policy:
    """A policy from a module and its tokenizer, both checked, without dropout. Whoever reads the weights of a module on
    `meta` calls `accept` and `silence` afterwards."""
    # tokenizer.json may ask for truncation or padding. Both are switched off here, so that the tokenizer that is saved
    # equals this one.
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    device = None if module.device.type == "meta" else _device(model.device)
    # On meta only the type is set. By the class, because type checkers do not understand transformers' own `to`.
    torch.nn.Module.to(module, device=device, dtype=getattr(torch, model.dtype)).eval()
    for part in module.modules():
        # The config's rates are 0 already; this is for layers that have a rate of their own.
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        if isinstance(part, nn.Embedding):
            part.padding_idx = None  # torch gives its row no gradient, and here every row learns
    notes = [*notes, *_check_vocabulary(tokenizer, module), *turn_end(tokenizer, stop_ids)]
    # What is saved from this module ends its turns where the policy did.
    if module.generation_config is not None:  # code of a model's own may have none
        module.generation_config.eos_token_id = list(stop_ids)
    context = _context(model, module, most)
    notes += _notes(module)
    if device is not None:
        # `silence` and `accept` run the model, so they wait until the weights are there.
        notes += silence(module, accept(module, context)[0])
    return Policy(
        module=module,
        tokenizer=tokenizer,
        stop_ids=stop_ids,
        context=context,
        tokenizer_digest=digest(tokenizer.backend_tokenizer.to_str()),
        template_digest=digest(str(tokenizer.chat_template or "")),
        source=source,
        notes=tuple(notes),
        remote_code=model.path is not None and model.trust_remote_code,
        kernels=model.kernels,
        share_prefixes=model.share_prefixes,
    )


def _emulates_float16(module: PreTrainedModel) -> bool:
    """Returns whether torch emulates float16 for this module: it has that type, and lies on a CPU without float16."""
    if module.dtype != torch.float16 or module.device.type != "cpu":
        return False
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    return supported is None or not supported()


def _notes(module: PreTrainedModel) -> Iterator[str]:
    """What people should know of how this model is computed."""
    if _emulates_float16(module):
        yield (
            "this CPU has no float16 unit: torch computes in float32 and rounds each result to float16, which is exact"
            " and slower than float32"
        )
    text_config = module.config.get_text_config(decoder=True)
    coef = getattr(text_config, "router_aux_loss_coef", 0)
    if getattr(text_config, "output_router_logits", False) and coef:
        yield (
            f"its config asks for a load-balance loss (output_router_logits=true, router_aux_loss_coef={coef:g}), which"
            f" is not read from there: a stage of reinforcement adds one with router_aux_loss_coef={coef:g}, and"
            " imitation, preferences and reward models have none (docs/guides/experts.md)"
        )
    if is_stateful(module):
        yield (
            "the model keeps a recurrent state, so each sequence is computed in a row of its own and nothing is shared"
        )


def _context(model: Model, module: PreTrainedModel, most: int | None) -> int:
    """Returns the most tokens of a sequence: `model.context`, else the smaller one of `most` and the positions in the
    config, else BUILT_CONTEXT. ConfigError where it is below 2 or above the positions."""
    bound = positions(module)
    wanted = model.context
    if wanted is None:
        wanted = min(bound or most or BUILT_CONTEXT, most or bound or BUILT_CONTEXT)
    if wanted < 2:
        raise ConfigError(f"model.context={wanted}: a prompt and a token need at least 2")
    if bound is not None and wanted > bound:
        raise ConfigError(
            f"model.context={wanted} exceeds the {bound} positions of {type(module).__name__}. Set it to at most"
            f" {bound}"
        )
    return wanted


def _embedding_rows(module: PreTrainedModel) -> int:
    """Rows of the embedding: the ids that the model can read."""
    return int(getattr(module.get_input_embeddings(), "weight").shape[0])  # noqa: B009 (typed as any module)


def _check_vocabulary(tokenizer: PreTrainedTokenizerFast, module: PreTrainedModel) -> list[str]:
    """DataError where a token's id has no embedding row. Returns a note where rows have no token."""
    rows = _embedding_rows(module)
    # The largest id, and not the number of tokens: vocabularies may have holes.
    top_token, top = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if top >= rows:
        raise DataError(
            f"the tokenizer's token {top_token!r} has id {top}, but the model has {rows} embedding rows: tokenizer and"
            " model do not belong together. Use the tokenizer the model was trained with, or resize the embeddings"
            " (model.resize_token_embeddings) and save both"
        )
    missing = rows - len(tokenizer)
    if missing <= 0:
        return []
    return [f"{missing} embedding rows have no token; a policy that says one says nothing readable"]


def _device(name: str) -> torch.device:
    """The device of that name. It must have float64, by which tokens are drawn and weights checked: MPS has none."""
    try:
        # Only an allocation shows whether the device is there, and whether it has float64.
        return torch.empty(0, device=name, dtype=torch.float64).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # what torch raises differs by device
        # torch then lists all of its operators, which says less than this reason.
        not_built = isinstance(error, NotImplementedError)
        reason = "torch is built without it" if not_built else first_line(error)
        raise ConfigError(
            f"model.device={name!r} cannot be used here ({reason}). Use model.device=cpu, or a device torch can see"
        ) from error
