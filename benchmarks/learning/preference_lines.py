"""Every line of the preference ladder from the same start on the same pairs: what it ordered and what it says, by the
planted truth.

    python -m benchmarks.learning.preference_lines  # all lines, seeds 0, 1, 2, label noise 0 and 0.2
    python -m benchmarks.learning.preference_lines --only dpo,kto --seeds 0 --noise 0.2
    python -m benchmarks.learning.preference_lines --seconds 300         # what is missing, as far as the time goes
    python -m benchmarks.learning.preference_lines --page  # write the page again from the results, run nothing

The world is `replies`: judges with a known utility over correctness, politeness and length. For each seed one SFT on
replies of any quality makes the start. Every line then takes the same number of steps with the same optimizer on
judgements that are drawn alike, of which the share `noise` is flipped. Nothing is tuned for a line; its numbers are
those of the ladder. Which lines fail was written down before the run (`preference_predictions.py`). Online lines sample
themselves, and the world's own verifier judges, which makes no errors: they run without noise alone.

Measured on 256 held-out tasks that no line trained on, by the utility itself, without noise:

    accuracy   of one pair a task, the share that the line's own score of a completion orders as the utility does
    win rate   two samples of the trained policy against two of the start, for each task; equal utilities count half

Both with 95 % intervals over tasks, each with its mean over the seeds.
Writes benchmarks/learning/results/preference_lines.json after each line, and docs/research/preference-lines.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import posttrain
from benchmarks.learning.preference_predictions import BATCH, FAILS, FOUND, LR, STEPS
from posttrain.algorithm.preference.preference_minibatch import scores_of
from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.build.open_model import keep_policy
from posttrain.config.env import Env
from posttrain.config.run import Evaluation, Model, Optimizer, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.stage import Stage
from posttrain.core import abilities, seeds
from posttrain.core.judgements import Judgement
from posttrain.core.measure.interval import Score
from posttrain.core.sampling import Sampling
from posttrain.engine.learner.torch_settings import use_threads
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.ladder.preference_rows import PREFERENCES
from posttrain.record.run_folder import RunFolder
from posttrain.role.heldout_evaluation import evaluate
from posttrain.stages import Progress, Stages
from posttrain.stages.interrupt import Stopper
from posttrain.stages.preference.judged_batches import HELDOUT, batch_of
from posttrain.stages.run_parts import RunParts

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/learning/results/preference_lines.json"
PAGE = ROOT / "docs/research/preference-lines.md"

SEEDS = (0, 1, 2)
NOISES = (0.0, 0.2)
HELD = 256
SAMPLES = 2
"""Samples of each held-out task, of the start and of the trained policy, with the same seeds."""
MAX_TOKENS = 32
MODEL = Model(arch="qwen3", hidden=64, layers=2, heads=4, kv_heads=4, ffn=192, context=96)
START = Supervised(
    name="sft", style="reply", wrong=1.0, steps=800, batch=64, optimizer=Optimizer(lr=2e-3), eval=False, eval_every=0
)


@dataclass(frozen=True)
class LineRow:
    """One line on one seed at one share of flipped judgements. Sums are over held-out tasks, so rows can be joined."""

    line: str
    seed: int
    noise: float
    right: tuple[float, ...]
    """Of each task 1, .5 or 0: whether the line's own score orders the pair as the utility does."""
    wins: tuple[float, ...]
    """Of each task the share of samples that are better than the start's, equal ones counting half."""
    utility_before: float
    utility_after: float
    seconds: float


def world(noise: float, **more: Any) -> Env:
    return Env(name="replies", args={"noise": noise, **more}, heldout=HELD)


def stage_of(a: PreferenceAlgorithm) -> Stage:
    """The stage that runs a line: its own kind, the same length and optimizer."""
    how: dict[str, Any] = {
        "name": "prefer",
        "algorithm": a,
        "steps": STEPS,
        "optimizer": Optimizer(lr=LR),
        "eval": False,
        "eval_every": 0,
        "checkpoint_every": 0,
    }
    if a.online:
        return OnlinePreference(**how, prompts=BATCH, sampling=Sampling(max_tokens=MAX_TOKENS))
    return Preference(**how, batch=BATCH)


def run_of(name: str, seed: int, noise: float, start: Path) -> Run:
    a = PREFERENCES[name]
    more: dict[str, Any] = {"margins": True} if a.reads_margin else {"ranked": 3} if a.rows == "triple" else {}
    return Run(
        recipe=name,
        seed=seed,
        threads=1,
        model=Model(path=str(start)),
        env=world(noise, **more),
        stages=(stage_of(a),),
        evaluation=Evaluation(samples=SAMPLES, greedy=False),
        record_episodes=False,
    )


def make_start(seed: int, folder: Path) -> Path:
    """The checkpoint that all lines of this seed start from, as a plain model directory."""
    if not (folder / f"start-{seed}").exists():
        run = Run(recipe="start", seed=seed, threads=1, model=MODEL, env=world(0.0), stages=(START,))
        done = posttrain.run(run, out=folder / f"sft-{seed}", quiet=True)
        posttrain.export(done.folder, folder / f"start-{seed}")
    return folder / f"start-{seed}"


class Measure:
    """What a policy orders and says on the held-out tasks, by the utility itself."""

    def __init__(self, parts: RunParts, run: Run) -> None:
        self._parts, self._run = parts, run
        offered = abilities.judgements(make_environment(replace(run, env=world(0.0))))
        heldout = parts.environment.heldout
        drawn = [offered.draw(t, "pair", seeds.generator(HELDOUT, f"judgement/{t.id}", 0)) for t in heldout]
        self._pairs: list[Judgement] = list(drawn)
        assert offered.utility is not None
        self._utility = offered.utility

    def _batch(self) -> Any:
        return batch_of(self._pairs, self._parts.renderer, self._parts.sampler.context)

    def logp_M(self) -> np.ndarray:
        """float64 [M]: of all completions of the pairs."""
        return self._parts.learner.score(self._batch()).astype(np.float64)

    def right(self, a: PreferenceAlgorithm, before_M: np.ndarray) -> list[float]:
        """Of each pair, whether the line's score orders it as the utility does. `before_M`: the start's `logp_M`."""
        now_M = self.logp_M()
        score_E = scores_of(a, self._batch(), now_M - before_M if a.reads_reference else now_M)
        return [1.0 if g > 0 else 0.5 if g == 0 else 0.0 for g in (score_E[0::2] - score_E[1::2]).tolist()]

    async def said(self) -> np.ndarray:
        """[tasks, SAMPLES]: the utility of what it says."""
        parts, run = self._parts, self._run
        await parts.publish()
        sampling = Sampling(max_tokens=MAX_TOKENS).resolve(parts.stop_ids, parts.spell)
        found = await evaluate(parts.rollout, parts.environment.heldout, sampling, run.evaluation)
        parts.sampler.gauges()  # so that a step's counters are its own
        return np.array([[self._utility(g.task, e.text) for e in g.episodes] for g in found.groups])


async def trained(parts: RunParts, run: Run) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Train the one stage. Whether each pair is ordered right after it, and the utilities of before and after."""
    measure, a = Measure(parts, run), PREFERENCES[run.recipe]
    before_M, before = measure.logp_M(), await measure.said()
    (driver,) = Stages(parts, Progress(), Stopper()).left()
    await driver.run()
    return measure.right(a, before_M), before, await measure.said()


def play(name: str, seed: int, noise: float, start: Path) -> LineRow:
    """One line from the start."""
    begun, run = time.perf_counter(), run_of(name, seed, noise, start)
    use_threads(run.threads)
    environment = make_environment(run)
    policy = make_policy(run, environment)
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "run", run, facts(policy, 1)) as book:
        keep_policy(book, policy)
        parts = make_parts(run, policy, environment, book, [])
        right, before, after = asyncio.run(trained(parts, run))
    won = np.where(np.abs(after - before) < 1e-9, 0.5, (after > before).astype(np.float64)).mean(1)
    return LineRow(
        name,
        seed,
        noise,
        tuple(right),
        tuple(won.tolist()),
        float(before.mean()),
        float(after.mean()),
        time.perf_counter() - begun,
    )


# --- the results ------------------------------------------------------------------------------------------------------


def score(rows: Sequence[LineRow], what: str) -> Score:
    """Of rows of different seeds: each task counts once, with its mean over them."""
    return Score.of(np.mean([getattr(r, what) for r in rows], axis=0))


def cell(rows: Sequence[LineRow], what: str) -> str:
    """The mean and the lower end of its interval, with a mark where that is not above .5."""
    if not rows:
        return "-"
    found = score(rows, what)
    return f"{found.mean:.3f} ({found.low:.3f})" + ("" if found.low > 0.5 else " **no**")


def failed(rows: Sequence[LineRow]) -> bool:
    """Whether a lower bound of either measure is not above .5."""
    return any(score(rows, what).low <= 0.5 for what in ("right", "wins"))


def verdict(line: str, rows: Sequence[LineRow]) -> str:
    """What was predicted of a line, and whether it came so at each share of noise."""
    said: list[str] = []
    for noise in sorted({r.noise for r in rows}):
        of = [r for r in rows if r.noise == noise]
        expected = noise in FAILS[line].noise if line in FAILS else False
        said.append(f"{'fails' if expected else 'passes'} at {noise:g}: {'so' if failed(of) == expected else 'WRONG'}")
    return ", ".join(said)


def page(rows: Sequence[LineRow]) -> str:
    """docs/research/preference-lines.md."""
    of = {n: [r for r in rows if r.line == n] for n in PREFERENCES}
    noises = sorted({r.noise for r in rows})
    lines = [
        "# Preference lines side by side",
        "",
        (
            "For people who compare preference algorithms. After this page you know what each reached"
            " from the same start and judgements."
        ),
        "",
        f"Every line has the same start and the same judgements: {STEPS} steps of {BATCH} each at one learning rate,",
        f"seeds {', '.join(str(s) for s in sorted({r.seed for r in rows}))}. The world is `replies`, with {HELD}"
        " held-out tasks. A number is a mean over tasks, and behind it",
        "stands the lower end of its 95 % interval; **no** says that this end is not above .5.",
        "",
        "- Accuracy: pairs that the line's own score of a completion orders as the true utility does.",
        "- Win rate: samples against those of the start, by the true utility.",
        "",
        "Nothing was tuned for a line, so this is a check that each learns, and no ranking.",
        "",
        "`python -m benchmarks.learning.preference_lines` writes this page. What was predicted before the runs is in",
        "`benchmarks/learning/preference_predictions.py`.",
        "",
        "| line | "
        + " | ".join(f"accuracy, noise {n:g} | win rate, noise {n:g}" for n in noises)
        + " | utility before, after | predicted |",
        "|---|" + "---:|---:|" * len(noises) + "---|---|",
    ]
    for name, mine in of.items():
        if not mine:
            continue
        cells = [cell([r for r in mine if r.noise == n], what) for n in noises for what in ("right", "wins")]
        clean = [r for r in mine if r.noise == noises[0]] or mine
        moved = f"{np.mean([r.utility_before for r in clean]):.3f}, {np.mean([r.utility_after for r in clean]):.3f}"
        lines.append(f"| {name} | {' | '.join(cells)} | {moved} | {verdict(name, mine)} |")
    lines += ["", "Predicted to fail, before any of these runs, and why:", ""]
    lines += [
        f"- `{name}` at noise {', '.join(f'{n:g}' for n in told.noise)}: {told.why}." for name, told in FAILS.items()
    ]
    lines += ["", "Looked into afterwards:", ""]
    lines += [f"- `{name.replace(', ', '`, `')}`: {said}." for name, said in FOUND.items()]
    made = {(r.line, r.seed, r.noise) for r in rows}
    if missing := [x for x in every(PREFERENCES, SEEDS, NOISES) if x not in made]:
        of = f"{len(missing)} of {len(missing) + len(made)} runs"
        lines += ["", f"**Incomplete:** {of} are missing; `python -m benchmarks.learning.preference_lines` makes them."]
    return "\n".join(lines) + "\n"


def every(lines: Sequence[str], run_seeds: Sequence[int], noises: Sequence[float]) -> list[tuple[str, int, float]]:
    """The runs of these lines: (line, seed, noise)."""
    return [
        (line, seed, noise)
        for seed in run_seeds
        for noise in noises
        for line in lines
        if not (PREFERENCES[line].online and noise)
    ]


def written() -> list[LineRow]:
    """Rows of the results file, where they were run with the same settings."""
    facts = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    if facts.get("settings") != settings():
        return []
    rows: list[dict[str, Any]] = facts["rows"]
    return [LineRow(**r | {"right": tuple(r["right"]), "wins": tuple(r["wins"])}) for r in rows]


def settings() -> dict[str, Any]:
    """What rows must share to stand in one table."""
    return {"steps": STEPS, "batch": BATCH, "lr": LR, "heldout": HELD, "samples": SAMPLES, "sft_steps": START.steps}


def write(rows: Sequence[LineRow]) -> None:
    order = list(PREFERENCES)
    rows = sorted(rows, key=lambda r: (order.index(r.line), r.noise, r.seed))
    PAGE.write_text(page(rows), encoding="utf-8")
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "settings": settings(),
        "rows": [asdict(r) for r in rows],
    }
    RESULTS.write_text(json.dumps(facts, allow_nan=False).replace('{"line"', '\n{"line"') + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PREFERENCES), help="comma-separated lines")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument(
        "--noise", default=",".join(map(str, NOISES)), help="comma-separated shares of flipped judgements"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no further run after so long")
    parser.add_argument("--starts", type=Path, help="a folder that keeps the starts between calls")
    parser.add_argument("--dry", action="store_true", help="print, and write nothing")
    parser.add_argument("--page", action="store_true", help="write the page again from the results, and run nothing")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(written()), encoding="utf-8")
        return
    begun, rows = time.perf_counter(), [] if args.dry else written()
    wanted = every(
        args.only.split(","), [int(x) for x in args.seeds.split(",")], [float(x) for x in args.noise.split(",")]
    )
    done = {(r.line, r.seed, r.noise) for r in rows}
    missing = [x for x in wanted if x not in done]
    with tempfile.TemporaryDirectory() as scratch:
        for name, seed, noise in missing:
            if time.perf_counter() - begun > args.seconds:
                break
            rows.append(r := play(name, seed, noise, make_start(seed, args.starts or Path(scratch))))
            if not args.dry:
                write(rows)
            print(
                f"{name:18s} seed {seed} noise {noise:g}: accuracy {np.mean(r.right):.3f}, win rate"
                f" {np.mean(r.wins):.3f}, utility {r.utility_before:.3f} -> {r.utility_after:.3f}  {r.seconds:.0f} s",
                flush=True,
            )
    left = len(wanted) - len({(r.line, r.seed, r.noise) for r in rows} & set(wanted))
    print(f"{left} of {len(wanted)} runs are missing")


if __name__ == "__main__":
    main()
