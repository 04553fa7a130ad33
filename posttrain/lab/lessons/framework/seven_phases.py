"""Page 07: one step, phase by phase, and which numbers exist after each."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from posttrain.algorithm.credit.step_credit import credit_step
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import GRPO
from posttrain.toy.answers import Answers, ask, groups_of, logp_of, siblings
from posttrain.toy.one_sum import sum_policy, text
from posttrain.toy.policies import TabularPolicy
from posttrain.toy.training import batch_of, loss_of
from posttrain.verifier.integers import last_integer
from posttrain.web.picture import Bars, Matrix, TextTile, Tiles

PHASES = ("ask and answer", "judge", "score", "credit", "pack", "learn", "publish")
FIELDS = ("tokens", "log-prob at sampling", "version", "reward", "log-prob of the reference", "advantage", "weight",
          "gradient", "new weights at the sampler")  # fmt: skip
FILLED = {0: (0, 1, 2), 1: (3,), 2: (4,), 3: (5,), 4: (6,), 5: (7,), 6: (8,)}
"""For each phase (index in PHASES) the fields that it fills (indices in FIELDS)."""
G = 4


@dataclass
class StepState:
    """The values that one step has made so far; what no phase has made yet has its default."""

    answers: Answers
    policy: TabularPolicy
    rewards: np.ndarray = field(default_factory=lambda: np.zeros(0))
    reference: torch.Tensor | None = None
    credit: np.ndarray | None = None
    before: float = 0.0  # log-prob of the first answer before the update, and after it; both 0 where there was none
    after: float = 0.0


def play(phase: int, seed: int, scored: bool) -> StepState:
    """A step up to and with this phase, counted from 0. Without `scored` the reference is not asked, and `learn` raises
    InvariantError: GRPO's KL term reads its log-probs."""
    rng, policy, reference = torch.Generator().manual_seed(seed), sum_policy(12, 0.7), sum_policy(12, 0.6)
    state = StepState(ask(policy, siblings(torch.zeros(1, dtype=torch.int64), G), rng), policy)
    answers = state.answers
    if phase >= 1:
        state.rewards = np.array([float(last_integer(text(t).partition("#")[0]) == "12") for t in answers.tokens_ET])
    if phase >= 2 and scored:
        state.reference = logp_of(reference, answers)
    if phase >= 3:
        start = logp_of(policy, answers)
        groups = groups_of(answers, state.rewards[None], start, state.reference)
        step_credit = credit_step(GRPO, groups, max_tokens=3, ema=0.0)
        state.credit = np.stack([e.advantage[0] for e in step_credit.groups[0].episodes])
        if phase >= 4:
            batch = batch_of(GRPO, answers, state.credit, G, start, state.reference)
            if phase >= 5:
                state.before = float(logp_of(policy, answers).sum(1)[0])
                loss, _ = loss_of(GRPO, batch, policy, answers)
                loss.backward()
                assert policy.table.grad is not None
                # One plain step of size 2. The policy samples itself, so there is nothing more to publish.
                with torch.no_grad():
                    policy.table.sub_(2.0 * policy.table.grad)
                state.after = float(logp_of(policy, answers).sum(1)[0])
    return state


def compute(k: lab.Values) -> lab.Readout:
    phase = int(k["phase"]) - 1
    played: list[StepState] = []  # `refusal` returns no value of the call, so the state comes out through this list
    refused = lab.refusal(lambda: played.append(play(phase, int(k["seed"]), bool(k["scored"]))),
                          "the reference is missing")  # fmt: skip
    # A step that cannot be done is shown up to the scoring, index 2, that was left out.
    state = played[0] if played else play(2, int(k["seed"]), bool(k["scored"]))
    filled = [[1.0 if any(f in FILLED[p] for p in range(column + 1)) else 0.0 for column in range(7)]
             for f in range(len(FIELDS))]  # fmt: skip
    words = [["filled" if x else "" for x in row] for row in filled]
    rows = {
        f"answer {i + 1}": [
            TextTile(text(t[None]), "plain", round(float(x), 3), note="log-prob at sampling")
            for t, x in zip(state.answers.tokens_ET[i], state.answers.mu_ET[i], strict=True)
        ]
        for i in range(G)
    }
    pictures = [Matrix("What exists after which phase of a whole step", PHASES, FIELDS, filled, words, low=0, high=1,
                       chosen=(FILLED[phase][0], phase)), Tiles("The answers", rows)]  # fmt: skip
    names = [f"answer {i + 1}" for i in range(G)]
    if phase >= 1:
        pictures.append(Bars("Reward", names, {"reward": state.rewards.tolist()}, low=0, high=1))
    if state.credit is not None:
        pictures.append(Bars("Advantage of a token", names, {"advantage": state.credit[:, 0].tolist()}))
    moved = state.after - state.before
    return lab.Readout(
        pictures=pictures,
        sentence=f"Phase **{phase + 1}, {PHASES[phase]}**: " + (
            "it cannot be done." if refused else "it is left out." if phase == 2 and not k["scored"]
            else f"it fills {', '.join(FIELDS[f] for f in FILLED[phase])}.")
        + (f" The first answer's log-prob moves by **{moved:+.3f}** nats." if moved else ""),
        values={"phase": float(phase + 1), "right answers": float(state.rewards.sum()), "distance": abs(moved)},
        says=refused,
    )  # fmt: skip


LESSON = lab.Lesson(
    number="07", name="step", title="The controller: seven phases of a step", part="the framework", force="cost",
    minutes=5,
    question="In which order does a step make its numbers, and who needs what?",
    idea="""
        A step has an order: ask, answer, judge, score, credit, pack, learn, publish. The controller calls the roles in
        this order and sees no logit, no weight and no task. Each phase makes numbers that later ones read: no credit
        without rewards, no KL term without the reference's log-probs, no new samples without published weights.

        A stage stops after its steps, at a target of held-out reward, or when its time is up. Groups without spread get
        no credit, and are counted.
    """,
    formula="ask -> answer -> judge -> score -> credit -> pack -> learn -> publish -> write down",
    knobs=(
        lab.Slider("phase", "phase", 1, 1, 7),
        lab.Toggle("scored", "the reference scores the answers", True),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute,
    breaks=(
        lab.Break({"phase": 6, "scored": False}, "The loss has a KL term, and nobody asked the reference.",
                  "the reference is missing"),
    ),
    claims=(lab.Claim("Numbers that a step makes for each token before it learns", "counted", 7,
                      lambda: float(sum(len(FILLED[p]) for p in range(5))), within=0),),
    exercises=(
        lab.AskNumber("Which phase makes the advantage?", 4, within=0.01, why="Credit, after rewards and scores."),
        lab.AskKnobs("Play the step until the policy has moved.", "distance", 0.001, None, {"phase": 7}),
        lab.AskChoice("What does the controller see?", ("Logits", "Weights", "Neither"), 2,
                      why="It calls roles in order."),
    ),
    code=("posttrain.stages.training_step.ask", "posttrain.stages.training_step.learn"),
    docs="design/architecture.md", command="posttrain show runs/mine", grid=("phase", "scored"),
)  # fmt: skip
