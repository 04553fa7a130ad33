"""The `code` reward through the real command line: programs of a policy that knows nothing, judged in the sandbox."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from posttrain.config.env import Reward, SandboxSettings
from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.environment.make import environment
from posttrain.environment.tools.offered import OfferedTools
from posttrain.record import run_reader
from posttrain.sandbox import choose_backend
from posttrain.sandbox.backends import Namespaces
from posttrain.sandbox.sandbox_types import SandboxUnavailableError
from posttrain.verifier.configured import sources
from tests.engine.run_parts import RL, SMALL, play, refused, rl_steps
from tests.sandbox.sandbox_parts import backend


def asked(folder: Path, tests: object, reward: str = "code") -> tuple[str, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"def f(x): # x + {a}", "tests": tests, "completion": f"def f(x): return x + {a}"} for a in range(8)
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return (
        "verifiable",
        "sft=none",
        *SMALL,
        *RL,
        f"env.prompts={folder / 'mine.jsonl'}",
        f"env.rewards={reward}",
        "env.heldout=2",
    )


def test_a_program_earns_what_its_tests_say() -> None:
    """Both forms, from the configuration, on the sandbox this machine has."""
    task = Task(
        "t",
        "double it",
        info={"tests": [{"function": "f", "args": [2], "expected": 4}, {"function": "f", "args": [3], "expected": 6}]},
    )
    whole, part = sources((Reward(function="code"), Reward(function="code_fraction", weight=0.5)), [task])

    async def judge(text: str) -> list[tuple[float | None, str]]:
        attempt = Attempt(task, (text,), Stop.SAID)
        return [(j.verdict.score, j.verdict.kind) for j in (await whole(attempt), await part(attempt))]

    async def both() -> tuple[list[tuple[float | None, str]], list[tuple[float | None, str]]]:
        return await judge("```python\ndef f(x):\n    return 2 * x\n```"), await judge("def f(x): return 4")

    try:
        right, half = asyncio.run(both())
        assert right == [(1.0, ""), (1.0, "")]
        assert half == [(0.0, "wrong"), (0.5, "wrong")]
        assert whole.gauges()["verifier/code/seconds"].count == 2  # type: ignore[attr-defined]
        assert "verifier/code_fraction/seconds" in part.gauges()  # type: ignore[attr-defined]
    finally:
        whole.close()  # type: ignore[attr-defined]
        part.close()  # type: ignore[attr-defined]


def test_a_run_judges_programs(tmp_path: Path) -> None:
    folder = play(tmp_path / "run", *asked(tmp_path / "task", [{"function": "f", "args": [2], "expected": 4}]))
    step, _ = rl_steps(folder)
    assert step.gauges["rollout/unjudged"].mean == 0
    assert step.clock["verifier/code/seconds"] > 0
    recorded = run_reader.read_episodes(next((folder / "episodes").iterdir()))
    assert {j.source for r in recorded for j in r.episode.verdicts} == {"code"}


def test_tasks_without_tests_never_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "run", *asked(tmp_path / "task", []), "--out", str(tmp_path / "run"), code=4)
    assert "tests" in said


@pytest.mark.prove
def test_a_run_without_a_sandbox_says_so_on_every_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own description and in each verdict, those of other sources too. The stand-in called `none` contains them,
    all the same."""
    backend("namespaces")
    monkeypatch.setattr(
        choose_backend, "_unconfined", lambda packages, interpreter: Namespaces(packages, interpreter, name="none")
    )
    words = asked(tmp_path / "task", [{"function": "f", "args": [2], "expected": 4}], "code,exact")
    rows = (tmp_path / "task" / "mine.jsonl").read_text().splitlines()
    (tmp_path / "task" / "mine.jsonl").write_text(
        "".join(json.dumps(json.loads(r) | {"answer": "x"}) + "\n" for r in rows)
    )
    folder = play(tmp_path / "run", *words, "env.sandbox.name=none")
    told = json.loads((folder / "run.json").read_text())
    assert told["sandboxes"] == ["none"] and told["run"]["env"]["sandbox"]["name"] == "none"
    recorded = run_reader.read_episodes(next((folder / "episodes").iterdir()))
    verdicts = [j for r in recorded for j in r.episode.verdicts]
    assert {j.source for j in verdicts} == {"code", "exact"} and all("sandbox=none" in j.verdict.why for j in verdicts)


def test_where_programs_run_is_one_setting_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend("namespaces")
    for name in ("namespaces", "auto"):
        where = SandboxSettings(name=name)
        (code,) = sources((Reward(function="code"),), where=where)
        programs = environment(Env(name="programs", sandbox=where), 0)
        assert code.contained == "namespaces" and programs.contained == OfferedTools.of("python", where).contained == (
            "namespaces",
        )  # type: ignore[attr-defined]
        code.close()  # type: ignore[attr-defined]
    task = programs.train.task(0)
    verdict = asyncio.run(programs.judge(Attempt(task, (str(task.answer),), Stop.SAID)))[0].verdict
    assert verdict.score == 1.0 and programs.gauges()["verifier/programs/seconds"].count == 1
    programs.close()
    assert OfferedTools.of("files").contained == () == environment(Env(), 0).contained
    monkeypatch.delenv("ALLOW_UNSANDBOXED_CODE", raising=False)
    for build in (
        lambda w: sources((Reward(function="code"),), where=w),
        lambda w: environment(Env(name="programs", sandbox=w), 0),
        lambda w: OfferedTools.of("python", w),
    ):
        with pytest.raises(SandboxUnavailableError, match="refused for root|ALLOW_UNSANDBOXED_CODE=1"):
            build(SandboxSettings(name="none"))
