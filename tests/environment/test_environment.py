"""Building environments, reading integers, playing turns, and adding rewards."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.config.env import Reward
from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import Verdict, outcome
from posttrain.environment.check import Mark, check
from posttrain.environment.conformance import claims
from posttrain.environment.expression import evaluate
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.gallery.calculator import CalculatorEnv, result
from posttrain.environment.generated import GeneratedTasks
from posttrain.environment.make import checked, environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.scripted_policy import ScriptedPolicy, attempt, judged
from posttrain.environment.single import SingleTurn
from posttrain.system.errors import ConfigError
from posttrain.verifier.integers import last_integer

MINUS = ["-", "\u2212", "\u2013", "\uff0d"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("12", "12"),
        ("3+4=7;7+5=12", "12"),
        ("7-5", "5"),
        ("(7)-5", "5"),
        ("3+4=-1", "-1"),
        ("so -5.", "-5"),
        ("+7", "7"),
        ("-0", "0"),
        ("007", "7"),
        ("1,234,567", "1234567"),
        ("1'234", "1234"),
        ("1, 234", "234"),
        ("1234,567", "567"),
        ("12.0", "12"),
        ("12.5", None),
        ("1.2.3", None),
        ("wait...12", "12"),
        ("\uff11\uff12", "12"),
        ("10\u00b2", "10"),
        ("", None),
        ("none", None),
    ],
)
def test_last_integer(text: str, wanted: str | None) -> None:
    assert last_integer(text) == wanted


@given(
    st.integers(-(10**30), 10**30),
    st.sampled_from(MINUS),
    st.integers(0, 3),
    st.sampled_from(["", ",", "_", "'", "\u202f"]),
    st.sampled_from(["", "12 ", "5 is wrong: ", "a=", "3+4="]),
    st.sampled_from(["", ".", ".000", "!", " apples", ")"]),
)
def test_every_spelling_of_an_integer_reads_the_same(
    n: int, minus: str, zeros: int, separator: str, before: str, after: str
) -> None:
    digits = f"{abs(n):,}".replace(",", separator) if separator else "0" * zeros + str(abs(n))
    assert last_integer(before + (minus if n < 0 else "") + digits + after) == str(n)


@given(st.text())
def test_reading_an_integer_never_raises(text: str) -> None:
    said = last_integer(text)
    assert said is None or said == str(int(said))


def test_more_digits_than_python_converts_are_still_compared() -> None:
    assert last_integer("9" * 10_000) == "9" * 10_000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Env(name="arithmetik"), "did you mean 'arithmetic'"),
        (Env(args={"max_term": 3}), "did you mean 'max_terms'"),
        (Env(args={"max_terms": "3"}), "wants int, got str"),
        (Env(args={"max_terms": True}), "wants int, got bool"),
        (Env(args={"seed": 3}), "no such setting"),
        (Env(args={"ops": "*"}), "valid are"),
        (Env(args={"max_operand": 1, "max_terms": 2}), "room for 1 "),
        (Env(prompts="x.jsonl"), "is not read by the environment"),
        (Env(name="prompts"), "needs env.prompts"),
        (Env(name="gym:chain_sun"), "did you mean 'chain_sum'"),
        (Env(name="gym:chain_sum", args={"min_term": 2}), "did you mean 'min_terms'"),
        (Env(name="gym:chain_sum", args={"min_terms": 0}), "refuses"),
        (Env(name="gym:game_of_life_halting"), "any answer"),
        (Env(rewards=(Reward(function="exakt"),)), "did you mean 'exact'"),
    ],
)
def test_a_wrong_configuration_never_starts(config: Env, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        environment(config, 0)


def test_the_heldout_set_is_the_same_for_every_seed_and_has_the_size_asked_for() -> None:
    a, b = environment(Env(heldout=250), 0), environment(Env(heldout=250), 1)
    assert list(a.heldout) == list(b.heldout) and len(a.heldout) == 250
    assert a.train.task(0) != b.train.task(0) and a.train.count is None
    assert a.train.task(5) == environment(Env(heldout=250), 0).train.task(5)


@pytest.mark.parametrize("ops", ["+", "+-"])
def test_no_order_of_a_heldout_sum_is_trained_on(ops: str) -> None:
    env = Arithmetic(ops=ops, max_operand=3, heldout_count=25)
    held = {tuple(sorted((s, o) for s, o in t.info["terms"])) for t in env.heldout}
    assert len(held) == 25
    for i in range(3000):
        terms = [(s, o) for s, o in env.train.task(i).info["terms"]]
        assert tuple(sorted(terms)) not in held and terms[0][0] == "+"


def test_the_room_for_heldout_sums_counts_the_multisets() -> None:
    for ops in ("+", "+-"):
        env = Arithmetic(ops=ops, max_operand=2, min_terms=3, max_terms=3, heldout_count=1)
        drawn = {env.key(env.train.task(i)) for i in range(3000)} | {env.key(t) for t in env.heldout}
        assert env._room(3) == len(drawn) // 2


def test_wrong_reasoning_is_consistent_after_one_slip() -> None:
    env = Arithmetic(min_terms=4)
    for i in range(200):
        task = env.train.task(i)
        _, text = env.demonstrate(task, "cot", np.random.default_rng(i), 1.0)
        steps = [s.split("=") for s in text.split(";")]
        false = [sum(map(int, left.split("+"))) != int(right) for left, right in steps]
        assert sum(false) == 1 and [s[1] for s in steps[:-1]] == [s[0].split("+")[0] for s in steps[1:]]
        assert all(int(right) >= 0 for _, right in steps)


def test_the_share_of_false_demonstrations_is_the_one_asked_for() -> None:
    env, rng = Arithmetic(), np.random.default_rng(0)
    task = env.train.task(0)
    false = [env.demonstrate(task, "answer", rng, 0.3)[1] != task.answer for _ in range(2000)]
    assert abs(np.mean(false) - 0.3) < 0.04
    with pytest.raises(ConfigError, match="did you mean 'answer'"):
        env.demonstrate(task, "answr", rng, 0.0)


async def test_single_turn_ends_as_the_turn_did() -> None:
    env = Arithmetic()
    talk = ScriptedPolicy(["1"], Stop.LENGTH)
    assert await env.play(env.train.task(0), talk) is Stop.LENGTH
    assert talk.seen == [env.train.task(0).prompt]


CALC = CalculatorEnv()
TASK = Task(id="t", prompt="<12*3>", answer="36", info={"op": "*", "left": 12, "right": 3})


@pytest.mark.parametrize(
    ("turns", "stop", "seen", "end", "reward"),
    [
        (["calc:12*3", "36"], Stop.SAID, ["<12*3>", "[36]"], Stop.SAID, 1.0),
        (["calc:12*", "36"], Stop.SAID, ["<12*3>", "[?]"], Stop.SAID, 1.0),
        (["36"], Stop.SAID, ["<12*3>"], Stop.SAID, 1.0),
        (["calc:12*3", "37"], Stop.SAID, ["<12*3>", "[36]"], Stop.SAID, 0.0),
        (["calc:1*3", "calc:1*36"], Stop.SAID, ["<12*3>", "[3]"], Stop.TURNS, 0.0),
        (["calc:12*3"], Stop.LENGTH, ["<12*3>"], Stop.LENGTH, 0.0),
        (["calc:12*3", "36"], [Stop.SAID, Stop.CONTEXT], ["<12*3>", "[36]"], Stop.CONTEXT, 1.0),
    ],
)
async def test_calculator_turns(
    turns: list[str], stop: Stop | list[Stop], seen: list[str], end: Stop, reward: float
) -> None:
    talk = ScriptedPolicy(turns, stop)
    assert await CALC.play(TASK, talk) is end
    assert talk.seen == seen
    assert outcome(await CALC.judge(await attempt(CALC, TASK, turns, stop))) == reward


async def test_calculator_shows_its_tape_before_the_result() -> None:
    """The same for the same task and request, another for another; every line of it is true."""
    env = CalculatorEnv(tape=3)

    async def shown(request: str) -> str:
        talk = ScriptedPolicy([request, "36"])
        await env.play(TASK, talk)
        return str(talk.seen[1])

    first = await shown("calc:12*3")
    assert first == await shown("calc:12*3") != await shown("calc:12*4")
    *tape, last = first.split(";")
    assert last == "[36]" and len(tape) == 3 and len(set(tape)) > 1
    for line in tape:
        question, value = line.split("=")
        assert evaluate(question).value == int(value)


def test_calculator_shows_fractions_and_never_evaluates_code() -> None:
    assert result("calc:1/2") == "[1/2]"
    assert result("calc:__import__('os')") == "[?]"
    assert result("calc:9**9") == "[?]"


async def test_a_users_reward_is_added_to_the_environments_own(tmp_path) -> None:
    (tmp_path / "short.py").write_text("def short(task, text):\n    return -len(text)\n")
    env = environment(
        Env(rewards=(Reward(function=f"{tmp_path}/short.py:short", weight=0.1), Reward(function="exact"))), 0
    )
    task = env.heldout[0]
    verdicts = await judged(env, task, [f"={task.answer}"])
    assert [(j.source, j.weight, j.verdict.score) for j in verdicts] == [
        ("arithmetic", 1.0, 1.0),
        ("short", 0.1, -1.0 - len(task.answer)),
        ("exact", 1.0, 0.0),
    ]
    assert outcome(verdicts) == pytest.approx(1 - 0.1 * (1 + len(task.answer)))


def test_the_room_imports_no_torch_and_nothing_optional() -> None:
    code = (
        "import sys, posttrain.environment.make, posttrain.environment.rows.own_prompts,"
        " posttrain.verifier.user_functions,"
        " posttrain.environment.templates.renderer,posttrain.environment.conformance,"
        " posttrain.environment.adapters.reasoning_gym;from"
        " posttrain.environment.gallery import GALLERY, gallery_class; [gallery_class(n) for n in GALLERY];print([m for"
        " m in ('torch','transformers','datasets','pyarrow','reasoning_gym','math_verify','sympy') if m in"
        " sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_verdicts_come_from_what_was_said_last() -> None:
    said = Attempt(task=TASK, turns=("36", "no"), stop=Stop.SAID)
    assert CALC.verify(said) == Verdict.value(0.0, "no_integer", "said None, wanted 36")


def test_environments_are_judged_concurrently_without_mixing() -> None:
    env = Arithmetic()

    async def go() -> list[float | None]:
        return [outcome(v) for v in await asyncio.gather(*(judged(env, t, [str(t.answer)]) for t in env.heldout))]

    assert asyncio.run(go()) == [1.0] * 200


# --- classes of the user's -------------------------------------------------------------------------------------------

OWN_PLAY = """
from dataclasses import dataclass
from posttrain.core.verdict import Verdict
from posttrain.environment.rows.own_prompts import PromptsEnv

@dataclass(frozen=True, kw_only=True)
class Twice(PromptsEnv):
    more: str = "again"

    @property
    def name(self):
        return "twice"

    async def play(self, task, talk):
        talk.see(task.prompt)
        await talk.say()
        talk.see(f"{self.more} {task.info['thing']}")
        return (await talk.say()).stop
"""
JUDGES = "\n    def verify(self, attempt):\n        return Verdict.value(float(attempt.text == attempt.task.answer))\n"


def test_rows_of_ones_own_are_played_by_a_class_of_ones_own(tmp_path: Path) -> None:
    """The class reads the rows' columns; its verdict, where it has one, stands before the rewards'."""
    rows = [{"prompt": f"{i}?", "answer": str(i), "thing": f"t{i}"} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "plain.py").write_text(OWN_PLAY)
    (tmp_path / "judges.py").write_text(OWN_PLAY + JUDGES)
    own = {"prompts": str(tmp_path / "rows.jsonl"), "heldout": 2, "args": {"more": "now"}}
    plain = environment(
        Env(name=f"{tmp_path}/plain.py:Twice", rewards=(Reward(function="exact", weight=2.0),), **own), seed=0
    )
    task = plain.train.task(0)
    talk = ScriptedPolicy(["no", task.answer])
    assert asyncio.run(plain.play(task, talk)) is Stop.SAID
    assert f"now {task.info['thing']}" in str(talk.seen) and len(plain.heldout) == 2
    assert [j.source for j in asyncio.run(judged(plain, task, ["no", task.answer]))] == ["exact"]
    judges = environment(Env(name=f"{tmp_path}/judges.py:Twice", measured=False, **own), seed=0)
    assert judges.abilities.judges and outcome(asyncio.run(judged(judges, task, ["no", task.answer]))) == 1.0
    with pytest.raises(ConfigError, match=r"plain.py:Twice' needs env.prompts"):
        environment(Env(name=f"{tmp_path}/plain.py:Twice"), seed=0)
    (tmp_path / "other.py").write_text("from posttrain.environment.gallery.arithmetic import Arithmetic as Other")
    with pytest.raises(
        ConfigError, match="derive your own class from posttrain.environment.rows.own_prompts.PromptsEnv"
    ):
        environment(Env(name=f"{tmp_path}/other.py:Other", prompts=own["prompts"]), seed=0)


def test_an_environment_without_known_answers_needs_neither_gold_nor_alphabet() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Open(GeneratedTasks):
        name = "open"

        def draw(self, rng: np.random.Generator, name: str) -> Task:
            return Task(name, f"say {rng.integers(9999)}")

        def key(self, task: Task) -> str:
            return str(task.prompt)

        def verify(self, attempt: Attempt) -> Verdict:
            return Verdict.value(min(1.0, len(attempt.text) / 10))

    env = Open(heldout_count=4)
    found = env.abilities
    assert found.alphabet is None and found.gold is not None and found.gold.wrong is None
    assert found.gold.known(env.heldout) == []
    report = asyncio.run(check(env, tasks=4))
    assert not [f for f in report.findings if f.mark is Mark.FAIL and "raised" in f.detail]


def test_an_environment_may_know_right_answers_and_no_wrong_ones() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Unmistaken(Arithmetic):
        distractor = SingleTurn.distractor

    assert all(c.passed for c in asyncio.run(claims(Unmistaken(heldout_count=4), samples=4)))


def test_a_setting_of_several_types_is_refused_in_a_sentence() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Either(Arithmetic):
        level: int | None = None

    with pytest.raises(ConfigError, match=r"wants int \| None, got str"):
        checked("either", Either, {"level": "high"})


def test_rows_that_are_chats_have_no_alphabet_and_keep_their_claims(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i)} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    env = environment(
        Env(name="prompts", prompts=f"{tmp_path}/rows.jsonl", rewards=(Reward(function="exact"),)), seed=0
    )
    assert isinstance(env, PromptsEnv) and env.abilities.alphabet is None
    assert [c.name for c in asyncio.run(claims(env)) if not c.passed] == []
