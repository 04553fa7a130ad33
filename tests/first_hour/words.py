"""What stands for what: the pages that are played, names in them that stand for something of the reader's, sizes that
are made small, and what cannot be played, each with its reason."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.recipe.recipes import recipe
from posttrain.system.errors import PosttrainError

PAGES = (
    *("README.md", "docs/start/*.md", "docs/guides/*.md", "docs/**/*.md", "examples/**/*.md"),
    *("tour/*.md", "CONTRIBUTING.md"),
)
NOTEBOOKS = ("notebooks/*.ipynb",)
NOT_PAGES = {
    "docs/research/LOG.md": "what was done on a day, with what there was then",
    "docs/research/defects.md": "what was wrong on a day",
}
"""Pages that nobody follows from top to bottom."""


def pages(root: Path) -> list[Path]:
    """Every page and notebook that a new user follows, in the order in which they are offered."""
    found = [p for pattern in (*PAGES, *NOTEBOOKS) for p in sorted(root.glob(pattern))]
    return [p for p in dict.fromkeys(found) if str(p.relative_to(root)) not in NOT_PAGES]


@dataclass(frozen=True)
class Exempt:
    """A step that is not played: pages and text as patterns, and why."""

    page: str
    text: str
    why: str


CHECKOUT = "needs the source tree; suites of `make everything` run it"
WRITES = "needs the source tree; it writes what the pages show, in minutes"
MEASURES = "needs the source tree and minutes to hours: it takes a measurement that the log keeps with its date"
NETWORK = "needs the network"
EXEMPT = (
    Exempt("*", r"make\b", CHECKOUT),
    Exempt(
        "*",
        r"(python|python3) (tour/|-m (posttrain\.api\.pages|scripts\.ci|tests\.first_hour|benchmarks$)\b)",
        CHECKOUT,
    ),
    Exempt("*", r"(\w+=\w+ )?python -m pytest\b", CHECKOUT),
    Exempt("*", r"torchrun .*\btests/", CHECKOUT),
    Exempt("*", r"torchrun .*--nnodes\b", "needs two machines; tests/prove/test_rank_runs.py has two on loopback"),
    Exempt("*", r".*\bplacement=ray .*placement\.address=", "needs a Ray cluster of several machines"),
    Exempt("*", r"(python|python3) -m scripts\.(site|pages)\.", WRITES),
    Exempt("*", r"(python|python3) (-m )?benchmarks[./]", MEASURES),
    Exempt("*", r"(python|python3) -m venv", "the environment is there"),
    Exempt("*", r"(python|python3) -m posttrain\.engine\.vllm\.", "needs vLLM, which has an environment of its own"),
    Exempt("*", r".*\bengine=vllm\b", "needs vLLM, which has an environment of its own"),
    Exempt("*", r".*https://", NETWORK),
    Exempt("*", r".*\bdevice=cuda\b", "needs a GPU"),
    Exempt("*", r"(?s).*\bfrom trl import", "needs TRL, which the page compares with"),
    Exempt("*", r"(python|python3) -m verl\.", "is a command of verl, which the page compares with"),
    Exempt("*", r"(hf|jupyter|tensorboard|trackio|wandb)\b", "is a program of somebody else"),
    Exempt("*", r".*\btrackers=(wandb|trackio)\b", "needs a tracker that is not installed here"),
    Exempt("*", r".*\bhub:", NETWORK),
    Exempt(
        "*",
        r"pip install .*(vllm|posttrain\[(bench|all|nf4|adamw8bit|ray)\]|tensorboard|wandb|trackio|openai)",
        NETWORK,
    ),
    Exempt("*", r"python -m http\.server\b", "goes on until somebody ends it"),
    Exempt("*", r"posttrain lab\b.*--site\b", "takes minutes; the suite of the documentation builds it"),
    Exempt("*", r"posttrain lab\b(?!.*--list)", "goes on until somebody ends it; tests/lab has its server"),
    Exempt("*", r".*\bjudge:", "needs a judge that was trained in full; tests/stages/test_generative_judge.py has one"),
    Exempt("*", r"posttrain (run|check) haiku\.py:run\b", "needs a judge that listens; tests/cli/test_new.py has one"),
    Exempt("*", r".*--answers\b", "needs policies that end their answers; tests/stages/test_reward_report.py has two"),
)


def exempt(page: str, text: str) -> str:
    """Why a step is not played; '' where it is."""
    return next((e.why for e in EXEMPT if fnmatchcase(page, e.page) and re.match(e.text, text)), "")


# --- names that stand for something -----------------------------------------------------------------------------------

GIVEN_RUN, GIVEN_MODEL = "runs/mine", "my-model"
HUB = re.compile(r"(?<=[= ])(?:Qwen|HuggingFaceTB|meta-llama|google|mistralai)/[\w.-]+")
STANDS = (
    (HUB, GIVEN_MODEL),
    (re.compile(r"\bMODEL\b"), GIVEN_MODEL),
    (re.compile(r"\bRUN\b"), GIVEN_RUN),
    (re.compile(r"\bRECIPE\b"), "arithmetic"),
    (re.compile(r"(?<=ladder )NAME\b"), "grpo"),
    (re.compile(r"(?<=new env )NAME\b"), "another"),
    (re.compile(r"(?<= )openai/gsm8k\b"), "problems.jsonl"),
    (re.compile(r"(?<=checkpoints/)NAME\b"), "best"),
    (re.compile(r"\bFOLDER\b"), "taken"),
    (re.compile(r"\bFILE\b(?!\.)"), "pairs.jsonl"),
    (re.compile(r"(?<=--diff )A B\b"), "grpo dapo"),
    (re.compile(r"(?<=--episode )N\b"), "0"),
    (re.compile(r"\bruns/a\b"), GIVEN_RUN),
    (re.compile(r"\bruns/b\b"), "runs/other"),
)
ELLIPSIS = re.compile(r"\bruns/(?P<recipe>\w*)-?\.\.\.")


def put_in(text: str, runs: Path) -> str:
    """The text with the reader's own things in place of the words that stand for them. `runs/ladder-...` is the newest
    run of that recipe, `runs/...` the newest one."""
    for pattern, word in STANDS:
        text = pattern.sub(word, text)
    return ELLIPSIS.sub(lambda m: _newest(runs, m["recipe"]), text)


def _newest(runs: Path, name: str) -> str:
    found = sorted((p for p in runs.glob(f"{name}*-*") if (p / "run.json").exists()), key=lambda p: p.stat().st_mtime)
    return f"runs/{found[-1].name}" if found else GIVEN_RUN


# --- sizes ------------------------------------------------------------------------------------------------------------

SUPERVISED = {"steps": "4", "batch": "8"}
REINFORCE = {"steps": "2", "prompts": "4", "siblings": "4", "eval_every": "0", "sampling.max_tokens": "8"}
REJECTION = {"steps": "2", "prompts": "4", "siblings": "4", "batch": "4", "eval_every": "0", "sampling.max_tokens": "8"}
LABELS = {"steps": "2", "prompts": "6", "siblings": "2", "completions": "2", "sampling.max_tokens": "12"}
JUDGED = ("env.prompts=pairs.jsonl", "env.prompts=labels.jsonl")
"""Data of the reader's without completions: stages that would imitate them are left out by themselves, unless a word of
the command names them."""

RESUMED = 14
"""Steps that a run which goes on is given in place of the printed number: more than `runs/mine` has."""


def smaller(command: str, script: str = "") -> str:
    """The command with toy sizes: a run's stages, a check's tasks, an evaluation's prompts; a program of the
    reader's by `script`, which makes the runs in it small."""
    words = shlex.split(command, comments=True)
    if words[:2] == ["posttrain", "run"] and "--help" not in words:
        if "--resume" in words:
            return re.sub(r"\.steps=\d+", f".steps={RESUMED}", command)
        return with_words(
            command, toy(next((w for w in words[2:] if "=" not in w and not w.startswith("-")), ""), words)
        )
    if words[:2] == ["posttrain", "ladder"]:  # of a run that a page has made small
        return re.sub(r"--step \d+", f"--step {REINFORCE['steps']}", command)
    if words[:2] == ["posttrain", "check"]:
        few = re.sub(r"--tasks \d+", "--tasks 8", command)
        return few if "--tasks" in words else with_words(command, ["--tasks 8"])
    if words[:2] == ["posttrain", "eval"] and any(w.startswith(("env=", "env.prompts=")) for w in words):
        scores = "reward-model" in words[2]  # nothing is sampled
        return with_words(command, ["env.heldout=8", *(() if scores else ("--max-tokens 8",))])
    if script and words[0] == "python":
        return f"python {script} {command.removeprefix('python ')}"
    return command


def toy(name: str, given: list[str]) -> list[str]:
    """The overrides that make a recipe small; of what is no recipe (a file) none, because files are small here."""
    try:
        return sizes(recipe(name), given)
    except PosttrainError:
        return []


def sizes(run: Run, given: Sequence[str] = ()) -> list[str]:
    """The overrides that make a run small, beside those that are given: a stage that is taken out, or has nothing to
    imitate, stays out, one that is asked to evaluate on its way does, and a prover that is the best of several has so
    many completions."""
    judged = not set(JUDGED).isdisjoint(given)
    left = [s for s in run.stages if f"{s.name}=none" not in given and not (judged and isinstance(s, Supervised))]
    return ["env.heldout=8", "evaluation.samples=2", *(o for s in left for o in _of(s, given))]


def _of(stage: object, given: Sequence[str]) -> Iterator[str]:
    name = stage.name  # type: ignore[attr-defined]
    kinds = {Reinforce: REINFORCE, Rejection: REJECTION, StepLabeling: LABELS}
    small = next((sizes for kind, sizes in kinds.items() if isinstance(stage, kind)), SUPERVISED)
    for key, value in small.items():
        if key == "steps" and any(g.startswith(f"{name}.epochs=") for g in given):
            continue
        asked = key == "eval_every" and any(g.startswith(f"{name}.{key}=") and not g.endswith("=0") for g in given)
        best_of = [g.partition("=")[2] for g in given if key == "completions" and g.startswith(f"{name}.prover=")]
        yield f"{name}.{key}={'1' if asked else (*best_of, value)[0]}"


def with_words(command: str, words: list[str]) -> str:
    """The command with these words at its end; a setting that it has already gets the new value where it stands."""
    body, mark, comment = command.partition("  #")
    for word in words:
        key, _, value = word.partition("=")
        body, there = re.subn(rf"(?<= {re.escape(key)}=)\S+", value, body) if value else (body, 0)
        body = body if there else f"{body.rstrip()} {word}"
    return f"{body.rstrip()}{mark}{comment}"
