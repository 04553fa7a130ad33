"""From a benchmark to a policy: its rubric becomes a reward, the reward is checked, a tiny model is trained by it, and
compared with one that was trained by a better rubric. A judge that pays nothing says how good they are."""

from __future__ import annotations

import json
import random
from pathlib import Path

from judges import served

import posttrain
from posttrain.config.env import Env, JudgeEndpoint, Reward

LETTERS = "abcdefghijklmnop"
RUBRIC = "The answer begins with the first letter of the word: 4 points. It is friendly: up to 6 points."
BETTER = (
    "The answer is the first letter of the word: 10 points. Nothing is paid for ! or for more than one sign behind it."
)
STRICT = (
    "You are strict. The answer is the first letter of the word: 10 points. Whatever else it says is worth nothing."
)


def items() -> list[dict[str, str]]:
    """Words, each with an answer to imitate: three in five are right, with 0 to 3 signs behind."""
    rng = random.Random(0)
    out: dict[str, dict[str, str]] = {}
    while len(out) < 400:
        word = "".join(rng.choices(LETTERS, k=4))
        said = word[0] if rng.random() < 0.6 else word[-1]
        out[word] = {"prompt": f"{word}:", "answer": word[0], "completion": said + "!" * rng.choice((0, 1, 1, 2, 3))}
    return list(out.values())


def judge(url: str, rubric: str, measured: bool = False) -> Reward:
    """A judge by a rubric, which is written to a file first."""
    file = Path(f"rubric_{'heldout' if measured else 'better' if rubric == BETTER else 'first'}.md")
    file.write_text(rubric, encoding="utf-8")
    return Reward(function=f"judge:{url}", measured=measured, judge=JudgeEndpoint(rubric=str(file)))


def main() -> None:
    """Check, train twice, compare."""
    Path("items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in items()), encoding="utf-8")
    with served() as url:
        for name, rubric in (("first", RUBRIC), ("better", BETTER)):
            rewards = (judge(url, rubric), judge(url, STRICT, measured=True))
            env = Env(name="prompts", prompts="items.jsonl", rewards=rewards, heldout=60)
            for found in posttrain.check(env, tasks=16).findings:
                print(f"{found.mark:<7} {found.probe}: {found.detail}")
            posttrain.run(
                "verifiable",
                "sft.steps=60",
                "rl.steps=40",
                "rl.sampling.max_tokens=6",
                "rl.eval_every=20",
                env=env,
                out=f"runs/{name}",
            )
    posttrain.compare("runs/first", "runs/better")  # it prints the table


if __name__ == "__main__":
    main()
