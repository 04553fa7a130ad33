"""`posttrain eval` of a run whose answers nothing judges: the figures of its last stage on the held-out rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from posttrain.build.build_run import PolicyRoles, make_teacher
from posttrain.config.run import Run
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.stage import starts
from posttrain.core.ports import Environment
from posttrain.engine.model.policy_model import Policy
from posttrain.record.checkpoint import kept_folder
from posttrain.role.heldout_evaluation import EvaluationReport, report
from posttrain.role.learning.reference_scores import ReferenceScores
from posttrain.role.weights.saved_weights import load_weights
from posttrain.stages.measure_heldout_loss import HeldoutDemonstrations
from posttrain.stages.preference.judged_batches import heldout_judgements, segments
from posttrain.stages.preference.preference_stage import heldout_order
from posttrain.system.errors import ConfigError


async def measure_rows(
    run: Run,
    run_folder: Path,
    policy: Policy,
    roles: PolicyRoles,
    environment: Environment,
    load: Callable[[], None],
    say: Callable[[str], None],
) -> EvaluationReport:
    """A report whose `measures` are those of the run's last stage on held-out rows.

    A stage that learns from preferences measures how it orders held-out pairs, one that imitates its held-out loss.

    Args:
        load: loads the weights that are evaluated. Until then the model is the one that the run began with.
    """
    stage, learner, render, context = run.stages[-1], roles.learner, roles.renderer, roles.engine.context
    if isinstance(stage, Preference):
        judged, reference = heldout_judgements(environment), ReferenceScores("")
        # The reference scores first, with the weights that the stage began with; then those that are evaluated.
        if stage.algorithm.reads_reference:
            load_weights(kept_folder(run_folder, starts(run.stages, stage)), learner)
            scorer = learner if stage.reference is None else make_teacher(run, stage.reference, policy)
            # Computed once and kept, because the learner will hold other weights by the time they are read.
            reference.add(scorer, [s for j in judged for s in segments(j, render, context)])
        load()
        ordered = heldout_order(judged, stage.algorithm, learner, render, context, reference.of)
        if ordered is not None:
            figures = f"orders {ordered.accuracy} of {ordered.accuracy.prompts} held-out judgements as they were judged"
            say(f"{run_folder}: {figures}; mean margin {ordered.margin:.4g}")
            return replace(report((), None), measures=ordered.gauges())
    # Nothing ordered, or a stage that imitates: the loss of held-out demonstrations is what is left.
    load()
    demonstrations = HeldoutDemonstrations.of(stage, environment, render, roles.rollout)
    loss = demonstrations and await demonstrations.loss(learner, stage.micro_tokens)
    if loss is None:
        raise ConfigError(f"{stage.name} measures nothing on held-out rows: give env.rewards, which judge answers")
    say(f"{run_folder}: {loss.words}, over {len(loss.rows)} held-out rows (loss {loss.score})")
    return replace(report((), None), measures=loss.gauges())
