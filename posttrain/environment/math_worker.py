"""The process behind the `math` reward: one JSON question a line in, one JSON answer a line out, until the input ends."""

from __future__ import annotations

import json
import sys

from math_verify import parse, verify  # pyright: ignore[reportMissingImports]


def last_box(text: str) -> str:
    """The last complete `\\boxed{...}` (braces balanced), else the text: math-verify would join several boxes to a list."""
    start = text.rfind("\\boxed{")
    while start >= 0:
        depth = 0
        for end in range(start + len("\\boxed"), len(text)):
            depth += (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[start : end + 1]
        start = text.rfind("\\boxed{", 0, start)
    return text


def compare(gold: str, text: str) -> dict[str, object]:
    """What was understood of both, and whether they are equal. A gold answer may lack its dollar signs."""
    wanted = parse(f"${gold}$") or parse(gold)
    said = parse(last_box(text))
    return {
        "gold": str(wanted[-1]) if wanted else None,
        "text": str(said[-1]) if said else None,
        "equal": bool(wanted and said and verify(wanted, said)),
    }


def main() -> None:
    answers = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        question = json.loads(line)
        answers.write(json.dumps(compare(question["gold"], question["text"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
