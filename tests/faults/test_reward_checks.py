"""What observes a reward model: the second computation of its loss, and of its scores where it pays a policy."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from posttrain.checks.judging import step_label_checks
from posttrain.checks.judging.reward_model_scores import reads_the_last_token, scores_hold
from posttrain.checks.judging.step_label_checks import expected_step_loss, step_verdicts_hold, token_ends
from posttrain.config.run import Reinforce
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core.batch import Packed
from posttrain.core.judgements import Label, Pair, Ranking, StepLabels
from posttrain.core.sampling import Sampling
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict, failed, outcome, truth
from posttrain.role.judges.reward_judge import JudgeMember, RewardModelJudge
from posttrain.stages.checks_by_kind import observers
from posttrain.stages.reward_model.reward_model_checks import expected_loss, loss_is
from posttrain.system.errors import InvariantError

TASK = Task("a", "1")
STAGE = RewardModel(name="rm")


def scores(*x: float) -> np.ndarray:
    return np.array(x)


def test_the_numbers_of_the_survey() -> None:
    """B01: R_c 1.5, R_r .5: .313262; margin 1: .693147; centring .01 * 4 = .04."""
    pair = Pair(task=TASK, chosen="x", rejected="y")
    assert expected_loss([pair], STAGE, scores(1.5, 0.5)) == pytest.approx(0.313262, abs=1e-6)
    wide = replace(pair, margin=1.0)
    assert expected_loss([wide], STAGE, scores(1.5, 0.5)) == pytest.approx(0.693147, abs=1e-6)
    assert expected_loss([wide], replace(STAGE, margin=False), scores(1.5, 0.5)) == pytest.approx(0.313262, abs=1e-6)
    centred = replace(STAGE, centre=0.01)
    assert expected_loss([pair], centred, scores(1.5, 0.5)) == pytest.approx(0.313262 + 0.04, abs=1e-6)


def test_the_language_heads_share_is_computed_a_second_time() -> None:
    """B02: a difference of 3 at beta .1 is .554355. A form that is another one's is told."""
    pair, said = Pair(task=TASK, chosen="x", rejected="y"), scores(-1.0, -4.0)
    forms = {"dpo": 0.554355, "dpo_free": 0.554355, "sft": 0.744397}
    for form, second in forms.items():
        found = expected_loss([pair], replace(STAGE, regularise=form), scores(1.5, 0.5), said)
        assert found == pytest.approx(0.99 * 0.313262 + 0.01 * second, abs=1e-6)


def test_weights_rankings_and_labels() -> None:
    one, two = (Pair(task=TASK, chosen="x", rejected="y", weight=w) for w in (1.0, 3.0))
    alone = [expected_loss([p], STAGE, scores(*s)) for p, s in ((one, (1.0, 0.0)), (two, (0.0, 1.0)))]
    both = expected_loss([one, two], STAGE, scores(1.0, 0.0, 0.0, 1.0))
    assert alone[0] is not None and alone[1] is not None and both == pytest.approx((alone[0] + 3 * alone[1]) / 4)
    listed = Ranking(task=TASK, completions=("x", "y", "z"))
    r = scores(2.0, 1.0, -1.0)
    luce = -(2 - np.log(np.exp(r).sum())) - (1 - np.log(np.exp(r[1:]).sum()))
    assert expected_loss([listed], replace(STAGE, judgement="ranking"), r) == pytest.approx(luce)
    listed = Ranking(task=TASK, completions=("x", "y"))
    assert expected_loss([listed], replace(STAGE, judgement="ranking"), scores(0.0, 800.0)) == pytest.approx(800.0)
    label = replace(STAGE, judgement="label")
    said = expected_loss([Label(task=TASK, completion="x", good=False)], label, scores(2.0))
    assert said == pytest.approx(np.log1p(np.exp(2.0)))
    assert expected_loss([], replace(STAGE, judgement="rating", attributes=("a",)), scores()) is None


def test_another_loss_is_told() -> None:
    loss_is(0.5, 0.5004, "float32")
    with pytest.raises(InvariantError, match="the sign of the margin"):
        loss_is(0.5, 0.51, "float32")


class Scorer:
    """Scores a sequence by its ids: the sum of all, and a hundredth of the last."""

    def __init__(self, at: int = -1, noise: float = 0.0) -> None:
        self.at, self.noise = at, noise

    def rewards(self, packed: Packed) -> np.ndarray:
        ends = np.cumsum(packed.lengths_S)
        return np.array([float(packed.ids_N[e + self.at]) / 8 + self.noise for e in ends], np.float32)

    def tensors(self) -> dict[str, Any]:
        return {"reward_head.score.weight": torch.zeros(1)}


def judge(**changes: Any) -> RewardModelJudge:
    member = JudgeMember("rm", Scorer(**changes), 16, reads_last=True)
    return RewardModelJudge("rm", 1.0, (member,))


def episode(last: int, score: float | None, sibling: int = 0) -> Episode:
    ids = np.array([1, 2, last], np.int32)
    mask = np.array([False, True, True])
    logp = np.where(mask, -1.0, np.nan).astype(np.float32)
    segment = Segment(ids, mask, logp, np.where(mask, 0, -1).astype(np.int32), Sampling(stop_ids=()))
    verdict = Verdict.failed("outage") if score is None else Verdict.value(score)
    return Episode(TASK, 0, sibling, (segment,), Stop.SAID, (Judged("rm", 1.0, verdict, resolution=1e-5),))


def group(*given: tuple[int, float | None]) -> Group:
    return Group(TASK, 0, tuple(episode(last, score, i) for i, (last, score) in enumerate(given)))


def test_a_score_of_other_tokens_is_told() -> None:
    right = group((4, 0.5), (8, 1.0))
    assert [scores_hold(judge(), right, e, "float32") for e in right.episodes] == [0.0, 0.0]
    swapped = group((4, 1.0), (8, 0.5))
    with pytest.raises(InvariantError, match="gives 0.5 to the same tokens read alone"):
        scores_hold(judge(), swapped, swapped.episodes[0], "float32")


@pytest.mark.parametrize("steps", ["score", "outcome"])
def test_a_step_score_that_is_no_number_now_is_told(steps: str) -> None:
    made, verdict = episode(4, 0.5), Verdict.value(0.5)
    ends = SimpleNamespace(text=lambda ids: "ab"[: len(ids)])
    for how in ("min", "product", "mean", "last"):
        reward = SimpleNamespace(steps=steps, progress=False, aggregate=how)
        scorer = SimpleNamespace(tokens=lambda packed: np.array([0.5, np.nan]))
        of = SimpleNamespace(name="rm", ends=ends, separator="a", scorer=scorer, reward=reward)
        judged = replace(made, verdicts=(Judged("rm", 1.0, verdict, end=None if steps == "outcome" else 2),))
        with pytest.raises(InvariantError, match="nan"):
            step_verdicts_hold(of, judged, "float32")  # type: ignore[arg-type]


def test_a_step_beyond_the_text_ends_with_the_last_token() -> None:
    assert token_ends(lambda ids: "ab"[: len(ids)], np.arange(2), [7, 9]) == [2, 2]


def test_a_chance_that_rounds_to_1_has_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_label_checks, "step_scores", lambda *_: np.array([1.0]))
    batch: Any = SimpleNamespace(segment_M=np.zeros(1, int), target_M=np.zeros(1, int))
    roles: Any = SimpleNamespace(
        learner=None, stage=SimpleNamespace(soft=True), ends=SimpleNamespace(text=lambda ids: "a"[: len(ids)])
    )
    for value, loss in ((1.0, 0.0), (0.0, 53 * np.log(2))):
        steps = StepLabels(task=TASK, steps=("a",), labels=(1,), values=(value,), separator=";")
        assert expected_step_loss(roles, batch, [steps]) == pytest.approx(loss)


def test_noise_above_the_resolution_is_told_and_below_is_not() -> None:
    noisy = group((4, 0.5 + 1e-6), (8, 1.0))
    assert 0 < scores_hold(judge(), noisy, noisy.episodes[0], "float32") < 2e-6
    with pytest.raises(InvariantError, match=r"its resolution is 9\.1e-13, so noise between siblings"):
        scores_hold(replace(judge(), resolution=2.0**-40), noisy, noisy.episodes[0], "float32")


def test_an_answer_that_cannot_be_read_has_no_score() -> None:
    low = group((4, 0.0), (8, 1.0))
    short = RewardModelJudge("rm", 1.0, (JudgeMember("rm", Scorer(), 2),))
    with pytest.raises(InvariantError, match="never a low score"):
        scores_hold(short, low, low.episodes[0], "float32")
    out = group((4, None), (8, 1.0))
    assert scores_hold(short, out, out.episodes[0], "float32") == 0.0


def test_where_a_head_reads_is_told() -> None:
    probe = np.arange(3, 9, dtype=np.int32)
    reads_the_last_token(judge().members[0], probe)
    with pytest.raises(InvariantError, match="does not depend on the last token"):
        reads_the_last_token(judge(at=-2).members[0], probe)


def test_what_is_measured_is_no_reward_and_its_outage_leaves_nothing_out() -> None:
    paid = Judged("rm", 2.0, Verdict.value(0.5))
    own = Judged("world", 1.0, Verdict.value(0.25), measured=True)
    assert (outcome((own, paid)), truth((own, paid))) == (1.0, 0.25)
    broken = Judged("world", 1.0, Verdict.failed("outage"), measured=True)
    assert (outcome((broken, paid)), truth((broken, paid)), failed((broken, paid))) == (1.0, None, False)
    assert (outcome((own,)), truth((paid,))) == (None, None)
    with pytest.raises(InvariantError, match="what is measured is about the whole episode"):
        Judged("world", 1.0, Verdict.value(0.25), end=2, measured=True)


def test_who_observes() -> None:
    assert "RewardModelCheck" in observers(Reinforce(name="rl"), [], {}).names
    assert "RankingCheck" in observers(STAGE, [], {}).names
