"""Several seats in an episode, one of them trained: who plays, what is learned from, what limits and record know."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.build.build_engines import make_engine
from posttrain.build.build_run import make_policy
from posttrain.cli.token_view import episode_lines
from posttrain.config.run import Run
from posttrain.core import seeds
from posttrain.core.ports import Attempt, Talk
from posttrain.core.sampling import Sampling
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Episode, Group, Stop, Task
from posttrain.core.verdict import Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.scripted_policy import ScriptedPolicy, attempt
from posttrain.environment.templates.renderer import RenderedDialogue
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.record import run_reader
from posttrain.record.step_format import from_columns, of_groups, read_columns, to_columns
from posttrain.role.episode_conversation import Player
from posttrain.role.learning.demonstrations import recited
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import ConfigError, DataError
from tests.tiny import only_rl, play, tiny_parts, tiny_run

ASKED = Sampling(max_tokens=3)


@dataclass(frozen=True, kw_only=True)
class Interview(Arithmetic):
    """Two seats: one asks, the trained one answers, twice. The asker hears the answer before it asks again."""

    max_terms: int = 2
    max_operand: int = 4
    lines: tuple[tuple[str, tuple[str, ...]], ...] | None = None
    """The asker's words by task id: the world writes them itself. None: a seat says them."""

    vouches_for_gold = False  # type: ignore[assignment]

    async def play(self, task: Task, talk: Talk) -> Stop:
        talk.see(task.prompt)
        asker = None if self.lines is not None else talk.seat("asker")
        if asker is not None:
            asker.see(task.prompt)
        end = (await talk.say()).stop
        for n in range(2):
            if asker is not None:
                asker.see("=")
                question = (await asker.say(3)).text
            else:
                question = dict(self.lines or ())[task.id][n]
            talk.see(question + "=")
            end = (await talk.say()).stop
        return end

    def verify(self, attempt: Attempt) -> Verdict:
        """Spread on nearly any two texts."""
        return Verdict.value(float(sum(map(ord, "".join(attempt.turns))) % 7))

    def knows_gold(self, task: Task) -> bool:
        return False


def interview(folder: Path, run: Run | None = None, **env: Any) -> RunParts:
    """A tiny RL run whose environment has two seats."""
    parts = tiny_parts(folder, run or only_rl(tiny_run(steps=1, siblings=3)))
    world: Any = Interview(heldout_count=4, **env)
    parts.environment, parts.rollout = world, replace(parts.rollout, environment=world)
    return parts


def contract(parts: RunParts, **more: Any) -> Sampling:
    return replace(ASKED, **more).resolve(parts.stop_ids, parts.spell)


def stranger(parts: RunParts) -> Player:
    """Another tiny model, with weights of its own, played by an engine of its own."""
    run = replace(parts.run, seed=parts.run.seed + 1)
    policy = make_policy(run, parts.environment)
    renderer: Any = parts.renderer
    serving = make_engine(run, policy, renderer.decode)
    return Player(serving.sampler, lambda task: RenderedDialogue(renderer, task), contract(parts))


def group(parts: RunParts, task: int = 0, **more: Any) -> Group:
    return asyncio.run(
        parts.rollout.group(
            parts.environment.train.task(task), 0, RolloutRequest(groups=1, siblings=3), contract(parts), "s", **more
        )
    )


def said(e: Episode) -> list[list[int]]:
    return [s.ids[s.mask].tolist() for s in e.segments]


@pytest.mark.prove
@pytest.mark.parametrize("who", ["policy", "stranger"])
def test_two_seats_play_and_train(tmp_path: Path, who: str) -> None:
    """A real run: the trained seat learns, the asker's words are in the record, and the engine's tokens add up."""
    parts = interview(tmp_path / "run")
    before = {n: t.detach().clone() for n, t in parts.learner.parameters().items()}
    if who == "stranger":
        parts.rollout = replace(parts.rollout, players={"asker": stranger(parts)})
    asyncio.run(play(parts))
    assert any(not torch.equal(before[n], t) for n, t in parts.learner.parameters().items())
    [file] = [f for f in run_reader.episode_files(tmp_path / "run") if f.kind != "eval"]
    episodes = [r.episode for r in from_columns(read_columns(file.path))]
    for e in episodes:
        assert [t.seat for t in e.seats] == ["asker"] * 2 and [t.after for t in e.seats] == [1, 2]
        assert all(t.policy == (who == "policy") for t in e.seats) and all(0 < t.tokens <= 3 for t in e.seats)
        assert len(e.turns) == 3 and sum(e.turns) == e.spoken


@pytest.mark.prove
def test_gradients_are_those_of_words_that_the_world_wrote(tmp_path: Path) -> None:
    """The same episodes with a seat, and with its words replayed by the world: weights after the step are bit-equal."""
    run = only_rl(tiny_run(steps=1, prompts=2, siblings=2))
    seated = interview(tmp_path / "seat", run)
    asker = replace(stranger(seated), sampling=contract(seated, greedy=True))  # so that it asks every sibling the same
    seated.rollout = replace(seated.rollout, players={"asker": asker})
    before = {n: t.detach().clone() for n, t in seated.learner.parameters().items()}
    asyncio.run(play(seated))
    assert any(not torch.equal(before[n], t) for n, t in seated.learner.parameters().items())
    [file] = [f for f in run_reader.episode_files(tmp_path / "seat") if f.kind != "eval"]
    found = [r.episode for r in from_columns(read_columns(file.path))]
    lines = {e.task.id: tuple(t.text for t in e.seats) for e in found}
    heldout = {t.id: ("1", "2") for t in seated.environment.heldout}
    assert all(lines[e.task.id] == tuple(t.text for t in e.seats) for e in found)

    written = interview(tmp_path / "world", run, lines=tuple((heldout | lines).items()))
    asyncio.run(play(written))
    [file] = [f for f in run_reader.episode_files(tmp_path / "world") if f.kind != "eval"]
    again = [r.episode for r in from_columns(read_columns(file.path))]
    assert [(said(e), e.reward) for e in again] == [(said(e), e.reward) for e in found] and not any(
        e.seats for e in again
    )
    one, two = seated.learner.parameters(), written.learner.parameters()
    assert all(torch.equal(one[n], two[n]) for n in one) and one.keys() == two.keys()


def test_a_seat_changes_no_draw_of_the_trained_one(tmp_path: Path) -> None:
    """Random numbers of a seat belong to (seat, turn); those of the trained seat are what they are without it."""
    parts = interview(tmp_path / "run")
    task = parts.environment.train.task(0)
    first = group(parts)
    alone = replace(parts.rollout, environment=replace(parts.environment, lines=((task.id, ("1", "2")),)))
    other = asyncio.run(alone.group(task, 0, RolloutRequest(groups=1, siblings=3), contract(parts), "s"))
    turn = [e.turns[0] for e in first.episodes]
    assert turn == [e.turns[0] for e in other.episodes]
    assert [said(e)[0][:n] for e, n in zip(first.episodes, turn, strict=True)] == [
        said(e)[0][:n] for e, n in zip(other.episodes, turn, strict=True)
    ]
    assert seeds.key(1, "s", task.id, 0, 0, 1) != seeds.key(1, "s", task.id, 0, 0, "seat", "asker", 1)
    parts.book.close()
    parts.close()


def test_limits_hold_over_all_seats(tmp_path: Path) -> None:
    parts = interview(tmp_path / "run")
    for limits, stop in ((EpisodeLimits(turns=3), Stop.TURNS), (EpisodeLimits(tokens=7), Stop.TOKENS)):
        parts.rollout = replace(parts.rollout, limits=limits)
        for e in group(parts).episodes:
            turns, tokens = len(e.turns) + len(e.seats), e.spoken + sum(t.tokens for t in e.seats)
            assert turns <= (limits.turns or 9) and tokens <= (limits.tokens or 99)
            assert e.stop is stop or tokens < (limits.tokens or 0)
    parts.book.close()
    parts.close()


def test_seats_survive_the_record_and_older_records_have_none(tmp_path: Path) -> None:
    parts = interview(tmp_path / "run")
    played = group(parts)
    columns = to_columns(of_groups([played]))
    assert [r.episode.seats for r in from_columns(columns)] == [e.seats for e in played.episodes] and played.episodes[
        0
    ].seats
    bare = replace(played, episodes=tuple(replace(e, seats=()) for e in played.episodes))
    shown = "\n".join(episode_lines(0, from_columns(columns)[0], None, False))
    assert "seat asker after turn 1 (" in shown
    older = to_columns(of_groups([bare]))
    assert b'"seats"' not in older["meta"].tobytes()
    assert all(not r.episode.seats for r in from_columns(older))
    parts.book.close()
    parts.close()


def test_a_seat_without_a_player_is_refused_where_others_have_one(tmp_path: Path) -> None:
    parts = interview(tmp_path / "run")
    parts.rollout = replace(
        parts.rollout, players={"askr": Player(parts.sampler, parts.rollout.dialogue, contract(parts))}
    )
    with pytest.raises(ConfigError, match="seat 'asker'.*askr"):
        group(parts)
    parts.book.close()
    parts.close()


def test_scripts_play_seats_and_demonstrations_refuse_them(tmp_path: Path) -> None:
    world = Interview(heldout_count=4)
    task = world.heldout[0]
    talk = ScriptedPolicy(("1", "2", "3"), seats={"asker": ("why", "how")})
    assert asyncio.run(world.play(task, talk)) is Stop.SAID
    assert talk.seen[1:] == ["why=", "how="] and talk.others["asker"].seen == [task.prompt, "=", "="]
    with pytest.raises(IndexError):
        asyncio.run(attempt(world, task, ("1", "2", "3")))
    parts = interview(tmp_path / "run")
    with pytest.raises(DataError, match="seat 'asker'"):
        asyncio.run(
            recited(world, parts.renderer, parts.rollout.dialogue("t"), task, str(task.prompt), ("1",), contract(parts))
        )
    parts.book.close()
    parts.close()
