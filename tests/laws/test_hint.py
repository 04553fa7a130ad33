"""Laws of a teacher that is shown more than the policy: what it reads, what it scores, and what is learned from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law_toys import batch_of

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.config.run import Reinforce
from posttrain.core.abilities import Abilities
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.ports import Learner
from posttrain.core.sampling import Sampling
from posttrain.core.streams import REFERENCE, START, TOP_IDS
from posttrain.core.types import Episode, Group, Segment, Stop, Task, Top
from posttrain.core.verdict import Judged, Verdict
from posttrain.ladder.algorithm import Algorithm, patch
from posttrain.ladder.pieces.hint import Hint
from posttrain.ladder.pieces.pull import KL
from posttrain.ladder.policy_rows import GKD, GRPO, OPD, SDFT, SDPO
from posttrain.role.learning.hinted_teacher import NOBODY, Hints, behind
from posttrain.role.score import score
from posttrain.system.errors import ConfigError, InvariantError

VOCABULARY, CONTEXT = 8, 40
SAMPLING = Sampling(max_tokens=20, stop_ids=(0,))
laws = settings(max_examples=40)


def ids_of(text: str) -> np.ndarray:
    """a is 1, b is 2, ...; g also ends a line; 0 stops."""
    return np.array([ord(c) - ord("a") + 1 for c in text.replace("\n", "g")], np.int32)


class Letters:
    """A dialogue of letters."""

    def see(self, content: Any, tools: Any = ()) -> np.ndarray:
        return ids_of(content)

    def text(self, ids: np.ndarray) -> str:
        return "".join(chr(ord("a") + int(i) - 1) for i in ids if i)


@dataclass
class World:
    """An environment whose hint is `before` the prompt; empty: its hinted prompt is the prompt."""

    hint: str = "{answer}"
    name: str = "letters"

    @property
    def abilities(self) -> Abilities:
        return Abilities(hint=lambda task: self.hint.replace("{answer}", str(task.answer)) + str(task.prompt))


class Mind:
    """A policy in float64: the logits after a prefix are the mean of its tokens' rows, plus the last token's own."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.far, self.near = (
            torch.tensor(rng.normal(size=(VOCABULARY, VOCABULARY)), requires_grad=True) for _ in "ab"
        )

    def after(self, ids: np.ndarray) -> torch.Tensor:
        """[V]: log-probs of the token after this prefix."""
        at = torch.as_tensor(ids.astype(np.int64))
        return torch.log_softmax(self.far[at].mean(0) + self.near[at[-1]], 0)

    def rows(self, packed: Packed) -> torch.Tensor:
        """[M, V]: log-probs at the spoken tokens of packed segments."""
        starts = np.cumsum(packed.lengths_S) - packed.lengths_S
        at = zip(packed.source_M, packed.segment_M, strict=True)
        return torch.stack([self.after(packed.ids_N[starts[s] : p + 1]) for p, s in at])

    def score(self, packed: Packed) -> np.ndarray:
        rows = self.rows(packed).detach().numpy()
        return rows[np.arange(packed.spoken), packed.target_M].astype(np.float32)

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        assert list(names) == ["score"]
        return {"score": self.score(packed)}

    def top(self, packed: Packed, k: int) -> Top:
        rows = self.rows(packed).detach().numpy()
        order = np.argsort(-rows, axis=1, kind="stable")[:, : min(k or VOCABULARY, VOCABULARY)]
        return Top(order.astype(np.int32), np.take_along_axis(rows, order, 1).astype(np.float32))


def episode(task: Task, sibling: int, reward: float, *turns: str, seen: str = "gg") -> Episode:
    """An answer of one or more turns, each ended by a stop token, with an observation between them."""
    ids, mask = [*ids_of(str(task.prompt))], [False] * len(str(task.prompt))
    for i, turn in enumerate(turns):
        between = [] if i == 0 else ids_of(seen).tolist()
        ids += [*between, *ids_of(turn), 0]
        mask += [False] * len(between) + [True] * (len(turn) + 1)
    m = np.array(mask)
    logp, version = np.where(m, -1.0, np.nan).astype(np.float32), np.where(m, 0, -1).astype(np.int32)
    segment = Segment(np.array(ids, np.int32), m, logp, version, SAMPLING)
    verdict = (Judged("toy", 1.0, Verdict.value(reward)),)
    return Episode(
        task, 0, sibling, (segment,), Stop.SAID, verdict, "\n".join(turns), turns=tuple(len(t) + 1 for t in turns)
    )


def groups() -> list[Group]:
    """One group with two right answers, one with one, one with none; some of several turns."""
    one, two, none = Task("one", "abc", "d"), Task("two", "cab", "e"), Task("none", "bb", "f")
    return [
        Group(one, 0, (episode(one, 0, 0.0, "fed"), episode(one, 1, 1.0, "d"), episode(one, 2, 1.0, "cd", "d"))),
        Group(two, 0, (episode(two, 0, 1.0, "eee"), episode(two, 1, 0.0, "g", "ab"))),
        Group(none, 0, (episode(none, 0, 0.0, "a"), episode(none, 1, 0.0, "b"))),
    ]


def hints(how: Hint, world: World, context: int = CONTEXT) -> Hints:
    rollout = SimpleNamespace(
        environment=world, dialogue=lambda task: Letters(), sampler=SimpleNamespace(context=context)
    )
    return Hints(how, cast("Any", rollout))


def scored(a: Algorithm, mind: Mind, world: World, teacher: Mind | None = None) -> Any:
    assert a.hint is not None
    learner, reference = cast("Learner", mind), cast("Any", teacher)
    return score(groups(), a, learner, reference, optimizer_steps=2, hints=hints(a.hint, world))


def learned(a: Algorithm, mind: Mind, world: World) -> tuple[Batch, torch.Tensor]:
    """The minibatch of a step, and its loss with the gradient of the policy."""
    credit = credit_step(a, scored(a, mind, world), max_tokens=20, ema=0.0)
    batch = batch_of(a, credit)
    rows = mind.rows(batch)
    near = rows.gather(1, torch.as_tensor(batch[TOP_IDS].astype(np.int64))) if TOP_IDS in batch else None
    logp = rows[torch.arange(batch.spoken), torch.as_tensor(batch.target_M.astype(np.int64))]
    loss = objective(a, streams(batch, dtype=torch.float64), TokenScores(logp, None, None, near)).loss
    return batch, loss


def gradient(loss: torch.Tensor, mind: Mind) -> torch.Tensor:
    return torch.cat([g.ravel() for g in torch.autograd.grad(loss, (mind.far, mind.near))])


LIVE = patch(SDPO, "sdpo_now", "2601.20802", hint=Hint())
"""SDPO whose teacher has the weights of now."""
TOKENS = patch(OPD, "sdpo_tokens", "2601.20802", hint=Hint(), anchor="start", ratio="one")
"""SDPO of the said tokens alone, as TRL's default: the credit of a token is log teacher - log policy."""


# --- against a textbook ----------------------------------------------------------------------------------------------


def textbook(mind: Mind, world: World, each: Any) -> torch.Tensor:
    """Mean over the tokens of all answers that have a hint of `each`(teacher's row, policy's row, said token)."""
    terms: list[torch.Tensor] = []
    for g in groups():
        for e in g.episodes:
            right = next((o for o in g.episodes if o is not e and o.reward == 1.0), None)
            if right is None:
                continue
            hint = world.hint.replace("{answer}", right.text) + str(e.task.prompt)
            (s,) = e.segments
            after = s.ids[len(str(e.task.prompt)) :]
            for t in np.flatnonzero(s.mask):
                said = t - len(str(e.task.prompt))
                teacher = mind.after(np.concatenate([ids_of(hint), after[:said]])).detach()
                terms.append(each(teacher, mind.after(s.ids[:t]), int(s.ids[t])))
    return torch.stack(terms).mean()


def jsd(teacher: torch.Tensor, policy: torch.Tensor, said: int) -> torch.Tensor:
    t, p = teacher.exp(), policy.exp()
    m = (t + p) / 2
    return (t * (t / m).log() + p * (p / m).log()).sum() / 2


def test_sdpo_is_the_published_loss() -> None:
    """2601.20802: JSD of policy and self-teacher at the tokens of all answers for which another one is right, in
    float64, gradient of the whole model."""
    mind, world = Mind(0), World()
    _, loss = learned(LIVE, mind, world)
    want = textbook(mind, world, jsd)
    assert float(loss.detach()) == pytest.approx(float(want.detach()), rel=1e-6)
    torch.testing.assert_close(gradient(loss, mind), gradient(want, mind), rtol=1e-5, atol=1e-8)


def test_sdpo_of_said_tokens_is_the_published_loss() -> None:
    """TRL's sampled_token: sg[log policy - log teacher] * log policy."""
    mind, world = Mind(1), World()
    _, loss = learned(TOKENS, mind, world)
    want = textbook(mind, world, lambda t, p, i: (p[i] - t[i]).detach() * p[i])
    torch.testing.assert_close(gradient(loss, mind), gradient(want, mind), rtol=1e-5, atol=1e-7)


# --- an empty hint ---------------------------------------------------------------------------------------------------


def test_behind_an_empty_hint_the_teacher_is_the_policy() -> None:
    """Its log-probs are the policy's, bit for bit, so the credit and the gradient are exactly 0."""
    mind, world = Mind(2), World("")
    a = patch(TOKENS, "empty", "-", hint=Hint(of="answer"))
    for g in scored(a, mind, world):
        for e in g.episodes:
            assert not e.unhinted and np.array_equal(e[REFERENCE][0], e[START][0])
    batch, loss = learned(a, mind, world)
    assert batch.spoken and not torch.any(gradient(loss, mind))
    _, loss = learned(patch(SDPO, "empty_jsd", "-", hint=Hint(of="answer")), mind, world)
    assert abs(float(loss.detach())) < 1e-7, "the teacher's log-probs are stored in float32"
    assert float(gradient(loss, mind).abs().max()) < 1e-6


def test_a_hint_without_what_it_was_given_is_refused() -> None:
    """An environment that always shows the task's own answer would tell the teacher more than the group knows."""
    with pytest.raises(ConfigError, match="does not hold the answer"):
        scored(LIVE, Mind(2), World("f"))


def test_a_teacher_of_other_weights_reads_the_hint_too() -> None:
    """SDFT: the policy as the stage began, shown the task's answer; and the start is scored behind the own prompt."""
    mind, before, world = Mind(3), Mind(4), World()
    a = patch(SDFT, "sdft_tokens", "-", distill=None, pull=KL(coef=1.0, estimator="k1", placement="token"))
    for g in scored(a, mind, world, before):
        for e in g.episodes:
            (s,) = e.episode.segments
            told = np.concatenate([ids_of(str(e.episode.task.answer)), s.ids])
            want = [float(before.after(told[: t + 1])[s.ids[t]].detach()) for t in np.flatnonzero(s.mask)]
            assert e[REFERENCE][0] == pytest.approx(want, abs=1e-6)


# --- who has a hint --------------------------------------------------------------------------------------------------


def test_an_answer_without_a_hint_is_in_no_batch() -> None:
    """Three answers have no other right one beside them: the only right one of `two`, and both of `none`."""
    mind = Mind(5)
    found = {
        (e.episode.task.id, e.episode.sibling): e.unhinted for g in scored(LIVE, mind, World()) for e in g.episodes
    }
    assert {k for k, why in found.items() if why == NOBODY} == {("two", 0), ("none", 0), ("none", 1)}
    assert {k for k, why in found.items() if not why} == {("one", 0), ("one", 1), ("one", 2), ("two", 1)}
    batch, _ = learned(LIVE, mind, World())
    hinted = [e for g in groups() for e in g.episodes if not found[e.task.id, e.sibling]]
    assert batch.episodes == 4 and batch.spoken == sum(e.spoken for e in hinted)


def test_the_first_other_right_answer_is_the_hint() -> None:
    (one, *_), h = groups(), hints(Hint(), World())
    given = [h.given(one, e) for e in one.episodes]
    assert [t.answer for t in given if isinstance(t, Task)] == ["d", "cd\nd", "d"]


def test_what_the_policy_is_trained_on_has_no_hint() -> None:
    batch, _ = learned(LIVE, Mind(6), World("g{answer}g"))
    own = {e.segments[0].ids.tobytes() for g in groups() for e in g.episodes}
    assert all(batch.ids_of(e).tobytes() in own for e in range(batch.episodes))


def test_a_hint_that_does_not_fit_is_none() -> None:
    h = hints(Hint(of="answer"), World("a" * 30), context=34)
    said = [t.missing for g in groups() for t in h.of(g)]
    assert any("context" in why for why in said) and not all(said)


def test_an_answer_without_a_token_has_no_hint_and_stops_nothing() -> None:
    """Its prompt filled the context and was cut, so it is not the task's, and the environment asked nothing more."""
    task = Task("long", "abcabc", "d")
    silent = replace(episode(replace(task, prompt="abca"), 0, 0.0), task=task, stop=Stop.CONTEXT, turns=())
    group = Group(task, 0, (silent, episode(task, 1, 1.0, "d")))
    h = hints(Hint(of="answer"), World())
    assert [t.missing for t in h.of(group)] == ["it says nothing", ""]


def test_a_prompt_that_is_not_the_task_s_is_refused() -> None:
    (one, *_), h = groups(), hints(Hint(of="answer"), World())
    other = replace(one.task, prompt="cba")
    with pytest.raises(ConfigError, match="with more than its prompt"):
        h.of(Group(other, 0, tuple(replace(e, task=other) for e in one.episodes)))


# --- what moves and what does not ------------------------------------------------------------------------------------


@laws
@given(st.lists(st.integers(1, 7), max_size=20), st.integers(0, 2), st.integers(0, 2))
def test_no_label_moves(hint: list[int], group: int, sibling: int) -> None:
    """Whatever stands before it, the same tokens are spoken, with the same log-probs and versions; and back again."""
    g = groups()[group]
    (s,) = g.episodes[sibling % len(g.episodes)].segments
    own = ids_of(str(g.task.prompt))
    prompt = np.concatenate([own, np.array(hint, np.int32)])
    told = behind(s, own, prompt)
    assert np.array_equal(told.ids[told.mask], s.ids[s.mask]) and len(told.ids) == len(s.ids) + len(hint)
    assert np.array_equal(told.logp[told.mask], s.logp[s.mask])
    assert np.array_equal(Packed.of([told]).target_M, Packed.of([s]).target_M)
    back = behind(told, prompt, own)
    assert all(np.array_equal(getattr(back, f), getattr(s, f), equal_nan=f == "logp") for f in ("ids", "mask", "logp"))


def test_moved_labels_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(segment: Segment, own: np.ndarray, prompt: np.ndarray) -> Segment:
        out, by = behind(segment, own, prompt), len(prompt) - len(own)
        return replace(
            out,
            mask=np.roll(out.mask, -by),
            logp=np.roll(out.logp, -by),
            version=np.roll(out.version, -by),
        )

    monkeypatch.setattr("posttrain.role.learning.hinted_teacher.behind", shifted)
    with pytest.raises(InvariantError, match="other tokens than the policy said"):
        scored(LIVE, Mind(7), World())


# --- what means nothing ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: patch(GRPO, "a", "-", hint=Hint()), "Set rewards=none, or hint=none"),
        (lambda: patch(GRPO, "a", "-", pull=None, hint=Hint()), "nothing here reads one"),
        (lambda: Reinforce(name="rl", algorithm=LIVE, reference="elsewhere"), "policy's own weights"),
        (lambda: Reinforce(name="rl", algorithm=LIVE, siblings=1), "at least 2 are needed"),
        (lambda: Reinforce(name="rl", algorithm=GKD), "Name its model directory"),
        (lambda: Reinforce(name="rl", algorithm=SDPO), "no moving average is kept"),
    ],
)
def test_what_means_nothing_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()
    assert Reinforce(name="rl", algorithm=SDFT, reference="elsewhere").algorithm.hint == SDFT.hint
