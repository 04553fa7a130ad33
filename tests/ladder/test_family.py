"""The pieces of the family that live outside the loss, in real tiny runs: greedy answers, demonstrations, teachers,
warm-ups, coefficients that adapt, references that are refreshed, curricula, stored top tokens, judged steps."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from posttrain.algorithm.credit.adaptive_coefficients import AdaptiveState, remember, steered
from posttrain.checks.sampling.sampler_checks import noise_band
from posttrain.config.run import Env, Reinforce
from posttrain.config.stages.reinforce import Replay
from posttrain.core.gauge import Gauge, Step
from posttrain.core.ports import Attempt
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import SHOWN, Episode, Group, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.gallery.arithmetic import Arithmetic
from posttrain.environment.single import Listed
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.baseline import Value
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.pieces.token_choice import EntropyBonus, NoEasy, Priority
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import DPPO_TOP, DR_GRPO, GKD, GRPO, GRPO_PROCESS, LUFFY, PPO, REMAX
from posttrain.record import run_reader
from posttrain.role.prompt_order import Prompts
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import ConfigError
from tests.tiny import play, tiny_parts, tiny_run


def played(folder: Path, algorithm: Algorithm, **rl: Any) -> tuple[list[Step], list[Any]]:
    """(steps, episodes of the last step) of a tiny run."""
    asyncio.run(play(tiny_parts(folder, tiny_run(algorithm=algorithm, **rl))))
    steps = [s for s in run_reader.steps(folder) if s.stage == "rl"]
    return steps, list(run_reader.episodes(folder, "rl", len(steps)))


@pytest.mark.prove
def test_remax_compares_with_a_greedy_answer_it_does_not_learn(tmp_path: Path) -> None:
    steps, episodes = played(tmp_path / "r", REMAX)
    greedy = [r for r in episodes if r.episode.segments[0].sampling.greedy]
    assert len(greedy) == 4 and all(r.advantage is None for r in greedy)
    by_task = {r.episode.task.id: r.episode.reward for r in greedy}
    for r in episodes:
        if r.advantage is not None:
            assert r.advantage[0] == pytest.approx(r.episode.reward - by_task[r.episode.task.id])
    assert steps[-1].gauges["rollout/groups"].mean == 4


@pytest.mark.prove
def test_shown_siblings_are_learned_and_not_counted_as_rollout(tmp_path: Path) -> None:
    steps, episodes = played(tmp_path / "r", LUFFY)
    shown = [r for r in episodes if r.episode.shown]
    assert len(shown) == 4 and all(r.episode.sibling == 3 and r.episode.reward == 1 for r in shown)
    assert all(np.all(s.version[s.mask] == SHOWN) for r in shown for s in r.episode.segments)
    own = [r.episode.reward for r in episodes if not r.episode.shown]
    assert (
        steps[-1].gauges["rollout/reward"].mean == pytest.approx(np.mean(own))
        and steps[-1].gauges["rollout/reward"].count == 12
    )


@pytest.mark.prove
def test_top_tokens_reach_the_loss(tmp_path: Path) -> None:
    algorithm = replace(DPPO_TOP, clip=replace(DPPO_TOP.clip, top=3))  # type: ignore[arg-type]
    _, episodes = played(tmp_path / "r", algorithm, minibatches=2)
    for r in episodes:
        (s,) = r.episode.segments
        assert s.top is not None and s.top.ids.shape == (s.spoken, 3)
        said = s.ids[s.mask]
        among = s.top.ids == said[:, None]
        assert np.allclose(s.top.logp[among], s.logp[s.mask][among.any(1)], atol=1e-6), (
            "the said token has one log-prob"
        )
        assert np.all(np.diff(s.top.logp, axis=1) <= 0)


@pytest.mark.prove
def test_steps_are_judged_one_by_one(tmp_path: Path) -> None:
    run = tiny_run(algorithm=GRPO_PROCESS)
    run = replace(
        run, env=Env(name="arithmetic", args={"max_terms": 3, "max_operand": 4, "judge_steps": True}, heldout=6)
    )
    run = replace(
        run,
        stages=(
            replace(run.stages[0], style="cot"),
            replace(run.stages[1], sampling=replace(run.stages[1].sampling, max_tokens=14)),
        ),
    )  # type: ignore[call-arg]
    asyncio.run(play(tiny_parts(tmp_path / "r", run)))
    episodes = list(run_reader.episodes(tmp_path / "r", "rl", 3))
    ends = [[j.end for j in r.episode.verdicts if j.end is not None] for r in episodes]
    assert any(ends) and all(e == sorted(e) and e[-1] == r.episode.spoken for e, r in zip(ends, episodes, strict=True))
    assert all(r.episode.reward in (0.0, 1.0) for r in episodes), "steps do not enter the outcome"


@pytest.mark.parametrize(("text", "scores"), [("3+4=7;", [1]), ("3+4=7", [1]), ("3+4=8;;", [0, 0]), ("", [0])])
def test_nothing_after_the_last_sign_is_no_step(text: str, scores: list[int]) -> None:
    world = Arithmetic(judge_steps=True, heldout_count=0)
    task = Task("t", "<3+4>", "7", {"terms": [("+", 3), ("+", 4)]})
    attempt = Attempt(task, (text,), Stop.SAID, spoken_upto=lambda at: min(at, len(text)))
    steps = world.steps(attempt)
    assert [s.verdict.score for s in steps] == scores
    assert [s.end for s in steps] == [6, len(text)][-len(scores) :], "every token belongs to a step"


@pytest.mark.prove
def test_the_policy_stands_still_while_values_warm_up(tmp_path: Path) -> None:
    warm = patch(PPO, "warm", "-", baseline=Value(warmup=2))
    parts = tiny_parts(tmp_path / "r", tiny_run(algorithm=warm, steps=3))
    seen: list[tuple[str, float]] = []
    real = parts.sampler.load

    async def load(version: int, tensors: Any) -> str:
        told = await real(version, tensors)
        seen.append(
            (
                told,
                float(
                    sum(
                        p.detach().double().abs().sum()
                        for n, p in parts.learner.parameters().items()
                        if "value_head" in n
                    )
                ),
            )
        )
        return told

    parts.sampler.load = load  # type: ignore[method-assign]
    asyncio.run(play(parts))
    (before, _), (one, v1), (two, v2), (three, _) = seen[-4:]
    assert before == one == two != three and 0 < v1 != v2


def test_distillation_needs_a_teacher_and_one_with_our_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"rl.reference=PATH"):
        tiny_run(algorithm=GKD)
    with pytest.raises(ConfigError, match="reads no reference"):
        tiny_run(algorithm=DR_GRPO, reference="somewhere")


@pytest.mark.prove
def test_the_reference_is_refreshed_and_says_so(tmp_path: Path) -> None:
    fresh = patch(GRPO, "fresh", "-", pull=KL(refresh=2))
    steps, _ = played(tmp_path / "r", fresh, steps=4, minibatches=2)
    told = [any("reference is now the policy of step" in n for n in s.notes) for s in steps]
    assert told == [False, True, False, True]
    kl = [s.gauges["policy/kl_reference"].mean for s in steps]
    assert kl[2] < kl[1], "two steps after a refresh the policy is nearer to its reference than before it"


def test_coefficients_follow_what_was_measured() -> None:
    a = patch(
        GRPO, "steered", "-", pull=KL(coef=0.1, target=0.02, horizon=100), entropy=EntropyBonus(coef=0.0, target=0.2)
    )
    far = {"policy/kl_reference": Gauge(0.5, 1), "policy/entropy": Gauge(0.1, 1)}
    memory = remember(a, AdaptiveState(), far, episodes=50)
    assert memory.pull == pytest.approx(0.1 * (1 + 0.2 * 50 / 100)) and memory.entropy == pytest.approx(0.005)
    now = steered(a, memory)
    assert now.pull.coef == memory.pull and now.entropy.coef == 0.005  # type: ignore[union-attr]
    near = {"policy/kl_reference": Gauge(0.018, 1), "policy/entropy": Gauge(0.3, 1)}
    memory = remember(a, memory, near, episodes=50)
    assert memory.pull == pytest.approx(0.11 * (1 - 0.1 * 0.5)) and memory.entropy == 0.0
    assert steered(a, remember(a, replace(memory, entropy=0.02), near, episodes=1)).entropy.coef == 0.0, (
        "no bonus above the target"
    )  # type: ignore[union-attr]
    assert steered(GRPO, AdaptiveState()) is GRPO


def test_a_step_never_takes_the_whole_coefficient_of_a_kl() -> None:
    """1 - .2 * episodes / horizon is 0 from five horizons on: such a stage is refused, replayed groups counted."""
    a = patch(GRPO, "steered", "-", pull=KL(coef=0.1, target=0.02, horizon=100))
    most = Reinforce(name="rl", algorithm=a, prompts=62, siblings=8)
    memory = remember(most.algorithm, AdaptiveState(), {"policy/kl_reference": Gauge(0.0, 1)}, episodes=62 * 8)
    assert memory.pull == pytest.approx(0.1 * (1 - 0.2 * 4.96))
    for more in ({"prompts": 63}, {"replay": Replay(groups=1)}):
        with pytest.raises(ConfigError, match=r"one step of 504 episodes. Set pull.horizon above 100.8"):
            replace(most, **more)
    replace(most, prompts=63, algorithm=patch(GRPO, "fixed", "-", pull=KL(coef=0.1, horizon=100)))


TASKS = Listed(tuple(Task(str(i), f"<{i}>") for i in range(6)))


def solved(task: Task, rate: float) -> Group:
    episodes = tuple(_episode(task, i, float(i < rate * 4)) for i in range(4))
    return Group(task, 0, episodes)


def _episode(task: Task, sibling: int, reward: float) -> Episode:
    return Episode(task, 0, sibling, (), Stop.SAID, (Judged("v", 1.0, Verdict.value(reward)),))


def test_easy_tasks_are_not_asked_again() -> None:
    prompts = Prompts(TASKS, 0, curriculum=NoEasy(rate=0.9))
    first = [next(prompts)[0] for _ in range(6)]
    prompts.learn([solved(t, 1.0 if t.id in ("0", "3") else 0.5) for t in first])
    later = [next(prompts)[0].id for _ in range(8)]
    assert sorted({t.id for t in first}) == list("012345") and set(later) == set("1245")
    prompts.learn([solved(t, 1.0) for t in TASKS.tasks])
    with pytest.raises(ConfigError, match="every one of the 6 tasks was solved"):
        next(prompts)


@pytest.mark.parametrize("seed", range(4))
def test_the_last_task_of_a_curriculum_is_found_wherever_the_epoch_stands(seed: int) -> None:
    """The task comes early in this epoch and late in the next: as many tasks as there are do not always hold it."""
    prompts = Prompts(TASKS, seed, curriculum=NoEasy(rate=0.9))
    hard = next(prompts)[0]
    prompts.learn([solved(t, 0.5 if t is hard else 1.0) for t in TASKS.tasks])
    assert [next(prompts)[0].id for _ in range(5)] == [hard.id] * 5


def test_hard_tasks_are_asked_more_and_a_resumed_walk_goes_on_alike() -> None:
    def walk(cut: int) -> list[tuple[str, int]]:
        prompts = Prompts(TASKS, 7, curriculum=Priority(floor=0.05))
        prompts.learn([solved(t, 0.0 if t.id == "5" else 1.0) for t in TASKS.tasks])
        out = [next(prompts) for _ in range(cut)]
        again = Prompts(TASKS, 7, prompts.cursor, prompts.curriculum, dict(prompts.rates), dict(prompts.visits))
        return [(t.id, v) for t, v in (*out, *(next(again) for _ in range(60 - cut)))]

    asked = walk(60)
    assert walk(23) == asked, "a function of seed, cursor and what was solved"
    assert sum(t == "5" for t, _ in asked) > 40
    assert [v for t, v in asked if t == "5"] == list(range(sum(t == "5" for t, _ in asked))), "visits count up"
    nobody: Any = SimpleNamespace(drawn=True, weight=lambda rate: 0.0, left_out=lambda: "has weight 0")
    with pytest.raises(ConfigError, match="every one of the 6 tasks has weight 0"):
        next(Prompts(TASKS, 7, curriculum=nobody))


def test_curricula_read_only_what_the_policy_said() -> None:
    task, transcript = TASKS.tasks[0], Transcript(Sampling(stop_ids=(0,)))
    transcript.see([1])
    transcript.show([2, 0])
    shown = replace(_episode(task, 3, 1.0), segments=(transcript.segment(),))
    prompts = Prompts(TASKS, 0, curriculum=NoEasy(rate=0.9))
    prompts.learn([Group(task, 0, (_episode(task, 0, 0.0), _episode(task, 1, 1.0), shown))])
    assert prompts.rates == {"0": 0.5}


def test_a_clip_narrower_than_the_noise_is_refused() -> None:
    rng = np.random.default_rng(0)
    mu = -rng.gamma(1.0, 0.5, 400)
    noisy = mu + rng.normal(size=400) * 1e-2
    sequence = np.repeat(np.arange(40), 10)
    narrow = patch(
        GRPO, "narrow", "-", ratio="sequence_mean", clip=Clip(low=3e-4, high=4e-4), anchor="behaviour", pull=None
    )
    with pytest.raises(ConfigError, match=r"would fall silent although no weight has moved.*anchor=start"):
        noise_band(narrow, mu, noisy, sequence, "bfloat16")
    wide = replace(narrow, clip=Clip())
    band = noise_band(wide, mu, noisy, sequence, "bfloat16")["mismatch/band"].mean
    assert 0.02 < band < 0.03
    assert noise_band(replace(narrow, anchor="start"), mu, noisy, sequence, "bfloat16"), (
        "the learner's own log-probs carry no such noise"
    )


def test_parts_know_their_teacher(tmp_path: Path) -> None:
    parts: RunParts = tiny_parts(tmp_path / "r")
    with pytest.raises(ConfigError, match="no such directory"):
        parts.teacher(str(tmp_path / "nowhere"))
