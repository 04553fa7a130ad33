"""Checks the device that a model computes on, and what is kept in the memory of the CPU meanwhile."""

from __future__ import annotations

import re

from posttrain.system.errors import ConfigError

DEVICE = re.compile(r"(cpu|cuda|mps|xpu)(:\d{1,3})?")
"""Pattern of a device as torch names it."""


def check_device(device: str, offload_activations: bool, offload_optimizer: bool) -> None:
    """Refuse a device that does not exist, and to move to the CPU what is there. Raises ConfigError, which says what to
    set."""
    if not DEVICE.fullmatch(device):
        raise ConfigError(f"model.device={device!r} is no device: use cpu, cuda (cuda:1 for the second GPU) or xpu")
    if offload_activations and device == "cpu":
        raise ConfigError(
            "model.offload_activations=true moves activations from an accelerator to the memory of the CPU; with"
            " model.device=cpu they are there. Set it to false, or keep fewer with"
            " model.gradient_checkpointing=selective"
        )
    if offload_optimizer and device == "cpu":
        raise ConfigError(
            "model.offload_optimizer=true moves the optimizer's state from an accelerator to the memory of the CPU;"
            " with model.device=cpu it is there. Set it to false, or keep less with optimizer.kind=adamw8bit"
        )
