"""Writes reward models to disk and reads them back.

A last-token head with one output is written as transformers' sequence classification reads it (`num_labels=1`), so that
any library can use it. Every other head is written beside a causal LM in two files: `reward_head.json` (its
`HeadShape`) and `reward_head.safetensors` (its tensors). Both are read back as a policy with a reward head, so that
they are computed by the learner's own forward pass.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from posttrain.config.run import Model
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.engine.files.check_folder import LARGEST_SHAPE, SHAPE, TENSORS, form_of, read_object
from posttrain.engine.files.pretrained_files import read_pretrained
from posttrain.engine.files.safetensors_rows import load_tensors
from posttrain.engine.head.logit_transform import logit_dtype
from posttrain.engine.head.readout import read_out
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.layers import attention
from posttrain.engine.model.policy_model import Policy, load_policy, prepared
from posttrain.engine.model.stop_tokens import resolve_stops
from posttrain.engine.model.tiny_models import quiet
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, DataError, EngineError, PosttrainError, first_line
from posttrain.system.files import share


def pad_of(policy: Policy) -> tuple[int, str]:
    """(the id that pads batches of this reward model, the token); DataError where the tokenizer has none.

    It is never a stop token: completions end in one, and transformers reads the score at the last token that is not
    padding.
    """
    tokenizer: Any = policy.tokenizer
    # From the best to the worst: tokens with no meaning in a text, any special one, any from the end of the vocabulary,
    # where rare ones are.
    named = [tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *sorted(tokenizer.all_special_ids)]
    candidates = [i for i in [*named, *range(len(tokenizer) - 1, -1, -1)] if i is not None and i not in policy.stop_ids]
    if not candidates:
        raise DataError("every token of this tokenizer is a stop token, so none can pad a batch: add a padding token")
    return int(candidates[0]), str(tokenizer.convert_ids_to_tokens(int(candidates[0])))


def classifier_of(policy: Policy, head: RewardHead) -> PreTrainedModel:
    """The reward model as transformers' sequence classification, which shares the policy's weights. EngineError where
    there is none for this architecture, or one with another head."""
    config = copy.deepcopy(policy.module.config)
    config.num_labels = 1
    # Some classes for sequence classification read the padding token from the inner config, others from the outer one.
    config.get_text_config().pad_token_id = config.pad_token_id = pad_of(policy)[0]
    try:
        with torch.device("meta"):
            classifier: Any = AutoModelForSequenceClassification.from_config(config)
    except (ValueError, KeyError) as error:
        raise EngineError(
            f"transformers has no sequence classification for {type(policy.module).__name__} ({first_line(error)})"
        ) from error
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
        raise EngineError(
            f"{type(classifier).__name__} has no linear head `score` without bias, so transformers would compute"
            " another score"
        )
    # It was built on meta, without memory. Its decoder becomes the policy's own, and its head a copy.
    setattr(classifier, classifier.base_model_prefix, policy.module.get_decoder())
    score.weight = nn.Parameter(head.score.weight.detach().to(policy.dtype).clone())
    classifier.eval()
    return classifier


def write_reward_model(policy: Policy, folder: Path) -> str:
    """Write a policy with a reward head into a folder, an adapter merged; returns a line that says in which form."""
    head = policy.reward_head
    if head is None:
        raise ConfigError("there is no reward head to write: no stage of this run trains a reward model")
    policy = policy.plain()
    folder.mkdir(parents=True, exist_ok=True)
    why = ""
    # The standard form first. Where transformers would compute another score, the same weights go into the form with a
    # head beside the model, and the returned line says why.
    if head.shape.standard:
        try:
            classifier = classifier_of(policy, head)
            pad, token = pad_of(policy)
            # A copy, because the policy's tokenizer goes on with the padding token that it had.
            padded_tokenizer: Any = copy.deepcopy(policy.tokenizer)
            padded_tokenizer.pad_token = token
            with quiet():
                classifier.save_pretrained(folder)
                padded_tokenizer.save_pretrained(folder)
            share(folder)
            pad_before: Any = policy.tokenizer.pad_token_id
            note = (
                ""
                if pad_before == pad
                else f"; its padding token is {token!r} ({pad}), because {_why_another_pad(policy, pad_before)}"
            )
            return f"{type(classifier).__name__}, one label, read at the last token that is not padding{note}"
        except EngineError as error:
            why = f" ({error})"
    policy.write(folder)
    (folder / SHAPE).write_text(json.dumps(asdict(head.shape), indent=1) + "\n", encoding="utf-8")
    save_file({n: p.detach().contiguous() for n, p in head.named_parameters()}, folder / TENSORS)
    share(folder)
    return f"{type(policy.module).__name__} with its reward head in {SHAPE} and {TENSORS}{why}"


def _why_another_pad(policy: Policy, pad: int | None) -> str:
    """The reason, for a message, why the tokenizer's own padding token `pad` was not taken."""
    if pad is None:
        return "the tokenizer had none"
    return f"{policy.tokenizer.convert_ids_to_tokens(pad)!r} ends completions"


def read_reward_model(path: str, model: Model, most: int | None = None) -> Policy:
    """A reward model from a directory or hub id, as a policy with a reward head. Its log-probs mean nothing.

    Args:
        model: where it computes: device, dtype and kernels. Its path, adapter and context are not read.
        most: tokens of the longest sequence; None: all positions of the model.

    Raises:
        ConfigError, DataError, EngineError: it is no reward model, or cannot be computed as transformers does.
    """
    # A reward model is read whole: an adapter, a context or few bits are settings of the policy that is trained.
    model = replace(model, path=path, lora=None, quantize=None, context=None)
    folder = Path(path).expanduser()
    if folder.is_dir() and form_of(folder) == "head":
        return _with_head(load_policy(model, None, 0, most=most), folder)
    return _classifier(path, model, most)


def _with_head(policy: Policy, folder: Path) -> Policy:
    """The policy with the reward head that lies beside its model in `folder`. DataError where the head is damaged."""
    data = read_object(folder / SHAPE, LARGEST_SHAPE)
    try:
        shape = dataclass_json.from_plain(HeadShape, data)
        loaded = load_tensors(folder / TENSORS)
    except (PosttrainError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder}: its reward head is damaged ({error}). Copy the whole folder again") from error
    # The width first: a head is made only where the file has its numbers, however many its shape asks for.
    score = loaded.get("score.weight")
    head = _new_head(policy, shape) if score is not None and score.shape[:1] == (shape.width,) else None
    parameters = dict[str, nn.Parameter]() if head is None else dict(head.named_parameters())
    if head is None or set(parameters) != set(loaded) or any(p.shape != loaded[n].shape for n, p in parameters.items()):
        raise DataError(f"{folder / TENSORS} belongs to another head than {SHAPE} says. Copy the whole folder again")
    with torch.no_grad():
        for n, p in parameters.items():
            p.copy_(loaded[n])
    return replace(policy, reward_head=head)


def _new_head(policy: Policy, shape: HeadShape, blank: int | None = None) -> RewardHead:
    """A head for this policy's hidden states; its numbers are loaded afterwards. `blank`: see `RewardHead`."""
    width = read_out(policy.module).weight.shape[1]
    return RewardHead(shape, width, dtype=logit_dtype(policy.dtype), device=policy.device, blank=blank)


def _classifier(path: str, model: Model, most: int | None) -> Policy:
    """A sequence classifier of transformers, put under a causal LM whose own head is never read."""
    attention.register()
    dtype = getattr(torch, model.dtype)
    loaded, tokenizer, notes = read_pretrained(path, dtype, model.trust_remote_code, AutoModelForSequenceClassification)
    classifier: Any = loaded
    score = getattr(classifier, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None or score.out_features != 1:
        raise ConfigError(
            f"{path} is no reward model that can be read: {type(classifier).__name__} has no linear head `score` with"
            " one output and no bias"
        )
    config = classifier.config
    with quiet(), torch.device("meta"):
        # A policy is a causal LM, so one is made without memory around the classifier's decoder. Its own head must
        # exist for the read-out, and nothing reads it: the embedding stands in, so that no weight is made up.
        causal: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    setattr(causal, causal.base_model_prefix, classifier.base_model)
    stand_in = nn.Linear(1, 1, bias=False, device="meta")
    stand_in.weight = classifier.get_input_embeddings().weight
    causal.set_output_embeddings(stand_in)
    stops = resolve_stops(tokenizer, causal.generation_config)
    policy = prepared(model, causal, tokenizer, stops, f"from {path}, a reward model", notes, most)
    # transformers passes over padding at the end of a sequence, so this head passes over the same token.
    head = _new_head(policy, HeadShape(), blank=config.get_text_config().pad_token_id)
    with torch.no_grad():
        head.score.weight.copy_(score.weight)
    return replace(policy, reward_head=head)
