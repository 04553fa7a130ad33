"""Finds which directories hold a reward model, and in which form. This needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain.engine.files.check_folder import read_object
from posttrain.system.errors import ConfigError

SHAPE, TENSORS = "reward_head.json", "reward_head.safetensors"
"""The two files of a reward head, which lie beside a causal LM."""
CLASSIFIER = "ForSequenceClassification"
"""The end of the names of transformers' classes for sequence classification."""
LARGEST = 1 << 20
"""Most bytes of `SHAPE`."""


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
