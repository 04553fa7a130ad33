"""Every number a run writes down is defined, and the generated pages are those of the data."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from posttrain.diagnose.gauges.registry import REGISTRY
from posttrain.record import run_reader
from scripts.pages.generated_pages import PAGES
from tests.engine.run_parts import mine, play

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_current(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == PAGES[name](), "run `python -m scripts.pages.generated_pages`"


FAMILIES = {"reward": "SOURCE", "verdict": "KIND", "failed": "KIND", "abstained": "SOURCE"}


def defined(name: str) -> bool:
    """`eval/pass_at_8` is one of `eval/pass_at_K`, `reward/math` of `reward/SOURCE`."""
    name = re.sub(r"^(eval/pass_at|rollout/behind)_\d+$", r"\1_K", name)
    family = name.partition("/")[0]
    return (f"{family}/{FAMILIES[family]}" if family in FAMILIES else name) in REGISTRY


CLOCKS = {"engine/step", "engine/queue", "engine/requests", "engine/retried", "engine/load", "engine/turn"}
"""Seconds by what they were spent on: they stand in a step's clock, and no gauge has these names."""


def test_a_gauge_that_the_source_names_is_defined() -> None:
    """So a misspelt name is an error at its line, also where no run of the tests comes by."""
    families = {name.partition("/")[0] for name in REGISTRY}
    wrong = [
        f"{path}:{node.lineno}: {node.value}"
        for path in sorted((DOCS.parent / "posttrain").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"[a-z_]+(/[a-z0-9_]+)*/[a-z0-9_]*[a-z0-9]", node.value) and node.value not in CLOCKS
        if node.value.partition("/")[0] in families and not defined(node.value)
    ]
    assert not wrong, "no gauge is called so; define it in posttrain/diagnose/gauges:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "words",
    [
        ("algorithm=grpo", "rl.minibatches=2", "correction=truncate"),
        pytest.param(("algorithm=ppo", "entropy=entropybonus"), marks=pytest.mark.prove),
        pytest.param(("algorithm=rloo",), marks=pytest.mark.prove),
    ],
    ids=["grpo", "ppo", "rloo"],
)
def test_every_gauge_of_a_run_is_defined(words: tuple[str, ...], tmp_path: Path) -> None:
    words = tuple(w for w in mine(tmp_path / "data") if "eval_every" not in w and w != "sft=none") + words
    folder = play(tmp_path / "run", *words, "rl.eval_every=1", "sft.steps=1", "sft.batch=4")
    seen = {name for step in run_reader.steps(folder) for name in step.gauges}
    assert not {name for name in seen if not defined(name)}
    assert {
        "sft/loss",
        "rollout/reward",
        "engine/tokens",
        "optim/grad_norm",
        "eval/reward",
        "policy/ratio",
    } <= seen


def test_every_definition_is_whole() -> None:
    assert all(d.formula and d.unit and d.band for d in REGISTRY.values())


def test_sources_are_told_apart_and_paid_turns_summed() -> None:
    """Raw scores, an episode at a time: an abstention is no score, steps of a process judge have no part, and weights
    none."""
    from posttrain.core.types import Episode, Stop, Task
    from posttrain.core.verdict import Judged, Verdict
    from posttrain.diagnose.gauges.rollout_gauges import components

    def episode(*verdicts: Judged) -> Episode:
        return Episode(Task("t", "?"), 0, 0, (), Stop.SAID, verdicts)

    paid = [Judged("turn", 1.0, Verdict.value(x), end=i + 1, paid=True) for i, x in enumerate((0.5, 0.25))]
    seen = components(
        [
            episode(Judged("right", 1.0, Verdict.value(1.0)), Judged("brief", 0.1, Verdict.value(0.5)), *paid),
            episode(Judged("right", 1.0, Verdict.value(0.0, "wrong")), Judged("brief", 0.1, Verdict.abstain())),
            episode(Judged("right", 1.0, Verdict.failed("worker")), Judged("step", 1.0, Verdict.value(1.0), end=1)),
        ]
    )
    assert {name: (g.sum, g.count) for name, g in seen.items()} == {
        "reward/brief": (0.5, 1),
        "reward/right": (1.0, 2),
        "reward/turn": (0.75, 1),
        "abstained/brief": (1, 3),
        "failed/worker": (1, 8),
        "verdict/wrong": (1, 8),
    }
