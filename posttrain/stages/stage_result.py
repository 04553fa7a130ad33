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
    """The result of a stage that has taken its last step. `report`: of the evaluation after it."""
    s, stage = driver.state, driver.stage
    return StageResult(
        name=stage.name,
        kind=type(stage).__name__.lower(),
        steps=s.step,
        optimizer_steps=s.optimizer_steps,
        seconds=driver.seconds(),
        roles={k: round(v, 3) for k, v in driver.clock.total.items()},
        peaks=dict(driver.clock.most),
        accuracy=report.accuracy.known if report else None,
        greedy=report.greedy.mean if report and report.greedy and report.greedy.known else None,
        pass_at={str(k): x.mean for k, x in report.pass_at.items()} if report else {},
        before=s.before,
        why=s.ended or f"all {stage.steps} steps",
        start=starts(driver.parts.run.stages, stage),
        time_of=stage.time_of,
        hands_on=stage.hands_on,
        reward=report.reward.known if report else None,
        reward_before=s.reward_before,
        graded=report is not None and report.graded,
        proxy=report.proxy.known if report and report.proxy else None,
        proxy_before=s.proxy_before,
        agreement=driver.agreed.accuracy.known if driver.agreed else None,
        agreement_before=s.agreement_before,
        loss=driver.heldout_loss.score.known if driver.heldout_loss else None,
        loss_before=s.loss_before,
    )


def measured_words(result: StageResult) -> str:
    """Says what was measured at the end of a stage, for a line that people read; '' where nothing was."""
    said = [f"accuracy {result.accuracy[0]:.3f}"] if result.accuracy else []
    if result.reward and result.graded:
        said = [f"mean reward {number_text(result.reward[0], '.4g')}", *said]
    out = f"; held-out {', '.join(said)}" if said else ""
    if result.proxy:
        out += f"; its reward pays {number_text(result.proxy[0])}"
    if result.agreement:
        out += f"; {agreement_words(result.agreement[0])}"
    if result.loss:
        out += f"; {loss_words(result.loss[0])}"
    return out


def refuse_unjudged(driver: Driver[Any, Any, Any], report: EvaluationReport) -> None:
    """RewardError where nothing can be judged before the first step of a stage that learns from verdicts."""
    # `max_failed` marks the stages that learn from verdicts. Others may go on without a judged sample.
    asked, stage, parts = sum(len(g.episodes) for g in report.groups), driver.stage, driver.parts
    if not driver.state.step and report.failed == asked > 3 and hasattr(stage, "max_failed"):
        what = "held-out samples before the first step"
        enough_judged(what, report.groups, parts.run, stage, parts.book.folder, "figure")


def agreed(driver: Driver[Any, Any, Any]) -> AgreementReport | None:
    """How well the scores order held-out judgements now, written down pair by pair."""
    found = driver.agree()
    if found is not None and found.rows:
        driver.parts.book.write_losses(driver.stage.name, driver.state.step, HeldoutLoss(found.rows))
    return found


def waited_out(driver: Driver[Any, Any, Any], report: EvaluationReport | None) -> str:
    """Returns the reason why a stage with `patience` ends after this evaluation, or ''."""
    s, patience, loss = driver.state, driver.stage.patience, driver.heldout_loss
    reward = report.reward.known if report else None
    pairs = driver.agreed.accuracy.known if driver.agreed else None
    # Lower is better of all three: a reward and a share of pairs get a minus. The first that was measured decides.
    found = (loss.score.mean, "loss") if loss else None
    found = found or (reward and (-reward[0], "mean reward")) or (pairs and (-pairs[0], "share of pairs"))
    if not patience or not found:
        return ""
    now, what = found
    if s.lowest is None or now < s.lowest:
        s.lowest, s.lowest_at, s.waited = now, s.step, 0
    else:
        s.waited += 1
    if s.waited < patience:
        return ""
    most, more = ("lowest", "lower") if loss else ("highest", "higher")
    return (
        f"held-out {what} was {most} after step {s.lowest_at} ({abs(s.lowest):.3f}), and {patience} evaluations since"
        f" were not {more}; stopped at step {s.step}"
    )


def is_recorded(driver: Driver[Any, Any, Any], judges: tuple[str, ...]) -> bool:
    """Returns whether the record has the evaluation of a stage's weights of now: of a stage that was cut behind it, or,
    before the first step, as the last one of the stage before, which evaluated the same weights in the same way. A run
    that goes on from there measures them again.
    """
    parts, stage, results = driver.parts, driver.stage, driver.progress.results
    if parts.book.holds_evaluation(stage.name, driver.state.step):
        return True
    if driver.state.step or not results or starts(parts.run.stages, stage) != results[-1].name:
        return False
    before = parts.run.stage(results[-1].name)
    # The stage before ended with these weights. Its evaluation is the same one only with the same sampling, tasks and
    # judges.
    ways = [(parts.sampling(s), parts.run.env_of(s)) for s in (before, stage)]
    same = ways[0] == ways[1] and judges == tuple(j.name for j in parts.judged_setting(before).rollout.judges)
    return same and before.hands_on and parts.book.holds_evaluation(before.name, results[-1].steps)
