"""Reward models as judges in a run: their scores, what they read, what is refused, and what an outage is."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import posttrain
from posttrain.build.build_environments import make_environment
from posttrain.build.build_reward_models import FrozenRewards, reward_policy
from posttrain.build.build_run import make_policy
from posttrain.config.env import Reward
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.batch import Packed
from posttrain.core.types import Episode
from posttrain.core.verdict import State
from posttrain.engine.files.reward_folder import read_reward_model, write_reward_model
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.learner.learner import HFLearner
from posttrain.record import run_reader
from posttrain.record.external_access import asks
from posttrain.role.judges.reward_judge import JudgeMember, RewardModelJudge, combined
from posttrain.role.judging import with_judges
from posttrain.role.learning.logprob_tolerance import packed_text
from posttrain.system.errors import ConfigError
from tests.engine.engine_parts import tiny
from tests.role.reward_parts import trained
from tests.tiny import only_rl, tiny_run

pytestmark = pytest.mark.prove


def saved(folder: Path, run: Run, seed: int = 1, **shape: Any) -> str:
    """A reward model of random weights, with the tokenizer of the run's policy."""
    made = make_policy(replace(run, seed=seed), make_environment(run))
    write_reward_model(replace(made, reward_head=RewardHead(HeadShape(**shape), 32, seed=seed)), folder)
    return str(folder)


def with_models(*rewards: Reward, **rl: Any) -> Run:
    run = only_rl(tiny_run(**({"steps": 1} | rl)))
    return replace(run, env=replace(run.env, rewards=rewards))


def episodes(folder: Path) -> list[Episode]:
    return [e.episode for e in run_reader.episodes(folder, "rl", 1)]


def test_it_scores_token_ids_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rewards that are models, with weights: the record has what each says of the recorded tokens."""
    run = only_rl(tiny_run(steps=1))
    one, two = saved(tmp_path / "one", run), saved(tmp_path / "two", run, seed=2, pool="mean")
    run = with_models(Reward(function=f"model:{one}", weight=0.5), Reward(function=f"model:{two}"))
    posttrain.run(run, out=tmp_path / "run")
    learners = {n: HFLearner(read_reward_model(p, tiny())) for n, p in (("one", one), ("two", two))}
    found = episodes(tmp_path / "run")
    assert len(found) == 16
    for e in found:
        by = {j.source: j for j in e.verdicts}
        for name, learner in learners.items():
            again = learner.rewards(Packed.of(e.segments))[-1]
            assert by[name].verdict.score == pytest.approx(float(again), abs=1e-5) and by[name].resolution == 1e-5
        whole = sum(j.weight * (j.verdict.score or 0.0) for j in e.verdicts)
        assert by["one"].weight == 0.5 and e.reward == pytest.approx(whole)
    [step] = run_reader.steps(tmp_path / "run")
    scores = [j.verdict.score for e in found for j in e.verdicts if j.source == "two"]
    assert step.gauges["reward/two"].mean == pytest.approx(np.mean(np.array(scores, float)))
    assert "reward model one (weight 0.5) reads the policy's tokens" in capsys.readouterr().out


def test_a_run_that_trained_one_is_a_path_too(tmp_path: Path) -> None:
    trained(tmp_path / "rm", steps=3)
    found = reward_policy(tmp_path / "rm")
    assert found.reward_head is not None
    run = with_models(Reward(function=f"model:{tmp_path / 'rm'}"))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    learner = HFLearner(found)
    for e in episodes(tmp_path / "run"):
        [own] = [j for j in e.verdicts if j.source == "rm"]
        assert own.verdict.score == pytest.approx(float(learner.rewards(Packed.of(e.segments))[-1]), abs=1e-5)


def test_another_tokenizer_reads_the_conversation_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = tiny_run()
    path = saved(tmp_path / "bytes", replace(wide, env=replace(wide.env, name="countdown", args={})))
    run = with_models(Reward(function=f"model:{path}"))
    posttrain.run(run, out=tmp_path / "run")
    assert "has another tokenizer or chat template than the policy: it reads each conversation anew" in (
        capsys.readouterr().out.replace("\n", " ")
    )
    model = read_reward_model(path, tiny())
    for e in episodes(tmp_path / "run"):
        [own] = [j for j in e.verdicts if j.source == "bytes"]
        assert own.verdict.state in (State.VALUE, State.FAILED)
        if own.verdict.score is None:
            assert own.verdict.kind == "unreadable"
    assert model.tokenizer_digest


def test_a_chat_template_that_prompts_of_text_pass_by_is_said(tmp_path: Path) -> None:
    wide = tiny_run()
    path = saved(tmp_path / "bytes", replace(wide, env=replace(wide.env, name="countdown", args={})))
    words = AutoTokenizer.from_pretrained(path)
    words.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    words.save_pretrained(path)
    posttrain.run(with_models(Reward(function=f"model:{path}")), out=tmp_path / "run", quiet=True)
    [step] = run_reader.steps(tmp_path / "run")
    assert [n for n in step.notes if "reward model bytes has a chat template, and prompts are text" in n]


class Broken:
    """Scores that are no numbers, or none at all."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def rewards(self, packed: Packed) -> np.ndarray:
        if self.kind == "raises":
            raise RuntimeError("the card is gone")
        return np.full(len(packed.lengths_S), np.nan, np.float32)


@pytest.mark.parametrize(("kind", "name"), [("raises", "raised"), ("nan", "not finite")])
def test_an_outage_is_failed_and_never_a_low_score(kind: str, name: str, tmp_path: Path) -> None:
    posttrain.run(only_rl(tiny_run(steps=1)), out=tmp_path / "run", quiet=True)
    plain = [replace(e, verdicts=()) for e in episodes(tmp_path / "run")[:3]]
    judge = RewardModelJudge("rm", 1.0, (JudgeMember("rm", Broken(kind), 64),))
    for e in asyncio.run(with_judges((judge,), plain)):
        [own] = e.verdicts
        assert own.verdict.state is State.FAILED and own.verdict.kind == name and e.reward is None


def test_several_are_combined_with_pessimism() -> None:
    scores = np.array([[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]])
    np.testing.assert_allclose(combined(scores, "mean", 0.0), [3, 1])
    np.testing.assert_allclose(combined(scores, "mean", 1.0), [3 - np.std([1, 2, 6]), 1 - np.std([0, 0, 3])])
    np.testing.assert_allclose(combined(scores, "worst", 0.0), [1, 0])


def test_threads_take_turns_at_a_model(tmp_path: Path) -> None:
    """A check scores answers again while groups that were asked ahead are judged in another thread."""
    scorer = FrozenRewards(read_reward_model(saved(tmp_path / "one", only_rl(tiny_run())), tiny()))
    packed = packed_text(np.arange(40, dtype=np.int32) % 8)
    want = scorer.rewards(packed)
    with ThreadPoolExecutor(4) as pool:
        assert all(np.array_equal(x, want) for x in pool.map(scorer.rewards, [packed] * 200))


def test_an_ensemble_is_one_reward(tmp_path: Path) -> None:
    run = only_rl(tiny_run(steps=1))
    paths = [saved(tmp_path / n, run, seed=s) for s, n in enumerate("abc", 1)]
    reward = Reward(function=f"model:{'+'.join(paths)}", pessimism=1.0)
    assert reward.models == tuple(paths)
    posttrain.run(with_models(reward), out=tmp_path / "run", quiet=True)
    for e in episodes(tmp_path / "run"):
        [own] = [j for j in e.verdicts if j.source == "a+b+c"]
        each = np.array([float(x) for x in own.verdict.why.split(", ")])
        assert own.verdict.score == pytest.approx(each.mean() - each.std(), abs=2e-3)


def test_what_is_no_reward_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run = only_rl(tiny_run(steps=1))
    policy = make_policy(run, make_environment(run))
    policy.write(tmp_path / "plain")
    posttrain.run(run, out=tmp_path / "rl", quiet=True)
    for path, why in (
        (tmp_path / "plain", "plain is no reward model: its config.json names Qwen3ForCausalLM"),
        (tmp_path / "rl", "rl is no reward model: the weights of its checkpoint .* are a policy's"),
        (tmp_path / "nowhere", "no such directory"),
    ):
        with pytest.raises(ConfigError, match=why):
            posttrain.run(with_models(Reward(function=f"model:{path}")), out=tmp_path / "never", quiet=True)
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize(
    ("reward", "why"),
    [
        ({"function": "model:"}, "name a directory"),
        ({"function": "model:a", "workers": 2}, "leave workers and timeout out"),
        ({"function": "model:a", "pessimism": 1.0}, "is one model, and combine and pessimism are for several"),
        ({"function": "model:a+b", "combine": "worst", "pessimism": 1.0}, "and 0 with combine=worst"),
        ({"function": "exact", "pessimism": 1.0}, "are for several reward models"),
    ],
)
def test_settings_that_mean_nothing(reward: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Reward(**reward)


def test_a_strangers_folder_asks_for_the_model(tmp_path: Path) -> None:
    found = [a for a in asks(with_models(Reward(function=f"model:{tmp_path}"))) if a.path == "env.rewards.0.function"]
    assert [a.kind.value for a in found] == ["outside"] and "loads the model in" in found[0].what


def test_an_endpoint_is_not_judged_by_a_reward_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="judges a run or a model directory"):
        posttrain.evaluate("http://127.0.0.1:9/v1", "env=arithmetic", f"env.rewards=model:{tmp_path}")
