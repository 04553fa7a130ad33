"""Every example in a docstring of the package gives what it says."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("name", modules())
def test_examples_hold(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            pytest.skip(f"needs {error.name}")
        raise
    failed, tried = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried and not failed, f"{failed} of {tried} examples in {name} are not true: python -m doctest says which"
