"""Finds the model that `model=` names: a directory, checked by file names and sizes, or a hub id. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.files.check_folder import check_config, examine
from posttrain.record.certificate import verify_certificate
from posttrain.system.errors import ConfigError, DataError, first_line

# A folder with one of these files holds a tokenizer.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")
"""A name, or an owner and a name: `gpt2`, `Qwen/Qwen3-0.6B`."""
PATIENCE = 5.0
"""Seconds to wait for the hub's answer to the question whether it has a model."""


def check_source(setting: str, path: str) -> None:
    """ConfigError or DataError where no model can be read from there, or where it is not what its certificate says. A
    hub id that is not in the cache is asked for once, with a limit of time: libraries would try for half a minute.
    `setting`: for messages; '' where the path is a word of the command itself, which may also be a run folder."""
    located = locate(path, setting)
    described, where = _named(setting, path), Path(located)
    if saved_adapter(path) is not None:
        described += f" base_model_name_or_path={located}"
    # An adapter's own folder and that of its base model may each have a certificate; dict.fromkeys drops an equal one.
    for folder in dict.fromkeys((Path(path).expanduser().resolve(), where)):
        if folder.is_dir():
            verify_certificate(folder)
    # `locate` gives an absolute path for a directory, and a hub id is never one.
    if where.is_absolute():
        return
    import huggingface_hub as hub
    from huggingface_hub import errors

    here = f"{described}: there is no such directory here, and"
    try:
        # In the cache it can be loaded offline.
        if isinstance(hub.try_to_load_from_cache(located, "config.json"), str):
            return
        hub.get_hf_file_metadata(hub.hf_hub_url(located, "config.json"), timeout=PATIENCE)
    except errors.HFValidationError as error:
        raise ConfigError(f"{here} this is no hub id ({first_line(error)}). Check the spelling") from error
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{described}: the hub gives this model only to those who accepted its terms. Accept them on its page,"
            " and log in with: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{here} the hub has no such model, or does not show it to you. Check the spelling; for a private model log"
            " in with: hf auth login"
        ) from error
    except errors.EntryNotFoundError as error:
        raise DataError(f"{here} the hub's {located} has no config.json, so it is no transformers model") from error
    except Exception as error:  # of whichever library carries the request
        raise ConfigError(
            f"{here} the hub cannot be reached ({first_line(error)}). Check the spelling; offline, download it first"
            f" where there is a network (hf download {located} --local-dir FOLDER) and give that directory"
        ) from error


def _named(setting: str, path: str) -> str:
    """Returns the path as a message names it: with its setting where there is one."""
    return f"{setting}={path}" if setting else path


def locate(path: str, setting: str = "model.path") -> str:
    """Returns the directory as an absolute path, or the hub id. For a PEFT adapter it is that of the base model.
    ConfigError where there is no such directory and the path is no hub id, DataError where the directory is no complete
    model with its tokenizer."""
    saved = saved_adapter(path)
    # One step only. An adapter over an adapter goes on to the refusal below, as a folder without config.json.
    if saved is not None and saved_adapter(saved.base) is None:
        return locate(saved.base, f"{_named(setting, path)} base_model_name_or_path")
    folder, described = Path(path).expanduser(), _named(setting, path)
    if folder.is_dir():
        file_names = {f.name for f in folder.iterdir()}
        if {"config.json", "adapter_config.json"} <= file_names:
            raise DataError(
                f"{described}: a PEFT adapter lies beside the model. Where peft is installed, another model would"
                " be loaded: the one that adapter_config.json names. Merge the adapter (merge_and_unload,"
                " save_pretrained), or take adapter_config.json away"
            )
        if "config.json" not in file_names:
            adapter = ""
            if "adapter_config.json" in file_names:
                adapter = (
                    " It holds a PEFT adapter over another adapter: merge that one first (merge_and_unload,"
                    " save_pretrained)."
                )
            raise DataError(
                f"{described}: no config.json there, so it is no Hugging Face model directory.{adapter} Give the"
                " folder save_pretrained wrote"
            )
        if not file_names.intersection(TOKENIZER_FILES):
            raise DataError(
                f"{described}: a model without a tokenizer (none of {', '.join(TOKENIZER_FILES)}). Save the"
                " tokenizer there too: tokenizer.save_pretrained"
            )
        # Sizes and kinds of the files first, because the other one parses config.json.
        examine(folder)
        check_config(folder)
        return str(folder.resolve())
    if folder.is_file():
        raise ConfigError(
            f"{described} is a file: give the directory that holds config.json, the weights and the tokenizer"
        )
    # folder/name with an existing folder is a typing error: at the hub somebody else could own that name.
    if not HUB_ID.fullmatch(path) or ("/" in path and folder.parent.is_dir()):
        raise ConfigError(
            f"{described}: no such directory. Give {'a run folder, ' * (not setting)}a directory written by"
            " save_pretrained, or a hub id such as Qwen/Qwen3-0.6B"
        )
    return path
