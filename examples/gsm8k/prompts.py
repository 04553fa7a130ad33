"""Word problems in the form of GSM8K as prompts for posttrain.

    python prompts.py openai/gsm8k prompts.jsonl            # the data set of the hub; needs the package `datasets`
    python prompts.py my_problems.jsonl prompts.jsonl       # or a file of rows with `question` and `answer`

A row's `answer` is a solution whose last line is `#### RESULT`. Only the result is kept as the answer: the reward looks
at nothing else, so the solution is left to the policy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

MARK = "####"
INSTRUCTION = "Solve the problem step by step. Give the result, one number, in \\boxed{} at the end."


def rows(source: str, config: str, split: str) -> Iterable[Mapping[str, Any]]:
    """The rows of a JSONL file, or of a data set of the hub."""
    if Path(source).suffix in (".jsonl", ".json"):
        return (json.loads(line) for line in Path(source).read_text(encoding="utf-8").splitlines() if line.strip())
    from datasets import load_dataset

    return load_dataset(source, config, split=split)


def result(solution: str) -> str:
    """The number after the mark, without commas and without a dollar sign.

    >>> result("She sells 3 * 400 = 1,200.\\n#### 1,200")
    '1200'
    """
    if MARK not in solution:
        raise SystemExit(f"a solution has no line '{MARK} RESULT': {solution[-80:]!r}")
    return solution.rpartition(MARK)[2].strip().replace(",", "").lstrip("$")


def prompts(source: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row for posttrain a problem; a problem that comes twice is kept once."""
    seen: set[str] = set()
    for row in source:
        question = str(row["question"]).strip()
        if question not in seen:
            seen.add(question)
            messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
            yield {"prompt": messages, "answer": result(str(row["answer"]))}


def main() -> None:
    parser = argparse.ArgumentParser(description="word problems in the form of GSM8K as prompts")
    parser.add_argument("source", help="a data set of the hub, or a JSONL file with question and answer")
    parser.add_argument("out", type=Path, help="the file to write")
    parser.add_argument("--config", default="main", help="configuration of the data set (default: main)")
    parser.add_argument("--split", default="train", help="split of the data set (default: train)")
    options = parser.parse_args()
    made = list(prompts(rows(options.source, options.config, options.split)))
    options.out.write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf-8")
    print(f"{options.out}: {len(made)} prompts")


if __name__ == "__main__":
    main()
