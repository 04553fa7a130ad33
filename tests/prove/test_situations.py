"""Fourteen situations, each started on purpose on settings that no rule was tuned on, end with the right sentence in
the terminal; and healthy runs, drawn at random, get no sentence at all. The seed is printed, so that a failure
repeats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.trust import graded_situations, taught
from benchmarks.trust.situations import SENTENCES, SITUATIONS, fresh, play, tuned

pytestmark = pytest.mark.prove

COUNT = int(os.environ.get("POSTTRAIN_SITUATIONS", "1"))
"""Seeds: with 3 all of the page, with fewer those that the seed of the landing chooses."""
FIRST = int(os.environ.get("POSTTRAIN_SEED", "0"))
SEEDS = (0, 1, 2) if COUNT >= 3 else tuple((FIRST + i) % 3 for i in range(COUNT))


@pytest.fixture(scope="session")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stages")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SITUATIONS)
def test_it_ends_with_the_right_sentence(name: str, seed: int, stages: Path) -> None:
    print(f'python -m benchmarks.trust.situations --only "{name}" --seed {seed}')
    outcome = play(name, fresh(seed), stages / str(seed))
    assert outcome.right, f"said {outcome.said}\n{outcome.output}"


@pytest.mark.parametrize("seed", [1 + s for s in SEEDS])
@pytest.mark.parametrize("name", graded_situations.SITUATIONS)
def test_with_grades_it_ends_with_the_right_sentence(name: str, seed: int, stages: Path) -> None:
    """And no other sentence, nor a word of right and wrong."""
    print(f'python -m benchmarks.trust.graded_situations --only "{name}" --seed {seed}')
    outcome = graded_situations.play(name, seed, stages / f"graded-{seed}")
    assert outcome.right, f"said {outcome.said}, wrong {outcome.wrong}\n{outcome.output}"


def test_fresh_settings_share_nothing_with_the_tuned_one() -> None:
    known = tuned(0)
    for seed in (0, 1, 2):
        new = fresh(seed)
        for name in ("word", "says", "arch", "hidden", "prompts", "siblings", "algorithm", "lr", "seed"):
            assert getattr(new, name) != getattr(known, name), name


def test_every_situation_has_a_sentence_of_its_own() -> None:
    assert len(SITUATIONS) == 14 and len({s.says for s in SITUATIONS.values()}) == 14
    assert {s.says for s in SITUATIONS.values()} <= set(SENTENCES)


def test_healthy_runs_are_not_spoken_about(tmp_path: Path) -> None:
    print(f"seed {FIRST}: python -m benchmarks.trust.taught --seed {FIRST} --only N plays one again")
    outcomes = taught.many(FIRST, 6 * COUNT, tmp_path)
    assert not [taught.line(o) for o in outcomes if taught.is_false(o) or o.stopped]
