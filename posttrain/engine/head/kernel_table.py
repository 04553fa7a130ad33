"""Chooses the implementation of an operation: one table by operation, device and dtype, and one choice for a whole run.

Every operation has a reference form, plain torch for every device and dtype. Faster forms have a bound on their
difference from it. Each form is registered in the module that defines it: callers never name a form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from posttrain.config.engines import KernelChoice
from posttrain.engine.cpu import compile_native
from posttrain.system.errors import EngineError

FORMS = ("compiled", "torch", "reference")
"""In order of preference: code compiled on this machine (C, Triton), torch's fast operations, the definition."""


@dataclass(frozen=True, eq=False)
class Kernel:
    """One form of an operation. All forms of an operation take the same arguments."""

    form: Literal["compiled", "torch", "reference"]
    function: Callable[..., Any]
    devices: tuple[str, ...] = ()
    """Device types it runs on; (): all."""
    bounds: Mapping[torch.dtype, float] = field(default_factory=dict[torch.dtype, float])
    """By supported dtype, the largest difference from the reference form, relative to the largest number."""
    missing: Callable[[], str] = lambda: ""
    """Returns why this machine does not have it; '' where it does."""
    operation: str = ""
    """The name of the operation; `add_forms` fills it in."""

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str:
        """Returns the reason why the form cannot be used on this device and dtype; '' where it can."""
        if self.form == "reference":
            return ""
        if (self.devices and device.type not in self.devices) or dtype not in self.bounds:
            served = ", ".join(str(d).removeprefix("torch.") for d in self.bounds)
            devices = " and ".join(self.devices) or "any device"
            return f"{self.form} ones serve {served} on {devices}, not {dtype} on {device}"
        return self.missing()


def in_c(function: Callable[..., Any], bound: float) -> Kernel:
    """A form by the compiled C code, which computes in float32 on the CPU."""
    return Kernel("compiled", function, ("cpu",), {torch.float32: bound}, compile_native.missing)


TABLE: dict[str, tuple[Kernel, ...]] = {}
"""Forms of each operation, in the order of `FORMS`."""


def add_forms(operation: str, *forms: Kernel) -> None:
    """Register all forms of one operation. One of them is the reference form."""
    # The sort is stable: two compiled forms of one operation stay in the order in which they are given.
    TABLE[operation] = tuple(replace(k, operation=operation) for k in sorted(forms, key=lambda k: FORMS.index(k.form)))
    assert TABLE[operation][-1].form == "reference"


def kernel(operation: str, device: torch.device, dtype: torch.dtype, choice: KernelChoice = "auto") -> Kernel:
    """The first form in the order of `FORMS` that the choice allows and that supports the device and dtype."""
    first = 0 if choice == "auto" else FORMS.index(choice)
    # There is always one: the reference form is last, every choice allows it, and it fits everything.
    return next(k for k in TABLE[operation] if FORMS.index(k.form) >= first and not k.unfit(device, dtype))


def check_compiled(operation: str, device: torch.device, dtype: torch.dtype) -> None:
    """EngineError where no compiled form of an operation can be used."""
    reasons = [k.unfit(device, dtype) for k in TABLE[operation] if k.form == "compiled"]
    # `all` is true for an empty list, so an operation without any compiled form is refused too.
    if all(reasons):
        why = "; ".join(reasons) or f"{operation} has no such form"
        raise EngineError(f"model.kernels=compiled, but there are no compiled kernels: {why}")
