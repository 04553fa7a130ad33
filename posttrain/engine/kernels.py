"""Which form of an operation computes: one table by operation, device and dtype, and one choice for a whole run.

An operation has a reference form, which is plain torch and serves everywhere, and faster forms with a bound on how far
they may lie from it. Each form registers itself where it is written. A new one is one more row: nothing that computes
names a form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from posttrain.core.engines import KernelChoice
from posttrain.core.errors import EngineError

FORMS = ("compiled", "torch", "reference")
"""Code that this machine's C compiler builds; torch's fast operations; the plain definition."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Kernel:
    """One form of an operation. All forms of an operation take the same arguments."""

    operation: str
    form: Literal["compiled", "torch", "reference"]
    function: Callable[..., Any]
    devices: tuple[str, ...] = ()
    """Types of device it serves; (): all."""
    bounds: Mapping[torch.dtype, float] = field(default_factory=dict[torch.dtype, float])
    """Of each dtype it serves, the largest difference from the reference form, as a share of the largest number. The
    reference form serves every dtype and has no bound."""
    missing: Callable[[], str] = lambda: ""
    """Why this machine does not have it; '' where it does."""

    def unfit(self, device: torch.device, dtype: torch.dtype) -> str:
        """Why it does not serve there; '' where it does."""
        if self.form == "reference":
            return ""
        if (self.devices and device.type not in self.devices) or dtype not in self.bounds:
            served = ", ".join(str(d).removeprefix("torch.") for d in self.bounds)
            return (
                f"{self.form} ones serve {served} on {' and '.join(self.devices) or 'any device'}, not {dtype} on"
                f" {device}"
            )
        return self.missing()


TABLE: dict[str, tuple[Kernel, ...]] = {}
"""Forms of each operation, in the order of `FORMS`."""


def add_forms(*forms: Kernel) -> None:
    """Enter all forms of one operation, the reference form last."""
    (operation,) = {k.operation for k in forms}
    TABLE[operation] = tuple(sorted(forms, key=lambda k: FORMS.index(k.form)))
    assert TABLE[operation][-1].form == "reference"


def kernel(operation: str, device: torch.device, dtype: torch.dtype, choice: KernelChoice = "auto") -> Kernel:
    """The first form of `FORMS` that the choice allows and that serves there."""
    first = 0 if choice == "auto" else FORMS.index(choice)
    return next(k for k in TABLE[operation] if FORMS.index(k.form) >= first and not k.unfit(device, dtype))


def check_compiled(operation: str, device: torch.device, dtype: torch.dtype) -> None:
    """EngineError where the compiled form of an operation does not serve."""
    why = next(
        (k.unfit(device, dtype) for k in TABLE[operation] if k.form == "compiled"), f"{operation} has no such form"
    )
    if why:
        raise EngineError(f"model.kernels=compiled, but there are no compiled kernels: {why}")
