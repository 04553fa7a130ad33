"""Engine and learner in two processes with a core each, beside one process with one core and one with two: the same
steps, in one run.

    python -m benchmarks.speed.placement            # three rounds; about five minutes on two quiet cores
    python -m benchmarks.speed.placement --staleness 2
    python -m benchmarks.speed.placement --quick    # small and short: does it run?

A step is 32 prompts x 8 answers of one turn, `staleness=1`, so the engine says the answers of the next step while the
learner computes. With 2 it may be two steps ahead, so a step in which one of them has more to do than the other does
not stop the other. Ask and learn are the processor time of the two processes, each while the other worked: all that the
engine's process does, of which *passes* are its forward passes and draws, and all that the learner's does, with the
answers that it takes apart and judges. Its clock counts these as `rollout`, with the time that it waits; *without
rollout* is the step without both. With both at work all the time a step takes max(ask, learn); idle is what is left of
a step, and *no turn* the share of it in which the engine had nothing to say. *Disturbed* is the larger share of a step
in which one of the two was ready to compute and had no core, since others had it: idle shares hold that time too.
`EPOCHS` and `SLOTS` balance the two.

With `placement.cores=1` the engine keeps to the last core, and the learner to the first. The last side also has
`placement.environments=1`: episodes are played in a third process, on the engine's core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.speed.side import machine

if TYPE_CHECKING:
    from posttrain.core.gauge import Step

RESULTS = Path(__file__).parent / "results" / "placement.json"
SIDES = ("one process, 1 core", "one process, 2 cores", "two processes, 1 core each", "episodes beside the engine")
EPOCHS, SLOTS = 2, 20
"""With these, asking and learning take about equally long."""
WARM = 3
"""First steps of a side, and one at its end, that are left out."""


def side(name: str, quick: bool, staleness: int = 1, epochs: int = EPOCHS, slots: int = SLOTS) -> dict[str, float]:
    """Seconds a step of one side; called in a process of its own."""
    from posttrain.api import main
    from posttrain.config.engines import Embedded
    from posttrain.config.placement import Local, Processes
    from posttrain.config.run import Env, Evaluation, Model, Optimizer, Reinforce, Run
    from posttrain.core.sampling import Sampling
    from posttrain.ladder.policy_rows import DR_GRPO
    from posttrain.record import run_reader

    cores = sorted(os.sched_getaffinity(0))
    two = name in SIDES[2:]
    threads = 2 if name == SIDES[1] else 1
    rl = Reinforce(
        name="rl",
        algorithm=DR_GRPO,
        sampling=Sampling(max_tokens=8 if quick else 48),
        optimizer=Optimizer(lr=1e-5),
        prompts=4 if quick else 32,
        siblings=8,
        steps=6 if quick else 14,
        staleness=staleness,
        epochs=epochs,
        eval_every=0,
        checkpoint_every=0,
    )
    run = Run(
        recipe="placement",
        model=Model(hidden=64 if quick else 160, layers=2 if quick else 4, heads=4, kv_heads=4, ffn=480, context=128),
        env=Env(name="arithmetic", heldout=4),
        stages=(rl,),
        evaluation=Evaluation(samples=1, greedy=False),
        slots=slots,
        engine=Embedded(update="inflight"),  # new weights do not wait for the answers of the next step
        threads=threads,
        record_episodes=False,
        placement=Processes(cores=1, environments=int(name == SIDES[3])) if two else Local(),
    )
    if threads == 1 and not two:
        os.sched_setaffinity(0, cores[:1])
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        times = _times(lambda: main.run(run, out=out, quiet=True))
        rows = [s for s in run_reader.steps(out) if s.stage == "rl"][WARM:-1]
    wall, cpu, engine, *kept = ((b - a) / len(rows) for a, b in zip(times[WARM - 1], times[-2], strict=True))
    passes = sum(s.clock.get("engine/step", 0.0) for s in rows) / len(rows)  # reports may come a step late
    if not two:
        return {"step": wall, "ask": passes, "learn": wall - passes}
    return {
        "step": wall,
        "ask": engine,
        "learn": cpu,
        "engine idle": max(0.0, 1 - engine / wall),
        "learner idle": max(0.0, 1 - cpu / wall),
        "no turn": statistics.mean(s.clock["engine/idle"] for s in rows),
        "passes": passes,
        "without rollout": wall - statistics.mean(s.clock["rollout"] for s in rows),
        "push": statistics.mean(s.clock["sync"] for s in rows),
        "disturbed": max(kept) / wall,
        "over": wall / max(engine, cpu),
    }


def _times(play: Callable[[], object]) -> list[tuple[float, ...]]:
    """When each step of a run was written down, the processor time of this process and of its engines until then, and
    how long each of them was kept from a core."""
    from posttrain.engine.pool.engine_pool import EnginePool
    from posttrain.stages.run_parts import RunParts

    tell, seen = RunParts.tell, list[tuple[float, ...]]()

    def told(self: RunParts, step: Step) -> None:
        pids = [e.host.pid for e in self.sampler.engines if e.host.pid] if isinstance(self.sampler, EnginePool) else []
        cpu = time.process_time(), sum(map(processor_seconds, pids))
        seen.append((time.perf_counter(), *cpu, kept_seconds(os.getpid()), sum(map(kept_seconds, pids))))
        tell(self, step)

    RunParts.tell = told  # type: ignore[method-assign]
    play()
    return seen


def processor_seconds(pid: int) -> float:
    """Processor seconds of a process so far."""
    spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, spent)) / os.sysconf("SC_CLK_TCK")


def kept_seconds(pid: int) -> float:
    """Seconds in which the first thread of a process was ready to compute and another program had the core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def main_() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="of a batch: more make learning take longer")
    parser.add_argument("--slots", type=int, default=SLOTS, help="answers said at once: fewer take longer")
    parser.add_argument("--side")
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(side(asked.side, asked.quick, asked.staleness, asked.epochs, asked.slots)))
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    for _ in range(1 if asked.quick else asked.rounds):
        for name in SIDES:
            words = [
                sys.executable,
                "-m",
                "benchmarks.speed.placement",
                "--side",
                name,
                *("--staleness", str(asked.staleness)),
                *("--epochs", str(asked.epochs)),
                *("--slots", str(asked.slots)),
                *(["--quick"] if asked.quick else []),
            ]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{name} failed:\n{done.stderr[-2000:]}")
            found[name].append(json.loads(done.stdout.strip().splitlines()[-1]))
    rows = {n: {k: statistics.median(r[k] for r in rounds) for k in rounds[0]} for n, rounds in found.items()}
    for name, row in rows.items():
        print(f"{name:28s} " + "  ".join(f"{k} {x:.3f}" for k, x in row.items()))
    for name in SIDES[2:]:
        clock = rows[name]["step"] / max(rows[name]["ask"], rows[name]["without rollout"])
        faster = [rows[n]["step"] / rows[name]["step"] for n in SIDES[:2]]
        every = ", ".join(f"{r['over']:.2f}" for r in found[name])
        print(
            f"{name}: a step takes {rows[name]['over']:.2f} x max(ask, learn) (rounds {every}), {clock:.2f} x where"
            f" learn is without rollout"
        )
        print(f"{faster[0]:.2f} x as fast as one process with one core, {faster[1]:.2f} x as one with two")
    if not asked.quick and (asked.staleness, asked.epochs, asked.slots) == (1, EPOCHS, SLOTS):
        told = {"date": date.today().isoformat(), "machine": machine(1), "rounds": found, "medians": rows}
        RESULTS.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main_()
