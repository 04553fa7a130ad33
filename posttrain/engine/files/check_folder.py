"""Checks of a model directory before its files are parsed (files that are not regular, impossible sizes), and which
directories hold a reward model. This needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from posttrain.engine.model.architecture_kinds import keeps_state
from posttrain.system import read_untrusted
from posttrain.system.errors import ConfigError, DataError

READ = (".json", ".jinja", ".txt", ".model", ".safetensors", ".bin")  # endings of files that a loader may read
INDEX = ".index.json"
"""Ending of the files that say in which file each weight is."""
LARGEST = {
    ".json": 512 * read_untrusted.MiB,
    ".jinja": read_untrusted.MiB,
    ".txt": 512 * read_untrusted.MiB,
    ".model": 512 * read_untrusted.MiB,
}
"""Most bytes of a file, by ending. Weights may have any size."""
LARGEST_CONFIG = 16 * read_untrusted.MiB
"""Most bytes of config.json and the other `*config.json` files."""
LAYERS = re.compile(
    r"(num_|n_)?(hidden_|decoder_|encoder_)?(layers?|blocks)|(num_|n_)(hidden_|decoder_|encoder_)?layers?"
)
"""Names of config fields that count layers: num_hidden_layers, n_layer, num_layers, decoder_layers, num_blocks, ..."""
MOST_LAYERS = 4096
"""Most layers where the number of tensors is not known from the weights."""
SHAPE, TENSORS = "reward_head.json", "reward_head.safetensors"
"""The two files of a reward head, which lie beside a causal LM."""
CLASSIFIER = "ForSequenceClassification"
"""The end of the names of transformers' classes for sequence classification."""
LARGEST_SHAPE = read_untrusted.MiB
"""Most bytes of `SHAPE`."""


def examine(folder: Path) -> None:
    """DataError names a file that is a pipe, a device or a directory, that is too big for its kind, or a config file
    that holds no JSON object (transformers would continue without it)."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in READ:
            continue
        try:
            # Links are followed: the hub's cache consists of links. What counts is what lies behind them.
            about = os.stat(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from error
        read_untrusted.require_regular(path, about, DataError)
        most = LARGEST_CONFIG if path.name.endswith("config.json") else LARGEST.get(path.suffix)
        if most is not None and about.st_size > most:
            raise DataError(f"{path} has {about.st_size:,} bytes; at most {most:,} are read there")
        # Only to refuse it: transformers treats some config files that it cannot parse as absent.
        if path.name.endswith("config.json"):
            read_object(path)
        if path.name.endswith(INDEX):
            weight_files(path)


def weight_files(index: Path) -> dict[str, str]:
    """The file of each weight, by its name, as an index says; DataError where it names files outside its folder."""
    listed: Any = read_object(index, LARGEST[".json"]).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise DataError(f"{index} is damaged: weight_map must give the file of each weight. Copy or download it again")
    file_of_weight = cast("dict[str, str]", listed)
    # The loader joins these names to the folder, so ../ or an absolute path would open any file of this machine.
    if outside := next((f for f in file_of_weight.values() if Path(f).name != f), None):
        raise DataError(
            f"{index} names the file {outside[:80]!r}: the weights of a model lie beside their index, and nothing else"
            " is read. Download the model again, or save it with save_pretrained"
        )
    return file_of_weight


def check_config(folder: Path) -> None:
    """DataError where config.json has more layers than the weights have tensors: building them would take hours and all
    memory. EngineError where it names an architecture with a recurrent state that cannot be trained."""
    file = folder / "config.json"
    config = read_object(file)
    # A layer has at least one tensor, so a file with fewer tensors than layers belongs to another config. This is seen
    # from the headers alone, before a module is built.
    most = _tensors(folder)
    # Models with several parts keep the sizes of the text model in a config inside the config.
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        for name, value in part.items():
            if LAYERS.fullmatch(str(name)) and isinstance(value, int) and value > min(most, MOST_LAYERS):
                have = (
                    f"its weights hold {most} tensors"
                    if most < MOST_LAYERS
                    else f"no model has more than {MOST_LAYERS}"
                )
                raise DataError(
                    f"{file}: {name}={value:,}, and {have}. The config belongs to another model, or is damaged"
                )
    keeps_state(config)


def read_object(file: Path, most: int = LARGEST_CONFIG) -> dict[str, Any]:
    """The JSON object in a file of a model; DataError where there is none, or the file has more than `most` bytes."""
    return read_untrusted.parse_object(read_untrusted.read_bytes(file, most, DataError), str(file), DataError)


def _tensors(folder: Path) -> float:
    """Number of tensors in the safetensors of a folder; infinite where it cannot be known without reading more."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return len(weight_files(index))
    file = folder / "model.safetensors"
    if not file.is_file():
        return float("inf")
    try:
        with safe_open(file, "pt") as tensors:
            return len(tensors.keys())
    except (SafetensorError, OSError):  # the loader reports what is wrong
        return float("inf")


def form_of(folder: Path) -> str:
    """Returns the kind of reward model in a directory: `head` (a causal LM with a head beside it) or `classifier`.
    ConfigError, which says what it is, where it holds none."""
    # First, because such a folder is also a complete causal LM with a config.json.
    if (folder / SHAPE).is_file():
        return "head"
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"{folder} is no reward model: it has no config.json. Give a directory that posttrain export or"
            " save_pretrained wrote"
        )
    settings = read_object(config)
    kinds: Any = settings.get("architectures")
    names = [str(k) for k in kinds] if isinstance(kinds, list) else []
    if not names or not names[0].endswith(CLASSIFIER):
        raise ConfigError(
            f"{folder} is no reward model: its config.json names {', '.join(names) or 'no architecture'}, and a reward"
            f" model is saved as ...{CLASSIFIER} with one label, or has {SHAPE} beside it"
        )
    # A config without labels is let through: the outputs of the head itself are counted when it is loaded.
    labels: Any = settings.get("id2label", {0: ""})
    if isinstance(labels, dict) and len(labels) != 1:
        raise ConfigError(
            f"{folder} is no reward model: it has {len(labels)} labels, and a reward is one number (num_labels=1)"
        )
    return "classifier"
