"""What of asking ahead brings the time: overlap, the skipped forward, partial rollouts and staleness, each for itself.

    python -m benchmarks.speed.asynchrony_arms times  # seconds a step, on the work of `asynchrony.py`; 12 minutes
    python -m benchmarks.speed.asynchrony_arms accuracy --jobs 8        # accuracy after equal samples; 6 minutes
    python -m benchmarks.speed.asynchrony_arms times --seconds 600  # start none after this time; a later call goes on
    python -m benchmarks.speed.asynchrony_arms page          # write docs/research/asynchrony.md from the results

Every arm takes two optimizer steps a batch. The first is synchronous, each of the next four adds one thing, and the
last two leave one of them out again. Times need a machine with nothing beside it and are measured on few steps of 32
prompts x 8 answers. Accuracy needs no quiet: as in `staleness.py` every arm learns arithmetic from the same start and
equally many samples. A tool interrupts each answer after every few tokens, for longer than the learner computes: where
turns are said to their end before new weights come (`unfinished=go_on`), an answer is said by several versions only if
it is at a tool then. A run waits for most of its time: several may run at once. Results are written after each side,
and a call goes on from them.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import math
import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import posttrain
from benchmarks.learning.from_start import run_from, start
from benchmarks.speed.asynchrony import POSITIONS, SIZE, measured, side
from benchmarks.speed.grpo_work import save_checkpoint
from benchmarks.speed.side import machine
from benchmarks.speed.whole_answers import whole_answers
from posttrain.config.run import Embedded
from posttrain.core.ports import Attempt, Talk
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.ladder.policy_rows import LADDER
from posttrain.record import run_reader

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/speed/results/asynchrony_arms.json"
PAGE = ROOT / "docs/research/asynchrony.md"
BEGIN = "<!-- arms: written by `python -m benchmarks.speed.asynchrony_arms` -->"
END = "<!-- end of arms -->"


@dataclass(frozen=True)
class AsynchronyArm:
    """What an arm sets, as `asynchrony_side.SideJob` calls it."""

    words: str
    staleness: int = 0
    waits: bool = False
    algorithm: str = "decoupled_ppo"
    update: Literal["drain", "inflight", "stale"] = "drain"

    @property
    def settings(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "words"}


ARMS: Mapping[str, AsynchronyArm] = {
    "synchronous": AsynchronyArm("asks, then learns"),
    "overlap": AsynchronyArm("asks the next step while it learns; new weights wait for all answers", 1, True),
    "skipped forward": AsynchronyArm("and no log-probs of the start of a step are computed (`a3po`)", 1, True, "a3po"),
    "partial rollouts": AsynchronyArm("and answers go on under new weights (`inflight`)", 1, False, "a3po", "inflight"),
    "staleness": AsynchronyArm("and a second step is asked ahead", 2, False, "a3po", "inflight"),
    "no partial rollouts": AsynchronyArm("as `staleness`, but new weights wait for all answers", 2, True, "a3po"),
    "no skipped forward": AsynchronyArm(
        "as `staleness`, but log-probs of the start are computed", 2, False, "decoupled_ppo", "inflight"
    ),
}
SEEDS = (0, 1, 2)
BOTH: Mapping[str, Any] = {"minibatches": 2}
TIMES: Mapping[str, Any] = {"steps": 6}
"""Of the synchronous side; two more for each step that is asked ahead, as in `asynchrony`."""
ACCURACY: Mapping[str, Any] = {"prompts": 8, "siblings": 8, "steps": 40, "rate": 5e-4}
"""The rate of `staleness.py` is 1e-3, at one optimizer step a batch. With two of them, one of two synchronous seeds
ended below its start at that rate (.36), so half of it is taken."""
PIECE = 2
"""Tokens of an answer between two interruptions."""
CUTS = 4
"""Interruptions of an answer, at most."""
FASTEST, SLOWEST = 0.1, 1.0
"""Seconds of an interruption, log-uniform. The learner of a step takes some .2 s: with tools as fast as that an answer
has ended when new weights come, or waits for nothing but them."""
LEAST_MIXED = 0.1
"""Share of answers of several versions below which a row says nothing of partial rollouts, and is not kept."""


def rests(answer: str) -> tuple[str, ...]:
    """What a script has left to say in each turn: it is cut off after `PIECE` characters, and goes on in the next."""
    return tuple(answer[at:] for at in range(0, max(1, len(answer)), PIECE))


class InterruptedSums(Arithmetic):
    """Sums whose answers are said in pieces, with a tool at work between them."""

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        for _ in range(CUTS):
            said = await talk.say(PIECE)
            if said.stop is Stop.SAID:
                return said.stop
            await asyncio.sleep(FASTEST * (SLOWEST / FASTEST) ** random.random())
        return (await talk.say()).stop

    def verify(self, attempt: Attempt) -> Verdict:
        pieces = "".join(attempt.turns).replace("\n", "")  # a record joins turns by it, and no sum has one
        return super().verify(replace(attempt, turns=(pieces,)))

    def gold(self, task: Task) -> tuple[str, ...]:
        return rests(*super().gold(task))

    def distractor(self, task: Task) -> tuple[str, ...]:
        return rests(*super().distractor(task))


GALLERY["interrupted"] = f"{__name__}:InterruptedSums"


@dataclass(frozen=True)
class ArmTime:
    """One arm in one round, alone on the machine."""

    arm: str
    seed: int
    seconds: float
    """Of a step."""
    idle: float
    behind: float
    """Steps that tokens were older than the learner, mean."""


@dataclass(frozen=True)
class ArmAccuracy:
    """One arm on one seed."""

    arm: str
    seed: int
    before: float
    """Held-out accuracy."""
    after: float
    behind: float
    mixed: float
    """Share of the answers that were said by more than one version."""

    @property
    def void(self) -> bool:
        """Whether its answers were to go on under new weights, and did not."""
        arm = ARMS[self.arm]
        return arm.staleness > 0 and not arm.waits and self.mixed < LEAST_MIXED


def time_of(arm: str, seed: int, folder: str, threads: int) -> ArmTime:
    chosen = ARMS[arm]
    steps = TIMES["steps"] + 2 * chosen.staleness
    job = {"checkpoint": folder, "seed": seed, **BOTH, **chosen.settings, "steps": steps}
    found = measured(side(job, threads))
    return ArmTime(arm, seed, found["seconds"], found["idle"], found["behind"])


def accuracy_of(arm: str, seed: int, folder: Path, model: Path, **changes: Any) -> ArmAccuracy:
    chosen, sizes = ARMS[arm], {**ACCURACY, **changes}
    algorithm, name = LADDER[chosen.algorithm], arm.replace(" ", "_").replace(",", "")
    run = run_from(model, algorithm, name=name, seed=seed, staleness=chosen.staleness, **BOTH, **sizes)
    run = replace(run, env=replace(run.env, name="interrupted"), engine=Embedded(update=chosen.update))
    with whole_answers(chosen.waits):
        done = posttrain.run(run, out=folder / f"{name}-{seed}", quiet=True)
    out, stage = done.folder, done.stages[-1]
    assert stage.before is not None and stage.accuracy is not None
    steps = [s for s in run_reader.steps(out) if "rollout/versions_behind" in s.gauges]
    behind = statistics.mean(s.gauges["rollout/versions_behind"].mean for s in steps) if steps else 0.0
    said = [
        e.episode.segments for i in range(1, sizes["steps"] + 1) for e in run_reader.episodes(out, "rl", i, "train")
    ]
    versions = [{int(v) for s in segments for v in s.version[s.mask]} for segments in said]
    return ArmAccuracy(
        arm, seed, stage.before, stage.accuracy[0], behind, statistics.mean(len(v) > 1 for v in versions)
    )


def accuracies_of(
    wanted: Iterable[tuple[str, int]], folder: Path, starts: Path, jobs: int, until: float = math.inf, **changes: Any
) -> Iterator[ArmAccuracy]:
    """Rows as they end, of `jobs` runs at once: each in another process, since `whole_answers` is of a whole process.
    None begins after `until`."""
    left, running = deque(wanted), set[Future[ArmAccuracy]]()
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while True:
            while left and len(running) < jobs and time.perf_counter() < until:
                arm, seed = left.popleft()
                running.add(pool.submit(accuracy_of, arm, seed, folder, start(seed, starts), **changes))
            if not running:
                return
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in ended)


def table(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy]) -> Iterator[str]:
    """One line for each arm: medians of times, each beside the synchronous side of its round, and mean accuracies."""
    sync = {t.seed: t.seconds for t in times if t.arm == "synchronous"}
    yield "| arm | s a step | idle | faster | steps behind | accuracy | worst seed | behind there | mixed there |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|---:|"
    for arm, chosen in ARMS.items():
        mine = [t for t in times if t.arm == arm]
        cells = ["", "", "", ""]
        if mine:
            seconds, idle = (statistics.median(getattr(t, f) for t in mine) for f in ("seconds", "idle"))
            ratios = [sync[t.seed] / t.seconds for t in mine if t.seed in sync]
            faster = f"{statistics.median(ratios):.2f}x" if ratios else ""
            cells = [
                f"{seconds:.2f}",
                f"{idle / seconds:.0%}",
                faster,
                f"{statistics.mean(t.behind for t in mine):.2f}",
            ]
        found = [a for a in accuracies if a.arm == arm]
        if found:
            after, old, mixed = (statistics.mean(getattr(a, f) for a in found) for f in ("after", "behind", "mixed"))
            cells += [f"{after:.3f}", f"{min(a.after for a in found):.3f}", f"{old:.2f}", f"{mixed:.0%}"]
        else:
            cells += [""] * 4
        yield f"| **{arm}**: {chosen.words} | {' | '.join(cells)} |"


def told(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy]) -> list[str]:
    """The part of docs/research/asynchrony.md."""
    whole = len(ARMS) * len(SEEDS)
    lines = [
        BEGIN,
        "",
        *table(times, accuracies),
        "",
        f"Times: medians of up to {len(SEEDS)} rounds of few steps, 32 prompts x 8 answers of 3 turns, nothing beside"
        " it; *faster* than the synchronous",
        f"side of the round. Accuracy: held out, means over seeds after equally many samples of another task:"
        f" {ACCURACY['steps']} steps of",
        f"{ACCURACY['prompts']} x {ACCURACY['siblings']} answers to sums, AdamW at {ACCURACY['rate']:g}; a tool of"
        f" {FASTEST:g} to {SLOWEST:g} s interrupts an answer every {PIECE} tokens, at most {CUTS} times.",
        "Two optimizer steps a batch in both. *Steps behind*: mean age of a token. *Mixed*: answers said by several"
        " versions.",
    ]
    if accuracies:
        lines[-1] += f" Accuracy of the start: {statistics.mean(a.before for a in accuracies):.3f}."
    if len(times) < whole or len(accuracies) < whole:
        missing = f"{whole - len(times)} of {whole} times and {whole - len(accuracies)} of {whole} accuracies"
        lines += [
            "",
            f"**Incomplete:** {missing} are missing; `python -m benchmarks.speed.asynchrony_arms` makes them.",
        ]
    return [*lines, "", END]


def read() -> tuple[list[ArmTime], list[ArmAccuracy]]:
    if not RESULTS.exists():
        return [], []
    facts = json.loads(RESULTS.read_text())
    return [ArmTime(**r) for r in facts["times"]], [ArmAccuracy(**r) for r in facts["accuracy"]]


def keep(row: ArmTime | ArmAccuracy | None, threads: int) -> None:
    """Add a row to the results, which another call may be writing too. None: the page alone."""
    with PAGE.open() as page:
        fcntl.flock(page, fcntl.LOCK_EX)
        times, accuracies = read()
        if isinstance(row, ArmTime):
            times = [t for t in times if (t.arm, t.seed) != (row.arm, row.seed)] + [row]
        elif row is not None:
            accuracies = [a for a in accuracies if (a.arm, a.seed) != (row.arm, row.seed)] + [row]
        write(times, accuracies, threads)


def write(times: Sequence[ArmTime], accuracies: Sequence[ArmAccuracy], threads: int) -> None:
    """The results, and the part of the page that is made of them."""
    order = list(ARMS)
    times = sorted(times, key=lambda r: (order.index(r.arm), r.seed))
    accuracies = sorted(accuracies, key=lambda r: (order.index(r.arm), r.seed))
    rows = {"times": [asdict(r) for r in times], "accuracy": [asdict(r) for r in accuracies]}
    facts = {"date": time.strftime("%Y-%m-%d"), "machine": machine(threads)} | rows
    RESULTS.write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(BEGIN)
    PAGE.write_text(head + "\n".join(told(times, accuracies)) + rest.split(END)[1], encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("times", "accuracy", "page"))
    parser.add_argument("--only", default=",".join(ARMS), help="comma-separated arms")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--threads", type=int, default=2, help="of the sides whose time is measured")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no side after this time")
    parser.add_argument("--keep", type=Path, help="folder for the taught starts, which further calls then find made")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, of accuracy")
    parser.add_argument("--dry", action="store_true", help="print the rows, write nothing")
    options = parser.parse_args()
    if options.what == "times" and options.jobs != 1:
        parser.error("times need a machine with nothing beside them: --jobs is for accuracy")
    if options.what == "page":
        keep(None, options.threads)
        return
    until = time.perf_counter() + options.seconds
    known = {(r.arm, r.seed) for r in read()[options.what == "accuracy"]}
    asked = [(a, int(s)) for s in options.seeds.split(",") for a in options.only.split(",")]
    wanted = [one for one in asked if one not in known]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if options.what == "times":
            save_checkpoint(SIZE, folder, POSITIONS)
            rows: Iterable[Any] = (
                time_of(arm, seed, scratch, options.threads) for arm, seed in wanted if time.perf_counter() < until
            )
        else:
            rows = accuracies_of(wanted, folder, options.keep or folder, options.jobs, until)
        for row in rows:
            print(row, flush=True)
            if isinstance(row, ArmAccuracy) and row.void:
                print(f"  not kept: {row.mixed:.0%} of its answers are of several versions; raise SLOWEST", flush=True)
            elif not options.dry:
                keep(row, options.threads)


if __name__ == "__main__":
    main()
