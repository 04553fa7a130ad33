"""Placement changes nothing of what is computed: the router is a pure function, a pool loses and doubles no turn
whoever dies, and a run with engines in processes has the digest of the run in one process."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.api import main
from posttrain.config.env import Env
from posttrain.config.placement import Local, Placement, Processes
from posttrain.config.run import Run
from posttrain.core.exchange.request_owner import RequestOwner, UnanswerableTurn, asked_for
from posttrain.engine.pool.engine_pool import EnginePool
from posttrain.engine.pool.turn_router import BLOCK, CALLS_AHEAD, Beginnings, EngineLoad, choose
from posttrain.record import checkpoint as checkpoints
from posttrain.record import run_reader, step_format
from posttrain.role.weights import saved_weights as stored
from tests.engine.pool_parts import PLAIN, MemoryWeights, Script, known, prompt, scripted_pool
from tests.killing import kill
from tests.tiny import tiny_run

LOADS = st.builds(EngineLoad, st.integers(0, 500), st.integers(0, 64), st.booleans())


@given(st.integers(1, 100), st.lists(LOADS, max_size=6))
@settings(max_examples=200)
def test_a_turn_goes_where_most_of_it_is_cached_unless_that_engine_is_far_ahead(
    tokens: int, engines: list[EngineLoad]
) -> None:
    at = choose(tokens, engines)
    ready = [e for e in engines if e.ready]
    if at is None:
        assert not ready
        return
    least = min(e.busy for e in ready)
    near = [e for e in ready if e.busy <= least + CALLS_AHEAD * tokens]
    assert engines[at] in near
    assert engines[at].cached == max(e.cached for e in near)
    assert engines[at].busy == min(e.busy for e in near if e.cached == engines[at].cached)
    assert at == choose(tokens, [*engines]), "the same states give the same engine"


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=60))
@settings(max_examples=100)
def test_turns_that_never_end_are_balanced(count: int, turns: list[tuple[int, int]]) -> None:
    """Whatever comes, no engine is ahead of another by more than the turns that may stay with their beginnings."""
    busy, known_there = [0] * count, [Beginnings() for _ in range(count)]
    for task, tokens in turns:
        ids = np.full(BLOCK, task, np.int32)
        at = choose(tokens, [EngineLoad(b, k.cached(ids)) for b, k in zip(busy, known_there, strict=True)])
        assert at is not None
        busy[at] += tokens
        known_there[at].add(ids)
        assert max(busy) - min(busy) <= (CALLS_AHEAD + 1) * 40


@given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.lists(st.integers(0, 3), max_size=80))
@settings(max_examples=100)
def test_what_is_cached_is_a_common_beginning(first: list[int], more: list[int]) -> None:
    a, b = np.array(first, np.int32), np.array([*first, *more], np.int32)
    known_there = Beginnings()
    known_there.add(a)
    assert known_there.cached(a) == len(a), "siblings share all of their prompt"
    assert known_there.cached(b) >= len(a) // BLOCK * BLOCK, "a later turn shares the whole blocks of what was said"
    other = np.array([*more, *first], np.int32)
    same = next((i for i, (x, y) in enumerate(zip(other, a, strict=False)) if x != y), min(len(a), len(other)))
    assert known_there.cached(other) <= same
    known_there.forget()
    assert known_there.cached(a) == 0


LIVES = st.lists(st.one_of(st.none(), st.integers(0, 12)), max_size=5)


@given(LIVES, st.integers(1, 3), st.integers(1, 12), st.integers(0, 3))
@settings(max_examples=60)
def test_nothing_is_lost_or_doubled_whoever_dies(lives: list[int | None], count: int, turns: int, pushes: int) -> None:
    """Engines die after any number of answers, pushes of weights among them: every turn is answered once, with the
    words of the weights under which it was asked, and as if nobody had died."""
    script, weights = Script(lives=list(lives)), MemoryWeights()

    async def play() -> list[list[np.ndarray]]:
        pool = scripted_pool(script, count, deaths=len(lives) + 2, weights=weights)
        out = list[list[np.ndarray]]()
        for version in range(pushes + 1):
            if version:
                served = await pool.load(version, [("w", float(version))])
                assert served == f"weight {version:g}" and pool.version == version
            said = await asyncio.gather(*(pool.generate(prompt(t), PLAIN, 100 * version + t) for t in range(turns)))
            assert all((s.version == version).all() for s in said)
            assert set(await pool.score(prompt())) == {-float(version)}
            out.append([s.ids for s in said])
            tokens = pool.gauges()["engine/tokens"]
            assert (tokens.sum, tokens.count) == (sum(len(s.ids) for s in said), turns)
        assert sum(e.restarts for e in pool.engines) <= len(script.said) <= len(lives)
        pool.close()
        return out

    said = asyncio.run(play())
    expected = [
        [known(prompt(t), 100 * version + t, float(version)) for t in range(turns)] for version in range(pushes + 1)
    ]
    assert all((x == y).all() for a, b in zip(said, expected, strict=True) for x, y in zip(a, b, strict=True))
    assert weights.retired == list(range(1, pushes)), "older weights are freed once, the newest are kept"


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 10), st.data())
@settings(max_examples=40)
def test_a_turn_that_kills_engines_fails_alone(count: int, deaths: int, others: int, data: st.DataObject) -> None:
    """One deadly turn among others: it is given up after `deaths` engines, by name; every other turn is answered."""
    deadly = data.draw(st.integers(0, others))
    script = Script(deadly={deadly})

    async def turn(pool, t: int) -> np.ndarray | UnanswerableTurn:
        with asked_for(RequestOwner("train", f"task {t}", 1, 2)):
            try:
                return (await pool.generate(prompt(t), PLAIN, t)).ids
            except UnanswerableTurn as letter:
                return letter

    async def play() -> list[np.ndarray | UnanswerableTurn]:
        pool = scripted_pool(script, count, deaths=deaths)
        found = await asyncio.gather(*(turn(pool, t) for t in range(others + 1)))
        assert not any(e.reserved or e.held for e in pool.engines)
        pool.close()
        return found

    found = asyncio.run(play())
    letter = found[deadly]
    assert isinstance(letter, UnanswerableTurn)
    assert letter.deaths == deaths and letter.who == RequestOwner("train", f"task {deadly}", 1, 2)
    assert f"task 'task {deadly}', visit 1, sibling 2" in str(letter) and "a deadly turn" in str(letter)
    if deaths > 1:
        rest = [t for t in range(others + 1) if t != deadly]
        assert all((found[t] == known(prompt(t), t, 0.0)).all() for t in rest)
    assert sum(place == deadly for place, _ in script.given) == deaths


LONG = pytest.mark.prove


def placed(placement: Placement, staleness: int = 0, **rl: Any) -> Run:
    run = tiny_run(**{"steps": 4, "checkpoint_every": 2, "staleness": staleness} | rl)
    return replace(run, deterministic=True, placement=placement)


def outcome(folder: Path) -> str:
    """Digest of weights, optimizer, progress, episodes and record. What engines counted of their own work, such as
    passes and idle slots, is left out: it tells who sampled, and in `local` it is in the record."""
    last = checkpoints.find(folder)
    h = hashlib.blake2b()
    for name in (stored.WEIGHTS, stored.OPTIMIZER):
        path = last.folder / name
        h.update(path.read_bytes() if path.exists() else b"-")
    h.update(repr(sorted((k, v) for k, v in last.state.items() if k in ("stage", "version", "accuracy"))).encode())
    for s in run_reader.steps(folder):
        kept = {n: g for n, g in s.gauges.items() if not n.startswith("engine/") or n == "engine/tokens"}
        h.update(repr((s.stage, s.index, s.version, sorted(kept.items()), s.notes)).encode())
    for row in run_reader.episode_files(folder):
        for name, column in sorted(step_format.read_columns(row.path).items()):
            h.update(f"{row.path.name} {name} {column.dtype} {column.shape}".encode() + column.tobytes())
    return h.hexdigest()


def played(run: Run, folder: Path) -> str:
    main.run(run, out=folder, quiet=True)
    return outcome(folder)


@LONG
@pytest.mark.parametrize("staleness", [0, 2])
def test_engines_in_processes_change_no_bit(staleness: int, tmp_path: Path) -> None:
    local = played(placed(Local(), staleness), tmp_path / "local")
    for count in (1, 2):
        assert played(placed(Processes(engines=count), staleness), tmp_path / str(count)) == local


@LONG
@pytest.mark.parametrize("staleness", [0, 2])
def test_episodes_in_processes_change_no_bit(staleness: int, tmp_path: Path) -> None:
    """Of one turn, and of several with a tool: turns, observations and what is paid come from elsewhere."""
    one = placed(Local(), staleness)
    several = replace(one, env=Env(name="calculator", heldout=6), stages=one.stages[1:])
    several = replace(several, model=replace(several.model, context=192))
    for name, run in (("one", one), ("several", several)):
        local = played(run, tmp_path / f"{name}-local")
        elsewhere = Processes(engines=1, environments=2)
        assert played(replace(run, placement=elsewhere), tmp_path / f"{name}-elsewhere") == local


TICK, LONGEST = 0.01, 0.5
"""Seconds: between two looks for engines that are ready, and until the next kill."""


class Killer:
    """Kills engines of pools with SIGKILL, after seconds drawn from a seed, `LONGEST` at most, as long as it
    is told to. Seconds in which no engine is ready do not count."""

    def __init__(self, seed: int, between: float, kills: int) -> None:
        self.rng, self.between, self.left, self.killed = np.random.default_rng(seed), between, kills, 0
        self.pools = list[EnginePool]()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        due = self._drawn()
        while self.left and not self.over.wait(TICK):
            alive = [e for pool in self.pools for e in pool.engines if e.ready and e.host.pid]
            due -= TICK if alive else 0
            if alive and due <= 0:
                due = self._drawn()
                chosen = alive[int(self.rng.integers(len(alive)))].host.pid
                assert chosen is not None
                if kill(chosen):
                    self.left, self.killed = self.left - 1, self.killed + 1

    def _drawn(self) -> float:
        return min(float(self.rng.exponential(self.between)), LONGEST)


KILLS = int(os.environ.get("POSTTRAIN_SWEEP_KILLS", "4"))


@LONG
@pytest.mark.parametrize("staleness", [0, 2])
def test_killed_engines_change_no_bit(staleness: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL at random instants: the run ends with the digest of one that lost nobody. POSTTRAIN_SWEEP_SEED repeats
    it, POSTTRAIN_SWEEP_KILLS is how many are killed."""
    whole = played(placed(Local(), staleness, steps=12), tmp_path / "whole")
    seed = int(os.environ.get("POSTTRAIN_SWEEP_SEED", time.time_ns() % 2**31))
    print(f"POSTTRAIN_SWEEP_SEED={seed}")
    killer, begin = Killer(seed, 0.4, KILLS), EnginePool.__init__

    def watched(self: EnginePool, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        killer.pools.append(self)

    monkeypatch.setattr(EnginePool, "__init__", watched)
    killer.thread.start()
    try:
        run = placed(Processes(engines=2, deaths=KILLS + 2), staleness, steps=12)
        assert played(run, tmp_path / "killed") == whole
    finally:
        killer.over.set()
        killer.thread.join()
    steps = [s for s in run_reader.steps(tmp_path / "killed") if s.stage == "rl"]
    told = sum(s.clock.get("engine/deaths", 0) for s in steps)
    print(f"{killer.killed} engines killed, {told:g} told in the record")
    assert killer.killed and told <= killer.killed
