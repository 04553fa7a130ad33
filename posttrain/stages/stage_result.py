"""The result that a stage leaves, and the words in which its end is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from posttrain.checks.judging.verdict_checks import enough_judged
from posttrain.config.stages.stage import starts
from posttrain.core.measure.heldout_loss import HeldoutLoss, agreement_words, loss_words
from posttrain.core.measure.number_text import number_text
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.stages.preference.judged_batches import AgreementReport
from posttrain.stages.progress import StageResult

if TYPE_CHECKING:
    from posttrain.stages.loop import Driver


def result_of(driver: Driver[Any, Any, Any], report: EvaluationReport | None) -> StageResult:
    """The result of a stage that has taken its last step. `report`: the evaluation after that step."""
    s, stage = driver.state, driver.stage
    # Outcomes that are all 0 look like pass or fail. They are grades where those at the stage's start were: there the
    # mean reward was another number than the accuracy.
    began_graded = s.reward_before not in (None, s.before)
    has_accuracy = report is not None and not (began_graded and s.before is None)
    return StageResult(
        name=stage.name,
        kind=type(stage).__name__.lower(),
        steps=s.step,
        optimizer_steps=s.optimizer_steps,
        seconds=driver.seconds(),
        roles={k: round(v, 3) for k, v in driver.clock.total.items()},
        peaks=dict(driver.clock.most),
        accuracy=report.accuracy.known if report and has_accuracy else None,
        greedy=report.greedy.mean if report and report.greedy and report.greedy.known else None,
        pass_at={str(k): x.mean for k, x in report.pass_at.items()} if report else {},
        before=s.before,
        why=s.ended or f"all {stage.steps} steps",
        start=starts(driver.parts.run.stages, stage),
        time_of=stage.time_of,
        hands_on=stage.hands_on,
        reward=report.reward.known if report else None,
        reward_before=s.reward_before,
        graded=report is not None and (report.graded or began_graded),
        proxy=report.proxy.known if report and report.proxy else None,
        proxy_before=s.proxy_before,
        agreement=driver.agreement.accuracy.known if driver.agreement else None,
        agreement_before=s.agreement_before,
        loss=driver.heldout_loss.score.known if driver.heldout_loss else None,
        loss_before=s.loss_before,
    )


def measured_words(result: StageResult) -> str:
    """Says what was measured at the end of a stage, for a line that people read; '' where nothing was."""
    held_out = [f"accuracy {result.accuracy[0]:.3f}"] if result.accuracy else []
    if result.reward and result.graded:
        held_out = [f"mean reward {number_text(result.reward[0], '.4g')}", *held_out]
    out = f"; held-out {', '.join(held_out)}" if held_out else ""
    if result.proxy:
        out += f"; its reward pays {number_text(result.proxy[0])}"
    if result.agreement:
        out += f"; {agreement_words(result.agreement[0])}"
    if result.loss:
        out += f"; {loss_words(result.loss[0])}"
    return out


def refuse_unjudged(driver: Driver[Any, Any, Any], report: EvaluationReport) -> None:
    """Raises RewardError if no held-out sample could be judged before the first step of a stage that learns from
    verdicts."""
    # Stages that learn from verdicts have the setting `max_failed`. Other stages may go on without a judged sample.
    asked, stage, parts = sum(len(g.episodes) for g in report.groups), driver.stage, driver.parts
    if not driver.state.step and report.failed == asked > 3 and hasattr(stage, "max_failed"):
        what = "held-out samples before the first step"
        enough_judged(what, report.groups, parts.run, stage, parts.book.folder, "figure")


def measure_agreement(driver: Driver[Any, Any, Any]) -> AgreementReport | None:
    """Returns how well the scores order held-out judgements now; writes the result of each pair to the run folder."""
    agreement = driver.agree()
    if agreement is not None and agreement.rows:
        driver.parts.book.write_losses(driver.stage.name, driver.state.step, HeldoutLoss(agreement.rows))
    return agreement


def waited_out(driver: Driver[Any, Any, Any], report: EvaluationReport | None) -> str:
    """Returns the reason why a stage with `patience` ends after this evaluation, or ''."""
    s, patience, loss = driver.state, driver.stage.patience, driver.heldout_loss
    reward = report.reward.known if report else None
    pairs = driver.agreement.accuracy.known if driver.agreement else None
    # (figure, its name): the first of loss, mean reward and share of pairs that was measured. Lower must be better, so
    # the reward and the share get a minus.
    figure_and_name = (loss.score.mean, "loss") if loss else None
    figure_and_name = (
        figure_and_name or (reward and (-reward[0], "mean reward")) or (pairs and (-pairs[0], "share of pairs"))
    )
    if not patience or not figure_and_name:
        return ""
    figure, name = figure_and_name
    if s.lowest is None or figure < s.lowest:
        s.lowest, s.lowest_at, s.waited = figure, s.step, 0
    else:
        s.waited += 1
    if s.waited < patience:
        return ""
    best, better, sign = ("lowest", "lower", 1) if loss else ("highest", "higher", -1)
    return (
        f"held-out {name} was {best} after step {s.lowest_at} ({sign * s.lowest:.3f}), and {patience} evaluations since"
        f" were not {better}; stopped at step {s.step}"
    )


def is_recorded(driver: Driver[Any, Any, Any], judges: tuple[str, ...]) -> bool:
    """Returns whether the record already has the evaluation of the stage's present weights.

    A resumed run may evaluate weights again that were evaluated and recorded before the interruption. Before its first
    step, a stage may also start from the weights with which the stage before it ended. Then their evaluation is
    recorded there, if it was made in the same way.
    """
    parts, stage, results = driver.parts, driver.stage, driver.progress.results
    if parts.book.holds_evaluation(stage.name, driver.state.step):
        return True
    if driver.state.step or not results or starts(parts.run.stages, stage) != results[-1].name:
        return False
    before = parts.run.stage(results[-1].name)
    # "In the same way" means with the same sampling, tasks and judges.
    sampling_and_tasks = [(parts.sampling(s), parts.run.env_of(s)) for s in (before, stage)]
    same = sampling_and_tasks[0] == sampling_and_tasks[1] and judges == tuple(
        j.name for j in parts.judged_setting(before).rollout.judges
    )
    return same and before.hands_on and parts.book.holds_evaluation(before.name, results[-1].steps)
