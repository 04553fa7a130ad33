"""Reads an exported model as any user of transformers or PEFT does, and compares what was read with what was saved.

Attention, cache and head are those of transformers: nothing of posttrain computes in the model that is read back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from posttrain.engine.files.fingerprint import fingerprints
from posttrain.engine.model.recurrent_state import is_stateful
from posttrain.engine.model.stop_tokens import listed_ids, resolve_stops
from posttrain.engine.model.tiny_models import digest, quiet
from posttrain.system.errors import DataError, InvariantError, first_line

if TYPE_CHECKING:
    from posttrain.engine.model.policy_model import Policy


@dataclass(frozen=True, eq=False)
class ReloadedModel:
    """A model directory that was read back."""

    module: Any
    """The model that a user calls: a causal LM, or a PEFT model."""
    inner: Any
    """The causal LM, with PEFT's layers inside where an adapter was read."""
    tokenizer: Any
    stop_ids: tuple[int, ...]

    @property
    def tokenizer_digest(self) -> str:
        """The digest of the tokenizer, to compare with `Policy.tokenizer_digest`."""
        core = self.tokenizer.backend_tokenizer
        # As `prepared` does before a policy's digest is taken.
        core.no_truncation()
        core.no_padding()
        return digest(core.to_str())

    @property
    def template_digest(self) -> str:
        return digest(str(self.tokenizer.chat_template or ""))

    @torch.no_grad()
    def answer(self, prompt: np.ndarray, most: int) -> np.ndarray:
        """int32: the greedy answer to a prompt, up to and with the first stop token, at most `most` tokens. With a
        recurrent state it is computed anew for each token, because the cache has another form in each family."""
        device = next(self.inner.parameters()).device
        # `fed` is what the next pass reads: [1, T] at first, and [1, 1] once there is a cache.
        fed, past, answer_ids = torch.from_numpy(prompt.astype(np.int64)).to(device)[None], None, list[int]()
        sequence, cached = fed, not is_stateful(self.inner)
        while len(answer_ids) < most:
            out = self.module(input_ids=fed, **({"past_key_values": past} if cached else {}), use_cache=cached)
            token = int(out.logits[0, -1].argmax())
            answer_ids.append(token)
            if token in self.stop_ids:
                break
            next_one = torch.tensor([[token]], device=device)
            past, sequence = out.past_key_values if cached else None, torch.cat([sequence, next_one], 1)
            fed = next_one if past is not None else sequence
        return np.array(answer_ids, np.int32)

    @torch.no_grad()
    def score(self, ids: np.ndarray) -> np.ndarray:
        """float64 [T - 1]: log-probs of all tokens of a sequence but the first, by one forward pass without a cache."""
        device = next(self.inner.parameters()).device
        input_ids = torch.from_numpy(ids.astype(np.int64)).to(device)[None]
        logits: Tensor = self.module(input_ids=input_ids, use_cache=False).logits[0, :-1]
        parts = [
            # In parts of 64 positions, so that the float64 copy is [64, V] and not [T, V].
            torch.log_softmax(part.double(), -1).gather(-1, targets[:, None])[:, 0]
            for part, targets in zip(logits.split(64), input_ids[0, 1:].split(64), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()


def reload(folder: Path, policy: Policy, base: str = "") -> ReloadedModel:
    """Read an exported directory; DataError where transformers or PEFT cannot.

    Args:
        policy: what it was made from; its device, and whether code of the model's own is trusted.
        base: of an adapter: the model beneath it.
    """
    trust = policy.remote_code
    try:
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
            # "auto" is what the folder itself says. An adapter's base may be stored in another type than the run's.
            dtype: Any = policy.dtype if base else "auto"
            model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype=dtype, trust_remote_code=trust)
            inner, module = model, model
            if base:
                from peft import PeftModel

                adapted: Any = PeftModel.from_pretrained(model, str(folder))
                inner, module = adapted.base_model.model, adapted
    except Exception as error:  # files that cannot be read raise any error of their parser
        raise DataError(
            f"{folder}: what was exported cannot be read back ({type(error).__name__}: {first_line(error)})"
        ) from error
    module.to(policy.device).eval()
    config = model.generation_config
    # A whole export lists the stop ids, and transformers' own rule is tested; an adapter's base has its old config.
    stops = resolve_stops(tokenizer, config) if base else tuple(listed_ids(config))
    return ReloadedModel(module, inner, tokenizer, stops)


def same_weights(ours: Iterable[tuple[str, Tensor]], again: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """InvariantError where the tensors read back are not, bit for bit and by name, those that were saved."""
    saved, read = fingerprints(ours), fingerprints(again)
    if wrong := sorted(n for n in saved.keys() | read.keys() if saved.get(n) != read.get(n)):
        raise InvariantError(
            f"{folder}: {len(wrong)} tensors were read back differently from what was saved: {', '.join(wrong[:4])}."
            " The disk or the format failed; do not use this folder"
        )


def same_tokenizer(ours: PreTrainedTokenizerFast, again: PreTrainedTokenizerFast, folder: Path) -> None:
    """InvariantError where vocabulary, end token or chat template differ, or some texts are encoded differently."""
    # The first 200 tokens, joined as the decoder joins pieces, as raw strings, and as `decode` gives the first ids.
    # They pass through normalisers, merges and the decoder, which an equal vocabulary does not test.
    vocabulary = ours.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)[:200]
    texts = [ours.convert_tokens_to_string(tokens), "".join(tokens), ours.decode(list(range(min(200, len(ours)))))]
    same = (
        again.get_vocab() == vocabulary
        and again.eos_token_id == ours.eos_token_id
        and again.chat_template == ours.chat_template
    )
    if not same or any(_ids(ours, text) != _ids(again, text) for text in texts):
        raise InvariantError(
            f"{folder}: the tokenizer read back ({type(again).__name__}) encodes differently from the one saved "
            f"({type(ours).__name__}); do not use this folder"
        )


def _ids(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int] | str:
    """The ids of the text, or the error message (a character tokenizer refuses characters it does not have)."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:
        return str(error)
