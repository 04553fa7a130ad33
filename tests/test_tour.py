"""The programs of `tour/` compute what the library computes: credit, gradients, and the weights after whole steps.

The library's side goes the way of a real run: `credit_step`, `pack`, `Trainer.step` with `PolicyLoss` and its AdamW, on
the algorithms of the ladder as they are shipped. The tour's side is its own functions, on the same answers.
"""

from __future__ import annotations

import copy
import runpy
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.losses import Likelihood, PolicyLoss
from posttrain.algorithm.loss.policy_loss import Terms, objective
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.algorithm.preference.preference_loss import PreferenceLoss
from posttrain.algorithm.preference.preference_minibatch import prepared
from posttrain.config.run import Model, Optimizer, Reinforce
from posttrain.core.batch import Batch, Packed
from posttrain.core.exchange.scores import Reads, TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.scored import Credit, Scored, ScoredGroup
from posttrain.core.streams import REFERENCE, SIDE, START, VALUE, WEIGHT
from posttrain.core.types import Episode, Group, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.engine.learner.learner import FrozenScorer, HFLearner
from posttrain.engine.model.policy_model import Policy, load_policy
from posttrain.engine.optimizer.optimizer import StageOptimizer
from posttrain.ladder.algorithm import Algorithm
from posttrain.ladder.policy_rows import LADDER
from posttrain.ladder.preference_rows import DPO
from posttrain.role.learning.demonstrations import imitated
from posttrain.role.pack import pack
from posttrain.role.score import score
from posttrain.role.trainer import Trainer
from tour import dapo, dr_grpo, grpo, ladder, ppo, reinforce, rloo

pytestmark = pytest.mark.prove

PROGRAMS: dict[str, ModuleType] = {
    "reinforce": reinforce,
    "rloo": rloo,
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
}
ALONE = ("reinforce", "ppo")
"""Programs that ask each question once."""
SAMPLING = Sampling(max_tokens=dapo.MAX_TOKENS, stop_ids=(0,))
VOCABULARY = 20
WHOLE = {**PROGRAMS, "ladder": ladder}
every = pytest.mark.parametrize("name", PROGRAMS)
whole = pytest.mark.parametrize("name", WHOLE)


# --- the same answers on both sides ---------------------------------------------------------------------------------


@dataclass
class Drawn:
    """The answers of one step, as the tour holds them. `mu` is float64 [S, T], and 0 where nothing was said."""

    tokens: Tensor
    mask: Tensor
    reward: Tensor
    group: Tensor
    mu: Tensor

    def experience(self, name: str) -> object:
        known = (self.tokens, self.mask, self.mu, self.reward)
        return PROGRAMS[name].Experience(*known, *([] if name in ALONE else [self.group]))

    def groups(self, sizes: Sequence[int]) -> list[Group]:
        """The same as the library's episodes; those that said as much as they may were cut off."""
        rows, out = iter(range(len(self.tokens))), list[Group]()
        for p, size in enumerate(sizes):
            task = Task(str(p), "?")
            out.append(Group(task, 0, tuple(self._episode(next(rows), task, g) for g in range(size))))
        return out

    def _episode(self, row: int, task: Task, sibling: int) -> Episode:
        mask = self.mask[row].numpy()
        end = int(np.flatnonzero(mask)[-1]) + 1
        mask = mask[:end]
        logp = np.where(mask, self.mu[row, :end].numpy(), np.nan).astype(np.float32)
        ids, version = self.tokens[row, :end].numpy().astype(np.int32), np.where(mask, 0, -1).astype(np.int32)
        stop = Stop.LENGTH if mask.sum() >= dapo.MAX_TOKENS else Stop.SAID
        verdict = Judged("right", 1.0, Verdict.value(float(self.reward[row])))
        return Episode(task, 0, sibling, (Segment(ids, mask, logp, version, SAMPLING),), stop, (verdict,))


def drawn(seed: int, sizes: Sequence[int], *, unique: bool) -> Drawn:
    """Questions and answers of random lengths, some interrupted by the world, with rewards that often do not differ.

    `unique`: every token has an id of its own, which says where it stands; else they are ids of a small vocabulary.
    """
    rng = np.random.default_rng(seed)
    count, longest = sum(sizes), 5 + 3 + dapo.MAX_TOKENS
    mask = np.zeros((count, longest), bool)
    for row in mask:
        at, said = int(rng.integers(1, 6)), int(rng.choice([1, 2, *range(3, dapo.MAX_TOKENS + 1), dapo.MAX_TOKENS]))
        first = int(rng.integers(1, said + 1)) if rng.random() < 0.3 else said
        row[at : at + first] = True
        row[at + first + 2 : at + first + 2 + said - first] = True
    draws = rng.integers(0, VOCABULARY, (count, longest))
    ids = np.arange(count * longest).reshape(count, longest) if unique else draws
    reward = np.concatenate([_rewards(rng, n) for n in sizes])
    group = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    mu = np.where(mask, -rng.gamma(2.0, 0.5, mask.shape), 0.0).astype(np.float32).astype(np.float64)
    return Drawn(torch.tensor(ids), torch.tensor(mask), torch.tensor(reward), group, torch.tensor(mu))


def _rewards(rng: np.random.Generator, n: int) -> np.ndarray:
    """Right and wrong, any numbers, equal ones, ones that differ by rounding alone, ones that differ by little more."""
    kinds = [
        rng.integers(0, 2, n).astype(float),
        rng.normal(size=n),
        np.full(n, rng.choice([0.0, 1.0, 0.3])),
        rng.choice([0.3, 0.1 + 0.2], n),
        0.5 + 1e-9 * rng.integers(0, 3, n),
    ]
    return kinds[int(rng.choice(5, p=[0.4, 0.3, 0.1, 0.1, 0.1]))]


def near(base: Tensor, d: Drawn, rng: np.random.Generator, scale: float) -> Tensor:
    """[S, T] random log-probs near others; 0 where nothing was said."""
    said = np.minimum(base.numpy() + rng.normal(size=d.mask.shape) * scale, -0.01)
    return torch.tensor(np.where(d.mask.numpy(), said, 0.0))


# --- credit, weights and gradients ----------------------------------------------------------------------------------


@dataclass
class Found:
    """What one side says, [S, T] each and 0 where nothing was said: credit, weight, and the derivatives of the loss."""

    advantage: Tensor
    weight: Tensor
    by_logp: Tensor
    by_value: Tensor


@dataclass
class Streams:
    """Per-token numbers that models said [S, T]."""

    start: Tensor
    ref: Tensor
    value_start: Tensor
    logp: Tensor
    value: Tensor


def random_streams(d: Drawn, seed: int) -> Streams:
    rng = np.random.default_rng([seed, 1])
    start = near(d.mu, d, rng, 0.3)
    now = near(start, d, rng, 0.3)
    guess = torch.tensor(np.where(d.mask.numpy(), rng.normal(size=d.mask.shape), 0.0))
    value = torch.where(d.mask, guess + torch.tensor(rng.normal(size=d.mask.shape)) * 0.3, 0.0)
    return Streams(start, near(start, d, rng, 0.5), guess, now.requires_grad_(), value.requires_grad_())


def of_library(a: Algorithm, d: Drawn, sizes: Sequence[int], s: Streams) -> Found:
    held = {START: s.start, REFERENCE: s.ref, VALUE: s.value_start}
    names = {START: "start", REFERENCE: "reference", VALUE: "values"}
    rows, groups = iter(range(len(d.tokens))), list[ScoredGroup]()
    for g in d.groups(sizes):
        at = [next(rows) for _ in g.episodes]
        scored = [
            Scored(e, streams={k: (x[i, d.mask[i]].numpy(),) for k, x in held.items() if names[k] in a.reads})
            for e, i in zip(g.episodes, at, strict=True)
        ]
        groups.append(ScoredGroup(g, tuple(scored)))
    credit = credit_step(a, groups, max_tokens=SAMPLING.max_tokens, ema=0.0)
    (made,) = pack(credit, a, Reinforce(name="tour", algorithm=a, sampling=SAMPLING), seed=0, step=1)
    empty = [torch.zeros(d.mask.shape, dtype=torch.float64) for _ in range(4)]
    found = Found(*empty)
    each = [x for g in credit.groups for e in g.episodes for x in e.advantage]
    found.advantage[d.mask] = torch.tensor(np.concatenate(each))
    if made.batch is None:
        return found
    place = torch.as_tensor(made.batch.target_M, dtype=torch.int64)
    now = TokenScores(s.logp.flatten()[place], None, s.value.flatten()[place] if a.learns_values else None)
    loss = objective(a, streams(made.batch, dtype=torch.float64), now).loss
    found.weight.view(-1)[place] = torch.tensor(made.batch[WEIGHT])
    found.by_logp, found.by_value = derivatives(loss, s)
    return found


def derivatives(loss: Tensor, s: Streams) -> tuple[Tensor, Tensor]:
    by_logp, by_value = torch.autograd.grad(loss, (s.logp, s.value), allow_unused=True)
    assert by_logp is not None
    return by_logp, torch.zeros_like(s.value) if by_value is None else by_value


def of_tour(name: str, d: Drawn, s: Streams) -> Found:
    """The tour's functions as its steps call them, on the whole step as one minibatch."""
    if name == "reinforce":
        advantage, weight = reinforce.advantages(d.reward, d.mask), reinforce.weights(d.mask)
        loss = reinforce.loss(s.logp, advantage, weight)
    elif name == "rloo":
        advantage = rloo.advantages(*rloo.charged(d.reward, d.mu, s.ref), d.group)[:, None] * d.mask
        weight = rloo.weights(d.mask)
        loss = rloo.loss(s.logp, advantage, weight)
    elif name == "ppo":
        advantage, returns = ppo.advantages(d.reward, s.value_start, d.mask)
        weight = ppo.weights(d.mask)
        loss = ppo.loss(s.logp, s.start, advantage, s.value, s.value_start, returns, weight)
    elif name == "grpo":
        advantage, weight = grpo.advantages(d.reward, d.group)[:, None] * d.mask, grpo.weights(d.mask)
        loss = grpo.loss(s.logp, s.start, s.ref, advantage, weight)
    elif name == "dr_grpo":
        advantage, weight = dr_grpo.advantages(d.reward, d.group)[:, None] * d.mask, dr_grpo.weights(d.mask)
        loss = dr_grpo.loss(s.logp, s.start, advantage, weight)
    else:
        advantage = dapo.advantages(*dapo.shaped(d.reward, d.mask), d.group)[:, None] * d.mask
        weight = dapo.weights(d.mask, d.group)
        loss = dapo.loss(s.logp, s.start, advantage, weight)
    return Found(advantage, weight, *derivatives(loss, s))


def furthest(x: Tensor, y: Tensor) -> float:
    """Largest difference, relative to the largest number where that is above 1."""
    return float((x - y).abs().max() / max(1.0, float(y.abs().max())))


@every
@settings(max_examples=50, derandomize=True)
@given(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_credit_and_gradients_are_the_librarys(name: str, seed: int, sizes: list[int]) -> None:
    """In float64 and off policy, to 1e-12 for each token. What nobody said has exactly 0."""
    d = drawn(seed, sizes, unique=True)
    s = random_streams(d, seed)
    a = LADDER[name]
    right, found = of_library(a, d, sizes, s), of_tour(name, d, s)
    assert furthest(found.advantage, right.advantage) <= 1e-12
    assert torch.equal(found.advantage == 0, right.advantage == 0)
    assert furthest(found.by_logp, right.by_logp) <= 1e-12 and furthest(found.by_value, right.by_value) <= 1e-12
    assert not found.by_logp[~d.mask].any() and not found.by_value[~d.mask].any()
    taught = right.weight != 0  # the packer leaves out answers that teach nothing; the others keep their weight
    assert furthest(found.weight[taught], right.weight[taught]) <= 1e-15 if taught.any() else not found.by_logp.any()


def test_the_dynamic_filter_is_the_librarys() -> None:
    """Raw rewards decide which groups are kept, whatever length is punished with."""
    verdicts: list[bool] = []
    for seed in range(200):
        d = drawn(seed, [1 + seed % 4], unique=True)
        (group,) = d.groups([1 + seed % 4])
        assert dapo.mixed(d.reward) == group.mixed
        verdicts.append(group.mixed)
    assert 50 < sum(verdicts) < 150


def test_truncated_and_long_answers_are_among_the_drawn() -> None:
    """The gradients are compared on cut answers, interruptions, groups without spread, and clipped tokens too."""
    many = [drawn(seed, [3, 4], unique=True) for seed in range(50)]
    assert any((d.mask.sum(1) == dapo.MAX_TOKENS).any() for d in many)
    assert any(((d.mask[:, 1:] != d.mask[:, :-1]).sum(1) > 2).any() for d in many)
    silent = [not grpo.advantages(d.reward, d.group)[d.group == 0].any() for d in many]
    assert 5 < sum(silent) < 45
    ratio = [(s.logp - s.start).exp()[d.mask] for d, s in ((d, random_streams(d, i)) for i, d in enumerate(many))]
    outside = torch.cat([(r > 1.28) | (r < 0.8) for r in ratio]).double().mean()
    assert 0.3 < outside < 0.7


@settings(max_examples=50, derandomize=True)
@given(seed=st.integers(0, 2**31), pairs=st.integers(1, 5))
def test_the_losses_of_the_ladder_are_the_librarys(seed: int, pairs: int) -> None:
    """Likelihood and DPO, in float64, to 1e-12 for each token."""
    d = drawn(seed, [2 * pairs], unique=True)
    s = random_streams(d, seed)
    (group,) = d.groups([2 * pairs])
    order = [i + side * pairs for i in range(pairs) for side in (0, 1)]  # the library's: each pair lies together
    segments = [group.episodes[i].segments[0] for i in order]
    now, ref = (torch.cat([x[i, d.mask[i]] for i in order]) for x in (s.logp, s.ref))
    side = np.concatenate([np.full(int(d.mask[i].sum()), int(i < pairs), np.int32) for i in order])
    unit_E = np.repeat(np.arange(pairs, dtype=np.int32), 2)
    batch = Batch.of(segments, unit_E=unit_E, streams={SIDE: side, REFERENCE: ref.numpy()})
    now = TokenScores(now, None, None)
    likelihood = Likelihood().terms(imitated(segments), now).loss
    (preferred, _) = prepared(DPO, batch)
    for ours, theirs in (
        (ladder.likelihood(s.logp, d.mask), likelihood),
        (ladder.dpo_loss(s.logp, s.ref), PreferenceLoss(DPO).terms(preferred, now).loss),
    ):
        assert abs(ours.item() - theirs.item()) <= 1e-12 * max(1.0, abs(ours.item()))
        mine, right = (torch.autograd.grad(x, s.logp, retain_graph=True)[0] for x in (ours, theirs))
        assert furthest(mine * d.mask, right) <= 1e-12


# --- whole steps ----------------------------------------------------------------------------------------------------


class ExactLearner(HFLearner):
    """Scores in float64, where streams of a real run are float32."""

    def score(self, packed: Packed) -> np.ndarray:
        with torch.no_grad():
            return self.forward(packed).logp.numpy()

    def value(self, packed: Packed) -> np.ndarray:
        with torch.no_grad():
            return self.forward(packed, Reads(value=True)).value.numpy()

    def examine(self, packed: Packed, names: Collection[str]) -> dict[str, np.ndarray]:
        return {name: getattr(self, name)(packed) for name in names}


class ExactLoss(PolicyLoss):
    """Reads the streams of a minibatch in float64."""

    def terms(self, micro: Batch, scores: TokenScores) -> Terms:
        return objective(self.algorithm, streams(micro, dtype=torch.float64), scores)


class Plain(nn.Module):
    """The same model as the tour sees one: tokens [S, T] to logits, with values if wanted, by transformers alone."""

    def __init__(self, policy: Policy, value_head: nn.Linear | None) -> None:
        super().__init__()
        self.module = policy.clone().module
        self.module.set_attn_implementation("sdpa")
        self.value_head = copy.deepcopy(value_head)

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = self.module.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        logits = self.module.get_output_embeddings()(hidden)
        return logits if self.value_head is None else (logits, self.value_head(hidden)[..., 0])

    def weights(self) -> dict[str, Tensor]:
        return {n.removeprefix("module."): p.detach() for n, p in self.named_parameters()}


SIZES = {name: [1] * 8 if name in ALONE else [3, 1, 4, 4] for name in PROGRAMS}
"""Siblings of each question."""
LR = 3e-3


def tiny_policy() -> Policy:
    """A small GPT-2 far from uniform: all of it computes in float64, where newer models have norms in float32."""
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 4, "ffn": 48, "context": 32}
    policy = load_policy(Model(arch="gpt2", **sizes), "0123456789abcdefghij", 0)
    with torch.no_grad():
        for p in policy.module.parameters():
            if p.ndim > 1:
                p.mul_(3)
    policy.module.double()
    return policy


def library_steps(
    name: str, steps: Sequence[Drawn], learner: HFLearner, reference: HFLearner | FrozenScorer, exact: bool
) -> float:
    """Steps of the library's trainer; how many tokens its trust region silenced."""
    a, program = LADDER[name], PROGRAMS[name]
    stage = Reinforce(
        name="tour", algorithm=a, sampling=SAMPLING, prompts=8, minibatches=getattr(program, "MINIBATCHES", 1)
    )
    trainer = Trainer(learner, StageOptimizer(learner.parameters(), Optimizer(lr=LR, warmup=0)), micro_tokens=40)
    silenced = 0.0
    for index, d in enumerate(steps, 1):
        groups = score(d.groups(SIZES[name]), a, learner, reference, optimizer_steps=stage.optimizer_steps)
        credit: Credit = credit_step(a, groups, max_tokens=SAMPLING.max_tokens, ema=0.0)
        for minibatch in pack(credit, a, stage, seed=0, step=index):
            if minibatch.batch is not None:
                seen = trainer.step(minibatch.batch, (ExactLoss if exact else PolicyLoss)(a))
                silenced += seen["policy/clip_low"].sum + seen["policy/clip_high"].sum
    return silenced


def tour_steps(name: str, steps: Sequence[Drawn], policy: Plain, reference: Plain) -> None:
    program = PROGRAMS[name]
    optimizer = program.optimizer_of(policy, LR)
    for d in steps:
        program.step(policy, *([reference] if name in ("rloo", "grpo") else []), optimizer, d.experience(name))


@every
@pytest.mark.parametrize(("exact", "bound"), [(True, 1e-10), (False, 1e-5)], ids=["float64", "as shipped"])
def test_whole_steps_move_the_weights_alike(name: str, exact: bool, bound: float) -> None:
    """Three whole steps from the same weights on the same answers, by the library's trainer and by the tour's.

    The distance is relative to the largest weight. A real run keeps its streams in float32, so "as shipped" differs by
    that rounding, which Adam enlarges where gradients cancel.
    """
    policy = tiny_policy()
    learner = (ExactLearner if exact else HFLearner)(policy)
    nn.init.normal_(learner.value_head.weight, std=0.3)
    values = learner.value_head if name == "ppo" else None
    mine, mine_reference = Plain(policy, values), Plain(policy, values)
    reference = ExactLearner(policy.clone()) if exact else FrozenScorer(policy)
    before = {n: p.detach().clone() for n, p in learner.parameters().items()}
    steps = [drawn(seed, SIZES[name], unique=False) for seed in range(3)]
    silenced = library_steps(name, steps, learner, reference, exact)
    tour_steps(name, steps, mine, mine_reference)
    after, found = learner.parameters(), mine.weights()
    assert set(found) == {n for n in after if values is not None or not n.startswith("value_head")}
    moved = max(float((after[n] - before[n]).detach().abs().max()) for n in found)
    largest = max(float(x.abs().max()) for x in found.values())
    gap = max(float((after[n].detach() - found[n]).abs().max()) for n in found) / largest
    kind = "float64" if exact else "as shipped"
    print(f"{name}, {kind}: gap {gap:.1e}, largest move {moved:.1e}, {silenced:g} tokens clipped")
    assert moved > LR and gap <= bound
    assert silenced > 0 or name in ("reinforce", "rloo")


# --- the programs ---------------------------------------------------------------------------------------------------


@pytest.mark.prove
@whole
def test_it_learns(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A short run already answers more held-out questions than before; its sampler and learner agree."""
    torch.set_num_threads(1)  # as the programs do
    before, after = WHOLE[name].learn(steps=10, lr=1e-3, demonstrations=80)
    said = capsys.readouterr().out
    assert after > before + 0.05, said
    assert f"{after:.0%}" in said and f"{before:.0%}" in said
    gap = float(next(line for line in said.splitlines() if line.startswith("step   10")).split()[-1])
    assert gap < 1e-4


@whole
def test_help_names_the_flags(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"tour/{name}.py", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(Path(reinforce.__file__).with_name(f"{name}.py")), run_name="__main__")
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--steps", "--seed", "--lr"))


def section(program: ModuleType, first: str, last: str) -> str:
    text = Path(str(program.__file__)).read_text()
    return text[text.index(f"# --- {first}") : text.index(f"# --- {last}")]


@whole
def test_a_program_stands_alone_and_differs_only_where_the_algorithm_does(name: str) -> None:
    """It imports torch alone; task, policy and optimizer read the same in all, so that a diff shows the algorithm."""
    program = WHOLE[name]
    text = Path(str(program.__file__)).read_text()
    imported = {line.split()[1].split(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= {*sys.stdlib_module_names, "torch"}
    for function in ("questions", "solution", "verify", "optimizer_of", "update"):
        assert _source(text, function) == _source(Path(str(reinforce.__file__)).read_text(), function)
    if name != "ppo":
        after = "stage 1" if name == "ladder" else "the rollout"
        assert section(program, "the policy", after) == section(reinforce, "the policy", "the rollout")
    if name == "ladder":
        for function in ("rollout", "advantages", "weights", "loss", "step"):
            assert _source(text, function) == _source(Path(str(grpo.__file__)).read_text(), function)


def _source(text: str, function: str) -> str:
    start = text.index(f"def {function}(")
    return text[start : text.index("\n\n\n", start)]
