"""The losses of `parity.py`: an algorithm of ours, and how TRL is asked for the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.link import Hinge, Square
from posttrain.ladder.pieces.preference_pieces import (
    AlphaDivergence,
    Average,
    ChosenNLL,
    Conservative,
    ForwardKL,
    JensenShannon,
)
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import PREFERENCES

P = PREFERENCES


@dataclass(frozen=True)
class Case:
    """One loss on both sides."""

    name: str
    ours: PreferenceAlgorithm
    trainer: str
    """TRL's trainer: dpo, weighted (its DPO trainer with WPO's weights), kto, cpo, orpo or tpo."""
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its attributes, as its own configuration sets them."""
    prompt_is_one_token: bool = False
    """TRL's ORPO counts the likelihood of the prompt as well; a prompt of one token has none."""

    @property
    def trl(self) -> str:
        return f"{self.trainer} {self.settings.get('loss_types', [self.settings.get('loss_type', '')])[0]}"


def dpo(name: str, loss: str, of: PreferenceAlgorithm | None = None, **settings: Any) -> Case:
    ours = P[name] if of is None else of
    settings = {"loss_types": [loss], "loss_weights": [1.0], "beta": ours.beta, **settings}
    return Case(name, ours, "dpo", settings)


def of_dpo(name: str, **changes: Any) -> PreferenceAlgorithm:
    return patch(P["dpo"], name, "an option", **changes)


def cpo(name: str, loss: str, of: PreferenceAlgorithm, **settings: Any) -> Case:
    alpha = next((t.coef for t in of.add if isinstance(t, ChosenNLL)), 0.0)
    return Case(name, of, "cpo", {"loss_type": loss, "beta": of.beta, "cpo_alpha": alpha, **settings})


def tpo(name: str, loss: str, **changes: Any) -> Case:
    ours = patch(P["tpo"], name, "an option", **changes)
    settings = {"loss_type": loss, "beta": ours.beta, "tpo_alpha": 1.0}
    if isinstance(ours.noise, Conservative):
        settings["label_smoothing"] = ours.noise.rate
    return Case(name, ours, "tpo", settings)


CPO_BARE = patch(P["cpo"], "cpo without likelihood", "an option", add=())
CASES: tuple[Case, ...] = (
    dpo("dpo", "sigmoid"),
    dpo("dpo, forward KL", "sigmoid", of_dpo("f", divergence=ForwardKL()), f_divergence_type="forward_kl"),
    dpo("dpo, Jensen-Shannon", "sigmoid", of_dpo("j", divergence=JensenShannon()), f_divergence_type="js_divergence"),
    dpo(
        "dpo, alpha divergence",
        "sigmoid",
        of_dpo("a", divergence=AlphaDivergence(alpha=0.5)),
        f_divergence_type="alpha_divergence",
        f_alpha_divergence_coef=0.5,
    ),
    dpo("robust_dpo", "robust", label_smoothing=0.1),
    dpo("dpo_norm", "sigmoid_norm"),
    dpo("ld_dpo", "sigmoid", ld_alpha=0.5),
    Case("wpo", P["wpo"], "weighted", {"loss_types": ["sigmoid"], "beta": 0.1}),
    dpo("ipo_mean", "ipo"),
    dpo("slic", "hinge"),
    dpo("exo", "exo_pair", label_smoothing=1e-3),
    dpo("discopop", "discopop"),
    dpo("aot", "aot"),
    dpo("aot, noise", "aot", patch(P["aot"], "n", "x", noise=Conservative(rate=0.2)), label_smoothing=0.2),
    dpo("aot_unpaired", "aot_unpaired"),
    dpo("nca", "nca_pair"),
    dpo("sppo", "sppo_hard"),
    dpo("apo_zero", "apo_zero"),
    dpo("apo_down", "apo_down"),
    dpo("bco_pair", "bco_pair"),
    dpo(
        "dpo and likelihood",
        "sigmoid",
        of_dpo("l", add=(ChosenNLL(coef=0.5),)),
        loss_types=["sigmoid", "sft"],
        loss_weights=[1.0, 0.5],
    ),
    Case("kto", P["kto"], "kto", {"loss_type": "kto", "beta": 0.1}),
    Case(
        "kto, weights",
        patch(P["kto"], "w", "x", good=1.5, bad=0.5),
        "kto",
        {"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.5, "undesirable_weight": 0.5},
    ),
    Case("apo_zero_unpaired", P["apo_zero_unpaired"], "kto", {"loss_type": "apo_zero_unpaired", "beta": 0.1}),
    cpo("cpo", "sigmoid", P["cpo"]),
    cpo("cpo, noise", "sigmoid", patch(CPO_BARE, "n", "x", noise=Conservative(rate=0.2)), label_smoothing=0.2),
    cpo("cpo, hinge", "hinge", patch(CPO_BARE, "h", "x", link=Hinge(delta=1.0))),
    cpo("cpo, ipo", "ipo", patch(CPO_BARE, "i", "x", link=Square(), statistic=Average())),
    cpo("simpo", "simpo", P["simpo"], simpo_gamma=1.375),
    cpo("cpo_simpo", "simpo", P["cpo_simpo"], simpo_gamma=1.375),
    Case("orpo", P["orpo"], "orpo", {"beta": 0.1}, prompt_is_one_token=True),
    Case("tpo", P["tpo"], "tpo", {"loss_type": "sigmoid", "beta": 0.01, "tpo_alpha": 1.0}),
    tpo("tpo, noise", "sigmoid", noise=Conservative(rate=0.2)),
    tpo("tpo, hinge", "hinge", link=Hinge(delta=1.0)),
    tpo("tpo, ipo", "ipo", link=Square(), statistic=Average(), beta=0.1),
    Case(
        "tpo, averages and margin",
        patch(P["tpo"], "l", "x", statistic=Average(), beta=2.5, margin=P["simpo"].margin),
        "tpo",
        {"loss_type": "tpo-l", "beta": 2.5, "tpo_alpha": 1.0, "tpo_l_gamma": 1.375},
    ),
)
"""TRL's preference losses that do not sample: every loss type of each trainer. AlphaPO, the `alpha` of its CPO that
transforms averages, is no line of the ladder and has no case."""
