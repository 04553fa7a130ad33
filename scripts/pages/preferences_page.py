"""The generated page of the second ladder: what each preference algorithm computes, and where others differ."""

from __future__ import annotations

from posttrain.ladder.algorithm import differences
from posttrain.ladder.formula import compact, source
from posttrain.ladder.formula.preference_formula import PREFERENCE_FORM, preference_formulas, preference_reads
from posttrain.ladder.formula.tree_picture import picture
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import PREFERENCES

INTRODUCTION = f"""
# Preference algorithms

For people who choose, compare or read an algorithm that learns from judgements. After this page you know its \
formula as it is computed, and
its name in other libraries.

What learns from judgements is a ladder of its own: every algorithm is DPO plus a list of patches
(`posttrain/ladder/preference_rows.py`), and its loss is

```
{PREFERENCE_FORM}
```

| letter | is |
|---|---|
| `l` | log pi - log ref of a spoken token; log pi alone where `against=nothing` |
| `h` | score of a completion: the sum of `l` over its spoken tokens, its stop token included, or another statistic |
| `u` | beta h, less the shift: the reward that the policy implies |
| `x` | the margin of a pair; `f` is the link, `f(-x)` the same pair with its sides exchanged |
| `pi`, `ref` | the policy, and the policy as the stage began (or another model) |
| `sg[x]` | `x`, not differentiated |

Rows weigh what the data says, normalised over the minibatch. What reads a whole minibatch (the likelihood of the \
chosen as a
mean over tokens, KTO's z, the order of AOT, the mean of BCO) is made before it is split, so a split changes neither \
value nor
gradient. A pair stays together, and its prompt is computed once. In a terminal: `posttrain ladder`, `posttrain ladder \
simpo`,
`posttrain ladder --diff dpo simpo`.

Names that mean two things elsewhere: `ipo` reads sums as the paper does, and TRL's `ipo` is `ipo_mean`. SimPO's gamma
is absolute (`fixedmargin`), and `ratiomargin` is gamma / beta. TRL's `beta` of ORPO is `coef`. Its `label_smoothing` is
`noise=conservative` in CPO, TPO and AOT, `noise=robust` in its `robust`, and `link.rate` in `exo`.

The lines with `pairs` in their formulas draw their own, in a stage of the type `OnlinePreference`: the environment or a
reward model judges what was sampled. `xpo` and `nash_md` play against an opponent, which says the second completion of
each prompt: the reference, or a mixture of policy and reference in which the logits of every token are mixed. With \
`rso` the reference
says all of them, and the pairs are made of those that statistical rejection sampling keeps. An opponent is an engine \
of its own
beside the policy's (`engine=embedded`; vLLM samples one model and is refused), and the policy's part of it gets every
push. What it says is recorded with version -4, counts in no gauge of the policy, and its log-probs are
compared with those of the mixture.

`make parity` computes the loss and the gradient of all weights beside TRL's own loss code, for every loss type of its \
preference trainers
(AlphaPO, the `alpha` of its `CPOConfig`, is no line of this ladder).

"""


def preferences() -> str:
    """The page: a table, the tree, and a section for each algorithm."""
    lines = [INTRODUCTION + "## All in one table", "", *_table(), "", "## The tree", ""]
    lines += ["```", *picture(ladder=PREFERENCES), "```", ""]
    for a in PREFERENCES.values():
        lines += _section(a)
    return "\n".join(lines)


def _table() -> list[str]:
    rows = ["| name | source | rows | against | statistic | link | reads |", "|" + "---|" * 7]
    for a in PREFERENCES.values():
        read = ", ".join(preference_reads(a)) or "-"
        cells = (f"[{a.name}](#{a.name})", source(a), a.rows, a.against, compact(a.statistic), compact(a.link), read)
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _section(a: PreferenceAlgorithm) -> list[str]:
    of = f" Patch of [{a.parent.name}](#{a.parent.name})." if a.parent else ""
    lines = [f"## {a.name}", "", f"Source: {source(a)}.{of}", ""]
    if a.parent:
        changed = differences(a.parent, a).items()
        lines += [*(f"- `{f}`: {compact(old)} -> **{compact(new)}**" for f, (old, new) in changed), ""]
    lines += ["```", *(f"{name:<8} {text}" for name, text in preference_formulas(a)), "```", ""]
    return lines + ([f"Note: {a.note}.", ""] if a.note else [])
