"""What the pages take for granted: `my-model`, `mine.jsonl`, `chat.jsonl`, `mine.py`, `pairs.jsonl`, `labels.jsonl`,
`runs/mine`, a run to compare it with, and `problems.jsonl` for a data set of the hub. Run in the fresh environment, in
the folder that the pages are then played in copies of."""

import json
import subprocess
import sys
from pathlib import Path

REWARDS = """

def reward(task, text):
    return float(task.answer in text.split())


def helpful(prompts, completions, **columns):
    return [min(1.0, len(c) / 10) for c in completions]
"""
KEPT = '''"""A reward that looks at the files an episode left."""


def kept(prompts, completions, state, want, **_):
    return [float(s["files"] == w) for s, w in zip(state, want)]
'''
TEMPLATE = (
    "{% if tools %}<system>You have these tools:{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] or '' }}{% for c in m['tool_calls'] or [] %}"
    "\n<tool_call>\n{\"name\": \"{{ c['function']['name'] }}\", "
    "\"arguments\": {{ c['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSTTRAIN = (str(Path(sys.executable).with_name("posttrain")),)
SIZES = (
    *("env.heldout=8", "evaluation.samples=2", "sft.steps=10", "sft.batch=16", "rl.steps=12", "rl.prompts=4"),
    *("rl.siblings=4", "rl.eval_every=0", "rl.checkpoint_every=2"),
)


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def files() -> None:
    rows = [
        {"prompt": f"What is {a}+{b}?", "answer": str(a + b), "completion": str(a + b)}
        for a in range(8)
        for b in range(5)
    ]
    Path("mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    pairs = [{"prompt": r["prompt"], "chosen": r["answer"], "rejected": f"{r['answer']}1"} for r in rows]
    Path("pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in pairs))
    labels = [{"prompt": r["prompt"], "completion": r["answer"], "label": i % 2 == 0} for i, r in enumerate(rows)]
    Path("labels.jsonl").write_text("".join(json.dumps(r) + "\n" for r in labels))
    chats = [{"messages": [{"role": "user", "content": f"Say {i}."}, said(str(i))]} for i in range(30)]
    Path("chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in chats))
    subprocess.run([*POSTTRAIN, "new", "env", "my_task", "--folder", "given"], check=True)
    Path("mine.py").write_text(Path("given/my_task.py").read_text() + REWARDS)
    Path("path.py").write_text(KEPT)
    tasks = [
        {"prompt": f"Write {n} into a.txt.", "files": {}, "want": {"a.txt": str(n)}, "completion": str(n)}
        for n in range(40)
    ]
    problems = [
        {"question": f"Ann has {n} pens and buys {n} boxes of 3. How many pens has she?", "answer": f"#### {4 * n:,}"}
        for n in range(400)
    ]
    Path("problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in problems))
    Path("tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in tasks))


def model(folder: str) -> None:
    """A tiny model with random weights that can write any text and has a chat template."""
    from posttrain.config.run import Model
    from posttrain.engine.model.tiny_models import build_module, raw_bytes

    tokenizer = raw_bytes()
    tokenizer.chat_template = TEMPLATE
    small = Model(arch="qwen3", hidden=32, layers=2, heads=2, kv_heads=2, ffn=64, context=2048)
    build_module(small, tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    files()
    model("my-model")
    runs = {"runs/mine": "grpo", "runs/other": "dapo"}
    command = (*POSTTRAIN, "run", "arithmetic", *SIZES)
    made = [subprocess.Popen([*command, f"algorithm={name}", "--out", out]) for out, name in runs.items()]
    sys.exit(max(run.wait() for run in made))
