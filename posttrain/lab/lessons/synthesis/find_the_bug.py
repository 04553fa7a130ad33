"""Page 24: plant one of seven bugs in the library's own code and read the diagnosis; then plan a large run."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import torch

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.algorithm.loss.losses import PolicyLoss
from posttrain.api.swept import loop_of
from posttrain.checks.learning.credit_by_definition import expected_credit
from posttrain.checks.learning.credit_checks import StepCreditAudit
from posttrain.checks.learning.loss_checks import agrees_on_synthetic_batch
from posttrain.config.run import Reinforce
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.scored import ScoredGroup
from posttrain.core.streams import ADVANTAGE, MU
from posttrain.faults import FAULTS, planted
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import machine
from posttrain.plan.memory import INSTANTS, places
from posttrain.plan.models import shape_by_name
from posttrain.plan.simulation.simulated_loop import LoopOutcome
from posttrain.plan.simulation.simulator import simulate
from posttrain.plan.throughput import throughput
from posttrain.plan.work import Work
from posttrain.role.pack import pack
from posttrain.toy.episodes import PlainEpisode, scored_group
from posttrain.web.picture import Bars

BUGS = {
    "none": None,
    "standard deviation over G": "std_ddof",
    "groups mixed up": "groups_mixed",
    "credit one token late": "advantage_off_by_one",
    "sign flipped": "sign_flip",
    "KL reversed": "kl_reversed",
    "old log-prob recomputed": "old_logprob_after_step",
    "clip never acts": "clip_never_acts",
}
REWARDS, LENGTHS, LONGEST = ((1.0, 1.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0)), (3, 5, 2, 4), 20
"""Rewards of the answers to each of two prompts, tokens of each answer, and the most tokens of an answer."""
STAGE = Reinforce(name="rl")
DEVICES, EACH, GB, DAYS = 64, 8, 80, 7
"""The run of the whiteboard: 70 B parameters, so many H100 of so many GB, of which `EACH` make an engine; days."""


def step_of(seed: int) -> tuple[list[ScoredGroup], np.ndarray]:
    """(two groups of four answers, by how much the learner has moved from each sampled token)."""
    rng = np.random.default_rng(seed)
    groups = list[ScoredGroup]()
    for p, rewards in enumerate(REWARDS):
        plain = list[PlainEpisode]()
        for reward, n in zip(rewards, LENGTHS, strict=True):
            mu = rng.uniform(-2.5, -1, n)
            ids = rng.integers(1, 9, n).astype(np.int32)
            plain.append(PlainEpisode(reward, [[n]], mu, start=mu, reference=mu + rng.normal(0, 0.3, n), ids=ids))
        groups.append(scored_group(f"prompt {'AB'[p]}", plain))
    return groups, rng.normal(0, 0.25, 2 * sum(LENGTHS))


def packed(groups: list[ScoredGroup]) -> Batch:
    """The step's one minibatch, with its credit: what a run would train on."""
    credit = credit_step(GRPO, groups, max_tokens=LONGEST, ema=0.0)
    (minibatch,) = pack(credit, GRPO, STAGE, seed=0, step=1)
    assert minibatch.batch is not None
    return minibatch.batch


def push(batch: Batch, moved: np.ndarray) -> np.ndarray:
    """By how much a step down the loss raises the log-prob of each token, which has `moved` since it was sampled."""
    with torch.enable_grad():
        logp = torch.tensor(batch[MU] + moved, dtype=torch.float32, requires_grad=True)
        PolicyLoss(GRPO).terms(batch, TokenScores(logp, None, None)).loss.backward()
    assert logp.grad is not None
    return -logp.grad.double().numpy()


def audit(groups: list[ScoredGroup], batch: Batch) -> None:
    """Compute credit and weights of the minibatch a second way. Raises where they differ."""
    expected = expected_credit(GRPO, groups, max_tokens=LONGEST, ema=0.0)
    assert expected is not None
    StepCreditAudit(GRPO, expected, 1, LONGEST).check(batch)


@cache
def whiteboard(sample: int, ahead: int) -> tuple[dict[str, float], LoopOutcome]:
    """GB of a device that learns and of one that samples, and the loop: 128 prompts x 16 answers a step."""
    work = Work(shape=shape_by_name("Llama-3.1-70B"), lengths=Lengths(prompt=512, mean=2048, most=16384, cv=1.0),
                prompts=128, siblings=16, micro_tokens=17_000, width=2, accelerator=True, checkpointing="full",
                samples_answers=True, vllm=True, slots=512, engines=sample // EACH, ranks=DEVICES - sample,
                staleness=ahead)  # fmt: skip
    timed, learner = throughput(work, machine(f"{DEVICES}xH100"), workers=EACH), places(work)[0]
    learner_device = max(learner.total(i) for i in INSTANTS if i != "sync")  # what is sent lies in the host's memory
    cache_of_all = work.slots * work.lengths.answer * work.shape.cache_bytes(2)
    engine_device = work.shape.parameters * 2 / EACH + cache_of_all / EACH
    return {"learner": learner_device / 1e9, "engine": engine_device / 1e9}, simulate(loop_of(timed), 6)


def compute(k: lab.Values) -> lab.Readout:
    name, (groups, moved) = BUGS[str(k["bug"])], step_of(int(k["seed"]))
    sound = packed(groups)
    clean = push(sound, moved)
    with planted(name):
        batch = packed(groups)
        buggy = push(batch, moved)
        says = lab.refusal(partial(agrees_on_synthetic_batch, GRPO), "agrees_on_synthetic_batch") + lab.refusal(
            partial(audit, groups, batch), "StepCreditAudit"
        )
    labels = [f"{'AB'[i // 4]}{i % 4 + 1}: {r:g}" for i, r in enumerate(r for group in REWARDS for r in group)]
    starts = np.cumsum([0, *LENGTHS, *LENGTHS])[:-1]  # the first token of each answer
    credit = {"right": sound[ADVANTAGE][starts].tolist(), "found": batch[ADVANTAGE][starts].tolist()}
    wrong_tokens = int((np.abs(buggy - clean) > 1e-6).sum())
    defect = FAULTS[name].what if name else "no bug is planted"
    memory, loop = whiteboard(sample := EACH * int(k["engines"]), int(k["ahead"]))
    fits = memory["learner"] <= GB
    steps = fits * DAYS * 86400 / loop.step  # none where it does not fit
    # `idle` begins with the learner and the engines; its judges are left out.
    return lab.Readout(
        pictures=(
            Bars("Credit of the first token of each answer (prompt, answer: reward)", labels, credit),
            Bars("What the loss does to each answer's log-prob", labels,
                 {"right": np.add.reduceat(clean, starts).tolist(), "found": np.add.reduceat(buggy, starts).tolist()}),
            Bars(f"Whiteboard: 70 B on {DEVICES} H100, share of {GB} GB and of the time",
                 ["memory, learner", "memory, engine", "learner waits", "engines wait"],
                 {"share": [memory["learner"] / GB, memory["engine"] / GB, *list(loop.idle.values())[:2]]}, low=0),
        ),
        sentence=f"Planted: {defect}. **{wrong_tokens}** of {len(clean)} tokens get another gradient than they should"
        + (f"; **{len(says)}** of two checks speak." if name else ", and both checks are silent.")
        + f" Whiteboard: {sample} devices sample and {DEVICES - sample} learn, each of these holds "
        f"{memory['learner']:.0f} GB: it {'fits' if fits else '**does not fit**'}. Where it fits a step takes "
        f"**{loop.step:.0f} s**; {DAYS} days are **{steps:,.0f}** steps, and tokens are {loop.behind:.1f} steps old.",
        values={"tokens with a wrong gradient": float(wrong_tokens), "checks that speak": float(len(says)),
                "steps in 7 days": steps, "learner waits": loop.idle["learner"], "engines wait": loop.idle["engines"]},
        says=says,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="24", name="bugs", title="Seven bugs, and who finds them; and a whiteboard", part="synthesis",
    force="estimator", minutes=8,
    question="Training runs, the numbers look plausible, and one line is wrong: who tells you?",
    idea="""
        Bugs in reinforcement learning seldom crash. A wrong sign, a wrong standard deviation or a shifted credit give a
        gradient that is finite and wrong. The reward grows more slowly, or not, and there are many other reasons for
        that.

        So the library computes everything that matters twice: before the first step on made-up numbers, then on real
        steps, by code that shares nothing with what trains. Choose a bug. It is put into the library's own code in
        place of one function, exactly as `posttrain faults` does it in a run. The bars show what becomes of eight
        answers to two prompts, and the two checks say what they see.

        Then the whiteboard: 70 B parameters, 64 H100, 7 days. Eight devices make an engine; the others share what the
        learner holds. How many should sample?
    """,
    formula="gradient of the loss  ==  gradient of the definition,  token by token",
    knobs=(
        lab.Options("bug", "plant", "none", tuple(BUGS)),
        lab.Slider("seed", "seed", 0, 0, 20),
        lab.Slider("engines", "engines of 8 devices", 6, 1, 7),
        lab.Slider("ahead", "steps asked ahead", 0, 0, 4),
    ),
    compute=compute,
    breaks=(
        lab.Break({"bug": "sign flipped"}, "Right answers become less likely, and wrong ones more.",
                  "agrees_on_synthetic_batch", "sign flipped"),
        lab.Break({"bug": "standard deviation over G"}, "All credit is too large by a constant factor: it looks like "
                  "another learning rate.", "StepCreditAudit", "std over G"),
        lab.Break({"bug": "groups mixed up"}, "Answers are compared with those to another prompt.",
                  "StepCreditAudit", "groups mixed up"),
        lab.Break({"bug": "credit one token late"},
                  "The first token of an answer gets the credit of the answer before it.", "StepCreditAudit",
                  "credit late"),
        lab.Break({"bug": "KL reversed"},
                  "The pull to the reference is that of the other KL: too strong on tokens that became likelier, too "
                  "weak on others.", "agrees_on_synthetic_batch", "KL reversed"),
        lab.Break({"bug": "old log-prob recomputed"},
                  "Every ratio is 1: the clip never acts, far tokens count as near.", "agrees_on_synthetic_batch",
                  "old log-prob recomputed"),
        lab.Break({"bug": "clip never acts"}, "A few tokens that have moved far enough are pushed on.",
                  "agrees_on_synthetic_batch", "clip never acts"),
    ),
    exercises=(
        lab.AskNumber("Rewards 1, 1, 1, 0. By which factor is credit too large if the standard deviation divides by 4 "
                      "instead of 3?", 1.1547, why="The square root of 4/3."),
        lab.AskKnobs("Share the 64 devices out so that 7 days are more than 4,000 steps.", "steps in 7 days", 4000,
                     None, {"engines": 2, "ahead": 2},
                     why="Both then take about equally long, and nobody waits long."),
        lab.AskChoice("A constant factor on all credit. Why does a reward curve not show it?",
                      ("It stops the run", "It looks like another learning rate", "Adam ignores the loss"), 1,
                      why="So only a second computation of the credit tells it."),
    ),
    code=("posttrain.faults.planting.planted", "posttrain.checks.learning.loss_checks.agrees_on_synthetic_batch",
          "posttrain.checks.learning.credit_checks.StepCreditAudit", "posttrain.plan.simulation.simulator.simulate"),
    docs="research/trust.md", command="posttrain run arithmetic fault=std_ddof --allow-fault", grid=("bug", "engines"),
)  # fmt: skip
