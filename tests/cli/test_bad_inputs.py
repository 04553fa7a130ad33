"""What goes wrong at the command line says what to change, ends with its exit code, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from posttrain.cli import main
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.stages import loop
from tests.engine.run_parts import LADDER, TEXTS, mine, model_at, moved, play, refused, rl_steps

# --- the model --------------------------------------------------------------------------------------------------------


def test_a_model_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for path in (str(tmp_path / "nothing"), "runs/nothing"):
        said = refused(capsys, "run", *mine(tmp_path / "data"), f"model={path}", code=2)
        assert f"model.path={path}: no such directory" in said
    assert not list((tmp_path / "runs").iterdir()), "nothing was begun"


def test_a_tokenizer_without_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_at(tmp_path / "model")
    for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
        data = json.loads((model / name).read_text())
        for key in ("eos_token", "eos_token_id"):
            data.pop(key, None)
        (model / name).write_text(json.dumps(data))
    said = refused(capsys, "run", *mine(tmp_path / "data"), f"model={model}", code=4)
    assert "no EOS token" in said and 'Set "eos_token" in tokenizer_config.json' in said


def test_a_vocabulary_larger_than_the_embedding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = model_at(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    rows = {n: t[:9].clone() if "embed_tokens" in n or "lm_head" in n else t for n, t in tensors.items()}
    save_file(rows, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 9, "pad_token_id": None}
    (model / "config.json").write_text(json.dumps(config))
    said = refused(capsys, "run", *mine(tmp_path / "data"), f"model={model}", code=4)
    assert "the model has 9 embedding rows" in said


def test_a_prompt_longer_than_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "run", *mine(tmp_path / "data"), "model.context=7", "--out", str(tmp_path / "run"), code=4)
    assert (
        "mine.jsonl:1:" in said
        and "the prompt has 7 tokens" in said
        and "model.context" in said
        and not (tmp_path / "run").exists()
    )
    said = refused(capsys, "run", *mine(tmp_path / "data"), "model.context=6", "--out", str(tmp_path / "other"), code=2)
    assert "rl.sampling.max_tokens=6 leaves no room" in said and not (tmp_path / "other").exists()


def test_rows_that_are_too_long_are_counted_and_no_larger_context_is_advised_than_the_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, model = mine(tmp_path / "data"), model_at(tmp_path / "model")
    lines = (tmp_path / "data" / "mine.jsonl").read_text().splitlines()
    lines[3:5] = [line.replace("say ", "say " * 200) for line in lines[3:5]]
    (tmp_path / "data" / "mine.jsonl").write_text("\n".join(lines))
    bound = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    for context, advice in (
        (bound, "shorten it, as the model has no more positions"),
        (bound - 1, "raise model.context"),
    ):
        said = refused(capsys, "run", *words, f"model={model}", f"model.context={context}", code=4)
        assert "mine.jsonl:4:" in said and f"{advice} (rows that are too long: 2 of 20)" in said


@pytest.mark.prove
def test_a_model_that_stops_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Responses of nothing but the stop token are responses: the run goes on, and says that nothing differs."""
    model = model_at(tmp_path / "model", "llama")
    tensors = load_file(model / "model.safetensors")
    stop = json.loads((model / "config.json").read_text())["eos_token_id"]
    for name, tensor in tensors.items():
        if "norm.weight" in name or "lm_head" in name or "embed" in name:
            tensor.fill_(0.0 if "lm_head" in name else 1.0)
    tensors["lm_head.weight"][stop] = 1.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    folder = play(tmp_path / "run", *mine(tmp_path / "data"), f"model={model}")
    assert "no group has spread" in capsys.readouterr().out
    assert {s.gauges["rollout/tokens"].mean for s in rl_steps(folder)} == {1.0}
    assert main(["show", str(folder)]) == 0 and "stop" in capsys.readouterr().out


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["grpo", *(pytest.param(x, marks=pytest.mark.prove) for x in ("reinforce", "rloo", "dr_grpo", "dapo", "ppo"))],
)
def test_equal_rewards_are_noted_and_the_run_goes_on(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = mine(tmp_path / "data", reward="def reward(task, text):\n    return 0.0\n")
    folder = play(tmp_path / "run", *words, f"algorithm={name}")
    assert len(rl_steps(folder)) == 2
    assert (
        all(
            any("spread" in n or "passed the filter" in n or "same reward" in n for n in s.notes)
            for s in rl_steps(folder)
        )
        and "note:" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("def reward(task, text):\n    return 1 / 0\n", "ZeroDivisionError"),
        *(
            pytest.param(*x, marks=pytest.mark.prove)
            for x in (
                ("def reward(task, text):\n    return float('nan')\n", "nan"),
                ("def reward(prompts, completions, **columns):\n    return [1.0, 2.0]\n", "2"),
            )
        ),
    ],
    ids=["raises", "nan", "count"],
)
def test_a_broken_reward_stops_the_run(
    body: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "run", *mine(tmp_path / "data", reward=body), "--out", str(tmp_path / "run"), code=7)
    assert kind in said and "mine.py" in said and "rl.max_failed" in said
    mine(tmp_path / "data")
    assert "mine.py was changed" in refused(capsys, "run", "--resume", str(tmp_path / "run"), code=5)
    assert main(["run", "--resume", str(tmp_path / "run"), "--accept-changed"]) == 0, "mended, it goes on"
    assert len(rl_steps(tmp_path / "run")) == 2


@pytest.mark.prove
def test_samples_a_reward_cannot_judge_are_left_out(tmp_path: Path) -> None:
    body = (
        "def reward(task, text):\n    assert sum(map(ord, text)) % 4, 'unlucky'\n    return float(len(text) +"
        " sum(map(ord, text)) % 7)\n"
    )
    folder = play(tmp_path / "run", *mine(tmp_path / "data", reward=body), "rl.max_failed=0.9")
    unjudged = sum(s.gauges["rollout/unjudged"].sum for s in rl_steps(folder))
    recorded = [
        r for f in run_reader.episode_files(folder) if f.kind == "train" for r in run_reader.read_episodes(f.path)
    ]
    assert unjudged > 0 and sum(r.episode.reward is None for r in recorded) == unjudged
    assert all(
        r.advantage is None or not any(a.any() for a in r.advantage) for r in recorded if r.episode.reward is None
    ) and moved(folder)


# --- data -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        (['{"prompt": "a", "answer": "1"}', '{"prompt": "b", '], "mine.jsonl:2"),
        (['{"prompt": "a", "answer": "1", "id": "x"}', '{"prompt": "b", "answer": "1", "id": "x"}'], "mine.jsonl:2"),
    ],
    ids=["cut line", "ids twice"],
)
def test_a_bad_row_is_named_by_file_and_line(
    lines: list[str], where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = mine(tmp_path / "data")
    (tmp_path / "data" / "mine.jsonl").write_text("\n".join(lines))
    assert where in refused(capsys, "run", *words, code=4)


@pytest.mark.prove
def test_line_ends_byte_order_mark_and_emoji_are_fine(tmp_path: Path) -> None:
    words = mine(tmp_path / "data")
    rows = "".join(json.dumps({"prompt": t, "answer": "🙂"}, ensure_ascii=False) + "\r\n" for t in TEXTS[:12])
    (tmp_path / "data" / "mine.jsonl").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert len(rl_steps(play(tmp_path / "run", *words))) == 2


# --- the run folder ---------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_a_full_disk_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save, calls = loop.save_optimizer, list[Path]()

    def full(folder: Path, optimizer: Any) -> None:
        calls.append(folder)
        if len(calls) == 2:
            (folder / "half").write_bytes(b"x" * 1000)
            raise OSError(errno.ENOSPC, "No space left on device")
        save(folder, optimizer)

    monkeypatch.setattr(loop, "save_optimizer", full)
    words = mine(tmp_path / "data")
    said = refused(capsys, "run", *words, "--out", str(tmp_path / "run"), code=5)
    assert "the disk is full" in said and "The last good checkpoint is" in said and "--resume" in said
    assert find(tmp_path / "run").state["running"]["step"] == 1 and not list((tmp_path / "run").rglob("half"))
    assert main(["run", "--resume", str(tmp_path / "run")]) == 0
    assert [s.index for s in rl_steps(tmp_path / "run")] == [1, 2]


@pytest.mark.prove
def test_a_folder_that_holds_a_run_or_is_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = play(tmp_path / "run", *mine(tmp_path / "data"))
    before = (folder / "run.json").read_bytes()
    assert f"--resume {folder}" in refused(capsys, "run", *mine(tmp_path / "data"), "--out", str(folder), code=5)
    hold = (
        "import sys; from posttrain.record.run_folder import RunFolder;"
        f" b, _ = RunFolder.open_for_resume({str(folder)!r}); print('held',"
        " flush=True); sys.stdin.read()"
    )
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        said = refused(capsys, "run", "--resume", str(folder), code=5)
        assert str(other.pid) in said and "use" in said
        other.communicate()
    assert (folder / "run.json").read_bytes() == before and main(["run", "--resume", str(folder)]) == 0


# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("run", "laddder"), "did you mean 'ladder'"),
        (("run", "ladder", "stepps=3"), "did you mean pretrain.steps"),
        (("run", "ladder", "steps=3"), "rl.steps=3"),
        (("run", "ladder", "rl.steps=many"), "rl.steps=many: expected a whole number"),
        (("run", "ladder", "algorithm=grop"), "did you mean 'grpo'"),
        (("run", "ladder", "env=arithmetik"), "did you mean 'arithmetic'"),
        (("run", "ladder", "env=countdown"), "leave the stage out with cot=none"),
        (("run", "ladder", "rl=none"), "must name an earlier stage"),
        (("run", "ladder", "rl=none", "rl.steps=3"), "keep one"),
        (("run", "arithmetic", "rl=none", "sft=none"), "at least one stage"),
        (("run", "ladder", "evaluation.samples=0"), "evaluation.samples=0: must be >= 1"),
        (("run", "ladder", "env.heldout=-1"), "env.heldout=-1: must be >= 0"),
        (("run", "ladder", "slots=0"), "slots=0: must be >= 1"),
        (("run", "--resume", "somewhere", "ladder"), "leave out recipe"),
    ],
)
def test_words_that_mean_nothing(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert says in refused(capsys, *words, code=2)


def test_a_missing_tracker_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    said = refused(capsys, "run", *LADDER, "trackers=wandb", "--out", str(tmp_path / "run"), code=2)
    assert "pip install wandb" in said and not (tmp_path / "run").exists()
