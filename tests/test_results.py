"""The measured results that pages are written from are strict JSON: any reader may have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NoReturn

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is Python's, not JSON's; write null or a word that says what it means")


def test_results_are_strict_json() -> None:
    for path in sorted(BENCHMARKS.glob("*/results/*.json")):
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_the_check_can_fail(word: str) -> None:
    with pytest.raises(ValueError, match="not JSON's"):
        json.loads(f'{{"x": {word}}}', parse_constant=refuse)
