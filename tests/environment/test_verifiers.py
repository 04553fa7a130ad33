"""`verifiers:ID`: environments of the real package, of one turn, several and with tools, on our engine and under our
rules."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import posttrain
from posttrain.config.env import Reward
from posttrain.config.run import Env, Model
from posttrain.core.ports import Attempt
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Stop
from posttrain.core.verdict import State, outcome
from posttrain.engine.model.tiny_models import build_module
from posttrain.environment.adapters import verifiers, verifiers_judge
from posttrain.environment.adapters.verifiers import Verifiers
from posttrain.environment.check import Mark, check
from posttrain.environment.make import environment
from posttrain.environment.scripted_policy import ScriptedPolicy, judged
from posttrain.recipe.recipes import recipe
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, DataError
from tests.environment.template_parts import FAMILIES, tokenizer
from tests.tiny import MODEL

SINGLE = """
import verifiers as vf
from datasets import Dataset

def rows(first, count):
    asked = range(first, first + count)
    return Dataset.from_list([{"question": f"{n}+1?", "answer": str(n + 1), "info": {"n": n}} for n in asked])

async def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)

def short(completion, **given):
    return 1.0 / (1 + len(completion[-1]["content"]))

def breaks(completion, answer):
    if "boom" in completion[-1]["content"]:
        raise RuntimeError("the judge is gone")
    return 0.0

def load_environment(count: int = 20, system: str = "Add."):
    rubric = vf.Rubric(funcs=[right, short, breaks], weights=[1.0, 0.1, 0.0])
    held = rows(count - 2, 6)
    return vf.SingleTurnEnv(dataset=rows(0, count), eval_dataset=held, system_prompt=system, rubric=rubric)
"""
GUESS = '''
import verifiers as vf
from datasets import Dataset

CLEANED = []

class Guess(vf.MultiTurnEnv):
    """Higher or lower, until it is right."""

    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        said, wanted = messages[-1]["content"].strip(), state["answer"]
        state["guesses"] += 1
        if said == wanted:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        if said == "crash":
            raise KeyError("the world broke")
        return [{"role": "user", "content": "higher" if said < wanted else "lower"}]

    @vf.cleanup
    async def tidy(self, state):
        CLEANED.append(state["answer"])

class Tidy(vf.Rubric):
    @vf.cleanup
    async def tidy_rubric(self, state):
        CLEANED.append("rubric")

def found(completion, answer, state):
    said = [m["content"].strip() for m in completion if m["role"] == "assistant"]
    return float(answer in said) / max(1, state["guesses"])

def load_environment(keep: bool = True):
    data = Dataset.from_list([{"question": "a digit", "answer": str(n), "info": {"n": n}} for n in range(10)])
    rubric = Tidy(funcs=[found])
    if not keep:
        rubric.add_metric(lambda state: float(state["world"] is not None))
    env = Guess(dataset=data, max_turns=4, rubric=rubric)
    if not keep:
        async def setup(state, before=env.setup_state):
            state["world"] = object()
            return await before(state)
        env.setup_state = setup
    return env
'''
TOOLS = '''
import verifiers as vf
from datasets import Dataset

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: one number.
        b: another.
    """
    return a + b

def right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)

def load_environment():
    data = Dataset.from_list([{"question": f"{n}+{n}?", "answer": str(2 * n)} for n in range(12)])
    return vf.ToolEnv(dataset=data, tools=[add], max_turns=4, rubric=vf.Rubric(funcs=[right]))
'''
GROUP = SINGLE.replace("def breaks(completion, answer):", "def breaks(completions, answers) -> list[float]:")


def loaded(
    folder: Path, source: str, name: str = "mine", limits: EpisodeLimits = EpisodeLimits(), **args: Any
) -> Verifiers:
    file = folder / f"{name}.py"
    file.write_text(source)
    env = environment(Env(name=f"verifiers:{file}", args=args, heldout=3, limits=limits), 0)
    assert isinstance(env, Verifiers)
    return env


async def ended(
    env: Verifiers, number: int, *turns: str, stop: Stop = Stop.SAID
) -> tuple[ScriptedPolicy, Stop, dict[str, float | None], Attempt]:
    """A scripted episode: what was shown, why it ended, what its sources said."""
    task = env.train.task(number)
    talk = ScriptedPolicy(turns, stop)
    end = await env.play(task, talk)
    attempt = Attempt(task, tuple(talk.said), end, int, talk.state)
    return talk, end, {j.source: j.verdict.score for j in await env.judge(attempt)}, attempt


# --- one turn ---------------------------------------------------------------------------------------------------------


@pytest.mark.prove
async def test_one_turn_is_shown_judged_and_weighted(tmp_path: Path) -> None:
    env = loaded(tmp_path, SINGLE)
    talk, end, scores, attempt = await ended(env, 3, "4")
    assert (
        talk.seen == [({"role": "system", "content": "Add."}, {"role": "user", "content": "3+1?"})] and end is Stop.SAID
    )
    assert {k: scores[k] for k in ("right", "short", "breaks")} == {"right": 1.0, "short": 0.5, "breaks": 0.0}
    verdicts = await judged(env, env.train.task(3), ("4",))
    assert outcome(verdicts) == pytest.approx(1.05)
    assert {j.source: j.weight for j in verdicts}["breaks"] == 0.0, "a metric is logged raw and weighs nothing"
    again = {j.source: j.verdict.score for j in await env.judge(attempt)}
    assert again == scores, "judged again from what a record keeps"


async def test_a_reward_function_that_raises_is_no_zero(tmp_path: Path) -> None:
    source = SINGLE.replace("weights=[1.0, 0.1, 0.0]", "weights=[1.0, 0.1, 0.5]")
    verdicts = await judged(loaded(tmp_path, source), loaded(tmp_path, source).train.task(0), ("boom",))
    failed = {j.source: j.verdict for j in verdicts}["breaks"]
    assert (
        (failed.state, failed.kind) == (State.FAILED, "raised")
        and "the judge is gone" in failed.why
        and outcome(verdicts) is None
    )
    metric = await judged(loaded(tmp_path, SINGLE), loaded(tmp_path, SINGLE).train.task(0), ("boom",))
    told = {j.source: j.verdict for j in metric}["breaks"]
    assert told.state is State.ABSTAIN and "the judge is gone" in told.why and outcome(metric) is not None


async def test_a_rubric_with_its_own_way_of_scoring_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_judge, "SECONDS", 0.05)
    own_way = "class Slow(vf.Rubric):\n    async def score_rollout(self, state):\n        await asyncio.sleep(60)\n\n"
    source = SINGLE.replace("def load_environment", f"{own_way}def load_environment").replace("vf.Rubric(f", "Slow(f")
    env = loaded(tmp_path, f"import asyncio\n{source}")
    verdicts = await asyncio.wait_for(judged(env, env.train.task(0), ("1",)), 20)
    slow = {j.source: j.verdict for j in verdicts}["Slow"]
    assert (slow.state, slow.kind) == (State.FAILED, "timeout") and "0.15 s" in slow.why


@pytest.mark.parametrize("group", ["vf.EnvGroup(two)", "vf.EnvGroup([vf.EnvGroup(two)])"], ids=["flat", "nested"])
async def test_a_function_that_raises_is_no_zero_in_a_group_either(tmp_path: Path, group: str) -> None:
    member = SINGLE.replace("weights=[1.0, 0.1, 0.0]", "weights=[1.0, 0.1, 0.5]")
    member = member.replace("def load_environment(", "def one(")
    both = f"def load_environment():\n    two = [one(), one(system='Sum.')]\n    return {group}\n"
    env = loaded(tmp_path, f"{member}\n{both}")
    for system in ("Add.", "Sum."):
        task = next(t for t in map(env.train.task, range(38)) if t.prompt[0]["content"] == system)  # type: ignore[index]
        assert env.knows_gold(task)
        assert outcome(await judged(env, task, (str(task.answer),))) == pytest.approx(1.05)
        broken = await judged(env, task, ("boom",))
        failed = {j.source: j.verdict for j in broken}["breaks"]
        assert (failed.state, failed.kind) == (State.FAILED, "raised") and outcome(broken) is None


async def test_tools_of_a_group_have_their_limit(tmp_path: Path) -> None:
    source = TOOLS.replace("def load_environment", "def one")
    (member,) = loaded(tmp_path, f"{source}\ndef load_environment():\n    return vf.EnvGroup([one()])\n").inner.envs
    assert member.tool_map["add"].__wrapped__.__name__ == "add"


def test_the_split_is_theirs_and_leaks_nothing(tmp_path: Path) -> None:
    env = loaded(tmp_path, SINGLE)
    assert [t.prompt[-1]["content"] for t in env.heldout] == ["18+1?", "19+1?", "20+1?"]  # type: ignore[index]
    assert env.train.count == 18, "the two that both sets have are held out"
    alone = loaded(tmp_path, TOOLS)
    assert len(alone.heldout) == 2 and alone.train.count == 10


@pytest.mark.prove
async def test_it_can_be_checked(tmp_path: Path) -> None:
    report = await check(loaded(tmp_path, SINGLE), tasks=5, rate=1.0)
    assert report.passed, [f for f in report.findings if f.mark is Mark.FAIL]
    assert report.sources[0] == "right" and "short" in report.sources


# --- several turns ----------------------------------------------------------------------------------------------------


async def test_several_turns_run_to_their_end_and_are_cleaned_up(tmp_path: Path) -> None:
    env = loaded(tmp_path, GUESS)
    wanted = str(env.train.task(0).answer)
    other = str((int(wanted) + 5) % 10)
    talk, end, scores, attempt = await ended(env, 0, other, wanted)
    assert [m["content"] for seen in talk.seen[1:] for m in seen] == ["higher" if other < wanted else "lower"]  # type: ignore[index]
    assert end is Stop.SAID and scores["found"] == 0.5 and scores["num_turns"] == 2.0
    assert attempt.state["state"] == {"guesses": 2} and attempt.state["completion"][-1] == {
        "role": "user",
        "content": "yes",
    }
    assert [wanted, "rubric"] == inside(env).CLEANED
    assert {j.source: j.verdict.score for j in await env.judge(attempt)} == scores
    assert [wanted, "rubric"] == inside(env).CLEANED, "only the episode itself is cleaned up"
    json.dumps(attempt.state)


def inside(env: Verifiers) -> Any:
    import sys

    return sys.modules[type(env.inner).__module__]


async def test_the_last_turn_and_a_cut_turn_end_it(tmp_path: Path) -> None:
    env = loaded(tmp_path, GUESS)
    _, end, scores, _ = await ended(env, 0, *["x"] * 4)
    assert end is Stop.TURNS and scores["found"] == 0.0
    talk, end, scores, _ = await ended(env, 0, "x", "y", stop=Stop.LENGTH)
    assert end is Stop.LENGTH and talk.said == ["x"] and scores["num_turns"] == 1.0


async def test_what_breaks_in_the_world_is_an_outage_and_cleaned_up(tmp_path: Path) -> None:
    env = loaded(tmp_path, GUESS)
    with pytest.raises(KeyError, match="the world broke"):
        await ended(env, 0, "crash")
    assert [str(env.train.task(0).answer), "rubric"] == inside(env).CLEANED


async def test_an_aborted_episode_is_cleaned_up(tmp_path: Path) -> None:
    env = loaded(tmp_path, GUESS)

    class Endless(ScriptedPolicy):
        async def say(self, most: int | None = None) -> Any:
            if self.said:
                await asyncio.sleep(60)
            return await super().say(most)

    playing = asyncio.ensure_future(env.play(env.train.task(0), Endless(["x", "y"])))
    await asyncio.sleep(0.2)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert [str(env.train.task(0).answer), "rubric"] == inside(env).CLEANED


async def test_a_state_that_no_record_keeps_is_judged_once(tmp_path: Path) -> None:
    env = loaded(tmp_path, GUESS, keep=False)
    _, _, scores, attempt = await ended(env, 0, *["x"] * 4)
    assert scores["found"] == 0.0 and attempt.state["lost"] == ["world"]
    (again,) = await env.judge(attempt)
    assert again.verdict.state is State.FAILED and "world" in again.verdict.why


async def test_a_state_that_waits_too_long_is_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is judged from its record afterwards, and its rubric cleans up once."""
    monkeypatch.setattr(verifiers, "WAITING", 1)
    env = loaded(tmp_path, GUESS)
    attempts: list[Attempt] = []
    for number in range(3):
        task, talk = env.train.task(number), ScriptedPolicy(["x"] * 4)
        end = await env.play(task, talk)
        attempts.append(Attempt(task, tuple(talk.said), end, int, talk.state))
    assert inside(env).CLEANED.count("rubric") == 2, "two of three have made room"
    for attempt in attempts:
        assert {j.source: j.verdict.score for j in await env.judge(attempt)}["found"] == 0.0
    assert inside(env).CLEANED.count("rubric") == 3


async def test_a_history_that_is_rewritten_is_refused(tmp_path: Path) -> None:
    forgets = (
        GUESS
        + """
class Forgets(Guess):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]

def load_environment():
    nine = Dataset.from_list([{"question": "a", "answer": str(n), "info": {}} for n in range(9)])
    return Forgets(dataset=nine, rubric=vf.Rubric(funcs=[found]))
"""
    )
    with pytest.raises(DataError, match="another history than the policy saw"):
        await ended(loaded(tmp_path, forgets), 0, "x", "y")


# --- tools ------------------------------------------------------------------------------------------------------------


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


async def test_tools_are_offered_called_and_answered(tmp_path: Path) -> None:
    env = loaded(tmp_path, TOOLS)
    n = int(env.train.task(1).answer) // 2
    talk, end, scores, attempt = await ended(env, 1, call("add", f'{{"a": {n}, "b": {n}}}'), str(2 * n))
    (tool,) = talk.tools
    assert tool["function"]["name"] == "add" and set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    (answer,) = talk.seen[1]
    assert (answer["role"], answer["content"], answer["name"]) == ("tool", str(2 * n), "add")  # type: ignore[index,typeddict-item]
    assert end is Stop.SAID and scores == {"right": 1.0, "num_turns": 2.0, "total_tool_calls": 1.0, "add_calls": 1.0}
    assert {j.source: j.verdict.score for j in await env.judge(attempt)} == scores


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("sub", "{}"), "there is no tool 'sub'; there are: add"),
        (call("add", "{"), "could not be read"),
        ("<tool_call>", "never closed"),
        (call("add", '{"a": 1}'), "missing 1 required"),
        (call("add", '{"a": 1, "b": []}'), "unsupported operand"),
    ],
)
async def test_a_bad_call_is_an_observation(tmp_path: Path, said: str, told: str) -> None:
    talk, end, scores, _ = await ended(loaded(tmp_path, TOOLS), 1, said, "0")
    assert told in talk.seen[1][0]["content"] and end is Stop.SAID and scores["right"] == 0.0  # type: ignore[index,typeddict-item]


@pytest.mark.parametrize("nap", ["time.sleep(5)", "await asyncio.sleep(5)"], ids=["sync", "async"])
async def test_a_slow_tool_is_stopped_told_and_counted(tmp_path: Path, nap: str) -> None:
    define = "async def" if "await" in nap else "def"
    slow = TOOLS.replace("def add", f"{define} add").replace(
        "    return a + b", f"    import asyncio, time\n    {nap}\n    return a + b"
    )
    env = loaded(tmp_path, slow, limits=EpisodeLimits(tool_seconds=0.2, tool_timeouts=2))
    beats: list[float] = []

    async def beat() -> None:
        while True:
            beats.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.02)

    heart = asyncio.ensure_future(beat())
    asked = call("add", '{"a": 1, "b": 1}')
    try:
        one, end, _, _ = await ended(env, 1, asked, "2")
        assert end is Stop.SAID and "add took longer than 0.2 s and was stopped" in one.seen[1][0]["content"]  # type: ignore[index,typeddict-item]
        two, end, _, _ = await ended(env, 1, asked, asked, "2")
        assert end is Stop.TOOLS and len(two.said) == 2, "the second time-out ends it"
    finally:
        heart.cancel()
    assert max(b - a for a, b in pairwise(beats)) < 2, "other episodes went on meanwhile"


async def test_tools_need_a_template_that_writes_calls(tmp_path: Path) -> None:
    env, talk = loaded(tmp_path, TOOLS), ScriptedPolicy(["1"])
    talk.format = None
    with pytest.raises(DataError, match="writes no tool calls"):
        await env.play(env.train.task(0), talk)


# --- loading ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_loaded_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="or name its file: verifiers:path/no-such-env.py"):
        environment(Env(name="verifiers:no-such-env"), 0)
    with pytest.raises(ConfigError, match="unexpected keyword argument 'counts'"):
        loaded(tmp_path, SINGLE, counts=3)
    with pytest.raises(ConfigError, match="compares the answers of a group"):
        loaded(tmp_path, GROUP)
    with pytest.raises(ConfigError, match="no reward function with a weight"):
        loaded(tmp_path, TOOLS.replace("rubric=vf.Rubric(funcs=[right])", "rubric=vf.Rubric()"))

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ConfigError, match=r'pip install "posttrain\[verifiers\]"'):
        environment(Env(name="verifiers:mine"), 0)


def test_an_installed_module_is_found_by_its_id_and_signals_stay_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_sums.py").write_text(SINGLE)
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    env = environment(
        Env(name="verifiers:my-sums", args={"count": 12}, rewards=(Reward(function="contains"),), heldout=2), 0
    )
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert env.name == "verifiers:my-sums" and len(env.rewards) == 1


# --- a run ------------------------------------------------------------------------------------------------------------


def policy_at(folder: Path) -> Path:
    """A small model whose tokenizer has bytes and a chat template with tools."""
    words = tokenizer(FAMILIES["qwen2.5"])
    words.eos_token = "<|im_end|>"
    module = build_module(Model(**{**MODEL.__dict__, "context": 700}), words, 0)
    module.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("source", "judge"),
    [(GUESS, "found"), *(pytest.param(x, "right", marks=pytest.mark.prove) for x in (SINGLE, TOOLS))],
    ids=["several", "single", "tools"],
)
def test_two_steps_of_training_run(tmp_path: Path, source: str, judge: str) -> None:
    (tmp_path / "world.py").write_text(source)
    words = (
        "sft=none",
        "threads=1",
        "slots=16",
        "evaluation.samples=1",
        f"model={policy_at(tmp_path / 'model')}",
        "env.heldout=2",
    )
    stage = (
        "rl.steps=2",
        "rl.prompts=2",
        "rl.siblings=2",
        "rl.eval_every=0",
        "rl.checkpoint_every=0",
        "rl.sampling.max_tokens=40",
        "rl.sampling.allowed_words=1,2",
    )
    base = recipe("arithmetic")
    posttrain.run(base, f"env=verifiers:{tmp_path / 'world.py'}", *words, *stage, out=tmp_path / "run", quiet=True)
    episodes = [r.episode for n in (1, 2) for r in run_reader.episodes(tmp_path / "run", "rl", n)]
    assert len(episodes) == 8 and all(
        judge in {j.source for j in e.verdicts} and e.reward is not None for e in episodes
    )
    if source is GUESS:
        assert max(len(e.state["completion"]) for e in episodes) > 2, "the world answered, and was asked again"
