"""Notes on preference algorithms, by name: where this library differs from the paper or from other libraries."""

from __future__ import annotations

PREFERENCE_NOTES: dict[str, str] = {
    "dpo": (
        "log-probs are summed over the completion, its stop token included and nothing of the prompt. The reference is "
        "the policy at the start of the stage. TRL's f-divergences are `divergence`, its `use_weighting` is wpo"
    ),
    "cdpo": "TRL has no loss of this name in DPOTrainer; its label smoothing is this form in CPO and AOT",
    "robust_dpo": "TRL's `robust` with `label_smoothing` as the rate. A pair can have a negative loss",
    "odpo": "the margin is the row's own; the paper takes a log of the difference of scores",
    "dpo_norm": "length-normalised DPO of Tulu 3, TRL's `sigmoid_norm`; beta is per token here, so 5 and not 0.1",
    "ld_dpo": "lengths are those of the spoken tokens; alpha 1 would be DPO",
    "wpo": (
        "a pair's weight is the product over its sides of exp(mean of log pi - log sum pi^2), not differentiated, and "
        "read at the start of the optimizer step"
    ),
    "ipo": (
        "sums of log-probs, as in the paper's formula, OpenRLHF and rlhf-book. TRL's `ipo` takes averages: that is "
        "ipo_mean"
    ),
    "ipo_mean": "TRL's `ipo`; its authors' experiments used averages. beta is then a scale per token",
    "slic": "TRL's `hinge`: SLiC's link on DPO's margin, with the reference",
    "slic_hf": "the paper's form without a reference: delta in units of log-probs, and the likelihood of the chosen",
    "rso": (
        "the pairs are its own, drawn from the reference in every step; the loss is the paper's hinge, and "
        "link=logsigmoid is its other form. The kept completions are paired at random, each once, as in the paper's "
        "best setting (first-round-rank). Its program joins equal texts before it draws; here each sample counts"
    ),
    "exo": "TRL's `exo_pair` with `label_smoothing` as link.rate",
    "discopop": (
        "the mixture m is differentiated, as in the paper and TRL. At x = 0, where a stage begins, its gradient lowers "
        "the chosen completion: it has a minimum at x = -2.3714 tau and a maximum at 1.4401 tau, which steps must be "
        "large or noisy enough to leap"
    ),
    "aot": (
        "the order is that of the log-probs at the start of the optimizer step, over the whole minibatch, so that a "
        "split changes nothing. TRL sorts within each device's micro-batch"
    ),
    "aot_unpaired": "see aot; chosen and rejected may come from different prompts",
    "nca": "TRL's `nca_pair`",
    "sppo": (
        "hard labels: the winner's probability is 1. The paper's eta is 1/beta; soft probabilities of a judge would "
        "replace the two targets"
    ),
    "apo_zero": "for chosen completions better than what the policy says",
    "apo_zero_unpaired": "TRL's KTOTrainer with `apo_zero_unpaired`",
    "apo_down": "for chosen completions worse than what the policy says",
    "bco_pair": "TRL's `bco_pair`, without the running delta",
    "bco": (
        "delta is the mean of the rewards of all completions seen in the stage, this minibatch included; it is state "
        "that a checkpoint keeps"
    ),
    "kto": (
        "z is the mean log-ratio of completions under the prompts of others, over the whole minibatch, at least 0 and "
        "not differentiated. The paper's v is subtracted from lambda, which has the same gradient. Keep good n_good / "
        "(bad n_bad) in [1, 4/3]"
    ),
    "cpo": "TRL's beta and `cpo_alpha` (the weight of the likelihood)",
    "simpo": (
        "margin.gamma is absolute, as in the paper's formula and TRL's `simpo_gamma`. rlhf-book's gamma is the ratio "
        "gamma/beta: that is margin=ratiomargin"
    ),
    "cpo_simpo": "TRL's CPOTrainer with `loss_type=simpo` and `cpo_alpha` 1",
    "orpo": (
        "p is exp of the average log-prob. TRL's beta, the paper's lambda, is `coef` here. TRL's likelihood also "
        "counts the tokens of the prompt; here it reads the chosen completion alone, as in the paper"
    ),
    "tpo": "rankings of three: the gold completion is imitated and enters no difference, as in TRL",
    "oaif": "no penalty for a missing stop token: let a reward say that (TRL's `missing_eos_penalty`)",
    "iterative_dpo": "the paper also trains its reward model anew each round",
    "xpo": (
        "the sum over the reference's completion of its log-prob under the policy, as in TRL. Pairs that are judged "
        "alike are left out, their term of optimism too"
    ),
    "nash_md": (
        "the KL of a token is charged to that token alone, as in TRL: no token is charged for those after it. P is the "
        "sigmoid of the difference of the two rewards, one half where they are equal, so a reward is in units of "
        "log-odds. The opponent is mixed token by token, and samples under the stage's sampling contract"
    ),
}
