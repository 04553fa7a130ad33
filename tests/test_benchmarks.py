"""Our sides of the benchmarks still start and play: they build the library's parts themselves, and nothing else would
tell."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import posttrain
from benchmarks.__main__ import HERE, SHELVES, programs
from benchmarks.learning.updates_regions import ARMS
from benchmarks.learning.updates_worlds import Nim
from benchmarks.speed import asynchrony, asynchrony_arms, grpo_work, head
from benchmarks.speed.side import Worker
from benchmarks.speed.whole_answers import whole_answers
from posttrain.config.run import Optimizer
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.gauge import merge
from posttrain.core.types import Task
from posttrain.engine.cpu import compile_native
from posttrain.engine.head.value_heads import RewardHead
from posttrain.environment.scripted_policy import ScriptedPolicy
from posttrain.record import run_reader
from tests import faulty
from tests.late import Late, episodes_of, late_run

OF_TURNS = ("engine/queue",)
"""Entries of the clock that add up what turns waited side by side: longer than the step, where Python's memory is
cleaned while they wait."""
SMALL = grpo_work.Size(hidden=32, layers=1, heads=2, kv_heads=2, ffn=64, search=1, tries=1, repeats=1)


def test_every_measurement_is_listed() -> None:
    """One line each; what is not listed is a side that another program starts."""
    shelves = {p.parent.name for p in HERE.glob("*/__init__.py")}
    assert shelves == set(SHELVES)
    for shelf in shelves - {"miniatures"}:
        listed = {name.rpartition(".")[2] for name, what in programs(shelf) if len(what) > 10}
        files = {p.stem: p.read_text(encoding="utf-8") for p in (HERE / shelf).glob("*.py")}
        for name in (n for n, text in files.items() if '__name__ == "__main__"' in text and n not in listed):
            assert any(f"{name.rpartition('_')[0]}_" in text for n, text in files.items() if n in listed), name


def side(script: str, job: str, folder: Path, *more: str) -> Worker:
    return Worker(script, [sys.executable, "-m", f"benchmarks.speed.{script}", job, *more], 1, folder / "err")


@pytest.mark.prove
@pytest.mark.parametrize("regime", ["equal", "heavy"])
def test_grpo_step_takes_steps_of_the_forced_lengths(tmp_path: Path, regime: str) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path)
    wanted = int(grpo_work.lengths_PG(regime, 2).sum())
    with side("grpo_ours", grpo_work.Job(str(tmp_path), regime, 2, 1).dump(), tmp_path) as ours:
        assert ours.listen()["ready"]
        for _ in range(4):
            told = ours.timed(do="step")
            whole = [seconds for role, seconds in told["roles"].items() if role not in OF_TURNS]
            assert told["spoken"] == wanted and 0 < max(whole) <= told["seconds"]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("do", "regime"),
    [
        ("ours", "heavy"),
        pytest.param("siblings", 32, marks=pytest.mark.prove),
        pytest.param("turns", 93, marks=pytest.mark.prove),
    ],
)
def test_rollout_plays(tmp_path: Path, do: str, regime: str | int) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path, 1024)
    job = {"checkpoint": str(tmp_path), "threads": 1, "slots": 4, "context": 1024, "options": {}}
    with side("rollout_ours", json.dumps(job), tmp_path) as ours:
        assert ours.listen()["load_seconds"] > 0
        told = ours.timed(do=do, regime=regime, requests=6, salt=1)
        assert told["spoken"] > 0 and told["seconds"] > 0 and told["extra"]["gauges"]["engine/positions_linear"]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("regime", "other"),
    [("heavy", "naive"), ("half", "unshared"), ("half", "naive")],
)
def test_a_learners_step_has_the_gradient_of_another(tmp_path: Path, regime: str, other: str) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path)
    norms, shared = dict[str, float](), dict[str, float]()
    for name in ("ours", other):
        job = grpo_work.Job(str(tmp_path), regime, 2, 1, share=name == "ours").dump()
        with side("learner_side", name, tmp_path, job) as one:
            told = [one.timed(do="step", micro=3) for _ in range(2)]
            assert told[1]["process_seconds"] > 0 and told[1]["peak_mb"] >= told[1]["before_mb"] > 0
            norms[name], shared[name] = told[0]["norm"], told[1]["extra"].get("learner/shared", 0)
    assert norms["ours"] == pytest.approx(norms[other], rel=1e-3)
    assert shared["ours"] > 0 == shared[other]
    if regime == "half":
        assert 1 / (1 - shared["ours"]) == pytest.approx(2 * 16 / 17)


def test_the_head_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["head.py", "--quick"])
    head.main()
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    forms = {"torch", "naive"} | ({"compiled"} if not compile_native.missing() else set[str]())
    assert {(x["vocabulary"], x["form"]) for x in told} == {(v, f) for v in (258, 20_000) for f in forms}
    assert all(x["forward_backward"] > x["forward"] > 0 and x["peak_mib"] > 0 for x in told)


@pytest.fixture
def pair_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """A checkpoint and the pairs of one update; returns the job of a side of `preference.py`."""
    from benchmarks.speed.preference_work import PairJob, write_pairs

    grpo_work.save_checkpoint(SMALL, tmp_path)
    write_pairs(tmp_path / "pairs.jsonl", "heavy", 4)
    return lambda what: PairJob(what, str(tmp_path), str(tmp_path / "pairs.jsonl"), 4, 1).dump()


def textbook_norm(what: str, folder: Path) -> float:
    """The gradient norm of the first update by the shortest program that is right: one sequence after the other."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    reward = what == "reward"
    model: Any = (AutoModel if reward else AutoModelForCausalLM).from_pretrained(folder, dtype=torch.float32)
    head_weight = RewardHead(HeadShape(), SMALL.hidden).score.weight

    def score(row: dict[str, str], side: str) -> torch.Tensor:
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor([[*prompt, *tokenizer(row[side])["input_ids"], tokenizer.eos_token_id]])
        if reward:
            return (model(input_ids=ids).last_hidden_state[0, -1] @ head_weight.T)[0]
        logp = model(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        total = logp[len(prompt) - 1 :].sum()
        return 0.1 * (total - total.detach())  # at the first update the policy is the reference

    loss = -torch.stack([logsigmoid(score(r, "chosen") - score(r, "rejected")) for r in rows]).mean()
    weights = [*model.parameters(), *([head_weight] if reward else [])]
    return float(np.sqrt(sum(float(g.double().square().sum()) for g in torch.autograd.grad(loss, weights))))


@pytest.mark.prove
@pytest.mark.parametrize("what", ["dpo_ahead", "dpo", "reward"])
def test_learning_from_pairs_has_the_textbook_gradient(
    tmp_path: Path, pair_job: Callable[[str], str], what: str
) -> None:
    with side("preference_ours", pair_job(what), tmp_path) as ours:
        assert ours.listen()["ready"]
        told = [ours.timed(do="step") for _ in range(2)]
    assert told[0]["norm"] == pytest.approx(textbook_norm(what, tmp_path), rel=1e-4)
    assert told[1]["norm"] != told[0]["norm"] and told[1]["shared"] > 0.1
    assert told[1]["seconds"] > 0 and told[1]["peak_mb"] >= told[1]["before_mb"] > 0


@pytest.mark.prove
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is in the extra `bench` alone")
@pytest.mark.parametrize("what", ["dpo", "dpo_ahead", "reward"])
def test_trl_takes_the_same_updates(tmp_path: Path, pair_job: Callable[[str], str], what: str) -> None:
    """The second update follows from the first, so the optimizers agree too."""
    job = pair_job(what)
    (tmp_path / "trl").mkdir()
    with side("preference_ours", job, tmp_path) as ours, side("preference_trl", job, tmp_path / "trl") as trl:
        ours.listen()
        trl.ask(do="configure", micro=2)
        for _ in range(3):
            one, two = (s.timed(do="step") for s in (ours, trl))
            assert one["norm"] == pytest.approx(two["norm"], rel=1e-4)


@pytest.mark.prove
def test_arms_of_several_updates_part(tmp_path: Path) -> None:
    """Arms of docs/research/several-updates.md on a smaller task: bounds silence tokens, and VCPO's step shrinks."""
    model, found = faulty.start(tmp_path), dict[str, dict[str, float]]()
    for arm in ("no_clip", "clip", "gspo", "seq_is", "vcpo_step"):
        run = faulty.smallest(
            None,
            model,
            tmp_path,
            steps=4,
            minibatches=3,
            epochs=4,
            algorithm=ARMS[arm],
            optimizer=Optimizer(lr=2e-3, warmup=0),
        )
        posttrain.run(run, out=tmp_path / arm, quiet=True)
        gauges = merge(*(s.gauges for s in run_reader.steps(tmp_path / arm) if "policy/ratio" in s.gauges))
        found[arm] = {name: gauge.mean for name, gauge in gauges.items()}
    silent = {arm: f["policy/clip_low"] + f["policy/clip_high"] for arm, f in found.items()}
    assert silent["no_clip"] == silent["seq_is"] == 0 < silent["clip"] < 0.4 < silent["gspo"], silent
    assert "optim/share" not in found["seq_is"] and 0.1 < found["vcpo_step"]["optim/share"] < 0.99, found["vcpo_step"]


def game(heap: int, role: str, mine: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[ScriptedPolicy, bool]:
    """A game of the study of roles with these moves. Returns the trained seat, and whether it won."""
    task = Task(
        "nim-0", f"{'a' if role == 'first' else 'b'}<{heap}>", "", {"heap": heap, "source": f"nim/{role}", "game": 7}
    )
    talk = ScriptedPolicy(mine, seats={"opponent": theirs})
    asyncio.run(Nim(heldout_count=4).play(task, talk))
    assert talk.said == list(mine) and talk.others["opponent"].said == list(theirs)
    return talk, talk.state["won"]


@pytest.mark.parametrize(
    ("heap", "role", "mine", "theirs", "won", "seen"),
    [
        (5, "first", ("1", "3"), ("1",), True, ["a<5>", "<3>"]),
        (5, "first", ("1",), ("4",), True, ["a<5>"]),
        (5, "first", ("1", "4"), ("1",), False, ["a<5>", "<3>"]),
        (8, "second", ("1", "3"), ("3", "1"), False, ["b<8>", "<4>"]),
        (8, "second", ("2", "1", "1"), ("1", "3"), True, ["b<8>", "<5>", "<1>"]),
        (5, "first", ("x",), (), False, ["a<5>"]),
    ],
    ids=["wins", "they break a rule", "it breaks one", "they win", "wins second", "no move"],
)
def test_the_game_of_two_roles(
    heap: int, role: str, mine: tuple[str, ...], theirs: tuple[str, ...], won: bool, seen: list[str]
) -> None:
    """Each seat sees its role and the heap before each of its moves; who takes the last stone wins, a wrong move
    loses."""
    talk, found = game(heap, role, mine, theirs)
    assert (found, talk.seen) == (won, seen)
    assert talk.others["opponent"].seen[0] == seen[0].translate(str.maketrans("ab", "ba"))


def test_held_out_games_are_against_moves_drawn_at_random() -> None:
    """A demonstration is a whole game of legal moves against them, and they are the same moves each time."""
    world, random = Nim(heldout_count=40), Nim(heldout_count=40, opponent="random")
    wins = list[bool]()
    for task in world.heldout:
        _, turns = random.demonstrate(task, "move", np.random.default_rng(0), 0.0)
        assert isinstance(turns, tuple)
        talk = ScriptedPolicy(turns)
        asyncio.run(world.play(task, talk))
        assert talk.said == list(turns) and not talk.others and all(t in ("1", "2", "3") for t in turns)
        wins.append(talk.state["won"])
    assert 8 < sum(wins) < 32 and len({t.info["source"] for t in world.heldout}) == 2


def test_asking_ahead_is_compared_with_the_synchronous_side_of_its_round() -> None:
    sync = [{"seconds": 4.0, "idle": 2.0, "work": 2.0}, {"seconds": 5.0, "idle": 2.5, "work": 2.5}]
    ahead = [{"seconds": 2.0, "idle": 0.2, "work": 1.8}, {"seconds": 2.5, "idle": 0.2, "work": 2.3}]
    told = asynchrony.summary({0: sync, 1: ahead, 4: ahead})
    assert [r["faster"] for r in told] == [1, 2, 2]
    assert [r["limit"] for r in told] == [1, 2, 2], "K + 1, and no more than time over work"
    assert told[1]["idle_share"] == pytest.approx(0.2 / 2.25)


@pytest.mark.prove
def test_a_side_that_asks_ahead_plays_the_given_work(tmp_path: Path) -> None:
    grpo_work.save_checkpoint(SMALL, tmp_path, 1024)
    job = {"checkpoint": str(tmp_path), "prompts": 2, "siblings": 2, "slots": 8, "steps": 4}
    for staleness in (0, 1):
        told = asynchrony.side(job | {"staleness": staleness}, 1)
        found = asynchrony.measured(told)
        assert 0 < found["idle"] < found["seconds"] and found["most_behind"] == staleness
        spoken = {r["gauges"]["rollout/tokens"] for r in told["rows"]}
        assert len(spoken) == 1, "every step says the tokens of the table"


def test_each_arm_of_asking_ahead_adds_one_thing() -> None:
    settings = [a.settings for a in asynchrony_arms.ARMS.values()]
    changed = [{n for n in a if a[n] != b[n]} for a, b in pairwise(settings[:5])]
    assert changed == [{"staleness", "waits"}, {"algorithm"}, {"waits", "update"}, {"staleness"}]
    left_out = [{n for n in a if a[n] != settings[4][n]} for a in settings[5:]]
    assert left_out == [{"waits", "update"}, {"algorithm"}]


def test_an_arm_is_compared_with_the_synchronous_side_of_its_round() -> None:
    arms = asynchrony_arms
    times = [
        arms.ArmTime(arm, seed, seconds * (1 + seed), 1.0, behind)
        for arm, seconds, behind in (("synchronous", 4.0, 0.0), ("staleness", 2.0, 1.5))
        for seed in arms.SEEDS
    ]
    after = [arms.ArmAccuracy("staleness", seed, 0.5, 0.6 + seed / 10, 1.25, 0.5) for seed in arms.SEEDS]
    lines = {line.split("**")[1]: line for line in arms.table(times, after) if "**" in line}
    assert list(lines) == list(arms.ARMS)
    assert lines["synchronous"].endswith("| 8.00 | 12% | 1.00x | 0.00 |  |  |  |  |")
    assert lines["staleness"].endswith("| 4.00 | 25% | 2.00x | 1.50 | 0.700 | 0.600 | 1.25 | 50% |")


def test_rows_are_added_and_void_ones_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row replaces an older one of its arm and seed, whoever wrote the others meanwhile. Where answers were to go on
    under new weights and did not, a row is void."""
    arms, results, page = asynchrony_arms, tmp_path / "arms.json", tmp_path / "page.md"
    page.write_text(f"before\n{arms.BEGIN}\n{arms.END}\nafter\n")
    monkeypatch.setattr(arms, "RESULTS", results)
    monkeypatch.setattr(arms, "PAGE", page)
    time = arms.ArmTime("overlap", 0, 2.0, 1.0, 1.0)
    first, second = (arms.ArmAccuracy("staleness", 1, 0.5, after, 1.5, 0.4) for after in (0.6, 0.7))
    for row in (first, time, second):
        arms.keep(row, 2)
    assert arms.read() == ([time], [second])
    told = page.read_text()
    assert told.startswith("before\n") and told.endswith("after\n") and "| 0.700 | 0.700 | 1.50 | 40% |" in told
    may_mix = ("partial rollouts", "staleness", "no skipped forward")
    assert {a for a in arms.ARMS if arms.ArmAccuracy(a, 0, 0.5, 0.5, 1.0, 0.0).void} == set(may_mix)
    assert not any(arms.ArmAccuracy(a, 0, 0.5, 0.5, 1.0, 0.3).void for a in arms.ARMS)


@pytest.mark.prove
def test_interrupted_answers_span_versions_where_weights_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This policy answers with the sum alone, so each token is a piece here."""
    monkeypatch.setattr(asynchrony_arms, "PIECE", 1)
    model, small = faulty.start(tmp_path / "policy"), {"steps": 6, "prompts": 2, "siblings": 4}
    mixed = {
        arm: asynchrony_arms.accuracy_of(arm, 0, tmp_path, model, **small).mixed
        for arm in ("skipped forward", "partial rollouts")
    }
    assert mixed["skipped forward"] == 0 and mixed["partial rollouts"] > 0


@pytest.mark.prove
def test_new_weights_wait_for_whole_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then every answer is said by one version; else some are said by two."""
    monkeypatch.setattr(Late, "slowest", 0.4)  # longer than a learner's step on a busy machine
    mixed = dict[bool, list[bool]]()
    for wanted in (True, False):
        with whole_answers(wanted):
            run = late_run(1, steps=4, deterministic=False, eval_every=0, checkpoint_every=0)
            folder = posttrain.run(run, out=tmp_path / str(wanted), quiet=True).folder
        rows = [r for r in run_reader.episode_files(folder) if (r.stage, r.kind) == ("rl", "train")]
        said = [e.episode.segments for r in rows for e in episodes_of(r)]
        mixed[wanted] = [len({int(v) for s in segments for v in s.version[s.mask]}) > 1 for segments in said]
    assert len(mixed[True]) == len(mixed[False]) == 4 * 4 * 4
    assert not any(mixed[True]) and any(mixed[False])
