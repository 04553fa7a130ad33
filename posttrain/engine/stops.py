"""Which tokens end a turn, and whether the chat template agrees."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast

from posttrain.core.errors import DataError, PosttrainError
from posttrain.environment import templates


def resolve_stops(tokenizer: PreTrainedTokenizerFast, config: Any) -> tuple[int, ...]:
    """Ids that end a turn: first the tokenizer's EOS, then the model's EOS ids, each once.

    The model's ids are those of its generation config. Transformers derives it from `config.json` where there is
    no file. Ids in `config.json` are often left over from another tokenizer, so then only special tokens of this
    tokenizer count. A chat template's end of turn (`<|im_end|>`, `<|eot_id|>`) counts only where the tokenizer
    or the model lists it.

    Args:
        config: the model's generation config; None: there is none.
    """
    derived = bool(getattr(config, "_from_model_config", False))
    listed = None if config is None else config.eos_token_id
    model_ids: list[Any] = [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in model_ids):
        raise DataError(
            f"eos_token_id={str(listed)[:80]} of generation_config.json (or config.json) is no token id and no list of"
            " them: correct it there"
        )
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    own: list[Any] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stops = dict.fromkeys([*(int(i) for i in own), *(int(i) for i in model_ids if not derived or i in special)])
    if not stops:
        raise DataError(
            "the tokenizer has no EOS token and the generation config names none, so the policy could never end a turn."
            ' Set "eos_token" in tokenizer_config.json or "eos_token_id" in generation_config.json'
        )
    unknown = [i for i in stops if not 0 <= i < len(tokenizer)]
    if unknown:
        raise DataError(
            f"stop ids {unknown} of generation_config.json are no tokens of this tokenizer ({len(tokenizer)} tokens):"
            " correct eos_token_id there"
        )
    return tuple(stops)


def turn_end(tokenizer: PreTrainedTokenizerFast, stop_ids: tuple[int, ...]) -> list[str]:
    """A note where the chat template ends an assistant's turn with a special token that is not a stop token."""
    if not tokenizer.chat_template:
        return []
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    try:
        text = templates.apply(tokenizer, turns, generate=False)
    except templates.RefusedError as error:
        return [f"the chat template does not render a user and an assistant turn ({error})"]
    except PosttrainError:
        raise
    except Exception as error:  # a tokenizer of the model's own code may raise anything
        return [f"the chat template does not render a user and an assistant turn ({type(error).__name__}: {error})"]
    after = tokenizer.encode(str(text).rpartition("ok")[2], add_special_tokens=False)
    special = tokenizer.added_tokens_decoder
    if after and after[0] in special and special[after[0]].special and after[0] not in stop_ids:
        token = tokenizer.convert_ids_to_tokens(after[0])
        return [
            f"the chat template ends a turn with {token!r} ({after[0]}), which is not a stop token: add it to"
            " eos_token_id in generation_config.json"
        ]
    return []
