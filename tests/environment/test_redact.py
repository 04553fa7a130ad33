"""Secrets of the environment reach no record: not by verdicts, errors, observations, the world's state, notes or the
command line."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import posttrain
from posttrain.config.env import Reward
from posttrain.config.run import Env, Model
from posttrain.core.ports import Attempt, Talk
from posttrain.core.redact_secrets import scrubbed, scrubbed_data
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery import GALLERY
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.record import run_reader
from posttrain.role.episode_conversation import Conversation
from tests.tiny import MODEL, only_rl, tiny_run

SECRET = "sk-5f1c9a7e3b2d/4860+aZ=="
NAME = "MY_JUDGE_API_KEY"
GALLERY["leaks"] = f"{__name__}:Leaks"


@dataclass(frozen=True, kw_only=True)
class Leaks(Arithmetic):
    """Says its key wherever it can."""

    @property
    def alphabet(self) -> str:
        return "".join(map(chr, range(32, 127)))

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        await talk.say()
        talk.see(f"401 for {SECRET};")
        talk.leave({"headers": [f"Bearer {SECRET}"], SECRET: 1})
        said = await talk.say()
        if isinstance(talk, Conversation) and int(task.id.rpartition("-")[2]) % 2:
            raise ConnectionError(f"https://judge/?key={SECRET}")
        return said.stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        own = replace(self.verify(attempt), why=f"asked with {SECRET[:18]}...", kind=f"by {SECRET}")
        return (Judged(self.name, 1.0, own), *await self.added(attempt))

    def gold(self, task: Task) -> tuple[str, ...]:
        return super().gold(task) * 2

    def distractor(self, task: Task) -> tuple[str, ...]:
        return super().distractor(task) * 2


def test_no_record_of_a_run_holds_a_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, SECRET)
    monkeypatch.setattr(sys, "argv", ["posttrain", "run", f"key={SECRET}"])
    (tmp_path / "r.py").write_text(
        "import os\ndef reward(task, text):\n    raise RuntimeError('no answer for ' +"
        " os.environ['MY_JUDGE_API_KEY'])\n"
    )
    run = only_rl(tiny_run(steps=2, max_failed=1.0, eval_every=1))
    rewards = (Reward(function=f"{tmp_path / 'r.py'}:reward", weight=0.0),)
    env = Env(name="leaks", args={"max_terms": 2, "max_operand": 4}, heldout=6, rewards=rewards)
    posttrain.run(
        replace(run, env=env, model=Model(**{**MODEL.__dict__, "context": 128})), out=tmp_path / "run", quiet=True
    )
    found: list[str] = []
    seen = ""
    for path in (p for p in (tmp_path / "run").rglob("*") if p.is_file()):
        data = path.read_bytes()
        found += [str(path)] if SECRET.encode() in data or SECRET[:18].encode() in data else []
    for file in run_reader.episode_files(tmp_path / "run"):
        for r in run_reader.read_episodes(file.path):
            shown = characters_of(r.episode.segments[0].ids)
            told = f"{r.episode.error} {r.episode.state} {r.episode.verdicts} {r.episode.text} {shown}"
            found += [f"{file.path}: {told}"] if SECRET[:18] in told else []
            seen += told
    assert found == []
    for way in (
        f"401 for [{NAME}];",
        f"'Bearer [{NAME}]'",
        f"key=[{NAME}]",
        f"asked with [{NAME}]...",
        f"kind='by [{NAME}]'",
        f"no answer for [{NAME}]",
    ):
        assert way in seen, way
    assert f"key=[{NAME}]" in (tmp_path / "run" / "run.json").read_text()


def characters_of(ids: list[int]) -> str:
    from posttrain.engine.model.tiny_models import characters

    return str(characters(Leaks(heldout_count=0).alphabet).decode(list(ids)))


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (f"x {SECRET} y", f"x [{NAME}] y"),
        ("https://h/?k=sk-5f1c9a7e3b2d%2F4860%2BaZ%3D%3D&a=1", f"https://h/?k=[{NAME}]&a=1"),
        (f"{SECRET[:13]}...", f"[{NAME}]..."),
        (SECRET + SECRET, f"[{NAME}][{NAME}]"),
        (f"{SECRET[:9]} is too little to tell", f"{SECRET[:9]} is too little to tell"),
        ("", ""),
    ],
)
def test_what_is_taken_out(said: str, kept: str) -> None:
    assert scrubbed(said, {NAME: SECRET, "HOME": "/root/of/all"}) == kept


def test_a_secret_may_be_bytes_that_are_no_text() -> None:
    secret = os.fsdecode(b"sk-\xff-0123456789")
    assert scrubbed(f"k={secret}&u=sk-%FF-0123456789", {NAME: secret}) == f"k=[{NAME}]&u=[{NAME}]"


def test_data_keeps_its_shape() -> None:
    data = {"a": [1, None, SECRET, (True, SECRET)], SECRET: 2.0}
    assert scrubbed_data(data, {NAME: SECRET}) == {"a": [1, None, f"[{NAME}]", (True, f"[{NAME}]")], f"[{NAME}]": 2.0}
    assert scrubbed_data(Verdict, {NAME: SECRET}) is Verdict


def test_a_secret_that_comes_or_changes_later_is_scrubbed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of the environment is kept between texts, and not longer than the environment stays as it is."""
    text = "401 for sk-first-0123 and sk-second-4567"
    monkeypatch.delenv(NAME, raising=False)
    assert scrubbed(text) == text == scrubbed(text)
    monkeypatch.setenv(NAME, "sk-first-0123")
    assert scrubbed(text) == f"401 for [{NAME}] and sk-second-4567"
    monkeypatch.setenv(NAME, "sk-second-4567")
    assert scrubbed(text) == f"401 for sk-first-0123 and [{NAME}]"
    monkeypatch.delenv(NAME)
    assert scrubbed(text) == text


def test_a_text_is_scrubbed_without_reading_all_variables_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each verdict has two texts: to decode the environment for each took two thirds of the learner's work on an
    answer."""
    monkeypatch.setenv(NAME, SECRET)
    scrubbed("first")
    read = list[object]()
    monkeypatch.setattr("posttrain.core.redact_secrets.forms_of", lambda environment: read.append(environment) or ())
    assert scrubbed(f"401 for {SECRET}") == f"401 for [{NAME}]" and not read
