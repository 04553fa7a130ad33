"""Finds the tokens that end a turn, and checks that the chat template agrees."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerFast

from posttrain.environment.templates import template_process
from posttrain.environment.templates.rendering_differences import SAID
from posttrain.system.errors import DataError, PosttrainError


def listed_ids(config: Any) -> list[Any]:
    """The ids at which `generate` of transformers ends an answer, from a generation config or None."""
    listed = getattr(config, "eos_token_id", None)
    return [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]


def resolve_stops(tokenizer: PreTrainedTokenizerFast, config: Any) -> tuple[int, ...]:
    """Ids that end a turn: first the tokenizer's EOS, then the model's EOS ids, each once.

    The model's ids are those of its generation config (None: there is none). Where transformers has derived it from
    `config.json`, ids are often left over from another tokenizer, so only special tokens of this one count. A chat
    template's end of turn (`<|im_end|>`, `<|eot_id|>`) counts only where the tokenizer or the model lists it.
    """
    derived = bool(getattr(config, "_from_model_config", False))
    model_ids = listed_ids(config)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in model_ids):
        raise DataError(
            f"eos_token_id={str(config.eos_token_id)[:80]} of generation_config.json (or config.json) is no token id"
            " and no list of them: correct it there"
        )
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    tokenizer_eos: list[Any] = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # The first id is the one that is written where one end token is needed.
    stops = dict.fromkeys(int(i) for i in [*tokenizer_eos, *(i for i in model_ids if not derived or i in special)])
    if not stops:
        raise DataError(
            "the tokenizer has no EOS token and the generation config names none, so the policy could never end a turn."
            ' Set "eos_token" in tokenizer_config.json or "eos_token_id" in generation_config.json'
        )
    if unknown := [i for i in stops if not 0 <= i < len(tokenizer)]:
        raise DataError(
            f"stop ids {unknown} of generation_config.json are no tokens of this tokenizer ({len(tokenizer)} tokens):"
            " correct eos_token_id there"
        )
    return tuple(stops)


def turn_end(tokenizer: PreTrainedTokenizerFast, stop_ids: tuple[int, ...]) -> list[str]:
    """Returns notes about stop tokens that the tokenizer or the chat template contradicts.

    There is a note about a stop id that only the model lists and that is no special token of the tokenizer, or is its
    BOS or unknown token. And there is one about a chat template that ends an assistant's turn without a stop token.
    """
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    notes = [
        f"a turn ends at {tokenizer.convert_ids_to_tokens(i)!r} ({i}), by eos_token_id of the model, and for the"
        " tokenizer it is no token that ends a text: correct eos_token_id in generation_config.json"
        for i in stop_ids
        if i != tokenizer.eos_token_id and (i not in special or i in (tokenizer.bos_token_id, tokenizer.unk_token_id))
    ]
    if not tokenizer.chat_template:
        return notes
    # One dialogue ends with the assistant and one goes on, because templates may end only the last turn with EOS.
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": SAID}]
    tails: list[str] = []  # of each dialogue the text behind the assistant's words
    for next_turns in ([], turns[:1]):
        try:
            text = template_process.apply(tokenizer, [*turns, *next_turns], generate=False)
        except PosttrainError:
            raise
        except Exception as error:  # a tokenizer of the model's own code may raise anything
            reason = (
                str(error) if isinstance(error, template_process.RefusedError) else f"{type(error).__name__}: {error}"
            )
            # No note where only the dialogue that goes on fails: the end of the other one is enough for what follows.
            notes += [] if tails else [f"the chat template does not render a user and an assistant turn ({reason})"]
            break
        tails.append(str(text).rpartition(SAID)[2])
    named = {str(tokenizer.decode([i])): i for i in (*special, *stop_ids)}
    # Longest first, because an alternation takes the first that fits, and one token's text may begin with another's.
    any_token = "|".join(map(re.escape, sorted(filter(None, named), key=len, reverse=True)))
    # Only tokens directly behind the words count, with white space between: those of the user's turn come later.
    ends = [re.findall(any_token, match[0]) for t in tails if (match := re.match(rf"(?:\s*(?:{any_token}))*", t))]
    # One stop token behind one of the two turns is enough. `ends` is empty where the template rendered none of them.
    if not ends or any(named[name] in stop_ids for names in ends for name in names):
        return notes
    if not ends[0]:
        wanted = " or ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in stop_ids)
        return [*notes, f"the chat template writes {tails[0][:20]!r} behind a turn: let it end a turn with {wanted}"]
    return [
        *notes,
        f"the chat template ends a turn with {ends[0][0]!r} ({named[ends[0][0]]}), which is not a stop token: add it to"
        " eos_token_id in generation_config.json",
    ]
