"""What catches what: every planted fault, and healthy runs that must trip nothing. Writes docs/research/trust.md and
results/trust.json.

    OMP_NUM_THREADS=1 python -m benchmarks.trust.trust            # everything, a few minutes on one core
    OMP_NUM_THREADS=1 python -m benchmarks.trust.trust --new      # the faults that the last results lack
    OMP_NUM_THREADS=1 python -m benchmarks.trust.trust --staleness 2   # the faults of RL, with older samples
    OMP_NUM_THREADS=1 python -m benchmarks.trust.trust --staleness 2 --new   # those that their results lack
    OMP_NUM_THREADS=1 python -m benchmarks.trust.trust --page     # the page again, from the last results

Every fault of `posttrain.faults` and `tests.mutants` is planted into the smallest run that shows it, for at most 20
steps, and what stops or names it first is read off the error (or the record's notes). With `--staleness K` those of
reinforcement are planted again into runs whose groups are asked K steps ahead, free-running and deterministic. Healthy
runs take
`HEALTHY` algorithms on three seeds; the cost of watching is measured in the shipped recipe `arithmetic`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

import posttrain
from posttrain import faults
from posttrain.build import preflight_checks
from posttrain.checks import data_checks as data
from posttrain.checks import resume_checks
from posttrain.checks.judging import (
    generative_judge_checks,
    rejudge,
    reward_model_scores,
    verdict_checks,
)
from posttrain.checks.learning import (
    credit_checks,
    expert_balance_checks,
    expert_checks,
    gradient_and_update_checks,
    hint_checks,
    implicit_reward_checks,
    loss_checks,
)
from posttrain.checks.learning.credit_by_definition import uncovered_credit
from posttrain.checks.learning.gradient_by_definition import uncovered
from posttrain.checks.sampling import sampler_checks, sampler_draws, stale_logprobs
from posttrain.checks.sampling import staleness_checks as asked_ahead
from posttrain.checks.stage_history import due
from posttrain.config.field_docs import sentence
from posttrain.diagnose.rules import all_rules
from posttrain.ladder.policy_rows import LADDER
from posttrain.record import run_reader
from posttrain.role.events import Observers, PlayedEvent
from posttrain.role.learning import logprob_tolerance
from posttrain.role.roles import ReinforceRoles
from posttrain.search import search_checks
from posttrain.stages.preference import online_checks, preference_data, preference_loss_checks, preference_reference
from posttrain.stages.rejection import regeneration_checks, rejection_checks
from posttrain.stages.reward_model import reward_model_checks
from posttrain.system.errors import PosttrainError
from tests.faulty import BOUND, STEPS, acts_ahead, catch, named, smallest, start
from tests.mutants import FAULTS

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results/trust.json"
ONCE = {"loss": uncovered, "credit": uncovered_credit}
"""The choices that have no second computation."""
AHEAD = Path(__file__).parent / "results/trust_ahead.json"
PAGE = ROOT / "docs/research/trust.md"
HEALTHY = ("reinforce", "reinforce_ema", "rloo", "ppo", "grpo", "dapo", "dr_grpo", "gspo", "cispo", "maxrl")
SEEDS = (0, 1, 2)
EVERY_STEP = (
    *(
        sampler_checks.masks_cover_what_was_said,
        sampler_checks.said_by_these_weights,
        sampler_checks.stops_are_true,
        sampler_checks.sampler_agrees,
    ),
    *(
        sampler_checks.reference_unmoved,
        sampler_checks.no_distance_yet,
        sampler_draws.drawn_again,
        sampler_draws.bet_on_draws,
        sampler_draws.bet_on_siblings,
    ),
    *(
        data.no_held_out_task,
        data.in_order_of_the_file,
        data.filter_reads_outcomes,
        data.demonstration_ends_once,
        data.same_question,
    ),
    *(
        verdict_checks.failures_stay_out,
        rejudge.RejudgedAnswers,
        gradient_and_update_checks.served_is_trained,
        gradient_and_update_checks.gradient_reaches,
        gradient_and_update_checks.moved,
        gradient_and_update_checks.keeps_to_schedule,
    ),
    *(gradient_and_update_checks.only_frozen_is_left_out, gradient_and_update_checks.frozen_stays),
    *(asked_ahead.next_of_the_walk, asked_ahead.asks_on, asked_ahead.asked_within_bound, asked_ahead.as_old_as_asked),
    *(asked_ahead.versions_only_grow, asked_ahead.promised_as_begun, asked_ahead.ages_as_stamped),
    *(asked_ahead.unchanged_in_the_queue, asked_ahead.learned_before, asked_ahead.pushed_between_steps),
    *(stale_logprobs.start_is_the_learner, stale_logprobs.FreshCheck),
    hint_checks.teacher_scores,
    *(verdict_checks.measured_right, resume_checks.goes_on, resume_checks.came_back),
    *(preference_data.sides_are_as_judged, preference_data.completion_ends_once, preference_data.sides_share_a_prompt),
    *(preference_data.tokens_are_as_judged, preference_reference.reference_says),
    *(preference_reference.starts_at_reference, preference_loss_checks.shift_is),
    *(reward_model_checks.score_reaches, reward_model_checks.reads_the_end),
    *(
        reward_model_scores.holds_what_was_trained,
        reward_model_scores.reads_the_last_token,
        reward_model_scores.scores_hold,
    ),
    *(
        generative_judge_checks.shows_no_verdict,
        generative_judge_checks.order_is_random,
        generative_judge_checks.votes_are_counted,
    ),
    *(implicit_reward_checks.scored_first, implicit_reward_checks.scored_alone, implicit_reward_checks.outcomes_agree),
    *(online_checks.tokens_are_as_sampled, online_checks.opponents_play, online_checks.opponent_says),
    *(
        rejection_checks.kept_was_played,
        rejection_checks.kept_passes,
        rejection_checks.kept_once,
        rejection_checks.imitates_kept,
    ),
    *(expert_checks.every_token_has_its_experts, expert_checks.choices_are_the_samplers, expert_checks.learner_follows),
    *(expert_checks.experts_learn, expert_checks.experts_moved),
    *(
        rejection_checks.begins_with_its_weights,
        rejection_checks.nothing_is_lost,
        regeneration_checks.goes_on_from_its_step,
    ),
)
SECOND_OPINIONS = (
    credit_checks.everyone_is_scored,
    credit_checks.StepCreditAudit,
    loss_checks.loss_agrees,
    loss_checks.entropy_and_value_agree,
    preference_loss_checks.preference_loss_agrees,
    reward_model_checks.loss_is,
    implicit_reward_checks.outcome_loss_agrees,
    gradient_and_update_checks.update_agrees,
    expert_balance_checks.balance_agrees,
)
"""What the page lists of `posttrain/checks`."""
BEFORE = (
    loss_checks.agrees_on_synthetic_batch,
    loss_checks.points_uphill,
    preference_loss_checks.agrees_on_synthetic_judgements,
)
HEALTHY_STEPS = 12
HEAD = ("fault", "what is wrong", "caught by", "kind", "step", "ahead", "the same, deterministic")
"""Of the tables of faults."""
MODES = ("free-running", "deterministic")
"""Of runs whose groups are asked ahead."""


@dataclass(frozen=True)
class Healthy:
    """A run without a fault: what tripped (nothing, if all is well), and how close the second opinions were."""

    algorithm: str
    seed: int
    steps: int
    tripped: str
    loss_gap: float | None
    update_gap: float | None
    logp_gap: float


def healthy(name: str, seed: int, model: Path, folder: Path, *words: str) -> Healthy:
    """One algorithm on one seed from the policy the faults are shown with. `words`: further overrides."""
    out = folder / f"{name}-{seed}"
    tripped = ""
    try:
        posttrain.run(
            smallest(None, model, folder, steps=HEALTHY_STEPS, seed=seed),
            f"algorithm={name}",
            *words,
            out=out,
            quiet=True,
        )
        found = named(out)
        tripped = f"rule {found.detector}" if found else ""
    except PosttrainError as error:
        tripped = str(error)
    gauges = [s.gauges for s in run_reader.steps(out)]

    def worst(gauge: str) -> float | None:
        return max((g[gauge].mean for g in gauges if gauge in g), default=None)

    return Healthy(
        name,
        seed,
        len(gauges),
        tripped,
        worst("canary/loss_gap"),
        worst("canary/update_gap"),
        worst("canary/logp_gap_worst") or 0.0,
    )


# --- what watching costs ---------------------------------------------------------------------------------------------


def cost(folder: Path) -> dict[str, float]:
    """Seconds of a run of the recipe `arithmetic`, and of those the seconds inside its checks: in all, and at steps
    without second opinions.

    A step's seconds are its phases'; clocks with a slash lie inside one, or add up what many requests waited at once.
    """
    spent: defaultdict[int, float] = defaultdict(float)
    here = [0]

    def timed(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Observers, event: Any) -> Any:
            if isinstance(event, PlayedEvent):
                here[0] = event.experience.index
            begun = time.perf_counter()
            try:
                return real(self, event)
            finally:
                spent[here[0]] += time.perf_counter() - begun

        return call

    def timed_async(real: Callable[..., Any]) -> Callable[..., Any]:
        async def call(self: Observers, about: Any) -> Any:
            if isinstance(about, ReinforceRoles):
                spent.clear()  # the supervised stage before it is not counted
            begun = time.perf_counter()
            try:
                return await real(self, about)
            finally:
                spent[here[0]] += time.perf_counter() - begun

        return call

    steps = 31
    words = (
        "sft.steps=60",
        f"rl.steps={steps}",
        "rl.eval_every=0",
        "rl.checkpoint_every=0",
        "env.heldout=0",
        "algorithm=grpo",
    )
    with (
        patch.object(Observers, "emit", timed(Observers.emit)),
        patch.object(Observers, "needs", timed(Observers.needs)),
        patch.object(Observers, "begin", timed_async(Observers.begin)),
        patch.object(Observers, "after", timed_async(Observers.after)),
    ):
        posttrain.run("arithmetic", *words, out=folder / "cost", quiet=True)
    phases = {
        s.index: [x for name, x in s.clock.items() if "/" not in name]
        for s in run_reader.steps(folder / "cost")
        if s.stage == "rl"
    }
    taken = {index: sum(seconds) for index, seconds in phases.items()}
    plain_steps = [i for i in taken if i > 16 and not due(i)]
    return {
        "steps": steps,
        "share": sum(spent.values()) / sum(taken.values()),
        "share_plain": sum(spent[i] for i in plain_steps) / sum(taken[i] for i in plain_steps),
        "begin_seconds": spent[0],
    }


# --- the page --------------------------------------------------------------------------------------------------------


def measure(folder: Path) -> dict[str, Any]:
    """Everything the page says, measured now."""
    begun = time.perf_counter()
    model = start(folder / "start")
    caught: dict[str, Any] = {}
    for name, fault in FAULTS.items():
        found = catch(fault, model, folder / name)
        caught[name] = None if found is None else asdict(found)
        print(f"{name}: {'NOT CAUGHT' if found is None else f'{found.detector}, step {found.step}'}", flush=True)
    runs = [healthy(name, seed, model, folder / "healthy") for name in HEALTHY for seed in SEEDS]
    print(f"{sum(bool(r.tripped) for r in runs)} of {len(runs)} healthy runs tripped something", flush=True)
    return {
        "caught": caught,
        "healthy": [asdict(r) for r in runs],
        "cost": cost(folder),
        "seconds": time.perf_counter() - begun,
        "machine": {"platform": platform.platform(), "torch": torch.__version__, "threads": torch.get_num_threads()},
    }


def with_new(folder: Path) -> dict[str, Any]:
    """The last results, with the faults that they lack measured now."""
    data = json.loads(RESULTS.read_text())
    model, before = start(folder / "start"), data["caught"]
    for name in [n for n in FAULTS if n not in before]:
        found = catch(FAULTS[name], model, folder / name)
        before[name] = None if found is None else asdict(found)
        print(f"{name}: {'NOT CAUGHT' if found is None else f'{found.detector}, step {found.step}'}", flush=True)
    return {**data, "caught": {name: before[name] for name in FAULTS}}


def ahead(folder: Path, staleness: int, known: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The faults of reinforcement, planted into runs whose groups are asked `staleness` steps ahead: after the
    free-running ones, and after all. `known`: results whose faults are not planted again."""
    begun, model = time.perf_counter(), start(folder / "start")
    out: dict[str, Any] = {"staleness": staleness} | {m: dict(known.get(m, {})) for m in MODES}
    for mode in MODES:
        whole, caught = mode == "deterministic", out[mode]
        for name, fault in FAULTS.items():
            if name in caught or not acts_ahead(fault, whole):
                continue
            found = catch(fault, model, folder / mode / name, deterministic=whole, staleness=staleness)
            caught[name] = None if found is None else asdict(found)
            told = "NOT CAUGHT" if found is None else f"{found.detector}, step {found.step}"
            print(f"{mode} {name}: {told}", flush=True)
        out[mode] = {name: caught[name] for name in FAULTS if name in caught}
        seconds = known.get("seconds", 0.0) + time.perf_counter() - begun
        yield {**out, "date": time.strftime("%Y-%m-%d"), "seconds": seconds}


def _later(stale: dict[str, Any], mode: str, name: str) -> str:
    """The step at which a fault is caught in runs that ask ahead, as a cell of the table."""
    if name not in stale[mode]:
        return ""
    found = stale[mode][name]
    return "**open**" if found is None else str(found["step"])


def ahead_words(caught: dict[str, Any], stale: dict[str, Any]) -> list[str]:
    """What the page says of runs that ask ahead."""
    k = stale["staleness"]
    late, missed = list[str](), set[str]()
    for mode in MODES:
        for name, found in stale[mode].items():
            if found is None:
                missed |= {name} if caught.get(name) is not None else set()
            elif caught.get(name) is not None and found["step"] > caught[name]["step"] + 2 * k:
                late.append(f"`{name}` ({mode}: step {found['step']})")
    counts = " and ".join(f"{len(stale[m])} {m}" for m in MODES)
    return [
        f"The two last columns are of runs with `staleness={k}`, free-running and with `deterministic=true`"
        f" ({counts}, {stale['date']}, `benchmarks/trust/trust.py --staleness {k}`): the step at which the same"
        f" fault is"
        f" caught there. It may be {2 * k} steps later, since samples of the wrong weights, or under the wrong version,"
        f" are learned from up to {k} steps after they were said."
        + (f" Later than that: {', '.join(late)}." if late else " None is found later than that.")
        + (f" Caught without staleness alone: {', '.join(f'`{n}`' for n in sorted(missed))}." if missed else "")
        + " An empty cell: the fault is not of reinforcement, or cannot act there. `groups_interleaved` regroups what a"
        " step plays together, and a queue plays each group alone. It counts itself what was said for a group, so what"
        " `dead_engine_counted_twice` adds to the engines' counts does not reach the record. A model with a recurrent"
        " state is never deterministic; and where a run is, nothing is being said when new weights come, so"
        " `router_mixes_versions` has nothing to mix. Faults whose run has `staleness` in any case are measured with it"
        " in the column before too. Those of mixtures of experts were not planted ahead.",
        "",
    ]


def second_opinions() -> str:
    """The line that counts what has a second computation, and names what has none."""
    once = {part: [a.name for a in LADDER.values() if of(a)] for part, of in ONCE.items()}
    counts = {part: len(LADDER) - len(names) for part, names in once.items()}
    return (
        f"- Of {len(LADDER)} algorithms the loss of {counts['loss']} and the credit of {counts['credit']} are computed"
        f" a second time in runs. The other losses ({', '.join(once['loss'])}) and credits"
        f" ({', '.join(once['credit'])}) are proved by the laws in `tests/laws`, and their runs say which choice is"
        " computed once."
    )


def summary(thing: Any) -> str:
    """The first sentence of what a check says of itself."""
    return sentence(" ".join((inspect.getdoc(thing) or "").split()))


def functions(module: ModuleType) -> list[tuple[str, str]]:
    """The public checks of a module with what they say of themselves."""
    own = [
        (n, f)
        for n, f in vars(module).items()
        if inspect.isfunction(f) and f.__module__ == module.__name__ and not n.startswith("_")
    ]
    return [(n, summary(f)) for n, f in own]


def table(rows: list[tuple[str, ...]], *head: str) -> list[str]:
    def cell(x: str) -> str:
        return x.replace("|", chr(92) + "|")

    return [
        "| " + " | ".join(head) + " |",
        "|" + "---|" * len(head),
        *("| " + " | ".join(cell(x) for x in r) + " |" for r in rows),
        "",
    ]


def drawn_of_the_learner(found: dict[str, Any]) -> list[str]:
    """The runs among them that draw settings of the learner."""
    drawn = ", ".join(f"{name} {count}" for name, count in found["drawn"].items())
    again = "; ".join(f"{rule} {count}" for rule, count in sorted(found["redrawn"].items()))
    return [
        f"**The same with other learners**: {found['runs'] - found['false_alarms']} of {found['runs']} were not stopped"
        f" ({found['date']}, `benchmarks/trust/healthy.py --learner`, seed {found['seed']}, {found['steps']} RL"
        f" steps in"
        f" all). Such a run has some of these too, by how many have it: {drawn}. Settings that are refused for a stated"
        f" rule before anything runs were drawn again, {sum(found['redrawn'].values())} times"
        + (f" ({again})." if again else "."),
        "",
    ]


def drawn_at_random() -> list[str]:
    """What `benchmarks/trust/healthy.py` measured, in a paragraph."""
    found = json.loads(RESULTS.with_name("healthy.json").read_text())
    judged, asked = found["preferences"], json.loads(RESULTS.with_name("healthy_ahead.json").read_text())
    dtypes = ", ".join(f"{n} in {dtype}" for dtype, n in sorted(judged["dtypes"].items(), key=lambda x: -x[1]))
    return [
        f"**Healthy runs drawn at random**: {found['runs'] - found['false_alarms']} of {found['runs']} were not stopped"
        f" ({found['date']}, `benchmarks/trust/healthy.py`, seed {found['seed']}, {found['steps']} RL steps in all)."
        f" A run is"
        " drawn from recipe, algorithm, seed, minibatches, epochs, siblings, temperature, truncations, oversampling,"
        " dtype, architecture, drafts, length of SFT, reward and learning rate. It is healthy by definition: nothing"
        " is planted, and where it is stopped it must have finite losses with all checks off; no run is left out for"
        " how it went. Untaught policies and absurd learning rates are among them, so live rules may speak there and be"
        " right; how often they are wrong is measured on runs of taught policies: [tested](rules-tested.md).",
        "",
        *drawn_of_the_learner(found["learner"]),
        f"**The same with groups that are asked ahead**: {asked['runs'] - asked['false_alarms']} of {asked['runs']}"
        f" were not stopped ({asked['date']}, `benchmarks/trust/healthy.py --ahead`, seed {asked['seed']},"
        f" {asked['steps']}"
        " RL steps in all). Besides the above each has `staleness` 1, 2 or 4, is free-running or deterministic, drains"
        " or goes on in flight or over old caches, pushes after one step or two, and two in five are resumed from their"
        " middle.",
        "",
        f"**The same of stages that learn from judgements**: {judged['runs'] - judged['false_alarms']} of"
        f" {judged['runs']} were not stopped ({judged['date']}, `benchmarks/trust/healthy_preferences.py`, seed"
        f" {judged['seed']}, {judged['steps']} steps in all). A run is drawn from stage (given preferences, the"
        f" policy's own samples, a reward model), {len(judged['algorithms'])} lines of the second ladder, data (a file"
        " of pairs, arithmetic, replies with a planted taste and label noise), architecture, seed, reference, batch,"
        f" micro-batches, temperature, truncation, length of SFT and learning rate; {dtypes}; {judged['adapters']} with"
        " an adapter.",
        *mixtures_drawn(),
        *kinds_drawn(),
    ]


def kinds_drawn() -> list[str]:
    """What `benchmarks/trust/healthy_kinds.py` measured, in a paragraph."""
    path = RESULTS.with_name("healthy_kinds.json")
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(found["kinds"].items(), key=lambda x: -x[1]))
    return [
        "",
        f"**Of all kinds, drawn by one script**: of {found['runs']} runs {found['stopped_when_first_played']} were"
        " stopped when they were first played, and after what stopped them was mended"
        f" {found['stopped_after_mending']} ({found['date']}, `benchmarks/trust/healthy_kinds.py`, seed"
        f" {found['seed']}):"
        f" {kinds}. Those over ranks and with roles in processes (placed) are runs of the other kinds.",
    ]


def mixtures_drawn() -> list[str]:
    """What `benchmarks/trust/healthy_experts.py` measured, in a paragraph."""
    path = RESULTS.with_name("healthy_experts.json")
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    replay = ", ".join(f"{n} with {how}" for how, n in sorted(found["drawn"]["model.router_replay"].items()))
    return [
        "",
        f"**The same of mixtures of experts**: {found['runs'] - found['false_alarms']} of {found['runs']} were not"
        f" stopped ({found['date']}, `benchmarks/trust/healthy_experts.py`, seed {found['seed']}, {found['steps']}"
        f" RL steps"
        " in all). A run is one of the above from a mixture, drawn with its number of experts, router replay"
        f" ({replay}), load-balance loss, dtype, staleness and frozen routers; in {found['drawn']['undecided']} of them"
        " the experts score alike in groups, so that rounding decides which one computes a token.",
    ]


def still_open(name: str) -> str:
    """A fault that the smallest run does not catch, and what catches it in the run of its command."""
    f = FAULTS[name]
    said = f"- `{name}`: {f.what}. {f.harm.capitalize()}."
    if not f.caught_by:
        return said
    return f"{said} In the run that `posttrain faults {name}` prints, which is longer, the rule `{f.caught_by}` speaks."


def page(data: dict[str, Any]) -> str:
    caught: dict[str, Any] = data["caught"]
    stale = json.loads(AHEAD.read_text())
    runs: list[dict[str, Any]] = data["healthy"]
    found = [c for c in caught.values() if c is not None]
    before = sum(c["step"] == 0 for c in found)
    open_ = [n for n, c in caught.items() if c is None]
    tripped = [r for r in runs if r["tripped"]]
    gaps = [r["loss_gap"] for r in runs if r["loss_gap"] is not None]
    cost_ = data["cost"]
    rows = [
        (
            (f"`{n}`", FAULTS[n].what, "**open**", "", "")
            if c is None
            else (f"`{n}`", FAULTS[n].what, f"`{c['detector']}`", c["kind"], str(c["step"]))
        )
        + (_later(stale, "free-running", n), _later(stale, "deterministic", n))
        for n, c in ((n, caught[n]) for n in FAULTS)
    ]
    taught = [r for r in rows if r[0].strip("`") in faults.FAULTS]
    lines = [
        "<!-- generated by `python -m benchmarks.trust.trust`; measure again instead of editing -->",
        "# Trust: what every run checks, and how we know that it does",
        "",
        (
            "For people who ask whether they may believe a result. After this page you know what every"
            " run checks, which planted bugs each check caught,"
        ),
        "and what is not caught.",
        "",
        (
            f"{len(caught)} real bugs, collected from the issue trackers of other frameworks, can be planted into the"
            f" real code path, each as one replaced function. {len(found)} of them"
            f" ({100 * len(found) / len(caught):.1f}%) are caught within {STEPS} steps of a tiny run, {before} before"
            f" its first step; the median step is {sorted(c['step'] for c in found)[len(found) // 2]}."
            f" {len(runs) - len(tripped)} of {len(runs)} healthy"
            " runs trip nothing."
        ),
        "",
        *drawn_at_random(),
        "",
        "Watch one being caught:",
        "",
        "    posttrain faults                                     # the list",
        "    posttrain run arithmetic fault=std_ddof --allow-fault",
        "",
        "## What is checked, and when",
        "",
        (
            "**Types** refuse to be born wrong (`posttrain/core/types.py`, `batch.py`): a mask, log-probs and versions"
            " that are not aligned, labels that are not the next tokens, a group of two prompts, a verdict that is a"
            " number although its verifier failed."
        ),
        "",
        "**Before the first step** (`posttrain/build/preflight_checks.py`,"
        " `posttrain/checks/learning/loss_checks.py`):",
        "",
        *table(
            [(f"`{n}`", t) for n, t in functions(preflight_checks) if n != "prove_start"]
            + [(f"`{f.__name__}`", summary(f)) for f in BEFORE],
            "check",
            "what holds",
        ),
        (
            "**In every step** (`posttrain/checks`); a violated one stops the run with exit code 3 and says what to"
            " look at:"
        ),
        "",
        *table(
            [(f"`{f.__name__}`", summary(f)) for f in EVERY_STEP],
            "check",
            "what holds",
        ),
        (
            "**A second opinion** (`posttrain/checks/learning/{credit,loss,gradient_and_update}_checks.py`),"
            f" {summary(due).split(': ')[1]} Credit, weights and the loss are computed again from their definitions by"
            " code that shares nothing with what trained:"
        ),
        "",
        *table([(f"`{f.__name__}`", summary(f)) for f in SECOND_OPINIONS], "check", "what holds"),
        "**In every search** at inference (`posttrain/search/search_checks.py`, [search](../guides/search.md)):",
        "",
        *table([(f"`{n}`", t) for n, t in functions(search_checks)], "check", "what holds"),
        "**Live rules** (`posttrain/diagnose/rules/all_rules.py`) read the record and warn in its notes:",
        "",
        *table(
            [(f"`{n}`", " ".join((f.__doc__ or "").split())) for n, f in all_rules.RULES.items()],
            "rule",
            "when it speaks",
        ),
        (
            f"Watching costs {cost_['share']:.1%} of the recipe `arithmetic` (grpo, {cost_['steps']:.0f} steps,"
            f" {cost_['begin_seconds']:.2f} s of it before the first), {cost_['share_plain']:.1%} at steps after the"
            " 16th without a second opinion. The model is tiny; the share falls with its size, because most checks"
            " read tokens, not weights."
        ),
        "",
        "## Planted faults",
        "",
        (
            f"Each in the smallest run that shows it, at most {STEPS} steps; step 0 is before the first. `posttrain"
            f" faults` has the {len(taught)} that teach: with a NAME it says what a fault does to a user, where it was"
            " seen, what it replaces, and the command that shows it caught."
        ),
        "",
        *ahead_words(caught, stale),
        *table(taught, *HEAD),
        f"The other {len(rows) - len(taught)} are planted by tests alone (`tests/mutants`):",
        "",
        *table([r for r in rows if r not in taught], *HEAD),
        "## Healthy runs",
        "",
        f"{len(HEALTHY)} algorithms x {len(SEEDS)} seeds, {HEALTHY_STEPS} steps each: {len(tripped)} tripped anything"
        + (
            ": " + "; ".join(f"{r['algorithm']} seed {r['seed']}: {r['tripped'][:80]}" for r in tripped)
            if tripped
            else ""
        )
        + f". Largest difference between the loss and its second opinion {max(gaps):.1e}"
        f" (bound {loss_checks.LOSS_BOUND:g}),"
        f" of a log-prob between sampler and learner {max(r['logp_gap'] for r in runs):.1e} (bound"
        f" {logprob_tolerance.LEAST['float32'].worst:g}), of a first update"
        f" {max(r['update_gap'] or 0 for r in runs):.1e}"
        f" learning rates (bound {gradient_and_update_checks.UPDATE_BOUND:g}).",
        "",
        f"Algorithms: {', '.join(HEALTHY)}.",
        "",
        "## Not caught yet",
        "",
        *([still_open(n) for n in open_] or ["Every planted fault is caught."]),
        second_opinions(),
        (
            "- What a verifier should have said. Checks see that it repeats itself, pays right answers and refuses near"
            " misses; a hole in it stays one until somebody reads what is paid (`posttrain show RUN --best`), or a"
            " second judge, which is measured and not paid (`env.rewards.0.measured=true`), says something else."
        ),
        "- Anything smaller than the noise of the dtype.",
        "",
        (
            f"Measured in {data['seconds']:.0f} s on {data['machine']['platform']}, torch {data['machine']['torch']},"
            f" {data['machine']['threads']} thread."
        ),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--page", action="store_true", help="write the page again from the last results")
    parser.add_argument("--new", action="store_true", help="measure only the faults that the last results lack")
    parser.add_argument("--staleness", type=int, help=f"ask so many steps ahead, and plant again (page: {BOUND})")
    asked = parser.parse_args()
    if asked.staleness is not None:
        with tempfile.TemporaryDirectory() as folder:
            known = json.loads(AHEAD.read_text()) if asked.new else {}
            if known and known["staleness"] != asked.staleness:
                parser.error(f"the last results are of --staleness {known['staleness']}: leave --new out")
            for found in ahead(Path(folder), asked.staleness, known):
                AHEAD.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n")
    elif asked.new:
        with tempfile.TemporaryDirectory() as folder:
            RESULTS.write_text(json.dumps(with_new(Path(folder)), indent=1, allow_nan=False) + "\n")
    elif not asked.page:
        with tempfile.TemporaryDirectory() as folder:
            RESULTS.write_text(json.dumps(measure(Path(folder)), indent=1, allow_nan=False) + "\n")
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
