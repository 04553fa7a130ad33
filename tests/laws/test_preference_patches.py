"""The second ladder as data: a patch changes something that means something, and says so."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.ladder.algorithm import differences, patch
from posttrain.ladder.algorithm_notes import PREFERENCE_NOTES
from posttrain.ladder.formula.preference_formula import preference_formula, preference_formulas
from posttrain.ladder.pieces.link import AnchoredZero, Binary, Exact, Hinge, Link, Nash, Prospect, SelfPlay, Square
from posttrain.ladder.pieces.pair_source import (
    AgainstMixture,
    AgainstReference,
    BestWorst,
    PairSource,
    RejectionSampled,
    TwoSamples,
)
from posttrain.ladder.pieces.preference_pieces import (
    Added,
    AlphaDivergence,
    Average,
    ChosenNLL,
    Conservative,
    DataMargin,
    Desensitized,
    FDivergence,
    FixedMargin,
    ForwardKL,
    GoldNLL,
    LabelNoise,
    LogOdds,
    MarginTerm,
    Optimism,
    Robust,
    Statistic,
)
from posttrain.ladder.policy_rows import LADDER
from posttrain.ladder.preference_algorithm import PREFERENCE_CHOICES, PreferenceAlgorithm
from posttrain.ladder.preference_rows import (
    AOT,
    APO_DOWN,
    BCO,
    CPO,
    DPO,
    EXO,
    IPO,
    KTO,
    NASH_MD,
    PREFERENCES,
    SIMPO,
    TPO,
    XPO,
    preference,
)
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError
from posttrain.system.subclass_registry import alternatives


def test_every_row_is_dpo_with_patches_and_has_a_note_a_paper_and_a_formula() -> None:
    assert {*PREFERENCE_NOTES} <= {*PREFERENCES} and not {*PREFERENCES} & {*LADDER}
    for a in PREFERENCES.values():
        assert a.lineage()[0] is DPO and a.paper
        assert a.parent is None or differences(a.parent, a)
        assert all(line for _, line in preference_formulas(a))
        assert all(preference_formula(f, getattr(a, f)) for f in PREFERENCE_CHOICES)
    assert len({tuple(map(str, (getattr(a, f) for f in PREFERENCE_CHOICES))) for a in PREFERENCES.values()}) == len(
        PREFERENCES
    ), "two rows make the same choices"


@pytest.mark.parametrize("name", sorted(PREFERENCES))
def test_a_row_is_written_and_read_back_equal(name: str) -> None:
    a = PREFERENCES[name]
    assert dataclass_json.from_plain(PreferenceAlgorithm, dataclass_json.to_plain(a)) == a


def test_every_piece_that_ships_is_on_the_ladder_or_an_option_of_dpo() -> None:
    used = {type(p) for a in PREFERENCES.values() for p in a.pieces}
    options = {ForwardKL, AlphaDivergence, *(c for c in alternatives(FDivergence) if c.__name__ == "JensenShannon")}
    options |= {c for c in alternatives(MarginTerm) if c.__name__ == "RatioMargin"}
    for choice in (Statistic, FDivergence, Link, LabelNoise, MarginTerm, Added, PairSource):
        assert {c for c in alternatives(choice) if c.__module__.startswith("posttrain.")} <= used | options


def test_what_a_stage_reads_of_a_row() -> None:
    assert DPO.reads == {"reference"} and DPO.kind == "pair" and not DPO.online
    assert SIMPO.reads == frozenset() and not SIMPO.reads_reference
    assert PREFERENCES["wpo"].reads == {"reference", "start", "collision"}
    assert AOT.reads_start and BCO.reads_start and not KTO.reads_start and KTO.reads_mismatched
    assert KTO.kind == BCO.kind == "label" and TPO.kind == "ranking"
    assert PREFERENCES["odpo"].reads_margin and NASH_MD.reads_margin and not DPO.reads_margin
    assert {n for n, a in PREFERENCES.items() if a.online} == {"rso", "oaif", "iterative_dpo", "xpo", "nash_md"}
    assert PREFERENCES["rso"].reads_reference


def test_a_weight_multiplies_the_whole_loss_in_its_formula() -> None:
    for a in (APO_DOWN, NASH_MD):
        assert dict(preference_formulas(patch(a, "x", "x", coef=0.5)))["loss"] == f"0.5 * ({a.link.words()})"


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'simpo'"):
        preference("sim_po")


REFUSED: list[tuple[PreferenceAlgorithm, dict[str, Any], str]] = [
    (DPO, {"link": Hinge(delta=1.0), "beta": 0.1}, "is what 'dpo' already has"),
    (DPO, {"linke": Square()}, "no choice is called 'linke'"),
    (IPO, {"margin": FixedMargin(gamma=1.0)}, "a second target means nothing"),
    (DPO, {"against": "nothing", "divergence": ForwardKL()}, "is one to the reference"),
    (DPO, {"statistic": Average(), "divergence": ForwardKL()}, "ratio of whole completions"),
    (DPO, {"link": SelfPlay(), "divergence": ForwardKL()}, "only a difference cancels"),
    (DPO, {"link": SelfPlay(), "noise": Robust(rate=0.1)}, "reads no margin"),
    (DPO, {"link": AnchoredZero(), "margin": FixedMargin(gamma=1.0)}, "reads none"),
    (EXO, {"noise": Conservative(rate=0.1)}, "count it twice"),
    (DPO, {"statistic": LogOdds()}, "a ratio to a reference is none"),
    (DPO, {"rows": "label"}, "reads pairs"),
    (APO_DOWN, {"rows": "label"}, "reads pairs"),
    (KTO, {"shift": None}, "that is anchoredzero"),
    (KTO, {"against": "nothing"}, "mean of log-ratios to the reference"),
    (KTO, {"statistic": Average()}, "whole completions"),
    (KTO, {"statistic": Desensitized(alpha=0.5)}, "compares two lengths"),
    (KTO, {"weights": "wpo"}, "product over the two sides"),
    (TPO, {"weights": "wpo"}, "product over the two sides"),
    (NASH_MD, {"weights": "wpo"}, "learns from one side alone"),
    (KTO, {"draw": TwoSamples()}, "reads none"),
    (DPO, {"good": 2.0}, "weigh single completions"),
    (DPO, {"shift": "running"}, "a difference cancels it"),
    (DPO, {"link": Prospect(), "shift": "mismatched"}, "a difference cancels it"),
    (AOT, {"against": "nothing"}, "sorts log-ratios"),
    (AOT, {"weights": "wpo"}, "nobody's"),
    (AOT, {"margin": FixedMargin(gamma=1.0)}, "belong to no pair"),
    (AOT, {"link": Binary()}, "sorts what a link of differences reads"),
    (AOT, {"divergence": ForwardKL()}, "compares log-ratios"),
    (AOT, {"statistic": Desensitized(alpha=0.5)}, "compares lengths within one"),
    (TPO, {"add": ()}, "nothing reads"),
    (CPO, {"add": (GoldNLL(),)}, "has none"),
    (CPO, {"add": (ChosenNLL(), ChosenNLL(coef=2.0))}, "the same term twice"),
    (DPO, {"add": (Optimism(),)}, "completions of the reference"),
    (XPO, {"draw": TwoSamples()}, "completions of the reference"),
    (DPO, {"link": Nash()}, "what the policy itself said"),
    (NASH_MD, {"draw": RejectionSampled()}, "what the policy itself said"),
    (NASH_MD, {"against": "nothing"}, "has none"),
    (DPO, {"draw": TwoSamples(), "margin": DataMargin()}, "drawn pairs have none"),
    (DPO, {"beta": 0.0}, "must be > 0"),
]


@pytest.mark.parametrize(("parent", "changes", "why"), REFUSED, ids=[w for _, _, w in REFUSED])
def test_what_means_nothing_is_refused_with_the_reason(
    parent: PreferenceAlgorithm, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        patch(parent, "x", "x", **changes)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Conservative(rate=0.5),
        lambda: Robust(rate=0.0),
        lambda: Exact(rate=0.7),
        lambda: Desensitized(alpha=1.0),
        lambda: Desensitized(alpha=1.5),
        lambda: AlphaDivergence(alpha=1.0),
        lambda: FixedMargin(gamma=0.0),
        lambda: Hinge(delta=-1.0),
        lambda: BestWorst(of=1),
        lambda: RejectionSampled(of=4, keep=8),
        lambda: RejectionSampled(keep=3),
        lambda: RejectionSampled(temperature=0.0),
        lambda: AgainstMixture(coef=2.0),
    ],
)
def test_numbers_out_of_range_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        wrong()


def test_the_opponent_is_said_where_there_is_one() -> None:
    drawn = (AgainstReference(), AgainstMixture(coef=0.2), TwoSamples(), RejectionSampled(of=6, keep=4))
    assert [d.opponent() for d in drawn] == [1.0, 0.2, None, 1.0]
    assert [list(d.opposed()) for d in drawn] == [[1], [1], [], [0, 1, 2, 3, 4, 5]]
    assert [d.samples() for d in (*drawn, BestWorst(of=5))] == [2, 2, 2, 6, 5]
    assert [d.pairs() for d in (*drawn, BestWorst(of=5))] == [1, 1, 1, 2, 1]
