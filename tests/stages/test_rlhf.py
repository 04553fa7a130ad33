"""A run that trains a reward model and is paid by it: what judges when, what is measured beside it, and a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import posttrain
from posttrain.build import build_reward_models
from posttrain.build.build_reward_models import stage_policy
from posttrain.build.reward_paths import check_reward_models
from posttrain.checks.judging.reward_model_scores import read_alone
from posttrain.config.env import Env, Reward
from posttrain.config.model_settings import Lora
from posttrain.config.overrides import apply
from posttrain.config.run import Model, Optimizer, Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.gauge import Step
from posttrain.core.types import Episode
from posttrain.diagnose.run_outcome import read_outcome
from posttrain.engine.adapters.adapter_modules import adapter_tensors, base_tensors
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.record import run_reader
from posttrain.record.external_access import asks
from posttrain.role.weights.saved_weights import WEIGHTS
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.system.errors import ConfigError
from tests.tiny import tiny_run

pytestmark = pytest.mark.prove

OWN = Reward(function="model:stage:rm")


def rlhf_run(*rewards: Reward, measured: bool = True, **rl: Any) -> Run:
    """A few steps of imitation, of a reward model, and of RL against it."""
    sft, stage = tiny_run(**({"steps": 4} | rl)).stages
    rm = RewardModel(
        name="rm", steps=3, batch=8, hands_on=False, optimizer=Optimizer(lr=3e-3, warmup=1), checkpoint_every=0
    )
    env = Env(name="replies", args={"numbers": 2}, heldout=6, rewards=rewards or (OWN,), measured=measured)
    return replace(tiny_run(), env=env, stages=(replace(sft, style="reply", eval=True), rm, stage))


def episodes(folder: Path, step: int) -> list[Episode]:
    return [e.episode for e in run_reader.episodes(folder, "rl", step)]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rlhf") / "run"
    posttrain.run(rlhf_run(), out=folder, quiet=True)
    return folder


def test_the_policy_is_paid_by_the_reward_model_that_the_run_trained(done: Path) -> None:
    """The reward of each episode is the kept reward model's score of its tokens; the world's verdict pays nothing."""
    policy = stage_policy(done, "rm")
    kept = load_file(done / "kept" / "rm" / WEIGHTS)
    assert policy.reward_head is not None and torch.equal(
        policy.reward_head.score.weight, kept["reward_head.score.weight"]
    )
    learner = HFLearner(policy)
    for e in episodes(done, 2):
        own, paid = e.verdicts
        assert (own.source, own.measured, own.counts) == ("replies", True, False)
        assert (paid.source, paid.measured, e.reward) == ("rm", False, paid.verdict.score)
        assert e.truth == e.figure == own.verdict.score
        assert e.reward == pytest.approx(float(learner.rewards(read_alone(e))[0]), abs=1e-5)


def test_it_starts_from_the_imitation_and_compares_with_it(done: Path) -> None:
    """The reward model hands nothing on: RL begins with the weights of `sft`, which are its reference."""
    first = run_reader.steps(done)[-4]
    assert (first.stage, first.index) == ("rl", 1) and first.gauges["policy/kl_reference"].mean < 1e-6
    assert [s.start for s in posttrain.load(done).stages] == ["start", "sft", "sft"]


def test_held_out_figures_have_the_truth_and_what_is_paid_apart(done: Path) -> None:
    sft, _, rl = posttrain.load(done).stages
    assert sft.reward is not None and sft.proxy is None  # no reward model was trained yet
    assert rl.reward is not None and rl.proxy is not None
    groups = [e.episode for e in run_reader.episodes(done, "rl", 4, "eval")]
    assert rl.reward[0] == pytest.approx(np.mean([e.truth or 0.0 for e in groups]))
    assert rl.proxy[0] == pytest.approx(np.mean([e.reward or 0.0 for e in groups]))
    of = read_outcome(done).stages[-1]
    assert of.proxy is not None and of.proxy.after == pytest.approx(rl.proxy[0])
    assert of.end is not None and of.end.reward.mean == pytest.approx(rl.reward[0])
    [*_, last] = run_reader.steps(done)
    assert {"rollout/truth", "rollout/reward", "reward/rm", "canary/reward_noise"} <= last.gauges.keys()


def test_an_evaluation_of_the_run_asks_its_reward_model(done: Path) -> None:
    report = posttrain.evaluate(done, quiet=True)
    rl = posttrain.load(done).stages[-1]
    assert report.proxy is not None and rl.proxy is not None and rl.reward is not None
    assert report.proxy.mean == pytest.approx(rl.proxy[0], abs=1e-5) and report.reward.mean == rl.reward[0]


def test_ppo_learns_against_it_with_the_kl_in_the_reward(tmp_path: Path) -> None:
    """As 2203.02155: values, a clipped ratio over two passes, and beta log pi / ref of each token off the reward."""
    words = ("rl.algorithm=ppo", "rl.pull=kl", "rl.pull.coef=0.5", "rl.pull.estimator=k1", "rl.pull.placement=reward")
    run = apply(rlhf_run(epochs=2), words)
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "rl"]
    assert {"value/loss", "policy/kl_reference", "reward/rm"} <= steps[-1].gauges.keys()
    assert steps[0].gauges["optim/steps"].sum == 2 and steps[-1].gauges["policy/kl_reference"].mean > 0
    for e in run_reader.episodes(tmp_path / "run", "rl", 4):
        [paid] = [j for j in e.episode.verdicts if j.source == "rm"]
        assert e.episode.reward == paid.verdict.score


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(sorted((folder / "checkpoints").glob("0*"))[-1] / WEIGHTS)


def plain(steps: list[Step]) -> list[Any]:
    return [(s.stage, s.index, s.version, s.gauges) for s in steps]


@pytest.mark.parametrize("stage", ["rl", "rm"])
def test_a_run_that_is_killed_goes_on_bit_for_bit(
    stage: str, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of RL, or before it has begun: the same weights and the same record as never killed."""
    real = ReinforceDriver.remember
    least = {"rl": 3, "rm": 1}[stage]

    def killed(self: Any, asked: Any, step: Step) -> Step:
        if step.index == least:
            raise RuntimeError("killed")
        return real(self, asked, step)

    monkeypatch.setattr(ReinforceDriver, "remember", killed)
    with pytest.raises(RuntimeError, match="killed"):
        posttrain.run(rlhf_run(), out=tmp_path / "run", quiet=True)
    monkeypatch.undo()
    posttrain.run("", resume=tmp_path / "run", quiet=True)
    one, two = weights(done), weights(tmp_path / "run")
    assert one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)
    assert plain(run_reader.steps(done)) == plain(run_reader.steps(tmp_path / "run"))
    for a, b in zip(episodes(done, 4), episodes(tmp_path / "run", 4), strict=True):
        assert a.verdicts == b.verdicts and np.array_equal(a.segments[0].ids, b.segments[0].ids)


def test_a_finished_run_goes_on_as_if_it_had_been_longer(done: Path, tmp_path: Path) -> None:
    """Two steps of RL and then two more are the four of the run that was not stopped."""
    posttrain.run(rlhf_run(steps=2), out=tmp_path / "run", quiet=True)
    posttrain.run("", "rl.steps=4", resume=tmp_path / "run", quiet=True)
    one, two = weights(done), weights(tmp_path / "run")
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert plain(run_reader.steps(done))[:-1] == plain(run_reader.steps(tmp_path / "run"))[:-1]


def test_a_policy_that_was_paid_by_its_run_is_exported(done: Path, tmp_path: Path) -> None:
    """The weights that the run went on with are a policy's: they are exported, and no reward head is in them."""
    where = posttrain.export(done, tmp_path / "model")
    assert not [n for n in load_file(Path(where) / "model.safetensors") if "reward" in n]


def test_an_adapter_of_the_same_model_is_paid_by_another_one(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With adapters, reward model and policy are two adapters over one base, which is in memory once, and the run's own
    checks hold. The score is that of the reward model alone, bit for bit."""
    model = posttrain.export(done, tmp_path / "model")
    run = rlhf_run(steps=2)
    run = replace(run, model=Model(path=str(model), context=64, lora=Lora(rank=2)))
    made, load = list[tuple[Policy, Policy]](), build_reward_models.stage_policy

    def loaded(folder: Path, stage: str, trust: bool = False, beside: Policy | None = None) -> Policy:
        found = load(folder, stage, trust, beside)
        assert beside is not None
        made.append((beside, found))
        return found

    monkeypatch.setattr(build_reward_models, "stage_policy", loaded)
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    [(policy, judge)] = made
    held, own = base_tensors(policy.module), base_tensors(judge.module)
    assert held.keys() == own.keys() and all(held[n].data_ptr() == own[n].data_ptr() for n in held)
    mine, others = adapter_tensors(judge.module), adapter_tensors(policy.module)
    assert all(mine[n].data_ptr() != others[n].data_ptr() for n in mine)
    assert any(not torch.equal(mine[n], others[n]) for n in mine), "the policy went on, its reward model did not"
    e = episodes(tmp_path / "run", 2)[0]
    alone = stage_policy(tmp_path / "run", "rm")
    assert next(iter(base_tensors(alone.module).values())).data_ptr() not in {t.data_ptr() for t in held.values()}
    assert HFLearner(judge).rewards(read_alone(e)).tolist() == HFLearner(alone).rewards(read_alone(e)).tolist()
    assert e.reward == pytest.approx(float(HFLearner(alone).rewards(read_alone(e))[0]), abs=1e-5)


def test_several_of_the_run_are_one_reward(tmp_path: Path) -> None:
    run = rlhf_run(Reward(function="model:stage:rm+stage:other", pessimism=1.0), steps=1)
    sft, rm, rl = run.stages
    run = replace(run, stages=(sft, rm, replace(rm, name="other"), rl))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    e = episodes(tmp_path / "run", 1)[0]
    given = [float(HFLearner(stage_policy(tmp_path / "run", n)).rewards(read_alone(e))[0]) for n in ("rm", "other")]
    assert e.verdicts[1].source == "rm+other" and given[0] != given[1]
    assert e.reward == pytest.approx(np.mean(given) - np.std(given), abs=1e-5)


def test_a_second_opinion_is_measured(tmp_path: Path) -> None:
    """A reward model that is measured and not paid: its score is the truth."""
    run = rlhf_run(OWN, Reward(function="model:stage:other", measured=True), steps=1, measured=False)
    sft, rm, rl = run.stages
    posttrain.run(replace(run, stages=(sft, rm, replace(rm, name="other"), rl)), out=tmp_path / "run", quiet=True)
    own, paid, other = episodes(tmp_path / "run", 1)[0].verdicts
    e = episodes(tmp_path / "run", 1)[0]
    assert (own.measured, paid.measured, other.measured) == (False, False, True)
    assert own.verdict.score is not None and paid.verdict.score is not None
    assert e.truth == other.verdict.score and e.reward == pytest.approx(own.verdict.score + paid.verdict.score)


@pytest.mark.parametrize(
    ("rewards", "why"),
    [
        ("model:stage:none", "those that train one are rm. Name such a stage"),
        ("model:stage:sft", "those that train one are rm"),
        ("model:stage:", "or a stage of this run: model:PATH, model:stage:NAME"),
    ],
)
def test_a_stage_that_trains_none_is_refused(rewards: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_reward_models(rlhf_run(Reward(function=rewards)))


def test_a_policy_cannot_be_paid_by_what_is_trained_later(tmp_path: Path) -> None:
    run = rlhf_run()
    sft, rm, rl = run.stages
    with pytest.raises(ConfigError, match="rl learns from what it samples before rm has trained its reward model"):
        posttrain.run(replace(run, stages=(sft, rl, rm)), out=tmp_path / "run", quiet=True)
    with pytest.raises(ConfigError, match="no stage of this run trains one"):
        posttrain.run(run, "rm=none", out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


def test_what_is_measured_needs_something_that_is_paid() -> None:
    with pytest.raises(ConfigError, match="own verdict is not paid, and nothing else is"):
        Env(name="replies", measured=True)
    with pytest.raises(ConfigError, match=r"set env\.rewards\.0\.measured=true"):
        Env(name="prompts", rewards=(Reward(function="exact"),), measured=True)


def test_a_stage_of_the_run_asks_for_nothing_outside() -> None:
    assert not [a for a in asks(rlhf_run()) if "reward" in a.path]
    both = rlhf_run(Reward(function="model:stage:rm+runs/other"))
    assert [a.what for a in asks(both) if "rewards" in a.path] == ["fetches the model runs/other from the hub"]
