"""`posttrain check`: every planted hole is found by the probe that is for it, and a sound verifier passes them all."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.build.preflight_checks import rewards_tell, split_is_clean
from posttrain.cli import main
from posttrain.config.run import Env
from posttrain.core.ports import Attempt, Talk
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.check import PROBES, RATE, CheckReport, Mark, ProbeResult, Subject, check, workings
from posttrain.environment.check.workings import WORKINGS, sandboxes
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.gallery.calculator import CalculatorEnv
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.rows.row_reader import PromptRow, digest
from posttrain.environment.scripted_policy import judged
from posttrain.evaluation import check_environment
from posttrain.evaluation.check_environment import expected_rate
from posttrain.record import run_reader
from posttrain.sandbox.backends import Unconfined
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.system.errors import ConfigError
from posttrain.verifier.code.code_reward import Code
from posttrain.verifier.user_functions import source
from tests.sandbox.sandbox_parts import backend, made, patched
from tests.tiny import only_rl, tiny_run

Judge = Callable[[Task, str], Any]


def rows(count: int = 24) -> tuple[PromptRow, ...]:
    """Products of different numbers, so that no answer is common."""
    tasks = [Task(id=f"t{i}", prompt=f"{i} times seventeen", answer=str(17 * i)) for i in range(3, 3 + count)]
    return tuple(PromptRow(t, None, digest(t.prompt)) for t in tasks)


async def tried(
    *judges: Judge, weights: tuple[float, ...] = (1.0, 1.0), rate: float = 1.0, tasks: int = 8
) -> CheckReport:
    rewards = tuple(
        source(j, name=f"judge{i}", weight=w) for i, (j, w) in enumerate(zip(judges, weights, strict=False))
    )
    return await check(PromptsEnv(rows=rows(), rewards=rewards), tasks=tasks, rate=rate)


async def asked(probe: str, judge: Judge, rate: float = 1.0) -> ProbeResult:
    """What one probe finds."""
    env = PromptsEnv(rows=rows(), rewards=(source(judge, name="judge"),))
    subject = await Subject.of(env, [r.task for r in rows()][:16], rate)
    return await next(p for p in PROBES if p.name == probe)(subject)


def exact(task: Task, text: str) -> float:
    return float(text.strip() == task.answer)


async def test_a_sound_verifier_passes_everything() -> None:
    report = await tried(exact)
    assert report.passed and report.sources == ("judge0",)
    assert {
        "gold",
        "silence",
        "constant",
        "random strings",
        "templates",
        "several answers",
        "odd texts",
        "throughput",
    } <= set(report.marked(Mark.OK))
    assert set(report.marked(Mark.WARN)) == {"paraphrase", "gold variants"}, (
        "it reads the bare answer alone, and the report says so"
    )


def boxed(task: Task, text: str) -> float:
    return float(f"\\boxed{{{task.answer}}}" == text[text.rfind("\\boxed") :].strip())


async def test_the_form_of_right_answers_is_found() -> None:
    report = await tried(boxed)
    found = next(f for f in report.findings if f.probe == "gold")
    assert report.passed and "\\\\boxed{X}" in found.detail


# --- holes ------------------------------------------------------------------------------------------------------------


def contains(task: Task, text: str) -> float:
    return float(str(task.answer) in text.replace(",", " ").split())


def prefix(task: Task, text: str) -> float:
    """Half-written answers count, the empty one too."""
    return float(str(task.answer).startswith(text.strip()))


def either_end(task: Task, text: str) -> float:
    words = text.split() or [""]
    return float(task.answer in (words[0], words[-1]) and len(words) < 4)


def near_enough(task: Task, text: str) -> float:
    """A comparison that is false for NaN both ways."""
    try:
        return float(not abs(float(text) - int(task.answer)) > 0.01)
    except ValueError:
        return 0.0


def long_is_good(task: Task, text: str) -> float:
    return float(text.strip() == task.answer or (len(text) >= 200 and len(set(text)) > 5))


def believes(task: Task, text: str) -> float:
    return float(text.strip() == task.answer or "correct" in text)


def zero_is_fine(task: Task, text: str) -> float:
    return float(text.strip() in (task.answer, "0"))


def raises(task: Task, text: str) -> float:
    return float(int(text.strip() or 0) == int(task.answer))


def one_more(task: Task, text: str) -> float:
    return float(text.strip() in (str(task.answer), str(int(task.answer) + 17)))


def forgets(task: Task, text: str) -> float:
    return float(text.strip() == task.answer and int(task.answer) % 2)


def pays_all(task: Task, text: str) -> float:
    return 1.0


def wavers(task: Task, text: str) -> float:
    return float(random.random() < 0.5)


CALLS = itertools.count()


def first_ten(task: Task, text: str) -> float:
    """Remembers: from some call on it says no."""
    return float(text.strip() == task.answer and next(CALLS) % 40 < 30)


class Shared:
    """One place for everybody's answer, as in a parser that keeps what it reads in a global."""

    task: Task | None = None
    pause = threading.Event()

    def __call__(self, task: Task, text: str) -> float:
        self.task = task
        self.pause.wait(0.002)
        return float(text.strip() == self.task.answer)


def slow(task: Task, text: str) -> float:
    time.sleep(0.02)
    return exact(task, text)


@pytest.mark.parametrize(
    ("judge", "probe"),
    [
        (contains, "several answers"),
        (either_end, "several answers"),
        (prefix, "silence"),
        (near_enough, "templates"),
        (believes, "templates"),
        (long_is_good, "random strings"),
        (zero_is_fine, "constant"),
        (raises, "odd texts"),
        (one_more, "distractor"),
        (forgets, "gold"),
        (pays_all, "gold"),
        (wavers, "the same twice"),
        (first_ten, "the same twice"),
    ],
)
async def test_a_hole_is_found_by_its_probe(judge: Judge, probe: str) -> None:
    found = await asked(probe, judge)
    assert found.mark is Mark.FAIL and found.detail and found.advice
    assert (await asked(probe, exact)).mark is Mark.OK


async def test_a_verifier_that_shares_a_place_is_right_alone_and_wrong_in_a_crowd() -> None:
    assert (await asked("the same twice", Shared())).mark is Mark.OK
    assert (await asked("the same in a crowd", Shared())).mark is Mark.FAIL


@pytest.mark.prove
async def test_one_that_is_slower_than_expected_is_found() -> None:
    assert (await asked("throughput", slow, rate=10_000)).mark is Mark.FAIL
    assert (await asked("throughput", slow, rate=0.5)).mark is Mark.OK


def brief(task: Task, text: str) -> float:
    return 1.0 / (1 + len(text))


@pytest.mark.prove
async def test_a_shaping_reward_is_told_apart_and_must_not_outweigh_the_answer() -> None:
    well = await tried(exact, brief, weights=(1.0, 0.1))
    assert well.passed and "do not tell right answers from wrong ones: judge1" in next(
        f.detail for f in well.findings if f.probe == "gold"
    )
    badly = await tried(exact, brief, weights=(0.1, 1.0))
    assert badly.marked(Mark.FAIL) == ("order",)


# --- rewards that are graded, or look elsewhere -----------------------------------------------------------------------


def target_length(task: Task, text: str) -> float:
    """A graded reward of length: it never looks at the answer."""
    return max(0.0, 1 - abs(len(text) - 20) / 20)


def thinks(task: Task, text: str) -> float:
    return float("<think>" in text)


def close(task: Task, text: str) -> float:
    """Partial credit by the distance of a number."""
    try:
        return 1 / (1 + abs(float(text.strip()) - int(task.answer)))
    except (ValueError, OverflowError):
        return 0.0


def overlap(task: Task, text: str) -> float:
    """Partial credit for common words."""
    said, wanted = set(text.split()), set(str(task.answer).split())
    return 2 * len(said & wanted) / (len(said) + len(wanted)) if said and wanted else 0.0


def right_and_brief(task: Task, text: str) -> float:
    return float(text.strip() == task.answer) + 0.2 / (1 + len(text) / 50)


@pytest.mark.parametrize("judge", [close, overlap, right_and_brief])
async def test_partial_credit_is_not_failed(judge: Judge) -> None:
    report = await tried(judge)
    assert report.passed, [f for f in report.findings if f.mark is Mark.FAIL]
    assert {"gold", "silence", "constant"} <= set(report.marked(Mark.OK))


async def test_what_a_graded_reward_pays_less_is_not_called_unpaid() -> None:
    found = await asked("paraphrase", overlap)
    assert "paid less: after words, after a thought" in found.detail
    spelt = await asked("gold variants", right_and_brief)
    assert spelt.mark is Mark.WARN and "paid less: space before" in spelt.detail


@pytest.mark.parametrize("judge", [target_length, brief, thinks])
async def test_a_reward_of_the_text_alone_is_not_failed_and_what_is_left_out_is_said(judge: Judge) -> None:
    report = await tried(judge)
    assert report.passed and not report.marked(Mark.WARN)
    gold = next(f for f in report.findings if f.probe == "gold")
    assert gold.mark is Mark.SKIP and "reads the text alone" in gold.detail
    left = [f for f in report.findings if f.probe in ("order", "silence", "constant", "templates")]
    assert {f.detail for f in left} == {"no reward looks at the answer, so no text is right or wrong"}


async def test_a_reward_that_looks_at_another_column_is_not_failed() -> None:
    def long_enough(task: Task, text: str) -> float:
        return min(1.0, len(text) / task.info["wanted"])

    with_column = tuple(replace(r, task=replace(r.task, info={"wanted": 10 + i})) for i, r in enumerate(rows()))
    env = PromptsEnv(rows=with_column, rewards=(source(long_enough, name="long_enough"),))
    report = await check(env, tasks=16, rate=1.0)
    gold = next(f for f in report.findings if f.probe == "gold")
    assert report.passed and "reads other columns" in gold.detail and "completion" in gold.detail


def polite(task: Task, text: str) -> float:
    """A rubric of at most .9 that pays silence."""
    return 0.25 + 0.65 * ("thank" in text.lower())


@pytest.mark.prove
async def test_without_a_right_answer_empty_ones_are_played_beside_real_ones() -> None:
    """What each is paid stands beside what the answers of a run earned, and what could not be tried is counted."""
    bare = tuple(replace(r, task=replace(r.task, answer=None)) for r in rows())
    env, said = PromptsEnv(rows=bare, rewards=(source(polite, name="rubric"),)), list[str]()
    report = await check(env, tasks=8, rate=1.0, earned=[0.5, 1.0], progress=said.append)
    found = next(f for f in report.findings if f.probe == "answers that read nothing")
    assert found.detail.startswith("silence earns 0.25, a constant earns 0.25, random text earns 0.25, an echo")
    assert "a template earns 0.9; your real answers 0.75 on average, your best 1" in found.detail
    assert found.mark is Mark.WARN and "answers that read nothing: 40 of 40 answers judged" in said
    assert report.verdict.startswith("nothing failed in the ") and report.verdict.endswith(" could not")
    alone = await check(env, tasks=8, rate=1.0)
    found = next(f for f in alone.findings if f.probe == "answers that read nothing")
    assert found.mark is Mark.WARN and "no real answer is known" in found.detail
    good = await check(replace(env, rewards=(source(lambda t, x: 0.0, name="none"),)), tasks=8, rate=1.0, earned=[0.5])
    assert next(f for f in good.findings if f.probe == "answers that read nothing").mark is Mark.OK


async def test_one_that_pays_everything_alike_fails_and_says_what_it_may_want() -> None:
    def own_form(task: Task, text: str) -> float:
        return float(text == f"ANS: {task.answer}")

    for judge in (pays_all, own_form):
        found = await asked("gold", judge)
        assert found.mark is Mark.FAIL and "pays every text that was tried the same" in found.detail


@pytest.mark.prove
async def test_a_prompt_is_shown_as_the_conversation() -> None:
    chat = tuple(
        replace(r, task=replace(r.task, prompt=({"role": "user", "content": f"Say {r.task.answer}."},))) for r in rows()
    )
    env = PromptsEnv(rows=chat, rewards=(source(one_more, name="one_more"),))
    report = await check(env, tasks=16, rate=1.0)
    told = " ".join(f.detail for f in report.findings)
    assert "'Say " in told and "role" not in told and "content" not in told


def batch(scores: Callable[[list[float]], list[float]]) -> Any:
    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        return scores([float(c.strip() == a) + len(c) / 1000 for c, a in zip(completions, answer, strict=True)])

    return reward


def ranked(scores: list[float]) -> list[float]:
    order = sorted(range(len(scores)), key=lambda i: (round(scores[i]), i))
    return [float(order.index(i)) for i in range(len(scores))]


@pytest.mark.parametrize(
    ("scores", "mark"),
    [
        (lambda s: s[::-1], Mark.FAIL),
        (lambda s: [*s[1:], *s[:1]], Mark.FAIL),
        (sorted, Mark.FAIL),
        (ranked, Mark.WARN),
        (lambda s: [x - sum(s) / len(s) for x in s], Mark.OK),
        (lambda s: s, Mark.OK),
    ],
)
async def test_scores_that_go_to_the_wrong_siblings(scores: Any, mark: Mark) -> None:
    """A reward that breaks ties by place only depends on the order, and one that compares siblings is right."""
    assert (await asked("the same siblings", batch(scores))).mark is mark


async def on_rows(probe: str, *, prompt: str = "{i} times", completion: str = "{a}", by: int = 0) -> ProbeResult:
    found = [Task(f"t{i}", prompt.format(i=i, a=17 * i), str(17 * (i + by))) for i in range(3, 27)]
    data = tuple(PromptRow(t, completion.format(a=17 * i), digest(t.prompt)) for i, t in enumerate(found, 3))
    env = PromptsEnv(rows=data, rewards=(source(exact, name="judge"),))
    return await next(p for p in PROBES if p.name == probe)(await Subject.of(env, found[:16], 1.0))


async def test_answers_shifted_against_the_demonstrations() -> None:
    for by, completion, mark in (
        (1, "{a}", Mark.FAIL),
        (-1, "{a}", Mark.FAIL),
        (0, "It is {a}.", Mark.WARN),
        (0, "{a}", Mark.OK),
    ):
        found = await on_rows("demonstrations", completion=completion, by=by)
        assert found.mark is mark and ("shifted" in found.detail) == bool(by)


async def test_an_answer_that_stands_in_its_prompt() -> None:
    assert (await on_rows("answer in the prompt", prompt="{i} times (it is {a})")).mark is Mark.WARN
    every = "{i} times: " + " ".join(str(17 * i) for i in range(40))
    for prompt in (every, "{i} times"):
        assert (await on_rows("answer in the prompt", prompt=prompt)).mark is Mark.OK


@pytest.mark.parametrize(
    ("judge", "says"),
    [
        (lambda task, text: 1 - exact(task, text), "inverted"),
        (lambda task, text: 1 - boxed(task, text), "inverted"),
        (contains, "a list of all answers"),
        (prefix, "saying nothing"),
        (exact, ""),
        (boxed, ""),
        (lambda task, text: float(len(text)), ""),
        (lambda task, text: -float(len(text)), ""),
        (lambda task, text: 1.0, ""),
        (lambda task, text: None, ""),
        (lambda task, text: time.sleep(2), ""),
    ],
)
async def test_a_run_tries_the_rewards_of_its_prompts_itself(judge: Judge, says: str) -> None:
    """In less than a second; rewards of the text alone, and slow ones, are left out."""
    env: Any = PromptsEnv(rows=rows(), rewards=(source(judge, name="judge"),))
    begun = time.monotonic()
    notes = await rewards_tell(env, [r.task for r in rows()])
    assert time.monotonic() - begun < 2 and [says in n for n in notes] == [True] * bool(says), notes


def test_a_key_that_tells_equal_tasks_apart_is_noted_before_the_first_step() -> None:
    broken: Any = KeyedByName(heldout_count=60, max_operand=5)
    sound: Any = Arithmetic(heldout_count=60, max_operand=5)
    assert "told apart: training task" in split_is_clean(broken)[0]
    assert split_is_clean(sound) == []


async def test_a_verifier_that_reads_the_beginning_alone() -> None:
    found = await asked("paraphrase", lambda task, text: float(task.answer in text[:100].strip(".* ").split()))
    assert found.mark is Mark.WARN and "not paid: after a long text (12 of 12)" in found.detail


class LastAnswer(CalculatorEnv):
    """Its world answers an episode what it answered the one before."""

    async def play(self, task: Task, talk: Any) -> Any:
        see = talk.see

        def seen(content: Any, tools: Any = ()) -> None:
            CACHE.append(content)
            see(CACHE[-3] if talk.seen and len(CACHE) > 2 else content, tools)

        talk.see = seen
        return await super().play(task, talk)


class FirstAnswer(CalculatorEnv):
    """Its world answers every episode what it answered the first one."""

    async def play(self, task: Task, talk: Any) -> Any:
        see = talk.see
        talk.see = lambda content, tools=(): see(FIRST.setdefault("", content) if talk.seen else content, tools)
        return await super().play(task, talk)


CACHE: list[Any] = []
FIRST: dict[str, Any] = {}


async def test_what_the_world_answers_belongs_to_its_episode() -> None:
    for cls, mark in ((LastAnswer, Mark.FAIL), (FirstAnswer, Mark.WARN), (CalculatorEnv, Mark.OK)):
        env = cls(heldout_count=16)
        subject = await Subject.of(env, env.heldout, 1.0)
        CACHE.clear()
        found = await next(p for p in PROBES if p.name == "episodes apart")(subject)
        assert found.mark is mark, found


# --- environments with a verifier of their own ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env", [Arithmetic(heldout_count=60, max_operand=99), CalculatorEnv(heldout_count=40)], ids=lambda e: e.name
)
async def test_the_gallery_passes(env: Any) -> None:
    report = await check(env, tasks=16, rate=1.0)
    assert report.passed, [f for f in report.findings if f.mark is Mark.FAIL]
    assert "held-out is disjoint from train" in report.marked(Mark.OK)


class Halves(Arithmetic):
    def verify(self, attempt: Attempt) -> Verdict:
        full = super().verify(attempt)
        return Verdict.value(0.5 * (full.score or 0.0))


class Unsplit(Arithmetic):
    _held = frozenset()  # type: ignore[assignment]


class KeyedByName(Unsplit):
    def key(self, task: Task) -> str:
        return task.id


class Trips(Arithmetic):
    async def play(self, task: Task, talk: Talk) -> Stop:
        await super().play(task, talk)
        raise IndexError("of its own")


class Words(Arithmetic):
    def paraphrases(self, task: Task) -> tuple[tuple[str, ...], ...]:
        return ((f"{task.answer}.",), ("it is " + "twelve",))


@pytest.mark.parametrize(
    ("cls", "probe"),
    [
        (Unsplit, "held-out is disjoint from train"),
        pytest.param(Halves, "gold", marks=pytest.mark.prove),
        pytest.param(KeyedByName, "held-out is disjoint from train", marks=pytest.mark.prove),
        pytest.param(Words, "declared variants", marks=pytest.mark.prove),
    ],
)
async def test_a_broken_environment_is_found_by_its_probe(cls: type[Arithmetic], probe: str) -> None:
    assert probe in (await check(cls(heldout_count=60), tasks=16, rate=1.0)).marked(Mark.FAIL)


async def test_an_error_of_the_world_is_no_end_of_the_script() -> None:
    with pytest.raises(IndexError, match="of its own"):
        await Subject(Trips(heldout_count=4), (), 1.0).judge(Arithmetic().train.task(0), ("7",))


@pytest.mark.prove
async def test_a_sandbox_with_a_hole_fails_the_check(tmp_path: Path) -> None:
    backend("landlock")
    hole = patched(tmp_path, "syscalls.py", "plain = PLAIN + (() if host_files else FILES)", "plain = PLAIN + FILES")
    env = PromptsEnv(rows=rows(), rewards=(Code(Sandbox(made("landlock", hole), workers=1), owned=True),))
    found = await WORKINGS[-1](Subject(env, (), 1.0))
    env.close()
    held = Sandbox(made("landlock"), workers=1)
    kept = await WORKINGS[-1](Subject(PromptsEnv(rows=rows(), rewards=(Code(held, owned=True),)), (), 1.0))
    held.close()
    assert kept.mark is Mark.OK and "landlock withstood every attack" in kept.detail
    assert found.mark is Mark.FAIL and "change a file of the host" in found.detail


async def test_where_nothing_contains_programs_the_check_fails_and_attacks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attacked(_: object) -> list[str]:
        raise AssertionError("the attacks ran without a sandbox")

    monkeypatch.setattr(workings, "selftest", attacked)
    env = PromptsEnv(rows=rows(), rewards=(Code(Sandbox(Unconfined(), workers=1), owned=True),))
    found = await WORKINGS[-1](Subject(env, (), 1.0))
    env.close()
    assert found.mark is Mark.FAIL and "full rights" in found.detail


@pytest.mark.prove
def test_the_sandbox_is_tried_where_one_judges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "```python\ndef f(x):\n    return x + {}\n```"
    data = [
        {
            "prompt": f"add {k}",
            "completion": program.format(k),
            "tests": [{"function": "f", "args": [2], "expected": 2 + k}],
        }
        for k in range(5)
    ]
    file = tmp_path / "code.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in data))
    code = main(
        [
            "check",
            "prompts",
            f"env.prompts={file}",
            "env.rewards=code",
            "env.heldout=2",
            "--tasks",
            "2",
            "--rate",
            "0.1",
            "--json",
        ]
    )
    said = json.loads(capsys.readouterr().out)
    found = {f["probe"]: f for f in said["findings"]}
    assert found["sandbox"]["mark"] == "ok" and "withstood every attack" in found["sandbox"]["detail"]
    assert (code, said["passed"]) == (0, True), [f for f in said["findings"] if f["mark"] == "fail"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_fails_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps({"prompt": r.task.prompt, "answer": r.task.answer}) + "\n" for r in rows()))
    code = main(["check", "prompts", f"env.prompts={file}", "env.rewards=contains", "--tasks", "8", "--rate", "1"])
    text = capsys.readouterr().out
    assert code == 1 and "several answers" in text and "1 of " in text and "To do:" in text
    assert "skipped sandbox: nothing here runs programs" in text and "│ skip" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["arithmetic", "rl.steps=3"], "reads the environment alone"),
        (["arithmtic"], "did you mean 'arithmetic'"),
        (["arithmetic", "env.args.max_operands=3"], "did you mean 'max_operand'"),
        (["arithmetic", "--tasks", "0"], "must be more than 0"),
        (["prompts"], "needs env.prompts"),
        (["nowhere/mine.py:Task"], "no such file; there is no folder nowhere"),
    ],
)
def test_what_cannot_be_checked_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.prove
def test_from_python_with_an_environment_of_ones_own() -> None:
    assert posttrain.check(Arithmetic(heldout_count=20), tasks=4, rate=1.0).passed
    with pytest.raises(ConfigError, match="takes no overrides"):
        posttrain.check(Arithmetic(heldout_count=20), "seed=1")


def test_the_page_has_a_row_for_every_probe() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/check.md").read_text()
    assert [p.name for p in PROBES if f"\n| {p.name} | {p.means} |" not in page] == []


async def test_sandboxes_are_found_wherever_an_environment_holds_them() -> None:
    for env in (
        environment(Env(name="programs", heldout=4), 0),
        PromptsEnv(rows=rows(), tools="python"),
        Arithmetic(heldout_count=4),
    ):
        if env.vouches_for_gold:
            await judged(env, env.heldout[0], env.gold(env.heldout[0]))
        assert bool(sandboxes(Subject(env, (), 1.0))) == (env.name != "arithmetic"), env.name
        env.close()


@pytest.mark.prove
def test_a_run_is_checked_by_its_folder_against_the_rate_of_its_rollouts(tmp_path: Path) -> None:
    posttrain.run(only_rl(tiny_run(steps=2)), out=tmp_path / "run", quiet=True)
    done = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert expected_rate(tmp_path / "run") == pytest.approx(2 * 16 / sum(s.clock["rollout"] for s in done))
    assert expected_rate("arithmetic") == RATE
    report = posttrain.check(tmp_path / "run", tasks=4, rate=1.0)
    assert report.passed and report.tasks == 4


@pytest.mark.prove
@pytest.mark.parametrize(("strict", "mark"), [(lambda text: len(text), Mark.OK), (lambda text: -len(text), Mark.WARN)])
async def test_what_is_paid_is_held_against_what_is_measured(strict: Callable[[str], float], mark: Mark) -> None:
    """Two judges before a run: of answers to one task, how many pairs does the second order the other way round?"""
    pays = source(lambda task, text: float(len(text)), name="pays")
    measures = source(lambda task, text: float(strict(text)), name="measures")
    env = PromptsEnv(rows=rows(), rewards=(pays, measures), measured_rewards=("measures",))
    found = next(f for f in (await check(env, tasks=8, rate=1.0)).findings if f.probe == "paid and measured")
    assert found.mark is mark and "pairs of answers to one task" in found.detail
    assert ("most: " in found.detail) is (mark is Mark.WARN)
    alone = await check(PromptsEnv(rows=rows(), rewards=(pays,)), tasks=8, rate=1.0)
    assert "paid and measured" in alone.marked(Mark.SKIP)


def test_a_run_of_a_file_is_checked_by_its_environment(tmp_path: Path) -> None:
    """`posttrain check mine.py:run`, and of an `Env` in it; a class there is the environment itself."""
    (tmp_path / "mine.py").write_text(
        "from posttrain.config.env import Env\nfrom posttrain.recipe.recipes import recipe\n"
        "ENV = Env(name='arithmetic', heldout=7)\nN = 3\n\ndef run():\n    return recipe('arithmetic')\n"
    )
    assert check_environment.build(f"{tmp_path}/mine.py:ENV").heldout_count == 7
    assert check_environment.build(f"{tmp_path}/mine.py:run", "env.heldout=5").heldout_count == 5
    with pytest.raises(ConfigError, match="a class of an environment, a Run or an Env is wanted"):
        check_environment.build(f"{tmp_path}/mine.py:N")
