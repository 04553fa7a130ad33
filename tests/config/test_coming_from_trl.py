"""docs/start/coming-from-trl.md has every field of TRL's configurations, and each name of ours on it can be set.

`tests/golden/trl_fields.json` holds the fields of the TRL release that the page was written for. Where TRL can be
imported, the installed one is compared as well; `POSTTRAIN_UPDATE=1` then writes the file anew. Elsewhere a test marked
prove takes the release from the package index and reads its classes without importing them: the pinned release, or the
newest one with `POSTTRAIN_TRL=newest`, as `make everything` has it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import posttrain
from posttrain.config.overrides import apply, surface
from posttrain.config.run import Model
from posttrain.config.trl_names import FIRST_TRIED, OTHERS
from posttrain.engine.model.tiny_models import build_module
from posttrain.recipe.recipes import recipe
from posttrain.system.errors import ConfigError
from tests.engine.engine_parts import tiny
from tests.environment.docs_page_parts import SPAN, cells, settable
from tests.environment.template_parts import FAMILIES, tokenizer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/start/coming-from-trl.md"
RECORDED = ROOT / "tests" / "golden" / "trl_fields.json"
TABLES = {
    "GRPOConfig": "grpo",
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "dpo",
    "RewardConfig": "reward_model",
    "TrainingArguments": "grpo",
}
"""The first word of a table's head: the class whose fields it lists, and the recipe whose settings it names."""
OWN = tuple(t for t in TABLES if t != "TrainingArguments")
"""The classes of TRL itself."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the page: fields of TRL, what the second column says, and why."""

    table: str
    fields: tuple[str, ...]
    here: str
    why: str

    @property
    def spans(self) -> list[str]:
        return SPAN.findall(self.here)


def rows(text: str) -> Iterator[Row]:
    table = ""
    for line in text.splitlines():
        row = cells(line)
        if len(row) != 3:
            table = ""
        elif (head := row[0].strip("`")) in TABLES and row[1] == "here":
            table = head
        elif table and not row[0].startswith("---"):
            yield Row(table, tuple(SPAN.findall(row[0])), row[1], row[2])


ROWS = list(rows(PAGE.read_text(encoding="utf-8")))


@pytest.mark.prove
def test_every_dtype_of_ours_is_on_the_page() -> None:
    """A row that says that there is none was written before it came."""
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`model.dtype={d}`" in text for d in get_args(get_type_hints(Model)["dtype"]) if d != "float32")


def recorded() -> dict[str, Any]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))


def installed() -> dict[str, Any] | None:
    """The fields of the installed TRL, or None where there is none."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return None
    from transformers import TrainingArguments
    from trl import DPOConfig, GRPOConfig, KTOConfig, RewardConfig, SFTConfig  # pyright: ignore[reportMissingImports]

    def names(cls: Any) -> list[str]:
        return sorted(f.name for f in dataclasses.fields(cls))

    base = names(TrainingArguments)
    own = {
        c.__name__: [n for n in names(c) if n not in base]
        for c in (GRPOConfig, SFTConfig, DPOConfig, KTOConfig, RewardConfig)
    }
    return {
        "trl": version,
        "transformers": importlib.metadata.version("transformers"),
        **own,
        "TrainingArguments": base,
    }


@pytest.fixture(scope="module", autouse=True)
def updated() -> None:
    found = installed()
    if os.environ.get("POSTTRAIN_UPDATE") and found is not None:
        RECORDED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def against(wanted: dict[str, Any]) -> list[str]:
    """What the page lacks, has twice, or has although TRL does not."""
    out = list[str]()
    for table in TABLES:
        listed = [f for row in ROWS if row.table == table for f in row.fields]
        out += [f"{table}.{f} is not on the page" for f in sorted({*wanted[table]} - {*listed})]
        out += [
            f"{table}.{f} is on the page and not in TRL {wanted['trl']}" for f in sorted({*listed} - {*wanted[table]})
        ]
        out += [f"{table}.{f} is on the page twice" for f in sorted({f for f in listed if listed.count(f) > 1})]
    return out


def test_the_page_has_every_recorded_field() -> None:
    assert against(recorded()) == []


def test_the_recorded_release_is_the_pinned_one_and_the_one_on_the_page() -> None:
    pinned = re.search(r"^trl==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None and recorded()["trl"] == pinned[1]
    assert f"TRL {pinned[1]}" in PAGE.read_text(encoding="utf-8")


def test_the_page_has_every_field_of_the_installed_trl() -> None:
    """Without TRL the record stands for it, so nothing is skipped."""
    found = installed()
    assert against(found or recorded()) == []
    if found is not None and found["trl"] == recorded()["trl"]:
        assert {k: found[k] for k in TABLES if k != "TrainingArguments"} == {
            k: recorded()[k] for k in TABLES if k != "TrainingArguments"
        }


# --- a release that is not installed ---------------------------------------------------------------------------------


def declared(sources: Iterable[str | bytes], name: str) -> list[str]:
    """The fields of a dataclass, with those of its bases that stand in the same sources. Nothing is imported."""
    classes = {n.name: n for text in sources for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ClassDef)}

    def of(known: str) -> list[str]:
        node = classes.get(known)
        if node is None:
            return []
        own = [s for s in node.body if isinstance(s, ast.AnnAssign) and "ClassVar" not in ast.unparse(s.annotation)]
        bases = [f for b in node.bases for f in of(ast.unparse(b).rpartition(".")[2])]
        return [*bases, *(s.target.id for s in own if isinstance(s.target, ast.Name))]

    assert name in classes, f"there is no class {name}: TRL has it elsewhere now"
    return list(dict.fromkeys(of(name)))


def test_fields_are_read_without_importing() -> None:
    base = "import nothing\nclass Base(Elsewhere):\n    a: int = 0\n    k: ClassVar[int] = 1\n    b: str\n"
    text = "class GRPOConfig(x.Base):\n    a: int = 2\n    c: float | None = field(default=None)\n    d = 3\n"
    assert declared([text, base], "GRPOConfig") == ["a", "b", "c"]
    with pytest.raises(AssertionError, match="TRL has it elsewhere"):
        declared([text], "SFTConfig")


@pytest.mark.prove
def test_the_page_has_every_field_of_a_release_from_the_index(tmp_path: Path) -> None:
    newest = os.environ.get("POSTTRAIN_TRL") == "newest"
    wanted = "trl" if newest else f"trl=={recorded()['trl']}"
    words = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, "--dest", str(tmp_path), wanted], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"{wanted} cannot be had from the package index: {done.stderr.strip()[-200:]}")
    (wheel,) = tmp_path.glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        sources = [archive.read(n) for n in archive.namelist() if re.fullmatch(r"trl/trainer/\w+\.py", n)]
    base = {*recorded()["TrainingArguments"]}
    found = {c: sorted({*declared(sources, c)} - base) for c in OWN}
    assert all(len(f) > 10 for f in found.values())
    version = wheel.name.split("-")[1]
    missing = against({**recorded(), **found, "trl": version})
    assert missing == [], (
        f"TRL {version}: write these fields into docs/start/coming-from-trl.md, and pin it in constraints.txt"
    )
    if version == recorded()["trl"]:
        assert found == {c: recorded()[c] for c in found}


def test_every_row_says_why() -> None:
    assert [r for r in ROWS if not r.fields or not r.why or (r.here != "none" and not r.spans)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.fields[0])
def test_every_name_of_ours_can_be_set(row: Row) -> None:
    run = recipe(TABLES[row.table])
    for words in row.spans:
        settable(run, words)


def test_the_check_refuses_what_cannot_be_set() -> None:
    for words in ("rl.nonsense", "rl.prompts=many", "pull.nothing", "posttrain run"):
        with pytest.raises((AssertionError, ConfigError)):
            settable(recipe("grpo"), words)


def test_a_name_of_another_library_leads_to_ours(tmp_path: Path) -> None:
    paths = [p for name in ("grpo", "sft", "dpo") for p, _ in surface(recipe(name))]
    fields = {f for names in recorded().values() if isinstance(names, list) for f in names}
    of_peft = ("r", "lora_r", "lora_alpha", "lora_dropout", "target_modules", "load_in_4bit", "load_in_8bit")
    arguments = ("train_dataset", "eval_dataset", "dataset_name", "reward_funcs", "peft_config", "callbacks")
    gone = ("model_name_or_path", "max_prompt_length")
    assert not {*OTHERS} - fields - {*of_peft, *arguments, *gone, "warmup_ratio", "fp16", "optim"}
    for name, ours in {**OTHERS, **FIRST_TRIED}.items():
        known = f"{name} of other libraries" if name in OTHERS else name
        with pytest.raises(ConfigError, match=re.escape(f"{known} is here: {ours}")):
            apply(recipe("grpo"), [f"{name}=1"])
        if re.fullmatch(r"[a-z_.0-9]+", ours) and ours not in ("on_step", "scale"):
            assert any(p == ours or p.endswith(f".{ours}") for p in paths), ours
    with pytest.raises(ConfigError, match="reward_funcs of other libraries is here: env.rewards"):
        posttrain.run("grpo", reward_funcs=[len], out=tmp_path / "a")
    with pytest.raises(ConfigError, match=r"rows of yours are env=prompts env\.prompts=trl-lib/Capybara"):
        posttrain.run("sft", env="trl-lib/Capybara", out=tmp_path / "b")


# --- four scripts, side by side ---------------------------------------------------------------------------------------

TOYS = {
    "sft": ("sft.batch=2", "env.heldout=1"),
    "dpo": ("dpo.steps=2", "dpo.batch=2", "env.heldout=1"),
    "reward_model": ("reward_model.steps=2", "reward_model.batch=2", "env.heldout=1"),
    "grpo": ("rl.steps=1", "rl.prompts=2", "rl.siblings=2", "rl.sampling.max_tokens=4", "env.heldout=1"),
    "arithmetic": ("rl.steps=3", "rl.prompts=2", "rl.siblings=2", "env.heldout=4", "rl.eval_every=0"),
}
"""Sizes in place of those on the page."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def small(name: str, words: Iterable[str]) -> list[str]:
    toy = [*TOYS[name], "threads=1"]
    return [w for w in words if w.partition("=")[0] not in {t.partition("=")[0] for t in toy}] + toy


def chat_model(folder: Path) -> None:
    """A model with the template of Qwen, as the quick starts use one."""
    words = tokenizer(FAMILIES["qwen2.5"])
    words.eos_token = "<|im_end|>"
    build_module(dataclasses.replace(tiny("qwen3"), context=256), words, 0).save_pretrained(folder)
    words.save_pretrained(folder)


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's data, its reward, and a tiny model called my-model."""
    monkeypatch.chdir(tmp_path)
    for name, text in zip(("chat.jsonl", "pairs.jsonl", "mine.jsonl"), blocks("json"), strict=True):
        rows = text.strip().splitlines()
        Path(name).write_text("\n".join([*rows, *(x.replace("What is", "And") for x in rows)]) + "\n")
    Path("mine.py").write_text(next(b for b in blocks("python") if b.startswith("# mine.py")))
    chat_model(tmp_path / "my-model")
    return tmp_path


@pytest.mark.prove
def test_the_command_lines_run_as_printed(there: Path) -> None:
    from posttrain.cli import main

    for line in "".join(blocks("sh")).strip().splitlines():
        words = shlex.split(line)[1:]
        if words[0] == "run":
            words = [*words[:2], *small(words[1], words[2:-2]), *words[-2:]]
        assert main(words) == 0, line
    made = ("sft-model", "dpo-model", "reward-model", "merged")
    assert all((there / name / "config.json").exists() for name in made)
    assert (there / "adapter" / "adapter_config.json").exists()


@pytest.mark.prove
def test_the_programs_run_as_printed(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, ours = posttrain.run, [b for b in blocks("python") if "posttrain.run(" in b]
    monkeypatch.setattr(posttrain, "run", lambda name, *words, **more: real(name, *small(name, words), **more))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.syspath_prepend(there)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    for text in ours:
        exec(compile(text, str(PAGE), "exec"), {})
    sys.modules.pop("mine")
    assert len(ours) == 5
    for name in ("sft-python", "dpo-python", "reward-python", "grpo-python"):
        assert (there / name / "config.json").exists()


# --- the quick starts of TRL's documentation, on rows of the same form ------------------------------------------------


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def asked(i: int) -> list[dict[str, str]]:
    return [said("user", f"What is {i}+{i + 1}?")]


def answered(i: int, text: str) -> list[dict[str, str]]:
    return [*asked(i), said("assistant", text)]


HUB: dict[str, Callable[[int], dict[str, Any]]] = {
    "trl-lib/Capybara": lambda i: {
        "source": "Dove",
        "messages": [
            *answered(i, f"It is {2 * i + 1}."),
            said("user", "Twice that?"),
            said("assistant", f"{4 * i + 2}"),
        ],
        "num_turns": 2,
    },
    "trl-lib/ultrafeedback_binarized": lambda i: {
        "chosen": answered(i, f"It is {2 * i + 1}."),
        "rejected": answered(i, "I do not know."),
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    },
    "trl-lib/DeepMath-103K": lambda i: {"prompt": asked(i), "solution": f"${2 * i + 1}$"},
    "trl-lib/tldr": lambda i: {"prompt": f"SUBREDDIT: r/sums POST: {i}+{i + 1}? TL;DR:", "completion": f" {2 * i + 1}"},
}
"""Data sets that the quick starts load, as rows of the same columns."""
REWARDS = """
from math_verify import parse, verify


def reward_num_unique_letters(completions, **kwargs):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def accuracy_reward(completions, solution, **kwargs):
    def one(text, wanted):
        gold = parse(wanted, parsing_timeout=None)
        found = parse(text, parsing_timeout=None)
        return float(verify(gold, found, timeout_seconds=None)) if gold else None

    return [one(c[0]["content"], s) for c, s in zip(completions, solution, strict=True)]
"""
QUICK = {
    "sft": ("sft", "trl-lib/Capybara", ()),
    "sft of prompts and completions": ("sft", "trl-lib/tldr", ()),
    "dpo": ("dpo", "trl-lib/ultrafeedback_binarized", ()),
    "reward model": ("reward_model", "trl-lib/ultrafeedback_binarized", ()),
    "grpo": ("grpo", "trl-lib/DeepMath-103K", ("env.rewards=rewards.py:accuracy_reward",)),
    "grpo with LoRA": (
        *("grpo", "trl-lib/DeepMath-103K"),
        ("env.rewards=rewards.py:reward_num_unique_letters", "model.lora.rank=8"),
    ),
}
"""Recipe, data set and the further words of each quick start."""


@pytest.mark.prove
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_start_of_trl_runs_with_the_paths_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model and data are given, and sizes are small: no other setting is needed, and no column renamed."""
    recipe_name, data, words = QUICK[name]
    monkeypatch.chdir(tmp_path)
    chat_model(Path("Qwen2.5-0.5B"))
    Path("data.jsonl").write_text("".join(json.dumps(HUB[data](i)) + "\n" for i in range(12)))
    Path("rewards.py").write_text(REWARDS)
    toys = (*TOYS[recipe_name], *(("sft.steps=2",) if recipe_name == "sft" else ()), "threads=1")
    result = posttrain.run(recipe_name, "model=Qwen2.5-0.5B", "env.prompts=data.jsonl", *words, *toys, out="run")
    (stage,) = result.stages
    assert stage.loss if recipe_name == "sft" else stage.agreement if recipe_name != "grpo" else stage.reward
