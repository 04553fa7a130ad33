"""Every example in a docstring of the package gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
OPTIONAL = {"math_verify", "aiohttp", "reasoning_gym", "verifiers", "vllm"}
"""Packages that a module may need and a plain installation lacks."""


def modules() -> list[str]:
    """Modules with an example, except what runs inside the sandbox."""
    found = [p for p in sorted((ROOT / "posttrain").rglob("*.py")) if ">>> " in p.read_text(encoding="utf-8")]
    return [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in found
        if "cell" not in p.parts
    ]


def test_examples_hold() -> None:
    wrong, tried = list[str](), 0
    for name in modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name in OPTIONAL:
                continue
            raise
        failed, count = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
        wrong += [f"{failed} of {count} in {name}"] if failed or not count else []
        tried += count
    assert tried and not wrong, f"{wrong} are not true: python -m doctest says which"
