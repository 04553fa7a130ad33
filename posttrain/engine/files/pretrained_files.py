"""Reading a checkpoint from disk or hub. Every kind of wrong checkpoint is refused with a message that explains it."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from posttrain.engine.files.check_folder import examine
from posttrain.engine.layers import attention
from posttrain.engine.model.architecture_kinds import WANTED, keeps_state
from posttrain.engine.model.locate_model import locate
from posttrain.engine.model.tiny_models import quiet
from posttrain.system.errors import ConfigError, DataError, EngineError, PosttrainError, first_line


def read_pretrained(
    path: str, dtype: torch.dtype, trust_remote_code: bool, kind: Any = AutoModelForCausalLM
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast, list[str]]:
    """(module on CPU with attention "posttrain", tokenizer, notes for people), from a local directory or a hub id.
    `kind`: the class of transformers that builds the module, for a causal LM or a sequence classifier.

    Nothing is downloaded where `path` is a directory. Missing weights are refused; transformers would
    initialize them randomly.
    """
    where = locate(path)
    attention.register()
    with quiet():
        config = _config(where, trust_remote_code)
        # Before the model is built, since layers copy their rate when they are made.
        notes = _silence_dropout(config)
        tokenizer = _tokenizer(where, trust_remote_code)
        module = _weights(where, config, dtype, trust_remote_code, notes, kind)
    return module, tokenizer, notes


def read_skeleton(path: str, trust_remote_code: bool) -> tuple[PreTrainedConfig, PreTrainedTokenizerFast, list[str]]:
    """(config without dropout, tokenizer, notes for people) of a local directory. Reads no weights."""
    where = locate(path)
    with quiet():
        config = _config(where, trust_remote_code)
        notes = _silence_dropout(config)
        return config, _tokenizer(where, trust_remote_code), notes


def read_tokenizer(
    path: str, trust_remote_code: bool = False
) -> tuple[PreTrainedTokenizerFast, GenerationConfig | None]:
    """(tokenizer, generation config) of a local directory or hub id. Reads no weights.

    The generation config is read from its file, else derived from config.json, else it is None.
    """
    folder = Path(path).expanduser()
    # A folder with a tokenizer alone is enough here, and `locate` would ask for a model in it.
    if folder.is_dir():
        examine(folder)
    where = str(folder.resolve()) if folder.is_dir() else locate(path)
    tokenizer = _tokenizer(where, trust_remote_code)
    if (generation := read_generation(where)) is None:
        with suppress(OSError, ValueError):  # a folder of a tokenizer has no config either
            generation = GenerationConfig.from_model_config(AutoConfig.from_pretrained(where))
    return tokenizer, generation


def read_generation(where: str) -> GenerationConfig | None:
    """The generation config of a directory or hub id; None where there is none, and DataError where it is wrong."""
    try:
        return GenerationConfig.from_pretrained(where)
    except OSError:
        return None
    except Exception as error:  # whatever its values lead to
        raise DataError(
            f"{where}: generation_config.json cannot be read ({type(error).__name__}: {first_line(error)}). Correct it"
        ) from error


def _config(where: str, trust: bool) -> PreTrainedConfig:
    """The config of a decoder-only model that can be trained; ConfigError, DataError or EngineError for others."""
    try:
        config = AutoConfig.from_pretrained(where, trust_remote_code=trust)
    # transformers raises OSError both for a file that it cannot read here and for a hub id that it cannot fetch.
    except OSError as error:
        if Path(where).is_dir():
            raise DataError(f"{where}/config.json cannot be read: {first_line(error)}") from error
        raise ConfigError(
            f"model.path={where} is neither a directory here nor a model that could be fetched from the hub"
            f" ({first_line(error)}). Check the spelling; offline, download it first (hf download {where}) and give its"
            " directory"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{where}: config.json names no architecture this transformers knows ({first_line(error)}). If it ships"
            " its own code, set model.trust_remote_code=true"
        ) from error
    except Exception as error:  # a config's own checks raise their own classes
        raise DataError(
            f"{where}/config.json describes no model ({type(error).__name__}: {first_line(error)})"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        raise DataError(
            f"{where} is an encoder-decoder ({config.model_type}): posttrain trains decoder-only causal LMs. Use one"
            " (Qwen, Llama, Gemma, GPT-2, ...)"
        )
    keeps_state(config.to_dict())  # for its refusal
    return config


def _silence_dropout(config: PreTrainedConfig) -> list[str]:
    """Set every dropout rate of the config, and of the configs inside it, to 0. Returns a note where one was not 0."""
    rates: dict[str, float] = {}
    # Names are searched, because each family has its own: attention_dropout, resid_pdrop, classifier_dropout, ...
    for part in (config, *(c for c in vars(config).values() if isinstance(c, PreTrainedConfig))):
        for name, rate in part.to_dict().items():
            if ("dropout" in name or name.endswith("pdrop")) and isinstance(rate, float) and rate > 0:
                rates[name] = rate
                setattr(part, name, 0.0)
    named = ", ".join(f"{n}={v:g}" for n, v in rates.items())
    return [f"dropout is off ({named} in the config): sampler and learner must be the same function"] if rates else []


def _tokenizer(where: str, trust: bool) -> PreTrainedTokenizerFast:
    """The tokenizer, with a tokenizer.json form; DataError where it has none or cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust)
    except Exception as error:  # broken files raise any error of their parser
        raise DataError(
            f"{where}: the tokenizer cannot be read ({type(error).__name__}: {first_line(error)}). Save it again with"
            " tokenizer.save_pretrained"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise DataError(
            f"{where}: {type(tokenizer).__name__} has no tokenizer.json form. Convert it to a PreTrainedTokenizerFast"
            " and save it there"
        )
    return tokenizer


def _weights(
    where: str, config: PreTrainedConfig, dtype: torch.dtype, trust: bool, notes: list[str], kind: Any
) -> PreTrainedModel:
    """The model with all of its weights, on the CPU. Appends to `notes` which tensors of the files it does not use."""
    try:
        loaded: Any = kind.from_pretrained(
            where,
            config=config,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=trust,
            # Else transformers initialises missing weights randomly and only logs it.
            output_loading_info=True,
        )
        module, info = loaded
    except Exception as error:
        # Architectures that pick their attention from a table of their own raise KeyError with the missing name.
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise EngineError(
                f"{where}: {config.model_type} computes attention in code of its own and takes no other. {WANTED}"
            ) from error
        raise unreadable(where, error) from error
    # from_pretrained loads an adapter that lies beside the weights: the model would not be that of the weights.
    if getattr(module, "_hf_peft_config_loaded", False):
        raise DataError(
            f"{where}: a PEFT adapter lies beside the model, and transformers has loaded it too. Download the adapter"
            " into a directory of its own and give that, or merge it first"
        )
    if missing := sorted(info["missing_keys"]):
        raise DataError(
            f"{where}: {len(missing)} tensors of {type(module).__name__} are not in its weights and would be random: "
            f"{', '.join(missing[:4])}. "
            "The checkpoint is incomplete, or belongs to another architecture than its config.json says"
        )
    if extra := sorted(info["unexpected_keys"]):
        notes.append(
            f"{len(extra)} tensors of the checkpoint are not used by {type(module).__name__}: {', '.join(extra[:3])}"
        )
    return module


def unreadable(where: str, error: Exception) -> PosttrainError:
    """The error for weights that raised something while they were read: broken files raise whatever their parser does.
    A refusal of our own says more than any wrapping of it."""
    if isinstance(error, PosttrainError):
        return error
    if isinstance(error, pickle.UnpicklingError):
        return DataError(
            f"{where}: its weights are a pickle of more than tensors (or a broken one), which could run programs, so it"
            " is not read. Ask for safetensors, or save it again with save_pretrained on a machine that trusts it"
        )
    if isinstance(error, EOFError) or type(error).__name__ == "SafetensorError":
        return DataError(f"{where}: its weights are damaged ({first_line(error)}). Copy or download them again")
    return DataError(f"{where}: no causal LM could be loaded ({type(error).__name__}: {first_line(error)})")
