"""Search at inference: votes, beams and trees over steps, by hand and on a scripted policy, and `posttrain eval` with
searches."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import posttrain
from benchmarks.learning.search_curves import by_difficulty
from posttrain.api import reward_transfer
from posttrain.cli import main
from posttrain.config.overrides import apply
from posttrain.config.run import Env, Optimizer
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.measure.answer_steps import aggregated
from posttrain.core.measure.interval import Score
from posttrain.core.measure.right import Grades, Right
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Stop
from posttrain.core.types import SampledTurn, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.evaluation import heldout_rows
from posttrain.evaluation.evaluate_search import SearchReport, evaluate_searches
from posttrain.evaluation.evaluation_target import contract_of
from posttrain.evaluation.search_words import asks_search, kinds_of, search_request
from posttrain.recipe.recipes import recipe
from posttrain.report.console import lines_of
from posttrain.report.plots import search_plot
from posttrain.search.curves import SearchPoint, frontier, leading, search_point
from posttrain.search.play_search import ANSWERS, beam, best, play, vote
from posttrain.search.puct import TreeNode, tree_search
from posttrain.search.search_checks import said_by_one_version, tree_adds_up, worth_is
from posttrain.search.search_kinds import (
    KINDS,
    ONE,
    BeamSearch,
    BestOfN,
    MajorityVote,
    SearchKind,
    TreeRule,
    TreeSearch,
)
from posttrain.search.step_sampling import Beginning, StepSearch
from posttrain.system.errors import ConfigError, InvariantError, PosttrainError
from tests.role.process_parts import process_run
from tests.tiny import only_rl, tiny_run

LETTERS = "pabc;."
STOP = LETTERS.index(".")
TASK = Task(id="t", prompt="p")


def text(ids: np.ndarray) -> str:
    return "".join(LETTERS[i] for i in ids if i != STOP)


@dataclass
class Dice:
    """Says one letter of a, b, c and a separator, three times, and then the stop token. Which letter is a function of
    the place and the position."""

    asked: list[np.ndarray] = field(default_factory=list[np.ndarray])

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        self.asked.append(ids)
        said: list[int] = []
        begun = len(ids) - 1
        rolled = seeds.uniforms(place, 16)
        while True:
            at = begun + len(said)
            token = STOP if at == 5 else LETTERS.index(";") if at % 2 else 1 + int(rolled[len(said)] * 3)
            said.append(token)
            stop = Stop.SAID if token == STOP else None
            if token == LETTERS.index(";") and sampling.stop:
                stop = Stop.STRING
            if stop is not None:
                n = len(said)
                return SampledTurn(np.array(said, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), stop)


class Likes:
    """Scores a step by its letter: a is good, c is bad."""

    def tokens(self, packed: Packed) -> np.ndarray:
        out = np.zeros(packed.spoken)
        worth = {"a": 0.9, "b": 0.5, "c": 0.1}
        for s in range(len(packed.lengths_S)):
            own = np.flatnonzero(packed.segment_M == s)
            last = 0.0
            for m in own:
                last = worth.get(LETTERS[int(packed.target_M[m])], last)
                out[m] = last
        return out


class World:
    async def judge(self, attempt: Any) -> Any:
        return (Judged("world", 1.0, Verdict.value(float(attempt.text == "a;a;a"))),)


def tools(**more: Any) -> StepSearch:
    sampling = Sampling(max_tokens=12, stop_ids=(STOP,))
    return StepSearch(Dice(), Likes(), World(), lambda t: np.zeros(1, np.int32), text, sampling, ";", **more)  # type: ignore[arg-type]


def test_votes_by_hand() -> None:
    assert best([0.1, 0.7, 0.7, 0.2]) == 1
    assert vote(["1", "2", "2", "1", "2"]) == 1
    assert vote(["1", "2", "2"], [5.0, 1.0, 1.0]) == 0
    assert vote([None, None]) == 0 and vote([None, "3"]) == 1


def test_whole_answers_have_the_scores_of_their_steps_and_cost_what_was_said() -> None:
    s = tools()
    found = asyncio.run(s.whole(TASK, 5))
    for b in found:
        steps = text(b.ids).split(";")
        assert [round(x, 2) for x in b.scores] == [{"a": 0.9, "b": 0.5, "c": 0.1}[x] for x in steps]
        assert b.stop is Stop.SAID and s.worth(b) == min(b.scores)
    assert s.spent == sum(len(b.ids) for b in found) == 30
    again = asyncio.run(tools().whole(TASK, 5))
    assert [b.key for b in again] == [b.key for b in found]


def test_a_wide_beam_finds_the_best_answer_and_shares_its_beginnings() -> None:
    s = tools()
    found = asyncio.run(beam(s, TASK, width=2, expand=12))
    assert text(found.ids) == "a;a;a" and found.stop is Stop.SAID
    found_reward = asyncio.run(s.judged(TASK, found))
    assert found_reward is not None and found_reward[1].of(found_reward[0])
    assert s.spent == 3 * 24 * 2  # three steps of two tokens, for 24 continuations each
    asked = s.sampler.asked  # type: ignore[attr-defined]
    assert len({x.tobytes() for x in asked}) <= 1 + 2 + 2 + 2


def test_what_a_leaf_is_worth_is_told_to_all_above_it() -> None:
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    child = TreeNode(Beginning(np.array([1], np.int32)), root)
    leaf = TreeNode(Beginning(np.array([1, 4], np.int32), stop=Stop.SAID), child)
    root.children, child.children = [child], [leaf]
    leaf.back_up(0.8)
    child.back_up(0.4)
    assert (leaf.value, child.value, root.value) == (0.8, pytest.approx(0.6), pytest.approx(0.6))
    assert (root.visits, child.visits, leaf.visits) == (2, 2, 1)
    assert child.finished and root.finished


def test_puct_takes_the_good_child_and_looks_at_the_others() -> None:
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in (1, 2)]
    for child, value in zip(root.children, (0.9, 0.6), strict=True):
        child.back_up(value)
    assert root.chosen(0.0) is root.children[0]
    for _ in range(20):
        root.children[0].back_up(0.9)
    assert root.chosen(4.0) is root.children[1]
    root.children[0].beginning = Beginning(np.array([1], np.int32), stop=Stop.SAID)
    assert root.chosen(0.0) is root.children[1]


def bandit(rule: TreeRule, pulls: int, values: tuple[float, float] = (0.9, 0.5)) -> tuple[int, int]:
    """How often each of two children with these values is chosen."""
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in (1, 2)]
    for child, value in zip(root.children, values, strict=True):
        child.back_up(value)
    for _ in range(pulls):
        child = root.chosen(1.0, rule)
        child.back_up(values[root.children.index(child)])
    first, second = (c.visits - 1 for c in root.children)
    return first, second


def test_ucb_and_puct_by_hand() -> None:
    """Values .9 with 20 visits and .2 with 2. UCB: .9 + sqrt(ln 22 / 20) = 1.293 and .2 + sqrt(ln 22 / 2) = 1.443.
    PUCT: .9 + sqrt(22) / 42 = 1.012 and .2 + sqrt(22) / 6 = .982."""
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in (1, 2)]
    for child, value, visits in zip(root.children, (0.9, 0.2), (20, 2), strict=True):
        for _ in range(visits):
            child.back_up(value)
    assert root.chosen(1.0, "ucb") is root.children[1] and root.chosen(1.0, "puct") is root.children[0]
    assert root.chosen(0.5, "ucb") is root.children[0]
    new = TreeNode(Beginning(np.array([3], np.int32)), root)
    root.children.append(new)
    assert root.chosen(0.5, "ucb") is new, "what was never looked at comes first"


def test_ucb_looks_at_a_worse_child_as_the_logarithm_of_all_visits_and_puct_as_their_root() -> None:
    """After N visits both children are worth the same with their bonus, so that n visits of the one that is worse by d
    fulfil sqrt(ln N / n) = d + sqrt(ln N / (N - n)), or sqrt(N) / (2 (1 + n)) = d + sqrt(N) / (2 (1 + N - n))."""
    for pulls in (400, 6400):
        ucb, puct = (bandit(rule, pulls)[1] for rule in ("ucb", "puct"))
        logs, root = math.log(pulls + 2), math.sqrt(pulls + 2) / 2
        assert ucb == pytest.approx(logs / (0.4 + math.sqrt(logs / (pulls - ucb))) ** 2, abs=2)
        assert puct == pytest.approx(root / (0.4 + root / (pulls - puct)), abs=2)
    assert bandit("ucb", 6400)[1] < 2.5 * bandit("ucb", 400)[1]
    assert bandit("puct", 6400)[1] > 3.5 * bandit("puct", 400)[1]


@pytest.mark.parametrize("rule", ["puct", "ucb"])
def test_a_tree_finds_the_best_answer(rule: TreeRule) -> None:
    s = tools()
    found = asyncio.run(tree_search(s, TASK, expansions=24, expand=6, exploration=0.5, rule=rule))
    assert text(found.ids) == "a;a;a" and found.stop is Stop.SAID and s.spent > 0


class Verifies:
    """Scores each beginning by its last letter, and notes what it was asked. It cannot read what holds a c."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def of_beginnings(self, task: Task, texts: Sequence[str]) -> list[float | None]:
        self.asked += texts
        worth = {"a": 0.9, "b": 0.5}
        return [None if "c" in t else worth[t.rstrip(";")[-1]] for t in texts]


def test_a_verifier_that_writes_is_asked_of_each_beginning_once() -> None:
    """A beam by its scores finds what the model's scores find. What it cannot read has no score and is worth least."""
    reads = Verifies()
    s = replace(tools(), scorer=None, verifier=reads)
    found = asyncio.run(beam(s, TASK, width=2, expand=12))
    assert text(found.ids) == "a;a;a" and found.scores == (0.9, 0.9, 0.9)
    assert len(reads.asked) == len(set(reads.asked)) and {"a;", "b;", "c;", "a;b;"} <= set(reads.asked)
    unread = asyncio.run(s.scored(TASK, [Beginning(np.array([1, 4, 3], np.int32))]))
    assert unread[0].scores == () and s.worth(unread[0]) == 0.0


# --- searches as data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        *(BestOfN(count=12), BestOfN(count=3, aggregate="product"), MajorityVote(count=5, answer="line")),
        *(MajorityVote(count=5, weighted=True, answer="line"), BeamSearch(width=2, expand=6)),
        *(TreeSearch(expansions=24, expand=6, exploration=0.5), ONE),
        TreeSearch(expansions=24, expand=6, exploration=0.25, rule="ucb"),
    ],
)
def test_every_search_is_played_and_its_name_says_it(kind: SearchKind) -> None:
    s = tools()
    found = asyncio.run(play(kind, s, TASK))
    assert found.stop is Stop.SAID and len(text(found.ids)) == 5 and s.spent == s.spent_on["t"] > 0
    assert kinds_of(kind.name) == [kind]
    whole = kind.reads != "steps"
    if whole:
        assert s.spent == 6 * kind.count  # type: ignore[attr-defined]
    again = tools()
    assert asyncio.run(play(kind, again, TASK)).key == found.key and again.spent == s.spent


def test_best_of_n_and_votes_choose_what_their_definition_says() -> None:
    s = tools()
    found = asyncio.run(s.whole(TASK, 12))
    for how in ("min", "product", "mean", "last"):
        chosen = asyncio.run(play(BestOfN(count=12, aggregate=how), tools(), TASK))  # type: ignore[arg-type]
        assert aggregated(chosen.scores, how) == max(aggregated(b.scores, how) for b in found)  # type: ignore[arg-type]
    said = [text(b.ids) for b in found]
    most = asyncio.run(play(MajorityVote(count=12, answer="line"), tools(), TASK))
    assert said.count(text(most.ids)) == max(said.count(x) for x in said)
    heavy = asyncio.run(play(MajorityVote(count=12, answer="line", weighted=True), tools(), TASK))
    weight = {x: math.fsum(s.worth(b) for b in found if text(b.ids) == x) for x in said}
    assert weight[text(heavy.ids)] == max(weight.values())


def test_what_a_vote_compares() -> None:
    boxed = "so\nit is \\boxed{ 7 }\n"
    read = {name: of(boxed) for name, of in ANSWERS.items()}
    assert read == {"integer": "7", "math": "7", "line": "it is \\boxed{ 7 }"}
    assert [of("  ") for of in ANSWERS.values()] == [None, None, None]


@dataclass
class Prefers:
    """A judge of whole answers: the number of their a. The first one it cannot judge."""

    name: str = "m"
    seen: list[str] = field(default_factory=list[str])

    async def judge(self, episodes: Any) -> Any:
        self.seen += [e.text for e in episodes]
        assert [e.sibling for e in episodes] == list(range(len(episodes)))
        return [
            (Judged("m", 1.0, Verdict.value(e.text.count("a") - 9.0) if e.sibling else Verdict.failed("down", "x")),)
            for e in episodes
        ]


def test_a_judge_or_the_verifier_scores_whole_answers() -> None:
    judge = Prefers()
    s = replace(tools(), scorer=None, judge=judge)
    found = asyncio.run(play(BestOfN(count=12), s, TASK))
    assert len(judge.seen) == 12 and found.scores == (max(x.count("a") for x in judge.seen[1:]) - 9.0,)
    with pytest.raises(ConfigError, match="adds scores up"):
        asyncio.run(play(MajorityVote(count=4, weighted=True), s, TASK))
    known = replace(tools(), scorer=None, verified=True)
    found = asyncio.run(play(BestOfN(count=120), known, TASK))
    assert text(found.ids) == "a;a;a" and found.scores == (1.0,)
    plain = replace(tools(), scorer=None)
    assert asyncio.run(play(MajorityVote(count=4, answer="line"), plain, TASK)).scores == ()


@pytest.mark.parametrize("kind", [BestOfN(count=9), MajorityVote(count=9), BeamSearch(), TreeSearch()])
def test_a_budget_ends_every_search_with_an_answer(kind: SearchKind) -> None:
    """It begins nothing more once the budget is spent. What was begun is ended, and counted."""
    free, tight = tools(), tools(budget=13)
    asyncio.run(play(kind, free, TASK))
    found = asyncio.run(play(kind, tight, TASK))
    assert found.stop is Stop.SAID and tight.spent < free.spent
    largest = {"steps": 2 * 4 * 4}.get(kind.reads, 6)
    assert tight.spent <= 13 + largest + 6
    if isinstance(kind, BestOfN):
        assert tight.spent == 18  # three answers of six tokens: after two of them 12 < 13
    other = Task(id="u", prompt="p")
    asyncio.run(play(kind, tight, other))
    assert tight.spent_on["u"] > 0, "another task has a budget of its own"


# --- what is checked of each ------------------------------------------------------------------------------------------


def test_tokens_of_other_weights_stop_a_search() -> None:
    said_by_one_version(np.array([3, 3]), 3, "t")
    s = tools(version=1)
    with pytest.raises(InvariantError, match=r"task 't' began with weights of version 1, and .* version 0"):
        asyncio.run(play(BeamSearch(), s, TASK))


def test_an_answer_is_chosen_by_what_was_asked_for() -> None:
    scores = (0.9, 0.4, 0.8)
    for how in ("min", "product", "mean", "last"):
        worth_is(scores, how, aggregated(scores, how), "t")  # type: ignore[arg-type]
        for other in {"min", "product", "mean", "last"} - {how}:
            with pytest.raises(InvariantError, match=f"the {how} of its steps' scores"):
                worth_is(scores, how, aggregated(scores, other), "t")  # type: ignore[arg-type]
    worth_is((0.0, 0.5), "product", 0.0, "t")
    worth_is((-3.0,), "product", -3.0, "t")


def test_a_tree_whose_values_do_not_add_up_is_refused() -> None:
    root = TreeNode(Beginning(np.zeros(0, np.int32)))
    root.children = [TreeNode(Beginning(np.array([i], np.int32)), root) for i in (1, 2)]
    for child, value in zip(root.children, (0.9, 0.6), strict=True):
        child.back_up(value)
    tree_adds_up(root, "t")
    root.total -= 0.3
    with pytest.raises(InvariantError, match=r"has 2 visits and a value of 1.2 in all, and 2 values of 1.5"):
        tree_adds_up(root, "t")


# --- curves -----------------------------------------------------------------------------------------------------------


class Sometimes(World):
    """Cannot judge what ends with b."""

    async def judge(self, attempt: Any) -> Any:
        failed = Verdict.failed("down", "x")
        return (Judged("world", 1.0, failed),) if attempt.text.endswith("b") else await super().judge(attempt)


def test_a_point_counts_each_task_once_and_leaves_out_what_is_not_judged(tmp_path: Path) -> None:
    tasks = [Task(id=f"t{i}", prompt="p") for i in range(30)]
    s = replace(tools(), environment=Sometimes())  # type: ignore[arg-type]
    points = [
        asyncio.run(search_point(k, s, tasks, 2)) for k in (ONE, BestOfN(count=4), BeamSearch(width=1, expand=30))
    ]
    one, best_of_4, wide = points
    assert (one.tokens, best_of_4.tokens) == (6.0, 24.0) and s.spent_on == Counter()
    assert one.unjudged > 0 and one.score.prompts == len(one.values) <= 30
    assert wide.score.mean == 1.0 > best_of_4.score.mean >= one.score.mean
    assert wide.gain(one).low > 0 and wide.gain(one).prompts == len(one.values)
    assert one.name == "one answer" and best_of_4.name == "best_of.count=4"
    assert frontier(points)[0] is one and frontier(points)[-1] is wide
    worse = replace(one, tokens=7.0)
    assert worse not in frontier([*points, worse])
    equal = [replace(one, score=Score.of(x)) for x in ([0.3, 0.3], [], [0.9, 0.9])]
    assert frontier(equal) == [equal[2]], "of equal costs the best one, beside one that nobody judged"
    for ending in ("svg", "png"):
        search_plot(
            [*points, replace(best_of_4, score=replace(one.score, low=-math.inf, high=math.inf))],
            "a title",
            tmp_path / f"x.{ending}",
        )
    drawn = (tmp_path / "x.svg").read_text()
    assert "tokens said for a task" in drawn and "beam" in drawn and "1x30" in drawn and "a title" in drawn
    with pytest.raises(ConfigError, match=r"use one of \.svg"):
        search_plot(points, "t", tmp_path / "x.txt")


class Letters(World):
    """Pays 10 for each letter a, and 5 in any case."""

    async def judge(self, attempt: Any) -> Any:
        return (Judged("world", 1.0, Verdict.value(5.0 + 10 * attempt.text.count("a"))),)


class Overflows(Likes):
    """A model that gives no number to a step that ends with b."""

    def tokens(self, packed: Packed) -> np.ndarray:
        scores = super().tokens(packed)
        return np.where(scores == 0.5, math.nan, scores)


@pytest.mark.parametrize("kind", [BestOfN(count=8), BeamSearch(width=2, expand=4), TreeSearch()])
def test_an_answer_to_which_the_model_gives_no_number_is_not_chosen(kind: SearchKind) -> None:
    s = replace(tools(), scorer=Overflows())  # type: ignore[arg-type]
    found = asyncio.run(play(kind, s, TASK))
    assert "b" not in text(found.ids) and all(map(math.isfinite, found.scores)) and found.scores


def test_a_search_of_which_nothing_was_judged_moves_no_scale() -> None:
    tasks = [Task(id=f"t{i}", prompt="p") for i in range(4)]
    graded = asyncio.run(search_point(ONE, replace(tools(), environment=Letters()), tasks))  # type: ignore[arg-type]
    none = replace(graded, grades=Grades.of([]), values={}, means={})
    assert graded.grades.scale[0] == 5.0 and [p.grades for p in leading([graded, none])] == [graded.grades] * 2
    assert leading([none, graded])[0].grades == graded.grades


def test_the_rule_for_right_answers_does_not_depend_on_their_order() -> None:
    """Of outcomes with several rules: a model's score, then the user's threshold, then sources without full marks."""
    rules = [Right(None), Right(0.5, True), Right(full=False), Right()]
    for first, second in combinations(rules, 2):
        for pair in ((first, second), (second, first)):
            one, two = (Grades.of([0.2, 1.0], rule) for rule in pair)
            assert (one | two).right == first
            assert Grades.each([(0.2, pair[0]), (1.0, pair[1])]).right == first
    assert (Grades.of([]) | Grades.of([0.5, 0.9], rules[1])).tells


def test_of_grades_the_mean_reward_leads(tmp_path: Path) -> None:
    tasks = [Task(id=f"t{i}", prompt="p") for i in range(20)]
    s = replace(tools(), environment=Letters())  # type: ignore[arg-type]
    points = leading([asyncio.run(search_point(k, s, tasks)) for k in (ONE, BestOfN(count=4))])
    assert all(p.score.mean >= 5 and p.score.low >= p.grades.scale[0] for p in points) and points[0].grades.graded
    assert points[1].gain(points[0]).mean == pytest.approx(points[1].score.mean - points[0].score.mean)
    search_plot(points, "t", tmp_path / "x.svg")
    assert "mean reward on held-out tasks" in (tmp_path / "x.svg").read_text()
    table = "\n".join(lines_of(SearchReport("m", "e", "", 20, 1, tuple(points)).table()))
    assert "mean reward [95 %]" in table and "accuracy" not in table


def test_the_best_search_by_difficulty() -> None:
    def point(kind: SearchKind, tokens: float, *right: float) -> SearchPoint:
        return SearchPoint(kind, Score.of(right), tokens, dict(enumerate(right)))

    points = [point(ONE, 10.0, 0, 0.5, 1), point(BestOfN(), 80.0, 0.25, 0.5, 0), point(TreeSearch(), 100.0, 0.5, 1, 0)]
    said = by_difficulty(points, {0: 0.0, 1: 0.5, 2: 1.0})
    assert said[:2] == [
        "hard: 1 tasks, of which 16 answers say so",
        "  at most  20 tokens: 0.000 one answer (10.0)",
    ]
    assert said[3:5] == [
        "  at most  80 tokens: 0.250 best_of.count=8 (80.0)",
        "  at most 160 tokens: 0.500 tree.expansions=12,expand=3 (100.0)",
    ]
    assert said[-1] == "  at most 160 tokens: 1.000 one answer (10.0)" and len(said) == 15


# --- words ------------------------------------------------------------------------------------------------------------


def test_words_of_searches() -> None:
    words = ["seed=1", "search=beam.width=2,4,expand=3", "search=vote", "search.by=model:runs/prm", "search.budget=99"]
    request, rest = search_request(words)
    assert (
        rest == ("seed=1",) and request.budget == 99 and request.by is not None and request.by.models == ("runs/prm",)
    )
    assert [k.name for k in request.kinds[1:]] == ["beam.width=2,expand=3", "beam.width=4,expand=3", "vote.count=8"]
    assert request.kinds[0] == ONE and asks_search(words) and not asks_search(["seed=1", "env.args.search=2"])
    assert search_request(["search=best_of", "search.by=verifier"])[0].verified
    assert len(search_request(["search=best_of.count=1,4", "search=best_of.count=4"])[0].kinds) == 2
    assert [k.reads for k in (ONE, BestOfN(), MajorityVote(), MajorityVote(weighted=True), TreeSearch())] == [
        *("nothing", "answers", "nothing", "answers", "steps")
    ]
    assert all(KINDS[name]().word == name and kinds_of(name) == [KINDS[name]()] for name in KINDS)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search=baem"], r"there is no search 'baem'; did you mean 'beam'\?"),
        (["search=beam.widht=3"], r"search=beam.widht: beam has no such setting; did you mean 'width'\?"),
        (["search=beam.width=four"], "search=beam.width=four: expected a whole number"),
        (["search=beam.4"], r"write settings behind the name, such as search=beam.width=4"),
        (["search=beam.width=0"], "search=beam.width=0: must be at least 1"),
        (["search=tree.exploration=-1"], "must be at least 0"),
        (["search=tree.exploration=inf"], "must be at least 0, and finite"),
        (["search=beam.width=2,expand=3,width=4"], "width is given twice; several values are written width=2,4"),
        (["search=best_of.aggregate=max"], "search=best_of.aggregate=max"),
        (["search.width=4", "search=beam"], r"search.width: .*search=beam.width=4"),
        (["search.by=model:x"], "search.by is about searches, and none is named: add one, such as search=best_of"),
        (["search=beam", "search.by=runs/prm"], "search.by=model:runs/prm for a reward model"),
        (["search=beam", "search.budget=-1"], "tokens a task"),
        (["search=beam", "search.budget=1", "search.budget=2"], "given twice"),
    ],
)
def test_wrong_words_are_told(words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        search_request(words)


# --- posttrain eval ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that ends with a process reward model, as the recipe prm does."""
    folder = tmp_path_factory.mktemp("searched") / "prm"
    run = process_run(sft=60)
    model = replace(run.stages[2], hands_on=True)
    posttrain.run(
        replace(run, env=replace(run.env, rewards=()), stages=(*run.stages[:2], model)), out=folder, quiet=True
    )
    return folder


@pytest.mark.prove
def test_eval_compares_searches(prm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curves.svg"
    words = [
        "search=best_of.count=2,4",
        "search=vote.count=4",
        "search=beam.width=2,expand=2",
        "search=tree.expansions=4",
    ]
    assert main(["eval", str(prm), *words, "--samples", "2", "--out", str(picture)]) == 0
    said = capsys.readouterr()
    names = ("one answer", "best_of.count=2", "best_of.count=4", "vote.count=4", "beam.width=2,expand=2", "tree.")
    assert all(n in said.out for n in names) and "process reward model rm" in said.out
    assert "6 held-out tasks of arithmetic, each searched 2 times" in said.out and f"written: {picture}" in said.out
    assert "the policy is that of its stage sft" in said.err
    assert picture.read_text().count("<svg") == 1
    report = evaluate_searches(prm, *words, samples=2, quiet=True)
    points = {p.name: p for p in report.points}
    assert [p.tokens for p in report.points] == sorted(p.tokens for p in report.points)
    assert points["one answer"].tokens < points["best_of.count=2"].tokens < points["best_of.count=4"].tokens
    assert points["best_of.count=4"].tokens == points["vote.count=4"].tokens, "they sample the same answers"
    assert all(0 <= p.score.low <= p.score.mean <= p.score.high <= 1 for p in report.points)
    tight = evaluate_searches(prm, "search=best_of.count=40", "search.budget=60", quiet=True)
    assert max(p.tokens for p in tight.points) <= 60 + 24
    assert capsys.readouterr().out == ""


@pytest.mark.prove
def test_best_of_n_by_the_verifier_is_pass_at_n(prm: Path) -> None:
    report = evaluate_searches(prm, "search=best_of.count=8", "search.by=verifier", samples=2, quiet=True)
    one, best_of_8 = report.points
    assert all(best_of_8.values[t] >= one.values[t] for t in one.values) and "knows the answers" in report.scored_by


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["search=beam", "search.by=verifier"], "search.by=verifier scores whole answers"),
        (["search=beam", "search.by=model:./nowhere"], "search.by=model:./nowhere"),
        (["search=beam", "search.by=model:stage:sfd"], "keeps nothing called 'sfd'"),
        (["search=beam", "env=shop"], "'shop' has episodes of several turns"),
        (["search=beam", "env.heldout=0"], "env.heldout=0 leaves no task"),
        (["search=beam", "env=calculator"], "'calculator' has episodes of several turns"),
        (["search=beam", "fault=leaf_value_not_backed_up"], "--allow-fault"),
    ],
)
def test_what_cannot_be_searched_is_told(prm: Path, words: list[str], says: str) -> None:
    with pytest.raises(PosttrainError, match=says):
        evaluate_searches(prm, *words, quiet=True)


@pytest.mark.prove
def test_a_search_without_scores_says_where_to_get_them(prm: Path, tmp_path: Path) -> None:
    run = replace(process_run(sft=2), stages=process_run(sft=2).stages[:1])
    posttrain.run(replace(run, env=replace(run.env, rewards=())), out=tmp_path / "plain", quiet=True)
    with pytest.raises(ConfigError, match=r"search=beam.*has no reward model.*search.by=model:RUN.*search.by=verifier"):
        evaluate_searches(tmp_path / "plain", "search=beam", quiet=True)
    report = evaluate_searches(tmp_path / "plain", "search=vote.count=2", quiet=True)
    assert len(report.points) == 2 and not report.scored_by
    scored = evaluate_searches(tmp_path / "plain", "search=beam.width=1,expand=2", f"search.by=model:{prm}", quiet=True)
    assert "process reward model prm" in scored.scored_by
    with pytest.raises(ConfigError, match="evaluate_searches"):
        posttrain.evaluate(tmp_path / "plain", "search=vote", quiet=True)
    with pytest.raises(ConfigError, match="give a run folder or a model directory"):
        evaluate_searches("http://127.0.0.1:8000/v1", "search=vote", quiet=True)


@pytest.mark.prove
def test_a_reward_model_of_whole_answers_chooses_among_whole_answers(tmp_path: Path) -> None:
    env = Env(name="replies", args={"numbers": 2, "margins": True}, heldout=6)
    rm = RewardModel(name="rm", steps=2, batch=8, optimizer=Optimizer(lr=3e-3, warmup=1), checkpoint_every=0)
    posttrain.run(replace(tiny_run(), env=env, stages=(rm,)), out=tmp_path / "orm", quiet=True)
    rl = only_rl(tiny_run(steps=1, sampling=Sampling(max_tokens=8)))
    posttrain.run(replace(rl, env=env), out=tmp_path / "policy", quiet=True)
    by = f"search.by=model:{tmp_path / 'orm'}"
    report = evaluate_searches(tmp_path / "policy", "search=best_of.count=4", by, quiet=True)
    assert "reward model orm reads the policy's tokens" in report.scored_by and len(report.points) == 2
    with pytest.raises(ConfigError, match="scores are no chances"):
        evaluate_searches(tmp_path / "policy", "search=vote.weighted=true", by, quiet=True)
    with pytest.raises(ConfigError, match="scores whole answers"):
        evaluate_searches(tmp_path / "policy", "search=tree", by, quiet=True)
    with pytest.raises(PosttrainError, match="and no policy before it"):
        evaluate_searches(tmp_path / "orm", "search=vote", quiet=True)


def test_options_of_searches_are_for_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "runs/x", "--out", "a.svg"]) == 2
    assert "are for searches: add search=best_of" in capsys.readouterr().err
    for option in (["--ema"], ["--api", "completions"]):
        assert main(["eval", "runs/x", "search=vote", *option]) == 2
        assert f"{option[0]} does not go with search=" in capsys.readouterr().err


def test_a_run_is_evaluated_as_its_stages_sample() -> None:
    """That of RL comes first, else that of the first stage that samples."""
    first = apply(recipe("reject"), ["reject.sampling.temperature=0.7", "reject.sampling.max_tokens=9"])
    assert contract_of(first, None, None).temperature == 0.7 and contract_of(first, 5, None).max_tokens == 5
    assert contract_of(recipe("sft"), None, 0.5) == Sampling(temperature=0.5)


async def test_the_reference_of_held_out_pairs_has_the_weights_that_the_stage_began_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a branched run, whose model is built without weights."""
    loaded, run = list[Path](), apply(recipe("dpo"), ["sft=none"])
    monkeypatch.setattr(heldout_rows, "load_weights", lambda folder, _: loaded.append(folder))
    monkeypatch.setattr(heldout_rows, "kept_folder", lambda run, name: run / name)
    monkeypatch.setattr(heldout_rows, "heldout_judgements", lambda _: ())
    ordered = SimpleNamespace(accuracy=SimpleNamespace(prompts=1), margin=0.0, gauges=dict)
    monkeypatch.setattr(heldout_rows, "heldout_order", lambda *_: ordered)
    parts: Any = SimpleNamespace(learner=None, renderer=None, engine=SimpleNamespace(context=8))
    anything: Any = None
    monkeypatch.setattr(heldout_rows.ReferenceScores, "add", lambda *_: None)
    await heldout_rows.measure_rows(run, Path("run"), anything, parts, anything, lambda: None, lambda _: None)
    assert loaded == [Path("run/start")]


def test_verifiers_stay_where_a_reward_model_is_held_to_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Env]()
    run = apply(recipe("grpo"), ["env.rewards=model:elsewhere,exact", "env.prompts=rows.jsonl"])

    def evaluate(*_: Any, env: Env, **__: Any) -> None:
        asked.append(env)
        raise ConfigError("enough")

    monkeypatch.setattr(reward_transfer, "asked_run", lambda *_: run)
    monkeypatch.setattr("posttrain.api.main.evaluate", evaluate)
    with pytest.raises(ConfigError, match="enough"):
        reward_transfer.transfer("rm", ["policy"])
    assert [r.function for r in asked[0].rewards] == ["exact"]
