"""A piece is its numbers, its words and its mathematics: what is defined outside the package does all that the shipped
ones do.

Nothing in posttrain names the pieces of `law_pieces`; overrides, JSON, words, cost, credit and loss find them by their
base class.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest
import torch
from law_toys import credits
from law_world import World

from posttrain.algorithm.credit.baseline_values import by_token, centred
from posttrain.algorithm.credit.reward_shaping import shape, shaped, sizes
from posttrain.algorithm.loss.mismatch_correction import factor
from posttrain.algorithm.loss.push_factor import pushed
from posttrain.algorithm.loss.reference_penalty import pull_term
from posttrain.algorithm.loss.step_scale import step_share
from posttrain.algorithm.loss.token_selection import choose
from posttrain.algorithm.preference.preference_link import divergence, link, noisy, owed, side, statistic
from posttrain.algorithm.preference.preference_loss import added
from posttrain.cli import ladder_tables as terminal
from posttrain.config.overrides import apply, surface
from posttrain.config.run import Reinforce, Run
from posttrain.core.streams import ADVANTAGE, START, WEIGHT
from posttrain.ladder import policy_rows
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.algorithm_cost import cost, reads
from posttrain.ladder.formula import formula, formulas, patches
from posttrain.ladder.pieces.baseline import Baseline
from posttrain.ladder.pieces.correction import Correction
from posttrain.ladder.pieces.link import Link
from posttrain.ladder.pieces.piece import Piece
from posttrain.ladder.pieces.preference_pieces import Added, FDivergence, LabelNoise, MarginTerm, Statistic
from posttrain.ladder.pieces.pull import KL, Pull
from posttrain.ladder.pieces.shape import Shaping, Signed
from posttrain.ladder.pieces.token_choice import Curriculum, NoEasy, Priority, Tokens
from posttrain.ladder.pieces.trust_region import Clip, TrustRegion
from posttrain.ladder.policy_rows import DAPO, DR_GRPO, GRPO, LADDER, LUFFY, REMAX
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.recipe.recipes import recipe
from posttrain.record.external_access import asks, decided
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, InvariantError
from posttrain.system.subclass_registry import Open, alternatives, is_open
from posttrain.toy.episodes import PlainEpisode, scored_group

CHOICES: tuple[type[Piece], ...] = (Baseline, Correction, Pull, Shaping, Tokens, Curriculum, TrustRegion)


@contextmanager
def offered() -> Iterator[ModuleType]:
    """The pieces of `law_pieces`, for a while."""
    sys.modules.pop("law_pieces", None)
    toys = import_module("law_pieces")
    try:
        yield toys
    finally:
        toys.Bell.withdraw()
        toys.Brief.withdraw()


@pytest.fixture
def toys() -> Iterator[Any]:
    with offered() as module:
        yield module


def built(*overrides: str) -> Run:
    return apply(recipe("arithmetic"), ["algorithm=dr_grpo", *overrides])


def algorithm_of(run: Run) -> Algorithm:
    return next(s for s in run.stages if isinstance(s, Reinforce)).algorithm


def test_overrides_and_json_read_a_new_piece(toys: Any) -> None:
    run = built("clip=bell", "shape=signed,brief")
    assert algorithm_of(run).clip == toys.Bell() and algorithm_of(run).shape == (Signed(), toys.Brief())
    run = apply(run, ["clip.width=3", "shape.brief.most=5"])
    a = algorithm_of(run)
    assert a.clip == toys.Bell(width=3.0) and a.shape == (Signed(), toys.Brief(most=5))
    plain = json.dumps(to_plain(run))
    assert '"type": "Bell", "width": 3.0' in plain and from_plain(Run, json.loads(plain)) == run
    with pytest.raises(ConfigError, match="did you mean 'bell'"):
        built("clip=bel")
    paths = {path for path, _ in surface(run)}
    assert {"rl.algorithm.clip.width", "rl.algorithm.shape.brief.price"} <= paths
    assert asks(run) == () and decided(toys.Bell, "width") is not None, "a piece reaches nothing outside"


def test_its_words_and_its_cost_are_shown(toys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a = patch(DR_GRPO, "rung", "-", clip=toys.Bell(), shape=(toys.Brief(),))
    said = dict(formulas(a))
    assert said["push"].startswith("rho exp(-(2 log rho)^2);") and said["r"].startswith("R; then r <- r - 0.01 |y|")
    assert formula("clip", a.clip) == "push = rho exp(-(2 log rho)^2)"
    assert patches(a) == ["clip=bell(width=2)", "shape=brief(price=0.01, most=1000)"]
    assert cost(a).memory == ("a bell a token",) and a.reads == {"start", "entropy"} and "lengths" in reads(a)
    assert cost(a).forwards == cost(DR_GRPO).forwards + 1, "the entropies that brief reads are scored"
    monkeypatch.setitem(LADDER, "rung", a)
    page = terminal.one("rung")
    assert "rho exp(-(2 log rho)^2)" in page and "a bell a token" in page
    assert next(line for line in terminal.table().splitlines() if line.startswith("rung ")).split()[2] == "bell"


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"anchor": "behaviour"}, "bell needs the learner"), ({"ratio": "one"}, "needs a ratio to bound")],
)
def test_a_wrong_combination_is_refused_for_its_own_reason(toys: Any, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        patch(DR_GRPO, "x", "-", clip=toys.Bell(), **changes)
    with pytest.raises(ConfigError, match="clip.width=0.0: must be > 0"):
        built("clip=bell", "clip.width=0")


def test_credit_and_loss_use_its_mathematics(toys: Any) -> None:
    plain = patch(DR_GRPO, "x", "-", clip=toys.Bell())
    brief = patch(plain, "y", "-", shape=(toys.Brief(price=0.5),))
    lengths = [[2, 4, 6]]
    centred_length = np.array([2, 4, 6]) - 4
    assert np.subtract(credits(brief, [1, 0, 0], lengths=lengths), credits(plain, [1, 0, 0], lengths=lengths))[
        0
    ] == pytest.approx(-0.5 * centred_length)
    group = scored_group("0", [PlainEpisode(1.0, [[n]], np.full(n, -1.0)) for n in (2, 9)])
    rewards, why = shaped((toys.Brief(price=0.5, most=5),), np.ones(2), [s.episode for s in group.episodes], 20)
    assert rewards.tolist() == [0.0, -3.5] and why == ["", "not brief"]
    assert sizes(
        (toys.Brief(price=0.5),), np.ones(2), np.ones(2), [s.episode for s in group.episodes], 20
    ).tolist() == [2.0, 5.5]

    here = World(plain, 0)
    batch = here.batch
    logp = here.scores(batch).logp
    weight, credit, start = (
        torch.as_tensor(x, dtype=torch.float64) for x in (batch[WEIGHT], batch[ADVANTAGE], batch[START])
    )
    gap = (logp - start).detach()
    want = -(weight * torch.exp(gap - (2 * gap) ** 2) * credit * logp).sum()
    found = here.gradient(here.terms(batch)[0].loss)
    for x, right in zip(found, here.gradient(want), strict=True):
        assert torch.allclose(x, right, rtol=0, atol=1e-12)
    assert found[0].abs().max() > 1e-4


def test_what_was_offered_can_be_withdrawn() -> None:
    before = [alternatives(choice) for choice in CHOICES]
    with offered() as toys:
        assert [x for x in alternatives(TrustRegion) if x not in before[-1]] == [toys.Bell]
        assert alternatives(Shaping)[-1] is toys.Brief
    assert [alternatives(choice) for choice in CHOICES] == before
    with pytest.raises(ConfigError, match="clip=bell"):
        built("clip=bell")
    with pytest.raises(ConfigError, match="no alternative"):
        toys.Bell.withdraw()


def test_a_name_stands_for_one_piece() -> None:
    """Overrides write names in lower case; a class that is defined again, as in a notebook, takes the place of the
    first."""

    class Door(Open, begin=True):
        pass

    def define(name: str) -> type[Door]:
        return type(name, (Door,), {"__module__": "here", "__qualname__": name})

    first, again = define("Wide"), define("Wide")
    assert first is not again and alternatives(Door) == (again,) and is_open(Door) and not is_open(again)
    with pytest.raises(ConfigError, match=r"here.WIDE: overrides would not tell it from here.Wide"):
        define("WIDE")
    with pytest.raises(ConfigError, match="no open choice"):
        alternatives(Clip)


def test_a_piece_without_words_or_mathematics_says_so() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mute(TrustRegion):
        pass

    try:
        with pytest.raises(TypeError, match="words"):
            cast("Any", Mute)()
    finally:
        Mute.withdraw()

    @dataclass(frozen=True, kw_only=True)
    class Blank(Clip):
        pass

    try:
        here = World(patch(DR_GRPO, "x", "-", clip=Blank(low=0.1)), 0)
        clip = World(patch(DR_GRPO, "x", "-", clip=Clip(low=0.1)), 0)
        for x, right in zip(here.library(), clip.library(), strict=True):
            assert torch.equal(x, right), "what derives from a piece has its mathematics"
    finally:
        Blank.withdraw()


@pytest.mark.parametrize(
    "function",
    [
        *(pushed, factor, pull_term, choose, shape, centred, by_token, step_share),
        *(statistic, divergence, link, side, owed, noisy, added),
    ],
    ids=lambda function: function.__name__,
)
def test_a_piece_without_mathematics_says_where_to_register_it(function: Any) -> None:
    with pytest.raises(InvariantError, match="NoEasy has no mathematics: register a function of NoEasy with") as said:
        function(NoEasy(), *[None] * (len(inspect.signature(function).parameters) - 1))
    module, name, register = str(said.value).rpartition(" ")[2].rsplit(".", 2)
    assert register == "register" and getattr(import_module(module), name) is function, "the name that it says is real"


def test_every_shipped_piece_has_its_mathematics() -> None:
    for choice, function in (
        (TrustRegion, pushed),
        (Correction, factor),
        (Pull, pull_term),
        (Tokens, choose),
        (Shaping, shape),
        (Statistic, statistic),
        (FDivergence, divergence),
        (Link, link),
        (LabelNoise, noisy),
        (MarginTerm, owed),
        (Added, added),
    ):
        # Nash has a term of its own in the loss, and no link of a margin.
        unregistered = {x for x in alternatives(choice) if function.dispatch(x) is function.dispatch(object)}
        assert {x.__name__ for x in unregistered} <= {"Nash"}
    for b in alternatives(Baseline):
        assert b in (by_token if b.per_token else centred).registry


def test_an_algorithm_is_one_line_of_the_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(policy_rows)
    line = 'TOY = _patch(DAPO, "toy", "2501.00001", clip=Cap(high=3.0))\n'
    before = "# --- on-policy distillation"
    assert source.count(before) == 1
    with_line = ModuleType("with_line")
    exec(compile(source.replace(before, line + before), "ladder", "exec"), with_line.__dict__)
    assert with_line.LADDER.keys() - LADDER.keys() == {"toy"}
    monkeypatch.setitem(LADDER, "toy", with_line.LADDER["toy"])
    assert [x.name for x in algorithm_of(apply(recipe("arithmetic"), ["algorithm=toy"])).lineage()][-2:] == [
        "dapo",
        "toy",
    ]
    assert "arXiv 2501.00001" in terminal.one("toy") and "toy" in terminal.table() and "toy " in terminal.tree()
    here = World(with_line.LADDER["toy"], 0)
    assert all(
        torch.equal(x, y)
        for x, y in zip(here.library(), World(patch(DAPO, "x", "-", clip=here.a.clip), 0).library(), strict=True)
    )


# --- what roles ask of an algorithm ----------------------------------------------------------------------------------


def test_a_request_says_what_a_step_needs_of_the_rollout() -> None:
    stage = Reinforce(name="rl", prompts=4, siblings=8, oversample=2, refill=3, algorithm=DAPO)
    assert GRPO.request(stage) == RolloutRequest(groups=4, siblings=8, extra=2, most=3)
    assert DAPO.request(stage) == RolloutRequest(groups=4, siblings=8, extra=2, most=3, mixed=True)
    assert REMAX.request(stage).greedy and LUFFY.request(stage).shown == LUFFY.shown


def test_what_else_roles_ask() -> None:
    assert GRPO.refresh == 0 and patch(GRPO, "x", "-", pull=KL(refresh=7)).refresh == 7
    silent = {x.__name__ for x in alternatives(TrustRegion) if x.silences}
    assert silent >= {"Clip", "Geometric", "Divergence", "FutureKL"} and silent.isdisjoint(
        {"Cap", "Taper", "Soft", "Hump"}
    )
    assert GRPO.silences and not REMAX.silences
    assert NoEasy(rate=0.5).weight(0.4) == 1.0 and NoEasy(rate=0.5).weight(0.5) == 0.0 and not NoEasy.drawn
    assert Priority(floor=0.05).weight(0.75) == 0.25 and Priority(floor=0.05).weight(1.0) == 0.05 and Priority.drawn
