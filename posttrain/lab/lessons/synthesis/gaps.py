"""Page 27: what courses leave out, where it sits in a system, and where it runs here."""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.lab import lesson as lab
from posttrain.web.picture import Bars, Matrix, TextTile, Tiles, Tone

ROLES = ("rollout", "environment", "reference", "algorithm", "trainer", "weight sync")


@dataclass(frozen=True)
class UntaughtSubject:
    """A subject that courses leave out."""

    name: str
    role: str
    """The role that it belongs to."""
    force: str
    needs: str
    """The page to read first."""
    days: int
    """Effort of building it, by our own judgement, from 1 (small) to 5 (large)."""
    code: str
    """Where it runs here; '' where it does not."""
    docs: str


GAPS = (
    UntaughtSubject("process reward models", "environment", "signal", "17", 5,
                    "posttrain.algorithm.credit.process_rewards.process_rewards", "guides/process-rewards.md"),
    UntaughtSubject("inside of a reward model", "environment", "signal", "15", 3,
                    "posttrain.algorithm.preference.reward_model_loss.RankingLoss", "guides/reward-models.md"),
    UntaughtSubject("judges in place of people", "environment", "signal", "15", 4,
                    "posttrain.role.judges.generative_judge.GenerativeJudge", "guides/judges.md"),
    UntaughtSubject("verifiers under attack", "environment", "signal", "18", 3,
                    "posttrain.environment.check.probe.Probe", "guides/check.md"),
    UntaughtSubject("a sandbox for programs", "environment", "cost", "18", 5,
                    "posttrain.sandbox.sandbox_pool.Sandbox", "guides/sandbox.md"),
    UntaughtSubject("generalised advantages", "algorithm", "estimator", "10", 1,
                    "posttrain.algorithm.credit.value_estimates.gae", "reference/algorithms.md"),
    UntaughtSubject("estimators of the KL", "algorithm", "estimator", "03", 1,
                    "posttrain.algorithm.loss.reference_penalty.estimate", "design/algorithms-notes.md"),
    UntaughtSubject("entropy", "algorithm", "estimator", "13", 2,
                    "posttrain.ladder.pieces.token_choice.EntropyBonus", "reference/algorithms.md"),
    UntaughtSubject("old samples: V-trace and weights", "algorithm", "estimator", "22c", 3,
                    "posttrain.algorithm.credit.value_estimates.v_trace", "guides/staleness.md"),
    UntaughtSubject("whitening of rewards", "algorithm", "estimator", "04", 1,
                    "posttrain.algorithm.credit.reward_spread.whitened", "reference/algorithms.md"),
    UntaughtSubject("half precision", "trainer", "cost", "05", 3,
                    "posttrain.engine.optimizer.loss_scale.LossScale", "guides/precision.md"),
    UntaughtSubject("routing of experts, replayed", "trainer", "cost", "05", 5,
                    "posttrain.config.model_settings.router_refusals", "guides/experts.md"),
    UntaughtSubject("caches moved to main memory", "rollout", "cost", "20", 3, "", ""),
    UntaughtSubject("activations computed again", "trainer", "cost", "22", 1,
                    "posttrain.engine.layers.activation_memory.keep_less", "help/out-of-memory.md"),
    UntaughtSubject("adapters instead of weights", "weight sync", "cost", "06", 4,
                    "posttrain.engine.adapters.adapter_modules.attach", "guides/real-models.md"),
)  # fmt: skip
NAMES = tuple(g.name for g in GAPS)
BY_NAME = {g.name: g for g in GAPS}


def compute(k: lab.Values) -> lab.Readout:
    chosen = BY_NAME[str(k["gap"])]
    alike = [g for g in GAPS if g.force == chosen.force]
    in_role = [[float(g.role == role) for role in ROLES] for g in GAPS]
    words = [
        ["here" if g.role == role and bool(g.code) else "not built" if g.role == role else "" for role in ROLES]
        for g in GAPS
    ]
    tone: Tone = "good" if bool(chosen.code) else "bad"
    where = chosen.code.removeprefix("posttrain.") or "not built"
    return lab.Readout(
        pictures=(
            Tiles("The gap you chose",
                  {"": [TextTile(chosen.name, tone), TextTile(f"role: {chosen.role}"),
                  TextTile(f"force: {chosen.force}"), TextTile(f"read page {chosen.needs} first")]},
                  {"good": "runs here", "bad": "does not"}),
            Matrix("Every gap, by the role it belongs to", ROLES, NAMES, in_role, words, low=0, high=1,
                   chosen=(NAMES.index(chosen.name), ROLES.index(chosen.role))),
            Bars(f"Effort of the gaps of {chosen.force}, 1 small to 5 large (our judgement)", [g.name for g in alike],
                 {"effort": [float(g.days) for g in alike]}, low=0, high=5),
        ),
        sentence=f"**{chosen.name}** belongs to the **{chosen.role}** and moves **{chosen.force}**. Here it is "
        f"`{where}`" + (f", explained in `docs/{chosen.docs}`." if chosen.docs else "."),
        values={
            "effort": float(chosen.days),
            "built here": float(sum(bool(g.code) for g in GAPS)),
            "runs": float(bool(chosen.code)),
        },
    )  # fmt: skip


LESSON = lab.Lesson(
    number="27", name="gaps", title="The gaps: what courses leave out", part="synthesis", force="cost", minutes=6,
    question="Which parts of a working system does nobody teach, and where do they sit?",
    idea="""
        A course shows the loop and a few losses. A system that is used needs more: scores for steps, judges, sandboxes
        for programs, estimators that are not biased, precision, experts, memory. Each of these sits in one of the six
        roles and moves one of three forces: a better *signal*, a better *estimator*, or a lower *cost*. Choose one: the
        page says what it needs first, and where it runs in this library.
    """,
    formula="gap = (role, force, what it needs first, effort)",
    knobs=(lab.Options("gap", "the gap", "estimators of the KL", NAMES),),
    compute=compute,
    claims=(
        lab.Claim("Gaps of the curriculum that run here", "curriculum 27", 15,
                  lambda: float(sum(bool(g.code) for g in GAPS)), within=0,
                  why="KV caches are not moved to main memory here: the embedded engine computes them again."),
    ),
    exercises=(
        lab.AskKnobs("Find the gap that is not built here.", "runs", None, 0, {"gap": "caches moved to main memory"}),
        lab.AskNumber("How many of the fifteen run here?", 14, why="All but caches in main memory."),
        lab.AskChoice("Which force does a sandbox move?", ("signal", "estimator", "cost"), 2,
                      why="It makes a signal safe to have, and its price is time."),
    ),
    code=tuple(g.code for g in GAPS if g.code),
    docs="design/architecture.md", command="posttrain ladder --diff ppo v_trace",
)  # fmt: skip
