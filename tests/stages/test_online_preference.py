"""The stage that learns from preferences between its own samples: how pairs are made, and runs that use them."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import posttrain
from posttrain.build.build_engines import check_engine
from posttrain.config.engines import VLLM
from posttrain.config.env import Reward
from posttrain.config.run import Optimizer, Run
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.core.batch import Packed
from posttrain.core.gauge import Gauge, Step
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.streams import MARGIN, OPPONENT, SIDE
from posttrain.core.transcript import Transcript
from posttrain.core.types import OPPOSED, Episode, Group, SampledTurn, Segment, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.pair_source import BestWorst, RejectionSampled
from posttrain.ladder.preference_rows import DPO, ITERATIVE_DPO, NASH_MD, OAIF, RSO, XPO
from posttrain.record import run_reader
from posttrain.record.checkpoint import find
from posttrain.role.trainer import NonFiniteGradient, Trainer
from posttrain.stages import training_step as steps
from posttrain.stages.preference.online_checks import opponents_play, pairs_again
from posttrain.stages.preference.online_stage import OnlineDriver
from posttrain.stages.preference.sampled_pairs import batch_of_pairs, sampled_pairs
from posttrain.system.errors import ConfigError, InvariantError, RewardError
from tests.tiny import play, tiny_parts, tiny_run

SAMPLING = Sampling(stop_ids=(0,))
SMALL_RSO = patch(RSO, "small_rso", "", draw=RejectionSampled(of=6, keep=4))


def episode(sibling: int, score: float | None, tokens: int = 2, resolution: float = 2.0**-40) -> Episode:
    transcript = Transcript(SAMPLING)
    transcript.see([1, 2])
    ids = np.arange(3, 3 + tokens, dtype=np.int32)
    transcript.say(SampledTurn(ids, np.full(tokens, -0.5, np.float32), np.zeros(tokens, np.int32), Stop.LENGTH))
    verdict = Verdict.failed("outage") if score is None else Verdict.value(score)
    return Episode(
        Task("t", "p"),
        0,
        sibling,
        (transcript.segment(),),
        Stop.LENGTH,
        (Judged("own", 1.0, verdict, None, False, resolution),),
    )


def group(*scores: float | None, resolution: float = 2.0**-40) -> Group:
    return Group(Task("t", "p"), 0, tuple(episode(i, s, i + 1, resolution) for i, s in enumerate(scores)))


def test_the_better_of_two_is_chosen_and_others_are_not_looked_at() -> None:
    found = sampled_pairs([group(0.0, 1.0, 5.0)], OAIF, 0)
    assert [(p.chosen.sibling, p.rejected.sibling, p.gap) for p in found.pairs] == [(1, 0, 1.0)]


def test_the_best_and_the_worst_of_all() -> None:
    found = sampled_pairs([group(0.5, 0.0, 1.0, 1.0, 0.0)], patch(OAIF, "best", "", draw=BestWorst(of=5)), 0)
    assert [(p.chosen.sibling, p.rejected.sibling) for p in found.pairs] == [(2, 1)]


def test_what_is_judged_alike_or_not_judged_makes_no_pair() -> None:
    """Rounding is no preference, and an outage is no low score."""
    groups = [group(1.0, 1.0), group(0.1 + 0.2, 0.3), group(None, 1.0), group(0.0, None, 1.0)]
    found = sampled_pairs(groups, OAIF, 0)
    assert (found.tied, found.unjudged, len(found.pairs)) == (2, 1, 1)
    assert (found.pairs[0].chosen.sibling, found.pairs[0].rejected.sibling) == (2, 0)
    coarse = sampled_pairs([group(0.5, 0.5001, resolution=1e-3)], OAIF, 0)
    assert coarse.tied == 1 and not coarse.pairs


def test_an_answer_without_a_token_makes_no_pair() -> None:
    """Where the prompt fills the context nothing is said, and it is judged all the same."""
    empty = replace(episode(0, 0.0), segments=(unspoken(),), turns=())
    found = sampled_pairs([Group(Task("t", "p"), 0, (empty, episode(1, 1.0)))], OAIF, 0)
    assert (len(found.pairs), found.unjudged) == (0, 1)


def test_what_rejection_sampling_keeps_is_paired_once_and_within_its_prompt() -> None:
    """Which ones are kept depends on the place of the stage, and on nothing else."""
    judged = [0.1 * i for i in range(6)]
    episodes = group(*judged).episodes
    groups = [Group(Task("t", "p"), v, tuple(replace(e, visit=v) for e in episodes)) for v in range(20)]
    found = sampled_pairs(groups, SMALL_RSO, 7)
    assert len(found.pairs) == 40 and found.tied == found.unjudged == 0
    for g, pairs in zip(groups, zip(found.pairs[0::2], found.pairs[1::2], strict=True), strict=True):
        both = [e for p in pairs for e in (p.chosen, p.rejected)]
        assert len({e.sibling for e in both}) == 4 and all(any(e is x for x in g.episodes) for e in both)
        for p in pairs:
            assert p.gap > 0 and p.gap == pytest.approx(judged[p.chosen.sibling] - judged[p.rejected.sibling])

    def siblings(place: int) -> list[int]:
        return [p.chosen.sibling for p in sampled_pairs(groups, SMALL_RSO, place).pairs]

    assert siblings(7) == siblings(7) != siblings(8)
    again = pairs_again(groups, SMALL_RSO, 7)
    assert [(p.chosen, p.rejected, p.gap) for p in found.pairs] == [(p.chosen, p.rejected, p.gap) for p in again]
    few = sampled_pairs([group(0.0, None, 1.0, None, 0.5), group(None, 1.0), group(1.0, 1.0)], SMALL_RSO, 7)
    assert (len(few.pairs), few.tied, few.unjudged) == (1, 1, 1), "of three that were judged one is left over"


def unspoken() -> Segment:
    transcript = Transcript(SAMPLING)
    transcript.see([1, 2])
    return transcript.segment()


def test_what_the_wrong_one_said_is_told() -> None:
    right = Group(Task("t", "p"), 0, (episode(0, 0.0), opposed(1, 1.0)))
    opponents_play([right], range(1, 2))
    opponents_play([group(0.0, 1.0)], range(0))
    silent = replace(episode(1, 0.0), segments=(unspoken(),))
    opponents_play([Group(Task("t", "p"), 0, (episode(0, 0.0), silent))], range(1, 2))
    for groups, wanted in (([right], range(0)), ([group(0.0, 1.0)], range(1, 2)), ([right], range(2))):
        with pytest.raises(InvariantError, match=r"completion [01] of task 't' was said by the"):
            opponents_play(groups, wanted)


def test_a_batch_of_pairs_has_the_chosen_one_first() -> None:
    batch = batch_of_pairs(sampled_pairs([group(0.0, 1.0), group(1.0, 0.0)], OAIF, 0).pairs, OAIF)
    assert batch.unit_E is not None and batch.unit_E.tolist() == [0, 0, 1, 1]
    assert batch[SIDE].tolist() == [1, 1, 0, 1, 0, 0]


def online_run(**settings: Any) -> Run:
    run = tiny_run()
    given = {
        "sampling": Sampling(max_tokens=6),
        "optimizer": Optimizer(lr=1e-3, warmup=1),
        "prompts": 6,
        "steps": 3,
        "eval_every": 0,
        "checkpoint_every": 1,
    } | settings
    return replace(run, stages=(run.stages[0], OnlinePreference(name="online", **given)))


def lines(folder: Path) -> list[Step]:
    return [s for s in run_reader.steps(folder) if s.stage == "online"]


@pytest.mark.parametrize(
    "algorithm",
    [ITERATIVE_DPO, *(pytest.param(a, marks=pytest.mark.prove) for a in (NASH_MD, OAIF, XPO))],
    ids=lambda a: a.name,
)
def test_it_learns_from_its_own_samples(tmp_path: Path, algorithm: Any) -> None:
    results = asyncio.run(play(tiny_parts(tmp_path / "run", online_run(algorithm=algorithm))))
    taken = lines(tmp_path / "run")
    assert len(taken) == 3 and results[-1].accuracy is not None
    paired = [s for s in taken if s.gauges["preference/pairs"].sum]
    assert all(math.isfinite(s.gauges["preference/loss"].mean) for s in paired)
    assert all(s.gauges["preference/gap"].mean > 0 or algorithm is NASH_MD for s in paired)
    assert results[-1].optimizer_steps == len(paired)


@pytest.mark.prove
@pytest.mark.parametrize("algorithm", [ITERATIVE_DPO, XPO, NASH_MD, SMALL_RSO], ids=lambda a: a.name)
def test_a_killed_stage_goes_on_as_if_it_had_never_been_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: Any
) -> None:
    run = replace(online_run(algorithm=algorithm, steps=4), deterministic=True)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    remember = OnlineDriver.remember

    class Killed(Exception):
        pass

    def killed(self: OnlineDriver, asked: Any, step: Step) -> Step:
        if step.index == 3:
            raise Killed
        return remember(self, asked, step)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(OnlineDriver, "remember", killed)
        posttrain.run(run, out=tmp_path / "cut", quiet=True)
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert find(tmp_path / "cut").state["weights"] == find(tmp_path / "whole").state["weights"]


def rewarded(run: Run, folder: Path, body: str) -> Run:
    """The run with a reward of one's own, and the world's verdict measured alone."""
    (folder / "own.py").write_text(f"def reward(task, text):\n    {body}\n")
    return replace(run, env=replace(run.env, rewards=(Reward(function=f"{folder / 'own.py'}:reward"),), measured=True))


@pytest.mark.prove
def test_a_step_without_a_pair_tells_all_that_was_seen_of_it(tmp_path: Path) -> None:
    """What observers said of the samples stands in the step's own line, and not in the next one's."""
    run = rewarded(online_run(steps=2), tmp_path, "return None if sum(map(ord, text)) % 2 else 1.0")
    asyncio.run(play(tiny_parts(tmp_path / "run", run)))
    first, second = lines(tmp_path / "run")
    for step in (first, second):
        assert step.gauges["optim/steps"].sum == 0 and "rollout" in step.clock
        assert "no prompt gave a pair" in step.notes[0]
        assert step.gauges["rollout/walked"].sum == 6 * step.index
    told = [[n for n in step.notes if "samples could not be judged" in n] for step in (first, second)]
    assert [len(n) for n in told] == [1, 0], "said once, in the step in which it began"


@pytest.mark.prove
def test_too_many_unjudged_samples_stop_it(tmp_path: Path) -> None:
    run = rewarded(online_run(max_failed=0.2), tmp_path, "raise OSError('the judge is down')")
    with pytest.raises(RewardError, match=r"12 of 12 samples .* more than online\.max_failed=0\.2"):
        asyncio.run(play(tiny_parts(tmp_path / "run", run)))


@pytest.mark.prove
def test_verdicts_that_change_stop_it(tmp_path: Path) -> None:
    """A reward that remembers its first answers and gives others later."""
    (tmp_path / "seen").mkdir()
    body = (
        f"import pathlib, hashlib; p = pathlib.Path({str(tmp_path / 'seen')!r}) / text.encode().hex()"
        "; was = p.exists(); p.touch(); return 0.0 if was else len(text) % 7 / 7 + 0.1"
    )
    with pytest.raises(InvariantError, match="the environment asked again says"):
        asyncio.run(play(tiny_parts(tmp_path / "run", rewarded(online_run(), tmp_path, body))))


def test_algorithms_of_given_pairs_are_refused() -> None:
    with pytest.raises(ConfigError, match="learns from given judgements"):
        online_run(algorithm=DPO)
    with pytest.raises(ConfigError, match=r"dpo\.algorithm=rso draws its own pairs"):
        Preference(name="dpo", algorithm=RSO)


def test_an_opponent_is_refused_where_it_cannot_be_sampled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"online\.algorithm=nash_md: engine=vllm samples one model"):
        check_engine(replace(online_run(algorithm=NASH_MD), engine=VLLM()))
    with pytest.raises(ConfigError, match="a mixture of two models"):
        online_run(algorithm=XPO, sampling=Sampling(max_tokens=6, repetition_penalty=1.1))


def opposed(sibling: int, score: float, tokens: int = 2) -> Episode:
    said = episode(sibling, score, tokens)
    s = said.segments[0]
    return replace(said, segments=(replace(s, version=np.where(s.mask, OPPOSED, -1).astype(np.int32)),))


def test_a_tie_teaches_nash_md_its_divergence_alone() -> None:
    """Its P is the sigmoid of the rewards' difference, one half where they are equal."""
    groups = [
        Group(Task("t", "p"), 0, (episode(0, mine, 2), opposed(1, its, 3))) for mine, its in ((0, 0), (0, 2), (2, 0))
    ]
    found = sampled_pairs(groups, NASH_MD, 0)
    assert (len(found.pairs), found.tied) == (3, 0)
    batch = batch_of_pairs(found.pairs, NASH_MD)
    assert batch[OPPONENT].tolist() == [False] * 2 + [True] * 3 + [True] * 3 + [False] * 2 + [False] * 2 + [True] * 3
    lost = 1 / (1 + math.exp(-2))
    np.testing.assert_allclose(np.unique(batch[MARGIN]), [0.5, lost])
    assert found.gauges()["preference/won"].mean == 0.5
    assert sampled_pairs(groups, XPO, 0).tied == 1


@pytest.mark.prove
def test_what_an_opponent_said_is_told_from_what_the_policy_said(tmp_path: Path) -> None:
    """Its tokens have a version of their own in the record, and count in no gauge of the policy."""
    asyncio.run(play(tiny_parts(tmp_path / "run", online_run(algorithm=NASH_MD, steps=1))))
    (taken,) = lines(tmp_path / "run")
    assert taken.gauges["rollout/tokens"].count == 6  # of 12 episodes
    episodes = [r.episode for r in run_reader.episodes(tmp_path / "run", "online", 1)]
    assert [e.opposed for e in episodes] == [False, True] * 6
    assert all(e.own is not e.opposed for e in episodes)


@pytest.mark.prove
def test_the_reference_says_all_completions_of_rso(tmp_path: Path) -> None:
    """Also once the policy has moved away: its log-probs are the reference's, and count in no gauge of the policy."""
    run = online_run(algorithm=SMALL_RSO, steps=2, optimizer=Optimizer(lr=0.02, warmup=1))
    run = rewarded(run, tmp_path, "return sum(map(ord, text)) % 7 / 7")
    results = asyncio.run(play(tiny_parts(tmp_path / "run", run)))
    taken = lines(tmp_path / "run")
    paired = [s for s in taken if s.gauges["preference/pairs"].sum]
    assert paired and results[-1].optimizer_steps == len(paired)
    assert all(0 < s.gauges["preference/pairs"].sum <= 12 and s.gauges["preference/gap"].mean > 0 for s in paired)
    assert all(s.gauges["rollout/tokens"].count == 0 and "preference/won" not in s.gauges for s in taken)
    assert taken[0].gauges["canary/opponent_gap"].mean < 1e-3
    said = [r.episode for step in (1, 2) for r in run_reader.episodes(tmp_path / "run", "online", step)]
    assert len(said) == 2 * 6 * 6 and all(e.opposed for e in said)


@pytest.mark.prove
def test_the_reference_alone_is_the_opponent_of_xpo(tmp_path: Path) -> None:
    """What it says is as likely as the reference says, after updates of the policy too."""
    parts = tiny_parts(tmp_path / "run", online_run(algorithm=XPO, steps=1, optimizer=Optimizer(lr=0.05)))
    reference = parts.freeze()
    opponent = parts.oppose(reference, 1.0)
    assert opponent.sync is None
    with torch.no_grad():
        for p in parts.learner.parameters().values():
            p.mul_(1.1)
    ids = np.array([1, 2, 3], np.int32)
    said = asyncio.run(opponent.sampler.generate(ids, replace(SAMPLING, max_tokens=6), 3))
    transcript = Transcript(replace(SAMPLING, max_tokens=6))
    transcript.see(ids)
    transcript.say(said)
    np.testing.assert_allclose(reference.score(Packed.of([transcript.segment()])), said.logp, atol=1e-5)
    assert set(said.version.tolist()) == {OPPOSED}
    parts.close()
    parts.book.close()


@pytest.mark.prove
@pytest.mark.parametrize("algorithm", [OAIF, NASH_MD], ids=lambda a: a.name)
def test_a_step_that_is_left_out_is_not_pushed(tmp_path: Path, algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in float16, whose gradients overflow now and then: the weights stay, and so does their version."""
    taken = Trainer.step

    def overflows(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        if kwargs["index"] == 2:
            raise NonFiniteGradient(float("inf"), 2, [0], 6)
        return taken(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", overflows)
    monkeypatch.setattr(steps, "left_out", lambda roles, batch, index, why: ({"optim/steps": Gauge(0, 1)}, str(why)))
    asyncio.run(play(tiny_parts(tmp_path / "run", online_run(algorithm=algorithm))))
    versions = [s.version for s in lines(tmp_path / "run")]
    assert len(versions) == 3 and versions[1] == versions[0]
