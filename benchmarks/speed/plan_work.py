"""One configuration of `plan_memory.py`, in a process of its own: a run as a user starts it, on a made-up model and
made-up data, and the resident memory that each of its roles takes above an empty run.

Every symbol of a text is a token (`grpo_work`), and a model of random weights says its end nearly never, so lengths
are those that the configuration asks for.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.speed.grpo_work import SYMBOLS, Size, memory_mb, save_checkpoint

REWARD = "import zlib\n\n\ndef worth(task, text):\n    return zlib.crc32(text.encode()) % 8 / 8\n"
"""A reward that differs among siblings, so that a step learns something."""


@dataclass(frozen=True)
class Case:
    """A configuration."""

    kind: str
    """sft, dpo, reward_model or grpo."""
    hidden: int
    layers: int
    vocabulary: int
    heads: int = 4
    kv: int = 4
    ffn: int = 0
    """0: three times hidden."""
    prompt: int = 64
    answer: int = 192
    batch: int = 16
    """Sequences or pairs of a step; of grpo samples, four of each prompt."""
    micro: int = 4096
    more: tuple[str, ...] = ()
    """Further overrides."""
    ranks: int = 1

    @property
    def size(self) -> Size:
        wide = self.ffn or 3 * self.hidden
        return Size(self.hidden, self.layers, self.heads, self.kv, wide, search=0, tries=0, repeats=0)

    @property
    def stage(self) -> str:
        return {"grpo": "rl"}.get(self.kind, self.kind)

    @property
    def recipe(self) -> str:
        return self.kind

    def overrides(self, model: str, data: str, steps: int = 2) -> list[str]:
        s, out = self.stage, [f"model={model}", f"env.prompts={data}", "env.heldout=0", f"{self.stage}.eval=false"]
        out += [f"{s}.steps={steps}", f"{s}.eval_every=0", f"{s}.micro_tokens={self.micro}", "threads=1"]
        out += [f"{s}.checkpoint_every=0", f"{s}.optimizer.lr=1e-5"]
        if self.kind == "grpo":
            out += [f"rl.prompts={self.batch // 4}", "rl.siblings=4", f"rl.sampling.max_tokens={self.answer}"]
            out += [f"env.rewards={Path(data).parent / 'reward.py'}:worth"]
        else:
            out += [f"{s}.batch={self.batch}"]
        if self.kind == "dpo":
            out += ["sft=none"]
        if self.kind in ("sft", "dpo"):
            out += ["env.rewards=none"]
        return [*out, *self.more]


def write_rows(path: Path, case: Case, rows: int) -> None:
    """Prompts of `case.prompt` tokens, and completions that end with their stop token after `case.answer`."""
    rng = np.random.default_rng(5)

    def text(count: int) -> str:
        return "".join(SYMBOLS[i] for i in rng.integers(0, len(SYMBOLS), count))

    made: list[dict[str, Any]] = []
    for _ in range(rows):
        prompt, said = text(case.prompt), [text(case.answer - 1) for _ in range(2)]
        made.append({"prompt": prompt, "answer": said[0]} | (
            {"chosen": said[0], "rejected": said[1]} if case.kind in ("dpo", "reward_model")
            else {"completion": said[0]} if case.kind == "sft" else {}
        ))  # fmt: skip
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in made), encoding="utf-8")


def played(case: Case, folder: Path, steps: int = 2) -> dict[str, float]:
    """The highest resident MiB of each role of a run."""
    import posttrain

    folder.mkdir()
    save_checkpoint(case.size, folder / "model", positions=8192, rows=case.vocabulary)
    write_rows(folder / "rows.jsonl", case, 64)
    (folder / "reward.py").write_text(REWARD)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_mb()["now_mb"]
    words = case.overrides(str(folder / "model"), str(folder / "rows.jsonl"), steps)
    nproc = case.ranks if case.ranks > 1 else None
    posttrain.run(case.recipe, *words, out=folder / "run", quiet=True, nproc=nproc)
    lines = [json.loads(line) for line in (folder / "run" / "steps.jsonl").read_text().splitlines()]
    peaks: dict[str, float] = {"before": before}
    for line in lines:
        for role, used in (line.get("memory") or {}).items():
            peaks[role] = max(peaks.get(role, 0.0), used / 2**20)
    return peaks


def measured(case: Case) -> dict[str, float]:
    """MiB of each role above what the process holds after its imports and an empty run."""
    with tempfile.TemporaryDirectory() as folder:
        small = replace(case, hidden=32, layers=1, vocabulary=1024, ffn=64, heads=4, kv=4, prompt=8, answer=16)
        played(replace(small, batch=8), Path(folder) / "small")
        found = played(case, Path(folder) / "whole")
    empty = found.pop("before")
    return {role: round(used - empty, 1) for role, used in found.items()} | {"empty": round(empty, 1)}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    wanted = Case(**{**told, "more": tuple(told["more"])})
    result = measured(wanted)
    print("RESULT " + json.dumps({"case": asdict(wanted), "measured": result}))
