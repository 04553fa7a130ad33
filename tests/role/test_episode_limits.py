"""Limits of an episode on a real engine: each has its own reason, holds for every environment, and leaves a learnable
episode."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.config.run import Env, Reinforce, Run
from posttrain.core.abilities import Abilities
from posttrain.core.abilities import Demonstrations as DemonstratedTexts
from posttrain.core.ports import Attempt, Talk
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Episode, Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.gallery.calculator import CalculatorEnv
from posttrain.ladder.pieces.baseline import ToGo
from posttrain.ladder.policy_rows import GIGPO, MT_GRPO, PPO
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.record.step_format import from_columns, of_groups, to_columns
from posttrain.role.rollout import Rollout
from posttrain.system.errors import ConfigError, DataError, InvariantError
from posttrain.verifier.reward_source import graded
from tests.tiny import MODEL, only_rl, play, tiny_parts, tiny_run


@dataclass(frozen=True, kw_only=True)
class Chatter(CalculatorEnv):
    """Answers whatever is said until a limit ends it, pays every turn, and keeps count of what it opened and closed."""

    opened: list[int]
    slow: float = 0.0
    most: int | None = None
    shows: str = "="
    raises: BaseException | None = None

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        if self.raises is not None:
            raise self.raises
        self.opened.append(1)
        turns = 0
        try:
            while True:
                said = await talk.say(self.most)
                if said.stop in (Stop.TURNS, Stop.TOKENS, Stop.CONTEXT):
                    return said.stop
                turns += 1
                talk.pay("turn", 0.25)
                talk.leave({"turns": turns})
                await asyncio.sleep(self.slow)
                talk.see(self.shows)
        finally:
            self.opened.append(-1)

    def verify(self, attempt: Attempt) -> Verdict:
        return graded(bool(attempt.state and attempt.state["turns"] > 1), attempt.state, "two turns")


def test_a_demonstration_longer_than_the_context_is_refused() -> None:
    """In a group too: the learner would read positions that the model does not have."""
    write = lambda task, style, rng, wrong: ("aa", "bbb")  # noqa: E731
    world = SimpleNamespace(abilities=Abilities(demonstrations=DemonstratedTexts(styles=("s",), write=write)))
    letters = SimpleNamespace(pair=lambda *given: (np.zeros(2, np.int32), np.ones(4, np.int32)))
    dialogue = SimpleNamespace(text=lambda ids: "b" * len(ids))
    judging = SimpleNamespace(judge=lambda *given: asyncio.sleep(0, ()))
    for context in (6, 5):
        sampler = SimpleNamespace(context=context)
        rollout = Rollout(sampler, world, lambda task: dialogue, 0, letters)  # type: ignore[arg-type]
        shown = rollout.show(Task("t", "aa"), 0, 0, Sampling(stop_ids=()), None, judging)  # type: ignore[arg-type]
        if context == 6:
            assert asyncio.run(shown).spoken == 4
            continue
        with pytest.raises(DataError, match="the demonstration of task 't' has 6 tokens and the model's context is 5"):
            asyncio.run(shown)


def episodes(tmp_path: Path, limits: EpisodeLimits, **chatter: Any) -> tuple[list[Episode], Chatter]:
    run = only_rl(tiny_run())
    parts = tiny_parts(
        tmp_path, replace(run, env=Env(name="calculator", heldout=6, limits=limits), model=replace(MODEL, context=96))
    )
    env = Chatter(opened=[], heldout_count=6, **chatter)
    rollout = replace(parts.rollout, environment=env)
    assert rollout.limits == limits
    stage = parts.run.stages[-1]

    async def go() -> list[Episode]:
        groups = await asyncio.gather(
            *(
                rollout.group(env.train.task(i), 0, RolloutRequest(groups=1, siblings=2), parts.sampling(stage), "test")
                for i in range(3)
            )
        )
        return [e for g in groups for e in g.episodes]

    out = asyncio.run(go())
    parts.book.close()
    return out, env


@pytest.mark.parametrize(
    ("limits", "stop"),
    [
        (EpisodeLimits(turns=3), Stop.TURNS),
        (EpisodeLimits(tokens=9), Stop.TOKENS),
        (EpisodeLimits(), Stop.CONTEXT),
    ],
)
def test_each_limit_ends_the_episode_by_its_own_reason(tmp_path: Path, limits: EpisodeLimits, stop: Stop) -> None:
    for e in episodes(tmp_path, limits)[0]:
        assert e.stop is stop and not e.error
        (segment,) = e.segments
        assert e.spoken == segment.spoken <= (limits.tokens or 96) and len(segment.ids) <= 97
        paid = [j for j in e.verdicts if j.paid]
        assert e.state == {"turns": len(paid)} and e.reward == pytest.approx(0.25 * len(paid) + (len(paid) > 1))
        assert [j.end for j in paid] == sorted({j.end for j in paid})  # type: ignore[type-var]
        if stop is Stop.TURNS:
            assert len(paid) == 3 and paid[-1].end == e.spoken
        if stop is Stop.TOKENS:
            assert e.spoken == 9


def test_the_clock_ends_an_episode_and_its_world_cleans_up(tmp_path: Path) -> None:
    said, env = episodes(tmp_path, EpisodeLimits(seconds=0.3), slow=30.0)
    assert {e.stop for e in said} == {Stop.TIME} and sum(env.opened) == 0 and len(env.opened) == 12
    assert all(e.state == {"turns": 1} and e.reward == 0.25 and e.spoken for e in said), "what was said before counts"


@pytest.mark.parametrize("raised", [RuntimeError("no"), SystemExit(3), asyncio.CancelledError("mine")])
def test_what_an_environment_raises_fails_its_episodes_and_ends_no_run(tmp_path: Path, raised: BaseException) -> None:
    for e in episodes(tmp_path, EpisodeLimits(turns=2), raises=raised)[0]:
        assert e.stop is Stop.ERROR and type(raised).__name__ in e.error


def test_a_turn_may_be_shorter_than_the_contract(tmp_path: Path) -> None:
    for e in episodes(tmp_path, EpisodeLimits(turns=2), most=2)[0]:
        assert e.spoken <= 4 and e.stop is Stop.TURNS


def test_an_episode_with_paid_turns_and_a_state_is_recorded_whole(tmp_path: Path) -> None:
    from posttrain.core.types import Group

    said, _ = episodes(tmp_path, EpisodeLimits(turns=2))
    group = Group(said[0].task, 0, tuple(said[:2]))
    back = [r.episode for r in from_columns(to_columns(of_groups([group])))]
    assert [(e.state, e.verdicts, e.reward, e.stop) for e in back] == [
        (e.state, e.verdicts, e.reward, e.stop) for e in said[:2]
    ]


def test_pay_follows_a_turn() -> None:
    from posttrain.role.episode_conversation import Conversation, Player

    talk = Conversation(Player(None, lambda task: None, None), "t", EpisodeLimits(), int)  # type: ignore[arg-type, return-value]
    with pytest.raises(InvariantError, match="before the policy said anything"):
        talk.pay("x", 1.0)


@pytest.mark.parametrize(
    "bad",
    [{"turns": 0}, {"tokens": -1}, {"seconds": 0.0}, {"tool_seconds": 0.0}, {"tool_timeouts": 0}, {"observation": 3}],
)
def test_a_limit_of_nothing_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"env.limits.{next(iter(bad))}="):
        EpisodeLimits(**bad)


def tool_run(name: str, style: str, **rl: Any) -> Run:
    """A few steps of imitation of several turns, and a few of reinforcement."""
    run = tiny_run(**rl)
    sft, stage = run.stages
    return replace(
        run, env=Env(name=name, heldout=6), model=replace(MODEL, context=256), stages=(replace(sft, style=style), stage)
    )


@pytest.mark.parametrize(
    ("name", "style", "algorithm"),
    [
        ("calculator", "tool", PPO),
        *(pytest.param("shop", "tools", a, marks=pytest.mark.prove) for a in (MT_GRPO, GIGPO)),
    ],
)
def test_a_run_with_tools_from_imitation_on(tmp_path: Path, name: str, style: str, algorithm: Any) -> None:
    """Every canary holds: turns end in one stop token each, observations are masked, credit has a second opinion or
    none."""
    results = asyncio.run(play(tiny_parts(tmp_path, tool_run(name, style, algorithm=algorithm))))
    assert [r.name for r in results] == ["sft", "rl"]


PAYS = """
from dataclasses import dataclass
from posttrain.environment.gallery.calculator import CalculatorEnv, is_request, result
from posttrain.core.types import Stop


@dataclass(frozen=True, kw_only=True)
class Pays(CalculatorEnv):
    async def play(self, task, talk):
        talk.see(task.prompt)
        for turn in range(3):
            said = await talk.say()
            talk.pay("digits", sum(c.isdigit() for c in said.text) / 4)
            talk.see("=")
        return Stop.TURNS
"""


@pytest.mark.parametrize(
    "algorithm",
    [
        replace(PPO, scale="one", baseline=ToGo(), whiten="token"),
        *(pytest.param(a, marks=pytest.mark.prove) for a in (PPO, MT_GRPO, GIGPO)),
    ],
)
def test_a_run_whose_turns_are_paid(tmp_path: Path, algorithm: Any) -> None:
    """The second opinions on credit and value targets agree about where a turn's reward stands."""
    (tmp_path / "pays.py").write_text(PAYS)
    run = only_rl(tiny_run(algorithm=algorithm))
    run = replace(run, env=Env(name=f"{tmp_path / 'pays.py'}:Pays", heldout=6), model=replace(MODEL, context=96))
    (result,) = asyncio.run(play(tiny_parts(tmp_path / "run", run)))
    assert result.steps == 3 and result.optimizer_steps


def test_a_demonstration_of_several_turns_is_played(tmp_path: Path) -> None:
    """Its turns are imitated, what the world answers between them is masked, and an episode of another length is
    refused."""
    from posttrain.role.learning.demonstrations import recited

    parts = tiny_parts(tmp_path, tool_run("shop", "tools"))
    env: Any = parts.environment
    task = env.heldout[0]

    def recite(turns: Any) -> Any:
        from posttrain.core.sampling import Sampling

        return asyncio.run(
            recited(
                env, parts.renderer, parts.rollout.dialogue(task.id), task, task.prompt, turns, Sampling(stop_ids=())
            )
        )

    gold = env.gold(task)
    said = recite(gold)
    segment = said.transcript.segment()
    assert tuple(said.turns) == gold and said.state == task.answer
    runs = np.flatnonzero(np.diff(segment.mask.astype(np.int8), prepend=0, append=0)).reshape(-1, 2)
    assert [parts.renderer.text(segment.ids[a:b]) for a, b in runs] == list(gold)
    before = sum(b - a for a, b in runs[:-1])
    assert [said.spoken_upto(n) for n in range(len(gold[-1]) + 1)] == [before + n for n in range(len(gold[-1]) + 1)], (
        "a token a character"
    )
    with pytest.raises(DataError, match="has 1 turns, and the episode goes on"):
        recite(gold[:1])
    with pytest.raises(DataError, match="has 4 turns and its episode ended after 3"):
        recite((*gold, "done"))
    parts.book.close()


def test_stage_limits_reach_the_environment() -> None:
    from posttrain.environment.make import environment

    env = environment(Env(name="shop", heldout=6, limits=EpisodeLimits(tool_seconds=3.0)), 0)
    assert env.limits.tool_seconds == 3.0 and isinstance(tool_run("shop", "tools").stages[1], Reinforce)


def test_what_is_shown_past_the_context_ends_the_episode_and_is_cut_there(tmp_path: Path) -> None:
    """A tool's answer of two million characters: its tokens are not all made, and the episode, which may be trained on,
    ends with the context."""
    tracemalloc.start()
    said, _ = episodes(tmp_path, EpisodeLimits(), shows="12+" * 700_000)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert said and most < 100 << 20
    for e in said:
        assert (
            e.stop is Stop.CONTEXT
            and sum(len(s.ids) for s in e.segments) == 96
            and 0 < sum(s.spoken for s in e.segments) < 96
        )
