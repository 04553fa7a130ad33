"""Process rewards: labels of steps by completion, what they cost, who learns them, and what a policy is paid."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import posttrain
from benchmarks.learning.process_bench import bench, planted_chains
from posttrain.build.build_reward_models import stage_policy
from posttrain.checks.judging.reward_model_scores import read_alone
from posttrain.checks.judging.step_label_checks import labels_are_of_their_steps, said, token_ends
from posttrain.config.env import Env, Reward
from posttrain.config.overrides import apply
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core import abilities, seeds
from posttrain.core.judgements import StepLabels
from posttrain.core.measure.answer_steps import (
    StepValues,
    aggregated,
    first_error,
    joined,
    progress,
    step_ends,
    steps_of_text,
)
from posttrain.core.ports import Attempt
from posttrain.core.streams import STEP
from posttrain.core.types import Episode, Segment, Stop, Task
from posttrain.core.verdict import SOLVED, Judged, Verdict, outcome
from posttrain.diagnose.reward_bench import ProcessBenchScore
from posttrain.engine.learner.learner import HFLearner
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import Renderer
from posttrain.record import run_reader
from posttrain.record.external_access import asks
from posttrain.role.judges.step_completion import StepLabeler, TokenEnds
from posttrain.role.judges.step_judge import step_scores, step_verdicts
from posttrain.stages.reward_model.reward_model_batches import reward_batch
from posttrain.stages.step_labels.step_label_stage import ROWS, LabelWork, StepLabelDriver, rows_of
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, DataError, InvariantError
from tests.role.process_parts import SAMPLING, Counting, labelled, needed, parts_of, process_run
from tests.vocabularies import train_bpe

LABEL = StepLabeling(name="label", separator=";", completions=4, prompts=4, siblings=3, sampling=SAMPLING)


# --- steps ------------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.text(alphabet="a1 ;", max_size=20), st.sampled_from([";", "; ", "a"]))
def test_steps_are_the_text_cut_and_none_is_blank(text: str, separator: str) -> None:
    steps = steps_of_text(text, separator)
    assert "".join(steps) == (text if steps else "")
    assert all(s.replace(separator, "").strip() for s in steps)
    if not steps:
        assert not text.replace(separator, "").strip()
    assert joined(steps, separator) == ("".join(steps), step_ends(text, separator))


def test_aggregates_and_labels_by_hand() -> None:
    """The numbers of C06."""
    values = StepValues(right=(0, 3, 8), asked=(8, 8, 8))
    assert (values.hard, values.soft) == ((False, True, True), (0.0, 0.375, 1.0))
    scores = (0.9, 0.4, 0.8)
    assert aggregated(scores, "min") == 0.4 and aggregated(scores, "product") == pytest.approx(0.288)
    assert aggregated(scores, "mean") == pytest.approx(0.7) and aggregated(scores, "last") == 0.8
    assert progress(scores) == pytest.approx((0.9, -0.5, 0.4)) and sum(progress(scores)) == pytest.approx(scores[-1])
    assert (first_error(scores), first_error((0.9, 0.6)), first_error((0.1,))) == (1, -1, 0)
    with pytest.raises(InvariantError, match="without a step"):
        aggregated((), "min")


def test_the_value_of_a_prover_is_that_of_all_choices_of_its_completions() -> None:
    """Best of K, by listing every choice of K of the completions; the mean of it over draws of n is 1 - (1 - p)^K."""
    for right, asked in product(range(6), (1, 2, 5)):
        if right > asked:
            continue
        for k in range(1, 7):
            listed = [any(c) for c in combinations([True] * right + [False] * (asked - right), min(k, asked))]
            found = StepValues(right=(right,), asked=(asked,)).best_of(k)
            assert found == pytest.approx((sum(listed) / len(listed),))
    p, n, k = 0.3, 8, 3
    chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    values = StepValues(right=tuple(range(n + 1)), asked=(n,) * (n + 1)).best_of(k)
    assert math.fsum(a * b for a, b in zip(chances, values, strict=True)) == pytest.approx(1 - (1 - p) ** k)


def test_progress_under_a_prover_beside_the_outcome_by_hand() -> None:
    """C06, PAV: Q .6, A(mu) = .3 - .2 = .1, alpha 3: .9. The outcome is the environment's, alpha the reward's weight,
    and the payments of an answer sum to alpha times the prover's last value."""
    pav = Reward(function="model:x", steps="pay", progress=True, weight=3.0)
    steps = step_verdicts("x", pav, (4, 9), (0.2, 0.3), 0.0)
    own = Judged("world", 1.0, Verdict.value(0.6))
    second = steps[1]
    assert second.paid and (second.end, own.verdict.score) == (9, 0.6)
    assert 0.6 + second.weight * (second.verdict.score or 0.0) == pytest.approx(0.9)
    assert outcome((own, *steps)) == pytest.approx(0.6 + 3 * 0.3)


def test_a_score_that_is_not_finite_takes_no_reward_where_it_is_measured() -> None:
    own = Judged("world", 1.0, Verdict.value(0.6))
    for measured, paid in ((True, 0.6), (False, None)):
        said = step_verdicts(
            "x", Reward(function="model:x", steps="outcome", measured=measured), (4,), (math.nan,), 0.0
        )
        assert said[0].verdict.kind == "not finite" and outcome((own, *said)) == paid


def test_the_score_of_process_bench() -> None:
    one = ProcessBenchScore.of([2, 0, -1, -1, -1], [2, 1, -1, -1, 0])
    assert (one.erroneous, one.correct) == (0.5, pytest.approx(2 / 3))
    assert one.f1 == pytest.approx(2 * 0.5 * (2 / 3) / (0.5 + 2 / 3))
    assert ProcessBenchScore.of([0, -1], [-1, 3]).f1 == 0.0
    with pytest.raises(DataError, match="the other kind"):
        ProcessBenchScore.of([-1, -1], [-1, 0])


@pytest.mark.parametrize("merged", [False, True])
def test_the_token_that_ends_a_step_is_found_as_by_decoding_every_beginning(merged: bool) -> None:
    """Tokens with a text of their own, and a tokenizer whose pieces depend on what stands before them."""
    words = ["3", "+4", "=7;", "7+", "5", "=12", ";1", ""]

    def text(ids: np.ndarray) -> str:
        plain = "".join(words[i] for i in ids)
        return plain.replace("5=1", "x") if merged else plain

    rng = np.random.default_rng(0)
    ends = TokenEnds(text)
    for _ in range(50):
        ids = rng.integers(0, 8, size=rng.integers(1, 12)).astype(np.int32)
        lengths = step_ends(text(ids), ";")
        if lengths:
            assert list(ends.upto(ids, lengths)) == token_ends(text, ids, lengths)


def test_a_step_ends_behind_a_character_of_several_tokens() -> None:
    """Where unseen characters become bytes, the bytes of half a character decode to more characters than the whole."""
    tokenizer: Any = train_bpe(["a;b;c" * 20], 300)
    renderer = Renderer(tokenizer, (), 64)
    ids = renderer.encode("a😀;b😀é;c")
    text = renderer.text(ids)
    ends = step_ends(text, ";")
    wanted = [next(n for n in range(len(ids) + 1) if renderer.text(ids[:n]).startswith(text[:end])) for end in ends]
    assert len(ids) > len(text) and list(TokenEnds(renderer.text).upto(ids, ends)) == wanted
    assert token_ends(renderer.text, ids, ends) == wanted


def test_an_answer_that_said_nothing_has_no_steps() -> None:
    """A prompt that fills the context leaves no token, and the stage goes on."""
    seen = Segment(
        np.zeros(3, np.int32), np.zeros(3, bool), np.full(3, np.nan, np.float32), np.full(3, -1, np.int32), SAMPLING
    )
    silent = Episode(Task("a", "?"), 0, 0, (seen,), Stop.CONTEXT, (Judged("world", 1.0, Verdict.value(0.0)),))
    labeler = StepLabeler(Any, LABEL, SAMPLING, TokenEnds(lambda ids: ""), "s")  # type: ignore[arg-type]
    assert labeler.cut(silent) == ()


def test_rows_come_back_whatever_an_answer_says(tmp_path: Path) -> None:
    """A separator of lines or paragraphs of Unicode ends no row."""
    steps, held = ["a\u2028b;", "c\x85d\x1e"], tmp_path / "rows"
    held.mkdir()
    book = SimpleNamespace(keep=lambda name, write: write(held), kept=lambda name: held)
    driver: Any = SimpleNamespace(stage=LABEL, parts=SimpleNamespace(book=book))
    for index in (1, 2):
        answer = SimpleNamespace(row=lambda step: {"completions": steps, "step": step})
        StepLabelDriver._write(driver, LabelWork(index, None, (answer,), {}))  # type: ignore[arg-type]
    assert [(r["completions"], r["step"]) for r in rows_of(held)] == [(steps, 1), (steps, 2)]


# --- labels by completion ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    parts = parts_of(tmp_path_factory.mktemp("labels") / "run", process_run())
    yield parts
    parts.close()
    parts.book.close()


@pytest.mark.prove
def test_a_completion_goes_on_from_its_step_and_the_label_is_its_verdict(made: Any) -> None:
    groups, answers = labelled(made, LABEL)
    assert len(answers) == sum(len(g.episodes) for g in groups) and any(len(a.steps) > 1 for a in answers)
    for a in answers:
        text = made.rollout.dialogue("").text
        assert "".join(a.steps) == text(said(a.episode)) == a.episode.text
        for k, own in enumerate(a.completions):
            begin = said(a.episode)[: a.tokens[k]].tolist()
            assert all(said(c)[: a.tokens[k]].tolist() == begin and c.task.id == a.episode.task.id for c in own)
            assert a.values.right[k] == sum((c.reward or 0.0) >= SOLVED for c in own)
            assert a.values.asked[k] == len(own) == (1 if own == (a.episode,) else LABEL.completions)


@pytest.mark.prove
def test_an_answer_that_ends_early_is_judged_as_it_is(made: Any) -> None:
    """Half of the rows are answers that end after an earlier step. Their last label is the environment's verdict of
    that text, the labels before it are those of the whole answer, and nothing more is sampled."""
    counting = Counting(made.sampler)
    parts = replace(made, rollout=replace(made.rollout, sampler=counting))
    _, plain = labelled(parts, LABEL)
    asked = len(counting.calls)
    _, both = labelled(parts, replace(LABEL, early_ends=True))
    assert len(counting.calls) == 2 * asked
    whole = {(a.episode.task.id, a.episode.sibling): a for a in both if not a.early}
    assert [(a.steps, a.values) for a in whole.values()] == [(a.steps, a.values) for a in plain]
    early = [a for a in both if a.early]
    assert len(early) == sum(len(a.steps) > 1 for a in plain) > 2
    text = made.rollout.dialogue("").text
    for a in early:
        full, e = whole[a.episode.task.id, a.episode.sibling], a.episode
        ids = said(e).tolist()
        assert ids[:-1] == said(full.episode)[: len(ids) - 1].tolist() and ids[-1] in made.stop_ids
        assert len(a.steps) < len(full.steps) and not e.text.endswith(";") and full.episode.text.startswith(e.text)
        attempt = Attempt(e.task, (e.text,), Stop.SAID, lambda characters: characters)
        (own,) = asyncio.run(made.environment.judge(attempt))
        assert e.figure is not None and e.figure == own.verdict.score
        assert a.values.right == (*full.values.right[: len(a.steps) - 1], int(e.figure >= SOLVED))
        labels_are_of_their_steps(a, text)
    rows = [a.row(1) for a in both]
    assert len({r["id"] for r in rows}) == len(rows)


@pytest.mark.prove
def test_rows_have_the_value_of_the_prover(tmp_path: Path) -> None:
    run = process_run()
    imitation, label = run.stages[:2]
    assert isinstance(label, StepLabeling)
    env = replace(run.env, rewards=())
    run = replace(run, env=env, stages=(imitation, replace(label, prover=3)))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    (folder,) = (tmp_path / "run" / "kept").glob("*-rows")
    rows = rows_of(folder)
    between = 0
    for row in rows:
        values = StepValues(right=tuple(row["right"]), asked=tuple(row["asked"]))
        assert row["values"] == list(values.best_of(3)) and all(map(math.isfinite, row["values"]))
        between += sum(v != s for v, s in zip(row["values"], values.soft, strict=True))
    assert between > 0, "some step has completions of both kinds"


@pytest.mark.prove
def test_completions_are_those_of_their_place(made: Any) -> None:
    """(task, visit, sibling, step, number) decide a completion: with other neighbours, or asked again, it is equal."""
    _, all_four = labelled(made, LABEL, 4)
    _, two = labelled(made, LABEL, 2)
    _, again = labelled(made, LABEL, 2)
    for one, other in zip([*two, *two], [*again, *all_four[: len(two)]], strict=True):
        for mine, theirs in zip(one.completions, other.completions, strict=True):
            assert [said(c).tolist() for c in mine] == [said(c).tolist() for c in theirs]
        assert one.values == other.values


@pytest.mark.prove
def test_beginnings_are_computed_once(made: Any) -> None:
    """Token positions computed / needed, by the engine's own counter. What is computed twice is one position of each
    beginning: its last token, whose distribution the completions are drawn from."""
    counting = Counting(made.sampler)
    made.sampler.gauges()
    stage = replace(LABEL, completions=8, siblings=2, sampling=replace(SAMPLING, max_tokens=50, min_tokens=50))
    labelled(replace(made, rollout=replace(made.rollout, sampler=counting)), stage, 4)
    computed, least = made.sampler.gauges()["engine/positions_linear"].sum, needed(counting.calls)
    beginnings = len({ids.tobytes() for ids, _ in counting.calls})
    assert beginnings > 12 and least <= computed <= 1.02 * least
    assert computed <= least + beginnings


# --- rows and what is learned -----------------------------------------------------------------------------------------


def rows(folder: Path, *lines: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return str(path)


@pytest.mark.prove
def test_the_rows_are_read_back_by_the_reader(made: Any, tmp_path: Path) -> None:
    _, answers = labelled(made, LABEL, 6)
    path = rows(tmp_path, *(a.row(1) for a in answers))
    read = environment(Env(name="prompts", prompts=path, args={"judged": "steps", "separator": ";"}, heldout=0), 0)
    found = {t.id: t for t in (read.train.task(i) for i in range(read.train.count or 0))}
    assert len(found) == len(answers)
    for a in answers:
        e = a.episode
        task = found[f"{e.task.id}/{e.visit}/{e.sibling}"]
        drawn = abilities.judgements(read).draw(task, "steps", seeds.generator(0, "x", 0))
        assert isinstance(drawn, StepLabels) and (drawn.steps, drawn.values) == (a.steps, a.values.soft)
        assert drawn.labels == tuple(1 if x else -1 for x in a.values.hard)
        assert joined(drawn.steps, drawn.separator)[0] == e.text


def test_values_and_steps_that_are_none_are_refused(tmp_path: Path) -> None:
    def read(**row: Any) -> None:
        environment(Env(name="prompts", prompts=rows(tmp_path, {"prompt": "<1+1>"} | row), heldout=0), 0)

    with pytest.raises(DataError, match=r"'values\[1\]' is 1.5, wanted a chance from 0 to 1"):
        read(completions=["a", "b"], labels=[True, False], values=[0.5, 1.5])
    with pytest.raises(DataError, match="'values' has 1 entries for 2 completions"):
        read(completions=["a", "b"], labels=[True, False], values=[0.5])


def stage_of(**more: Any) -> RewardModel:
    kept: dict[str, Any] = {"judgement": "steps", "pool": "token", "separator": ";"}
    return RewardModel(name="rm", **(kept | more))


def judged(**more: Any) -> StepLabels:
    task = Task(id="a", prompt="<3+4+0>", answer="7")
    kept: dict[str, Any] = {"steps": ("3+4=7;", "7+0=8"), "labels": (1, -1), "values": (0.75, 0.0), "separator": ";"}
    return StepLabels(task=task, **(kept | more))


@pytest.mark.prove
def test_a_label_is_at_the_last_token_of_its_step(made: Any) -> None:
    text = made.rollout.dialogue("").text
    for stage, want in ((stage_of(), (1.0, 0.0)), (stage_of(soft=True), (0.75, 0.0))):
        batch = reward_batch([judged(), judged()], stage, made.renderer, 64, TokenEnds(text))
        for s in range(2):
            label, ids = batch[STEP][batch.segment_M == s], batch.target_M[batch.segment_M == s]
            at = np.flatnonzero(~np.isnan(label))
            assert [text(ids[: n + 1]) for n in at] == ["3+4=7;", "3+4=7;7+0=8"]
            assert at[-1] == len(ids) - 1 and label[at].tolist() == list(want)
    with pytest.raises(DataError, match="set rm.separator and env.args.separator"):
        reward_batch([judged(separator="=")], stage_of(), made.renderer, 64, TokenEnds(text))
    with pytest.raises(DataError, match="rm.soft=false"):
        reward_batch([judged(values=())], stage_of(soft=True), made.renderer, 64, TokenEnds(text))
    with pytest.raises(DataError, match="right or wrong"):
        reward_batch([judged(labels=(0, 0))], stage_of(), made.renderer, 64, TokenEnds(text))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"pool": "last"}, "pool=token"),
        ({"separator": ""}, "separator"),
        ({"judgement": "label", "soft": True}, "soft"),
        ({"judgement": "pair", "pool": "last", "labels_of": "label"}, "labels_of"),
    ],
)
def test_a_stage_that_means_nothing_is_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        stage_of(**change)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"prover": 5, "completions": 4}, "the best of 5 is told from as many"), ({"prover": 0}, "must be >= 1")],
)
def test_a_prover_needs_as_many_completions(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        StepLabeling(name="label", **wrong)


def test_labels_come_from_an_earlier_stage_with_the_same_separator() -> None:
    run = process_run()
    with pytest.raises(ConfigError, match="must name an earlier stage that labels steps, label"):
        apply(run, ["rm.labels_of=sft"])
    with pytest.raises(ConfigError, match="Set rm.separator=|must end with"):
        apply(run, ["rm.separator=,"])
    with pytest.raises(ConfigError, match="process reward model"):
        Reward(function="exact", progress=True)
    with pytest.raises(ConfigError, match="single steps"):
        Reward(function="model:x", progress=True, steps="outcome")
    assert from_plain(Run, to_plain(run)) == run and not asks(run)


# --- whole runs -------------------------------------------------------------------------------------------------------


def chain(folder: Path, **how: Any) -> Path:
    posttrain.run(process_run(**how), out=folder, quiet=True)
    return folder


def verdicts(folder: Path) -> list[Episode]:
    return [e.episode for e in run_reader.episodes(folder, "rl", 2)]


@pytest.mark.prove
def test_from_labels_made_by_completion_to_a_policy_paid_by_steps(tmp_path: Path) -> None:
    """Each judged step has the kept reward model's score at its last token, and accuracy stays the world's."""
    folder = chain(tmp_path / "run")
    made = rows_of(folder / "kept" / "label-rows")
    assert {r["step"] for r in made} == {1, 2} and (folder / "kept" / "label-rows" / ROWS).is_file()
    assert all(len(r["completions"]) == len(r["labels"]) == len(r["values"]) for r in made)
    learner = HFLearner(stage_policy(folder, "rm"))
    steps = 0
    for e in verdicts(folder):
        own, *scored = e.verdicts
        assert own.source == "arithmetic" and e.reward == own.verdict.score and all(j.source == "rm" for j in scored)
        chance = step_scores(learner, read_alone(e))
        for j in scored:
            if j.end is not None:
                assert not j.paid and j.verdict.score == pytest.approx(chance[j.end - 1], abs=1e-5)
                steps += 1
    assert steps > 20
    last = run_reader.steps(folder)[-1]
    assert last.gauges["canary/reward_noise"].mean < 1e-4


@pytest.mark.prove
@pytest.mark.parametrize("how", ["min", "product", "mean", "last"])
def test_one_number_of_the_steps_scores_pays_the_answer(how: Any, tmp_path: Path) -> None:
    run = process_run(reward=Reward(function="model:stage:rm", steps="outcome", aggregate=how))
    run = apply(run, ["env.measured=true", "rl.algorithm=grpo"])
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    labelling = [s for s in run_reader.steps(tmp_path / "run") if "label/answers" in s.gauges]
    assert len(labelling) == 2
    for s in labelling:  # the truth labels them, and the model that will pay is not there yet
        assert s.gauges["rollout/abstained"].mean == s.gauges["rollout/unjudged"].mean == 0
    learner = HFLearner(stage_policy(tmp_path / "run", "rm"))
    for e in verdicts(tmp_path / "run"):
        ends = token_ends(lambda ids: "x" * len(ids), said(e), [])  # the last token alone
        [paid] = [j for j in e.verdicts if j.source == "rm"]
        each = [float(x) for x in paid.verdict.why.split(", ")] if paid.verdict.score is not None else []
        if each:
            assert paid.verdict.score == pytest.approx(aggregated(each, how), abs=2e-3)
            assert each[-1] == pytest.approx(step_scores(learner, read_alone(e))[ends[-1] - 1], abs=1e-3)
            assert e.reward == paid.verdict.score and e.figure in (0.0, 1.0)


@pytest.mark.prove
def test_steps_are_paid_where_they_end_and_values_see_it(tmp_path: Path) -> None:
    """Progress telescopes: what an answer is paid is its last step's score."""
    run = process_run(reward=Reward(function="model:stage:rm", steps="pay", progress=True))
    run = apply(run, ["env.measured=true", "rl.algorithm=ppo"])
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    learner = HFLearner(stage_policy(tmp_path / "run", "rm"))
    for e in verdicts(tmp_path / "run"):
        paid = [j for j in e.verdicts if j.source == "rm" and j.paid]
        if paid:
            assert paid[-1].end == e.spoken
            assert e.reward == pytest.approx(step_scores(learner, read_alone(e))[-1], abs=1e-5)


@pytest.mark.prove
def test_a_killed_labelling_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = chain(tmp_path / "whole")
    real, calls = StepLabelDriver.remember, []

    def stops(self: Any, asked: Any, step: Any) -> Any:
        out = real(self, asked, step)
        calls.append(asked.index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return out

    StepLabelDriver.remember = stops  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            posttrain.run(process_run(), out=tmp_path / "cut", quiet=True)
    finally:
        StepLabelDriver.remember = real  # type: ignore[method-assign]
    posttrain.run("", resume=tmp_path / "cut", quiet=True)
    one, two = ((f / "kept" / "label-rows" / ROWS).read_bytes() for f in (whole, tmp_path / "cut"))
    assert one == two


def test_a_separator_is_some_text() -> None:
    with pytest.raises(ConfigError, match="separator is empty"):
        StepLabeling(name="label", separator="")
    assert math.isclose(sum(StepValues(right=(1, 1), asked=(2, 4)).soft), 0.75)


# --- the first error --------------------------------------------------------------------------------------------------


def test_the_first_error_of_planted_chains_is_found_by_their_truth() -> None:
    """Half of the chains have one; a scorer that knows the truth has 1, one that scores a step late finds none."""
    run = process_run()
    run = replace(run, env=replace(run.env, args={"min_terms": 3, "max_terms": 5}, heldout=20, rewards=()))
    chains = planted_chains(run, 40, 0)
    assert [c.truth >= 0 for c in chains] == [bool(i % 2) for i in range(40)]
    assert {c.truth for c in chains} >= {-1, 0, 1, 2}
    for c in chains:
        steps = c.text.split(";")
        sums = [sum(o for _, o in c.task.info["terms"][: n + 2]) for n in range(len(steps))]
        wrong = [int(s.rpartition("=")[2]) != x for s, x in zip(steps, sums, strict=True)]
        assert c.truth == (wrong.index(True) if any(wrong) else -1)
    known = [[0.1 if i == c.truth else 0.9 for i in range(c.text.count(";") + 1)] for c in chains]
    late = [
        [0.1 if i == c.truth + 1 and c.truth >= 0 else 0.9 for i in range(len(s) + 1)]
        for c, s in zip(chains, known, strict=True)
    ]
    assert bench([c.truth for c in chains], known)[0].f1 == 1.0
    assert bench([c.truth for c in chains], late)[0].f1 == 0.0
