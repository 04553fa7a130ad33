"""PEFT adapters on disk. Their settings are read without torch; weights are safetensors only, so no code runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.config.model_settings import ALL_LINEAR, Lora
from posttrain.engine.files.check_folder import read_object
from posttrain.system import read_untrusted
from posttrain.system.errors import ConfigError, DataError

if TYPE_CHECKING:
    from posttrain.engine.model.policy_model import Policy

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LARGEST_CONFIG = 4 * read_untrusted.MiB
PREFIX = "base_model.model."
"""The prefix that PEFT writes before the name of each tensor."""
TARGET = re.compile(r"[\w.-]{1,256}")
"""A name of layers: `q_proj`, `model.layers.0.self_attn.q_proj`."""
KNOWN = {
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "use_rslora", "use_dora"),
    *("lora_dropout", "bias", "task_type", "inference_mode", "peft_version", "init_lora_weights", "auto_mapping"),
    *("revision", "fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""Settings that are read, or that change nothing once the weights are there. Any other must be empty."""
INITS = (None, False, True, "gaussian", "eva", "mica", "orthogonal")
"""Values of init_lora_weights for which the weights beneath stay as they are. PEFT changes them for any other."""


@dataclass(frozen=True)
class SavedAdapter:
    """An adapter on disk: the model beneath it, its settings, and what to tell people."""

    folder: Path
    base: str
    lora: Lora
    notes: tuple[str, ...] = ()


def saved_adapter(path: str | Path) -> SavedAdapter | None:
    """The adapter in a directory that holds no model of its own; None where there is no such directory.

    Raises:
        DataError: it is damaged, or of a kind that cannot be trained on here.
    """
    folder = Path(path).expanduser()
    # A directory with a config.json is a model. Both files together are refused elsewhere (locate_model), because
    # transformers would load the adapter silently.
    if not (folder / CONFIG).is_file() or (folder / "config.json").exists():
        return None
    file = folder / CONFIG
    config = read_object(file, LARGEST_CONFIG)
    if config.get("peft_type") != "LORA":
        raise DataError(f"{file}: peft_type={str(config.get('peft_type'))[:40]!r}; only LORA adapters can be loaded")
    # A setting that is not known may change what the adapter computes. It may be there where it is empty: newer
    # versions of PEFT list new settings at their off value.
    strange = [k for k, v in config.items() if k not in KNOWN and v not in (None, False, 0, [], {}, "")]
    strange += ["init_lora_weights"] * (config.get("init_lora_weights") not in INITS)
    if strange or config.get("bias", "none") != "none":
        raise DataError(
            f"{file}: it uses {', '.join((strange or ['bias'])[:4])}, which is not offered here. Merge the adapter into"
            " its base model (merge_and_unload, save_pretrained), and give that"
        )
    base, rank, alpha = config.get("base_model_name_or_path"), config.get("r"), config.get("lora_alpha")
    if not isinstance(base, str) or not base:
        raise DataError(f"{file}: base_model_name_or_path names no model. Write the base model's directory there")
    # A revision counts for a hub id only; a directory holds whatever was downloaded into it.
    if config.get("revision") not in (None, "", "main") and not Path(base).expanduser().is_dir():
        raise DataError(
            f"{file}: it was trained over the revision {str(config['revision'])[:60]!r} of {base[:120]}. Download that"
            f" (hf download {base[:120]} --revision REVISION --local-dir FOLDER), and write FOLDER as"
            " base_model_name_or_path"
        )
    # JSON's true is an int in Python.
    if type(rank) is not int or not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise DataError(f"{file}: r and lora_alpha must be numbers")
    dropout = config.get("lora_dropout")
    try:
        lora = Lora(
            rank=rank,
            alpha=float(alpha),
            targets=_targets(file, config),
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
        )
    # float() of a whole number with hundreds of digits raises OverflowError.
    except (ConfigError, OverflowError) as error:
        raise DataError(f"{file} describes no adapter: {error}") from error
    if not dropout:
        return SavedAdapter(folder, base, lora, ())
    note = f"adapter dropout is off ({dropout} in {CONFIG}): sampler and learner must be the same function"
    return SavedAdapter(folder, base, lora, (note,))


def _targets(file: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the layers that have the adapter. DataError where they are given in another form."""
    listed = config.get("target_modules")
    if listed == ALL_LINEAR:
        return (ALL_LINEAR,)
    # PEFT takes a single string as a regular expression. A pattern out of a foreign file is not run.
    if not isinstance(listed, list) or not all(isinstance(x, str) and TARGET.fullmatch(x) for x in listed):
        raise DataError(f"{file}: target_modules must be a list of names of layers, or {ALL_LINEAR}")
    return tuple(sorted(listed))


def load_saved(policy: Policy, saved: SavedAdapter) -> None:
    """Copy the saved weights into the policy's adapter. DataError where they are damaged, or of other layers."""
    import torch

    from posttrain.engine.adapters.adapter_modules import adapter_tensors
    from posttrain.engine.files.safetensors_rows import load_tensors

    file = saved.folder / WEIGHTS
    loaded = {n.removeprefix(PREFIX): t for n, t in load_tensors(file, "Copy or download it again").items()}
    adapter = {written_name(name): tensor for name, tensor in adapter_tensors(policy.module).items()}
    # All names and shapes are compared before anything is copied, so a wrong file leaves the adapter as it was.
    if set(loaded) != set(adapter) or any(loaded[n].shape != adapter[n].shape for n in adapter):
        wrong = sorted(set(loaded) ^ set(adapter)) or [n for n in adapter if loaded[n].shape != adapter[n].shape]
        raise DataError(
            f"{file} does not fit the adapter that {CONFIG} describes over {saved.base}: {', '.join(wrong[:3])} differ."
            " Is the base model the one it was trained on?"
        )
    with torch.no_grad():
        for name, tensor in adapter.items():
            tensor.copy_(loaded[name])


def written_name(name: str) -> str:
    """The name under which PEFT writes an adapter's tensor: without the adapter's own name, and for the magnitudes of
    DoRA without `.weight` too."""
    return name.removesuffix(".default.weight") if "lora_magnitude_vector" in name else name.replace(".default.", ".")


def write_adapter(policy: Policy, folder: Path, base: str) -> None:
    """Write the policy's adapter as PEFT does, with its tokenizer."""
    import copy

    from safetensors.torch import save_file

    from posttrain.engine.adapters.adapter_modules import NAME, adapter_tensors, target_names
    from posttrain.engine.model.tiny_models import quiet
    from posttrain.system.files import share

    folder.mkdir(parents=True, exist_ok=True)
    module: Any = policy.module
    # A copy: the config belongs to the module that goes on training.
    config = copy.copy(module.peft_config[NAME])
    config.base_model_name_or_path, config.inference_mode = base, True
    config.target_modules = target_names(module)
    with quiet():
        config.save_pretrained(folder)
        tensors = {PREFIX + written_name(n): t.detach().contiguous() for n, t in adapter_tensors(module).items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        policy.tokenizer.save_pretrained(folder)
        share(folder)
