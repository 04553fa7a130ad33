"""Peak memory of configurations as they ran on this machine, beside what a plan says of them.

    python -m benchmarks.speed.plan_memory  # measures all of them, each in a process of its own: half an hour
    python -m benchmarks.speed.plan_memory --only dpo     # those whose words contain this
    python -m benchmarks.speed.plan_memory --again        # plans again what was measured, and prints the table

What is measured is the highest resident memory of a run (of rank 0), by role, above what its process holds after its
imports and an empty run of the same kind (Linux). The ratio is estimate / measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.speed.plan_work import Case
from benchmarks.speed.side import machine
from posttrain.build.request.defaults import SLEEPS
from posttrain.config import overrides
from posttrain.plan.lengths import Lengths
from posttrain.plan.memory import Place, places
from posttrain.plan.shapes import ModelShape, shape_of
from posttrain.plan.work import work_of
from posttrain.recipe.recipes import recipe

RESULTS = Path(__file__).parent / "results" / "plan_memory.json"
CONTEXT = "model.context=512"
FULL, SELECTIVE = "model.gradient_checkpointing=full", "model.gradient_checkpointing=selective"
CASES = (
    Case("sft", 128, 4, 151936, more=(CONTEXT,)),
    Case("sft", 64, 2, 151936, batch=32, more=(CONTEXT,)),
    Case("sft", 256, 4, 65536, more=(CONTEXT, FULL)),
    Case("sft", 256, 4, 65536, more=(CONTEXT, SELECTIVE)),
    Case("sft", 512, 8, 65536, heads=8, batch=8, more=(CONTEXT,)),
    Case("sft", 128, 8, 100352, answer=960, batch=4, more=("model.context=1088",)),
    Case("sft", 256, 6, 65536, more=(CONTEXT, "model.lora.rank=16")),
    Case("sft", 256, 4, 100352, micro=1024, more=(CONTEXT,)),
    Case("dpo", 128, 4, 65536, more=(CONTEXT,)),
    Case("dpo", 256, 4, 65536, more=(CONTEXT,)),
    Case("dpo", 128, 4, 151936, more=(CONTEXT, FULL)),
    Case("dpo", 256, 4, 100352, more=(CONTEXT, "model.lora.rank=8")),
    Case("dpo", 64, 4, 151936, batch=8, more=(CONTEXT,)),
    Case("reward_model", 128, 4, 65536, more=(CONTEXT,)),
    Case("reward_model", 256, 4, 100352, more=(CONTEXT,)),
    Case("grpo", 128, 4, 151936, more=(CONTEXT,)),
    Case("grpo", 64, 4, 151936, batch=32, more=(CONTEXT,)),
    Case("grpo", 256, 4, 65536, more=(CONTEXT,)),
    Case("grpo", 256, 4, 65536, more=(CONTEXT, "pull=none")),
    Case("grpo", 128, 4, 100352, more=(CONTEXT, "engine.sleep=true")),
    Case("grpo", 128, 4, 100352, more=(CONTEXT, FULL)),
    Case("grpo", 256, 4, 65536, more=(CONTEXT, "model.lora.rank=16")),
    Case("grpo", 128, 4, 100352, answer=448, more=(CONTEXT,)),
    Case("grpo", 256, 8, 65536, micro=1024, more=(CONTEXT,)),
    Case("sft", 256, 4, 65536, more=(CONTEXT,), ranks=2),
    Case("dpo", 128, 4, 100352, more=(CONTEXT,), ranks=2),
    Case("grpo", 128, 4, 65536, more=(CONTEXT,), ranks=2),
    Case("grpo", 256, 4, 65536, more=(CONTEXT,), ranks=2),
)


def plan(case: Case) -> Place:
    """What a plan says of a configuration."""
    run = overrides.apply(recipe(case.recipe), case.overrides("model", "rows.jsonl"))
    lengths = Lengths(prompt=case.prompt, mean=case.answer, most=case.answer)
    shape = shape_of_case(case)
    if case.kind == "grpo" and shape.parameters >= SLEEPS:
        run = overrides.apply(run, ["engine.sleep=true"])  # as a run chooses it
    work = work_of(run, run.stages[-1], shape, lengths)
    return places(replace(work, ranks=case.ranks))[0]


def shape_of_case(case: Case) -> ModelShape:
    """The shape of a configuration's model."""
    s = case.size
    return shape_of(
        {"model_type": "qwen3", "hidden_size": s.hidden, "num_hidden_layers": s.layers, "vocab_size": case.vocabulary,
         "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads, "head_dim": s.hidden // s.heads,
         "intermediate_size": s.ffn, "tie_word_embeddings": True}
    )  # fmt: skip


def of_row(row: dict[str, Any]) -> tuple[Case, float]:
    """The configuration of a row of results, and the MiB that it took at its highest."""
    case = Case(**{**row["case"], "more": tuple(row["case"]["more"])})
    return case, max(used for role, used in row["measured"].items() if role != "empty")


def words(case: Case) -> str:
    more = ", ".join(m for m in case.more if not m.startswith("model.context"))
    sizes = f"{case.kind} h={case.hidden} layers={case.layers} V={case.vocabulary:,}"
    sizes += f" {case.batch} x {case.prompt}+{case.answer}"
    sizes += f", {case.ranks} ranks" if case.ranks > 1 else ""
    return f"{sizes}{', ' + more if more else ''}{f', micro_tokens={case.micro}' if case.micro != 4096 else ''}"


def measure(case: Case) -> dict[str, Any]:
    """A row of results."""
    command = [sys.executable, "-m", "benchmarks.speed.plan_work", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines = [x for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{words(case)} failed:\n{(done.stderr or done.stdout)[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def table(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Print estimate and measurement of every row; returns the ratios."""
    ratios = list[float]()
    for row in rows:
        case, most = of_row(row)
        place = plan(case)
        ratios.append(place.most / 2**20 / most)
        print(f"| {words(case)} | {most:,.0f} | {place.most / 2**20:,.0f} | {ratios[-1]:.2f} | {place.peak} |")
    print(f"estimate / measured: {min(ratios):.3f}, median {statistics.median(ratios):.3f}, {max(ratios):.3f}")
    return ratios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="those whose words contain this")
    parser.add_argument("--again", action="store_true", help="measure nothing")
    args = parser.parse_args()
    told = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"rows": []}
    found = {words(of_row(row)[0]): row for row in told["rows"]}
    for case in CASES:
        if not args.again and args.only in words(case):
            found[words(case)] = measure(case)
            rows = [found[w] for w in map(words, CASES) if w in found]
            about = {"date": date.today().isoformat(), "machine": machine(1), "torch": version("torch")}
            RESULTS.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    table([found[w] for w in map(words, CASES) if w in found])
    return 0


if __name__ == "__main__":
    sys.exit(main())
