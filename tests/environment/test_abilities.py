"""What an environment can do beside playing and judging: declared in one place, each ability brings what it says, none
is misspelt."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.build import preflight_checks
from posttrain.build.build_environments import check_environment, own_environments
from posttrain.build.build_run import facts, make_parts, make_policy
from posttrain.checks.data_checks import sameness
from posttrain.checks.judging.rejudge import RejudgedAnswers
from posttrain.config.env import Env
from posttrain.config.run import Run
from posttrain.core.abilities import Abilities, Demonstrations, GoldAnswers
from posttrain.core.conversation import LearnedConversation
from posttrain.core.ports import Attempt, Environment, Talk
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.make import environment
from posttrain.environment.single import Generated
from posttrain.record import run_reader
from posttrain.record.run_folder import RunFolder
from posttrain.role.judging import judged
from posttrain.system.errors import ConfigError, DataError, InvariantError
from tests.tiny import only_rl, play, tiny_run

TOLD = Task("t", "<1>", "2")


def right(task: Task) -> tuple[str, ...]:
    return (str(task.answer),)


async def verdict(attempt: Attempt) -> Verdict:
    return Verdict.value(float(attempt.text == attempt.task.answer))


class Bare(Environment):
    """`<3>` is answered `4`. It derives from the protocol and can nothing beside playing and judging."""

    name = "bare"  # type: ignore[assignment]
    train = Generated(lambda i: Task(f"bare-{i}", f"<{i % 8}>", str(i % 8 + 1)))  # type: ignore[assignment]
    heldout = tuple(Task(f"held-{i}", f"<{i}>", str(i + 1)) for i in (8, 9))  # type: ignore[assignment]

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        return (await talk.say()).stop

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        return (Judged(self.name, 1.0, await verdict(attempt)),)


def able(**given: Any) -> Any:
    """The same with these abilities, declared as a class says what it is."""
    return type("Able", (Bare,), {"abilities": Abilities(**given)})()


def played(folder: Path, env: Environment, run: Run) -> Sequence[Any]:
    """A run on it, from its parts, after the proofs of a start."""
    policy = make_policy(run, env)
    parts = make_parts(run, policy, env, RunFolder.create(folder, run, facts(policy, 2)), [])
    try:
        asyncio.run(preflight_checks.prove_start(parts, policy.tokenizer))
        return asyncio.run(play(parts))
    finally:
        parts.close()


@pytest.mark.prove
def test_a_bare_environment_runs(tmp_path: Path) -> None:
    """Its model has a tokenizer of bytes, and nothing is known of its right answers."""
    assert Bare().abilities == Abilities()
    (result,) = played(tmp_path, Bare(), only_rl(tiny_run(steps=2)))
    assert result.steps == 2 and len(list(run_reader.episodes(tmp_path, "rl", 2)))


@pytest.mark.prove
def test_one_that_derives_from_nothing_says_what_it_can(tmp_path: Path) -> None:
    class Stranger:
        name, train, heldout, play, judge = "stranger", Bare.train, Bare.heldout, Bare.play, Bare.judge

        def gauges(self) -> Any:
            return {}

        def close(self) -> None:
            return None

    stranger: Any = Stranger()
    with pytest.raises(
        ConfigError, match=r"Stranger declares no abilities: derive it .* or write `abilities = Abilities\(\)`"
    ):
        make_policy(tiny_run(), stranger)
    stranger.abilities = {"alphabet": "01"}
    with pytest.raises(ConfigError, match="abilities of type dict, not Abilities"):
        make_policy(tiny_run(), stranger)
    stranger.abilities = lambda: Abilities()
    with pytest.raises(ConfigError, match="is a method. Write @property above it"):
        make_policy(tiny_run(), stranger)
    stranger.abilities = Abilities()
    assert played(tmp_path, stranger, only_rl(tiny_run(steps=1)))


def test_an_alphabet_makes_the_tokenizer() -> None:
    one, other = (len(make_policy(tiny_run(), e).tokenizer) for e in (able(alphabet="0123456789<>"), Bare()))
    assert one == 12 + 2 and other > 256


def test_a_key_makes_tasks_the_same_that_are_put_in_other_words() -> None:
    twins = Task("a", "<1+2>", "3"), Task("b", "<2+1>", "3")
    for env, same in ((Bare(), False), (able(key=lambda t: t.answer), True)):
        assert (sameness(env)(twins[0]) == sameness(env)(twins[1])) is same


async def test_programs_that_nothing_contained_are_told_in_every_verdict() -> None:
    said = Attempt(TOLD, ("2",), Stop.SAID)
    for env, told in ((Bare(), ""), (able(contained=("namespaces",)), ""), (able(contained=("none",)), "sandbox=none")):
        assert [j.verdict.why for j in await judged(env, said)] == [told]


async def test_right_answers_are_asked_again_and_those_vouched_for_are_proved() -> None:
    """Without `verdict` any score will do that stays; with it right answers score 1, and wrong ones and silence
    nothing."""
    for env, remembered in (
        (Bare(), 0),
        (able(gold=GoldAnswers(right=right)), 2),
        (able(gold=GoldAnswers(right=lambda _: None)), 0),
    ):
        judges = RejudgedAnswers()
        await judges.begin(env, 0)
        assert len(judges._gold) == remembered
    false = GoldAnswers(right=lambda _: ("0",))
    await preflight_checks.gold_is_paid(able(gold=false), Bare.heldout)
    with pytest.raises(InvariantError, match="scores the right answer"):
        await preflight_checks.gold_is_paid(able(gold=replace(false, verdict=verdict)), Bare.heldout)
    vouched = GoldAnswers(right=right, verdict=verdict)
    await preflight_checks.near_misses_are_not(able(gold=vouched), Bare.heldout)
    with pytest.raises(InvariantError, match="which is no answer"):
        await preflight_checks.near_misses_are_not(able(gold=replace(vouched, wrong=right)), Bare.heldout)


async def test_a_verifier_that_fails_is_no_verdict_on_a_right_answer() -> None:
    """A sandbox that is killed while right answers are tried stops no run: the verifier is asked again, as in a
    rollout. Where it fails each time, the message says that, and not that the answer is wrong."""
    fails = itertools.count()

    async def shaky(attempt: Attempt) -> Verdict:
        return Verdict.failed("sandbox", "it was killed") if next(fails) % 3 < 2 else await verdict(attempt)

    async def down(attempt: Attempt) -> Verdict:
        return Verdict.failed("sandbox", "it was killed")

    gold = GoldAnswers(right=right, verdict=shaky)
    await preflight_checks.gold_is_paid(able(gold=gold), Bare.heldout)
    await preflight_checks.near_misses_are_not(able(gold=gold), Bare.heldout)
    assert next(fails) >= 6
    for proof in (preflight_checks.gold_is_paid, preflight_checks.near_misses_are_not):
        with pytest.raises(InvariantError, match=r"fails on task .* \(sandbox: it was killed\), each of 3 times"):
            await proof(able(gold=replace(gold, verdict=down)), Bare.heldout)


@pytest.mark.prove
def test_demonstrations_are_imitated(tmp_path: Path) -> None:
    def write(task: Task, style: str, rng: np.random.Generator, wrong: float) -> tuple[str, str]:
        return str(task.prompt), str(task.answer)

    run = tiny_run(steps=1)
    imitating = replace(run, stages=tuple(replace(s, style="answer") for s in run.stages[:1]))
    env = able(alphabet="0123456789<>", demonstrations=Demonstrations(styles=("answer",), write=write))
    check_environment(env, imitating.stages, imitating.env)
    assert played(tmp_path, env, imitating)
    with pytest.raises(ConfigError, match="environment 'bare' writes none: it has no demonstrations"):
        check_environment(Bare(), imitating.stages, imitating.env)


@dataclass(frozen=True)
class Line:
    task: Task
    completion: str | None
    place: str
    conversation: LearnedConversation | None = None


def test_rows_are_measured_before_the_first_step_and_named_by_their_place() -> None:
    long = Line(Task("l", "<" + "1" * 500 + ">", "2"), None, "mine.jsonl:7")
    with pytest.raises(DataError, match=r"^mine\.jsonl:7: "):
        make_policy(tiny_run(), able(alphabet="0123456789<>", rows=(long,)))
    make_policy(tiny_run(), able(alphabet="0123456789<>"))


async def test_tools_say_that_the_world_answers(tmp_path: Path) -> None:
    run = only_rl(tiny_run(steps=1))
    notes: list[bool] = []
    for number, env in enumerate((able(alphabet="0123456789<>"), able(alphabet="0123456789<>", tools=lambda _: ()))):
        policy = make_policy(run, env)
        parts = make_parts(run, policy, env, RunFolder.create(tmp_path / str(number), run, facts(policy, 2)), [])
        notes.append(await preflight_checks.conversations_append(parts, parts.setting(run.stages[-1]), env.heldout[0]))
        parts.close()
    assert notes == [False, True]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: Abilities(alphabeth="01"),
            "Abilities\\(alphabeth=...\\): there is no such field: did you mean 'alphabet'",
        ),  # type: ignore[call-arg]
        (lambda: GoldAnswers(rigth=right), "did you mean 'right'"),  # type: ignore[call-arg]
        (lambda: Demonstrations(style=("a",), write=None), "did you mean 'styles'"),  # type: ignore[call-arg, arg-type]
        (lambda: Demonstrations(styles="cot", write=None), "give the names of the styles"),  # type: ignore[arg-type]
        (lambda: Abilities(contained="none"), r"give a tuple of names, such as \('none',\)"),  # type: ignore[arg-type]
    ],
    ids=["ability", "gold", "demonstrations", "one style", "one sandbox"],
)
def test_what_is_misspelt_is_refused(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


MISSPELT = """
from dataclasses import dataclass
from posttrain.environment.gallery.arithmetic import Arithmetic

@dataclass(frozen=True, kw_only=True)
class Mine(Arithmetic):
    {setting}
    {method}
"""


@pytest.mark.parametrize(
    ("setting", "method", "says"),
    [
        ("", "def know_gold(self, task): return False", "has know_gold, which nothing reads: did you mean knows_gold"),
        ("", "paraphrase = property(lambda self: ())", "has paraphrase, which nothing reads: did you mean paraphrases"),
        ("style: str = 'x'", "", ""),
        ("", "def graded_by(self, task): return False", ""),
    ],
    ids=["method", "property", "a setting", "another word"],
)
def test_a_misspelt_method_of_a_users_class_is_refused(setting: str, method: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MISSPELT.format(setting=setting, method=method))
    config = Env(name=f"{tmp_path / 'mine.py'}:Mine", heldout=2)
    if not says:
        assert environment(config, 0).name == "arithmetic"
        return
    with pytest.raises(ConfigError, match=says):
        environment(config, 0)


def test_half_of_the_demonstrations_is_refused() -> None:
    from posttrain.environment.generated import GeneratedTasks

    with pytest.raises(ConfigError, match=r"class Half has styles\(\) alone"):
        type("Half", (GeneratedTasks,), {"styles": ("answer",)})


def test_a_gallery_task_declares_what_its_methods_say() -> None:
    env = Arithmetic(heldout_count=4)
    found, task = env.abilities, env.heldout[0]
    assert found.key is not None and found.key(task) == env.key(task) and found.alphabet == env.alphabet
    assert (
        found.gold is not None
        and found.vouched
        and found.gold.known(env.heldout) == [(t, env.gold(t)) for t in env.heldout]
    )
    assert found.demonstrations is not None and found.demonstrations.styles == ("document", "answer", "cot")
    assert found.rows is found.tools is None and found.contained == ()
    assert own_environments(tiny_run(), env) == {}
