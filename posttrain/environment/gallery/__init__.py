"""The environments of the library, one file each. A file is imported when its name is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from posttrain.system.errors import ConfigError, nearest

if TYPE_CHECKING:
    from posttrain.environment.single import SingleTurn

GALLERY: dict[str, str] = {
    "arithmetic": "posttrain.environment.gallery.arithmetic:Arithmetic",
    "countdown": "posttrain.environment.gallery.countdown:Countdown",
    "calculator": "posttrain.environment.gallery.calculator:CalculatorEnv",
    "judge": "posttrain.environment.gallery.judge:Judge",
    "programs": "posttrain.environment.gallery.programs:Programs",
    "replies": "posttrain.environment.gallery.replies:Replies",
    "shop": "posttrain.environment.gallery.shop:Shop",
    "verify": "posttrain.environment.gallery.verify:VerifySteps",
}
"""Name -> module:class. The class is a frozen dataclass; its own fields are the environment's settings."""


def gallery_class(name: str) -> type[SingleTurn]:
    """The class of a gallery name. Raises ConfigError with the nearest name if there is none."""
    if name not in GALLERY:
        raise ConfigError(f"no gallery environment {name!r}: {nearest(name, GALLERY)}")
    module, attribute = GALLERY[name].split(":")
    return getattr(importlib.import_module(module), attribute)
