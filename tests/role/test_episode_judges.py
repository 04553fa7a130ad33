"""Judges of finished episodes with token ids, written outside the package: one is a real transformers model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from posttrain.core.exchange.other_seats import SeatTurn
from posttrain.core.types import Episode, Group
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.ladder.pieces.baseline import TurnMean
from posttrain.ladder.policy_rows import GRPO
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.record import run_reader
from posttrain.record.step_format import from_columns, read_columns
from posttrain.role.judging import JUDGE_RETRIES, with_judges
from posttrain.stages.run_parts import RunParts
from posttrain.system.errors import ConfigError, InvariantError
from tests.tiny import only_rl, play, tiny_parts, tiny_run


class Fluency:
    """Pays the mean log-prob of what was said under a small frozen model. With `places`: each token's own, there."""

    name = "fluency"

    def __init__(self, vocabulary: int, *, places: bool = False) -> None:
        torch.manual_seed(7)
        shape: dict[str, Any] = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = GPT2Config(vocab_size=vocabulary, bos_token_id=None, eos_token_id=None, **shape)
        self.model, self.places = GPT2LMHeadModel(config).eval(), places
        self.calls: list[int] = []

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        self.calls.append(len(episodes))
        return await asyncio.to_thread(self.verdicts, episodes)

    @torch.no_grad()
    def verdicts(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        """One padded batch for all of them."""
        [segments] = zip(*(e.segments for e in episodes), strict=True)
        longest = max(len(s.ids) for s in segments)
        ids = torch.tensor(np.stack([np.pad(s.ids, (0, longest - len(s.ids))) for s in segments])).long()
        real = torch.tensor(np.stack([np.arange(longest) < len(s.ids) for s in segments])).long()
        logp = torch.log_softmax(self.model(input_ids=ids, attention_mask=real).logits.double(), -1)
        own = logp[:, :-1].gather(-1, ids[:, 1:, None])[..., 0].numpy()
        return [self.of(own[i, : len(s.ids) - 1][s.mask[1:]]) for i, s in enumerate(segments)]

    def of(self, logp: np.ndarray) -> tuple[Judged, ...]:
        if not self.places:
            return (Judged(self.name, 0.5, Verdict.value(float(logp.mean()) if len(logp) else 0.0), resolution=1e-6),)
        return tuple(
            Judged(self.name, 0.5, Verdict.value(x), end=i + 1, paid=True, resolution=1e-6)
            for i, x in enumerate(logp.tolist())
        )


def parts_of(folder: Path, *judges: Any, **rl: Any) -> RunParts:
    """A tiny RL run whose groups these judges read."""
    parts = tiny_parts(folder, only_rl(tiny_run(**({"steps": 1} | rl))))
    parts.rollout = replace(parts.rollout, judges=judges)
    return parts


def recorded(folder: Path) -> list[Episode]:
    found = [f for f in run_reader.episode_files(folder) if f.kind != "eval"]
    return [r.episode for f in found for r in from_columns(read_columns(f.path))]


def group(folder: Path, *judges: Any, greedy: bool = False) -> Group:
    """One group of three, of a policy that was not trained."""
    parts = parts_of(folder, *judges)
    sampling = replace(tiny_run().stages[1].sampling, greedy=greedy).resolve(parts.stop_ids, parts.spell)  # type: ignore[union-attr]
    try:
        task = parts.environment.train.task(0)
        return asyncio.run(parts.rollout.group(task, 0, RolloutRequest(groups=1, siblings=3), sampling, "s"))
    finally:
        parts.book.close()
        parts.close()


@pytest.mark.prove
def test_a_reward_model_scores_token_ids_in_a_run(tmp_path: Path) -> None:
    """One call a group; the record holds what the model says of the recorded tokens, beside the environment's
    verdict."""
    judge = Fluency(64)
    parts = parts_of(tmp_path / "run", judge)
    before = {n: t.detach().clone() for n, t in parts.learner.parameters().items()}
    asyncio.run(play(parts))
    assert any(not torch.equal(before[n], t) for n, t in parts.learner.parameters().items())
    episodes = recorded(tmp_path / "run")
    training = judge.calls[: len({(e.task.id, e.visit) for e in episodes})]
    assert len(episodes) == 16 and len(training) == 4 and all(2 <= n <= 4 for n in training)
    for e in episodes:
        own, [ours] = (
            [j for j in e.verdicts if j.source == "arithmetic"],
            [j for j in e.verdicts if j.source == "fluency"],
        )
        [(again,)] = judge.verdicts([e])
        assert own and ours.verdict.score == pytest.approx(again.verdict.score, abs=1e-5)
        assert e.reward == pytest.approx((own[0].verdict.score or 0.0) + 0.5 * (ours.verdict.score or 0.0), abs=1e-9)


@pytest.mark.prove
def test_rewards_at_each_token_reach_credit(tmp_path: Path) -> None:
    """Paid at every spoken token: the outcome is their sum, and credit that knows turns reads them."""
    algorithm = replace(GRPO, name="turns", baseline=TurnMean())
    parts = parts_of(tmp_path / "run", Fluency(64, places=True), algorithm=algorithm)
    asyncio.run(play(parts))
    for e in recorded(tmp_path / "run"):
        ends = [j.end for j in e.verdicts if j.source == "fluency"]
        assert ends == list(range(1, e.spoken + 1))
        assert e.reward == pytest.approx(sum(j.weight * (j.verdict.score or 0.0) for j in e.verdicts if j.counts))


def test_episodes_that_say_the_same_are_asked_once(tmp_path: Path) -> None:
    judge = Fluency(64)
    same = group(tmp_path / "run", judge, greedy=True)
    assert judge.calls == [1]
    assert (
        len({e.verdicts[-1].verdict.score for e in same.episodes}) == 1
        and same.episodes[0].verdicts[-1].source == "fluency"
    )


class Breaks(Fluency):
    """Its server is down for the first `times` calls."""

    def __init__(self, times: int) -> None:
        super().__init__(64)
        self.times = times

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        self.calls.append(len(episodes))
        if len(self.calls) <= self.times:
            raise ConnectionError("the reward model is gone")
        return self.verdicts(episodes)


def test_an_outage_is_retried_and_then_a_failed_verdict(tmp_path: Path) -> None:
    """It is never a score: the episodes leave baseline and batch."""
    back = group(tmp_path / "back", Breaks(JUDGE_RETRIES))
    assert len(back.judged) == 3
    gone = group(tmp_path / "gone", Breaks(JUDGE_RETRIES + 1))
    assert not gone.judged
    for e in gone.episodes:
        j = e.verdicts[-1]
        assert (j.source, j.verdict.state, j.verdict.kind) == (
            "fluency",
            State.FAILED,
            "raised",
        ) and "is gone" in j.verdict.why


class Says(Fluency):
    """Gives fixed verdicts, whatever it is asked."""

    def __init__(self, *verdicts: Judged, count: int | None = None, name: str = "fluency") -> None:
        self.given, self.count, self.name = verdicts, count, name

    async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
        return [self.given] * (len(episodes) if self.count is None else self.count)


def test_what_a_judge_returns_is_checked(tmp_path: Path) -> None:
    one = Verdict.value(1.0)
    few = group(tmp_path / "few", Says(Judged("fluency", 1.0, one), count=1))
    assert {e.verdicts[-1].verdict.kind for e in few.episodes} == {"count"} and not few.judged
    for n, (judge, told) in enumerate(
        [
            (Says(), "no verdict"),
            (Says(Judged("arithmetic", 1.0, one)), "rename one"),
            (Says(Judged("fluency", 1.0, one, end=99)), "spoken token 99"),
        ]
    ):
        with pytest.raises(InvariantError, match=told):
            group(tmp_path / str(n), judge)


def test_a_failing_judge_that_is_measured_excludes_nothing(tmp_path: Path) -> None:
    """Whether it raises or returns too few verdicts: the rewards stay, and what it measures is not known."""
    judges: dict[str, Any] = {"gone": Breaks(JUDGE_RETRIES + 1), "few": Says(count=1)}
    for name, judge in judges.items():
        judge.measured = True
        found = group(tmp_path / name, judge)
        assert len(found.judged) == 3 and {e.verdicts[-1].verdict.state for e in found.episodes} == {State.FAILED}
        assert all(e.reward == e.verdicts[0].verdict.score and e.truth is None for e in found.episodes)


def test_one_judge_that_fails_asks_only_about_its_own(tmp_path: Path) -> None:
    """Two judges stand in order, and an abstention of one leaves the other's number."""
    both = group(
        tmp_path / "run",
        Says(Judged("a", 1.0, Verdict.abstain()), name="a"),
        Says(Judged("b", 2.0, Verdict.value(3.0)), name="b"),
    )
    for e in both.episodes:
        assert [j.source for j in e.verdicts] == ["arithmetic", "a", "b"]
        assert e.reward == (e.verdicts[0].verdict.score or 0.0) + 6.0


def test_equal_tokens_beside_another_seat_are_judged_apart(tmp_path: Path) -> None:
    class Winner(Fluency):
        async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
            won = ["resign" in e.seats[0].text for e in episodes]
            return [(Judged(self.name, 1.0, Verdict.value(float(w))),) for w in won]

    first = group(tmp_path / "run").episodes[0]
    pair = [
        replace(first, seats=(SeatTurn("other", words, 2, 1, False),))
        for words in ("I resign", "checkmate", "I resign")
    ]
    judged = asyncio.run(with_judges((Winner(256),), pair))
    assert [e.verdicts[-1].verdict.score for e in judged] == [1.0, 0.0, 1.0]


def test_a_config_error_of_one_judge_ends_the_others(tmp_path: Path) -> None:
    ended: list[str] = []

    class Refuses(Fluency):
        async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
            raise ConfigError("no")

    class Waits(Fluency):
        async def judge(self, episodes: Sequence[Episode]) -> list[tuple[Judged, ...]]:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append("ended")
            return []

    episodes = group(tmp_path / "run").episodes
    with pytest.raises(ConfigError, match="no"):
        asyncio.run(with_judges((Waits(256), Refuses(256)), episodes))
    assert ended == ["ended"]
