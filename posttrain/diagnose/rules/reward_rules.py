"""Rules about what rewards and answers say: nothing to learn from, nothing learned, or the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config.run import Reinforce
from posttrain.config.stages.stage import Stage
from posttrain.core.gauge import Step
from posttrain.diagnose.rules.policy_rules import NEAR, better_lr, broken, collapse
from posttrain.diagnose.rules.rule import (
    Trend,
    average,
    ends,
    first,
    graded,
    known,
    last,
    mean,
    played_rule,
    reward_text,
    rule,
    running,
    scale,
    trend,
)

SAME = 6
"""Rules about tasks that are too hard or too easy speak after this many steps in a row. Fewer may have no spread by
chance."""
HARD, EASY = 0.02, 0.9
"""Shares of right answers below and above which there is little to learn."""
ENDED = 0.5
"""Share of answers that are cut off in a step. Below it most answers ended by themselves."""
FLAT = 30
"""The least number of steps after which a rule says that the reward does not rise."""
EXACT = 0.05
"""Largest error of the reward's change, as a share of the reward, with which a rule says that the reward does not rise.
With batches of 36 answers the error is 0.1 after 30 steps, and hides the rise of a policy that learns slowly."""


@rule
def reward_is_constant(history: Sequence[Step], stage: Reinforce) -> str:
    """Every answer of the first six steps and of the last six has the same reward, and it is not 0."""
    began, now = first(history, "rollout/reward", SAME), last(history, "rollout/reward", SAME)
    # A constant reward of 0 has other rules: too hard, or cut off before the answer.
    if not began or not now or now[-1] == 0 or max((*began, *now)) - min((*began, *now)) > 1e-9:
        return ""
    # Equal means may come of groups that differ within.
    if any(mean(s, "rollout/mixed") != 0 for s in (*history[:SAME], *history[-SAME:])):
        return ""
    # Where rewards are grades a cut or endless answer often has the least one. The cause is named instead.
    if graded(history) and (cut_off_before_the_answer(history, stage) or never_stops(history, stage)):
        return ""
    likely = (
        "the reward does not read the answer (give it a wrong one: posttrain check RUN), this is the least that it pays"
        " (teach the policy first, or use easier tasks), or the most (use harder ones)"
        if graded(history)
        else "the reward accepts anything (give it a wrong answer: posttrain check RUN), it does not read the answer,"
        " or every task is solved already (use harder ones)"
    )
    return (
        f"every answer so far got the same reward ({reward_text(now[-1])}), so nothing is learned. In order: {likely}"
    )


@rule
def siblings_agree(history: Sequence[Step], stage: Reinforce) -> str:
    """Finds, where rewards are grades, that for six steps the siblings earn the same in nine of ten groups."""
    silent, rewards = last(history, "credit/silent", SAME), last(history, "rollout/reward", SAME)
    # Where outcomes are pass or fail, `too_hard` and `too_easy` tell the two cases apart.
    if not graded(history) or not silent or not rewards or average(silent) < 0.9 or broken(history):
        return ""
    if reward_is_constant(history, stage) or too_hard(history, stage) or never_stops(history, stage):
        return ""
    if cut_off_before_the_answer(history, stage):
        return ""
    return (
        f"siblings earn the same reward in {average(silent):.0%} of the groups of {SAME} steps"
        f" ({reward_text(rewards[-1])} on average), so there is nothing to learn from. If this is the most that the"
        " reward pays, use harder prompts or finer grades; if it is the least, teach the policy first or use easier"
        " ones. If the answers of a group are alike too, raise"
        f" {stage.name}.sampling.temperature (now {stage.sampling.temperature:g})"
    )


@rule
def too_hard(history: Sequence[Step], stage: Reinforce) -> str:
    """For six steps at most 2 % of the answers are right, and nine in ten groups have no spread."""
    solved, silent = last(history, "rollout/solved", SAME), last(history, "credit/silent", SAME)
    cut = average(last(history, "rollout/truncated", SAME))
    if not solved or not silent or average(solved) > HARD or average(silent) < 0.9 or _policy_at_fault(history):
        return ""
    rewards = last(history, "rollout/reward", SAME)
    # With most answers cut off the limit is at fault. A reward that moves has something to learn from.
    if cut >= MOST_CUT or not rewards or max(rewards) - min(rewards) > 0.1:
        return ""
    return (
        f"the tasks are too hard for this policy: {average(solved):.1%} of the answers of {SAME} steps are right, and"
        f" {average(silent):.0%} of the groups have no spread. In order: teach it first (an sft stage), use easier"
        " tasks, or the prompt is not in the form the model knows (chat template). Judge a right answer by hand once:"
        f" posttrain check RUN. More siblings help where some answers are right: {stage.name}.siblings="
        f"{4 * stage.siblings}"
    )


@rule
def too_easy(history: Sequence[Step], stage: Reinforce) -> str:
    """More than 90 % of the answers are right in the first steps and in the last six, and two thirds of the groups have
    no spread."""
    began, solved = first(history, "rollout/solved", 3), last(history, "rollout/solved", SAME)
    silent = average(last(history, "credit/silent", SAME))
    # Easy from the first steps on. A policy that has become right has learned, which is no fault.
    if not began or not solved or min(average(began), average(solved)) < EASY or silent < 0.66:
        return ""
    if reward_is_constant(history, stage):
        return ""
    return (
        f"the tasks are too easy for this policy: {average(solved):.1%} of the answers of {SAME} steps are right, as at"
        f" the start, and {silent:.0%} of the groups have no spread. Use harder tasks; or filter=mixed, which plays on"
        " until a step has groups with spread (algorithm=dapo)"
    )


def _policy_at_fault(history: Sequence[Step]) -> bool:
    """Returns whether the policy was better at first, or a step broke it. Then tasks and limits are not at fault."""
    # A few right answers at the start show that the tasks can be solved.
    return broken(history) or average(known(history[:3], "rollout/solved")) > 3 * HARD


MOST_CUT = 0.8
"""Share of answers that are cut off, from which on the limit on tokens is at fault and not the tasks."""


@rule
def cut_off_before_the_answer(history: Sequence[Step], stage: Reinforce) -> str:
    """Most answers are cut off, and very few are right (of grades: few groups have a spread), four steps in a row."""
    cut, solved = last(history, "rollout/truncated", 4), last(history, "rollout/solved", 4)
    silent = min(last(history, "credit/silent", 4), default=0.0)
    poor = silent >= 0.9 if graded(history) else max(solved, default=1) <= 0.05
    # A special token in the middle of cut answers tells of a wrong stop id, which has its own rule (`never_stops`).
    if len(cut) < 4 or min(cut) < MOST_CUT or not poor or _past_an_end(history):
        return ""
    # Where answers were not cut off at first, the policy has grown longer, and the limit is not at fault.
    if _policy_at_fault(history) or average(known(history[:3], "rollout/truncated")) < 0.5 * MOST_CUT:
        return ""
    return (
        f"{cut[-1]:.0%} of the answers are cut off at max_tokens={stage.sampling.max_tokens} and"
        f" {f'{silent:.0%} of the groups have no spread' if graded(history) else f'{solved[-1]:.0%} are right'}:"
        f" the limit is graded, not the answer. Raise it: {stage.name}.sampling.max_tokens="
        f"{4 * stage.sampling.max_tokens}; if answers then still do not end, teach the policy to stop (an sft stage)"
    )


@rule
def never_stops(history: Sequence[Step], stage: Reinforce) -> str:
    """Nearly every answer runs to the limit, and most contain a special token that is not a stop token, four steps in a
    row. Where answers ended by themselves in an earlier step, the stop ids are right, and the policy has lost them."""
    cut, all_cut = last(history, "rollout/truncated", 4), known(history, "rollout/truncated")
    if not cut or min(cut) < 0.9 or min(all_cut) < ENDED or not _past_an_end(history):
        return ""
    special = average(last(history, "rollout/special", 4))
    return (
        f"{cut[-1]:.0%} of the answers never stop, and {special:.0%} of them go on after a special token that is not"
        " one of the stop ids: the stop id is wrong. The model ends its turns with another token; add it to"
        " eos_token_id in its generation_config.json (the start of the run prints the stop ids)"
    )


def _past_an_end(history: Sequence[Step]) -> bool:
    """Returns whether at least half of the answers of each of the last four steps say a special token that is no stop
    token."""
    special = last(history, "rollout/special", 4)
    return bool(special) and min(special) >= 0.5


@rule
def reward_without_quality(history: Sequence[Step], stage: Reinforce) -> str:
    """The reward rises (by 3 standard errors) while one of its sources falls by 5, and by a third or more."""
    reward = trend(history, "rollout/reward", 12)
    # 3 standard errors for the rise and 5 for the fall: the fall of a source is the evidence.
    if reward is None or reward.sure < 3:
        return ""
    trends = [(n, trend(history, n, 12)) for n in sorted(history[-1].gauges) if n.startswith("reward/")]
    fallen = [(n, t) for n, t in trends if t and t.sure < -5 and -t.gain > 0.33 * scale(history, n, t.before)]
    if not fallen:
        return ""
    name, t = fallen[0]
    return (
        f"the reward rises ({reward.words}) while {name.removeprefix('reward/')} falls"
        f" ({t.words}): the policy raises the reward and gets worse. Read its best paid answers"
        f" (posttrain show RUN), then lower the weight of the source that pays them, or stop at an earlier checkpoint"
        " and add a KL term"
    )


BEST = 6
"""Steps whose mean truth is compared with that of the last ones."""


@played_rule
def reward_without_truth(history: Sequence[Step], stage: Stage) -> str:
    """Finds that the outcome that is measured and not paid has fallen from its best six steps to the last six, by 5
    standard errors and a tenth, while the reward rose by 3 standard errors from the same steps to these."""
    steps = running(history)
    # Trends need steps without a hole, which are those that have followed one another up to now.
    seen = [s for s in steps if mean(s, "rollout/truth") is not None and mean(s, "rollout/reward") is not None]
    # The last step must have both, else the finding would be of an earlier one.
    if len(seen) < 3 * BEST or seen[-1] is not history[-1]:
        return ""
    truth, paid = known(seen, "rollout/truth"), known(seen, "rollout/reward")
    # The best block may not overlap the last one: a fall is between two separate means.
    best_at = max(range(len(seen) - 2 * BEST + 1), key=lambda i: average(truth[i : i + BEST]))
    (best, now), fallen = ends(truth, best_at, BEST)
    # The reward is compared over the same steps as the truth.
    (before, after), rise = ends(paid, best_at, BEST)
    if best - now < max(5 * fallen, 0.1 * scale(seen, "rollout/truth", best)) or after - before < 3 * rise:
        return ""
    was, is_ = reward_text(best, fallen), reward_text(now, fallen)
    if was == is_:
        return ""  # the fall is too small to show in the numbers of the message
    paid_words = f"{reward_text(before, rise)} to {reward_text(after, rise)} since step {seen[best_at].index}"
    return (
        f"the reward rises ({paid_words}) while what is measured and not paid falls ({was} to {is_}): the reward is"
        f" exploited. The best weights are those of about step {seen[best_at + BEST - 1].index}. Read what is paid best"
        " (posttrain show RUN). In order: stop there, say in the rubric or the reward what those answers lack, a larger"
        " KL to the start (pull=kl, or beta of a preference algorithm), more judgements of this policy's own answers,"
        " or several reward models with pessimism (env.rewards=model:A+B)"
    )


STAYS = 0.1
"""The truth counts as staying where it has risen by at most this share of itself, three standard errors included."""


@played_rule
def reward_outruns_truth(history: Sequence[Step], stage: Stage) -> str:
    """The reward has risen by 5 standard errors and a quarter, while what is measured and not paid has risen by less
    than a tenth, three standard errors included. Truth above 0.9 cannot rise much, and is left out."""
    paid, truth = trend(history, "rollout/reward", 24), trend(history, "rollout/truth", 24)
    if paid is None or truth is None or mean(history[-1], "rollout/truth") is None:
        return ""
    # Truth near 1 cannot rise as the reward does, so its standstill is no sign.
    if paid.sure < 5 or paid.gain < 0.25 * scale(history, "rollout/reward", paid.before) or EASY < truth.before <= 1:
        return ""
    most = STAYS * scale(history, "rollout/truth", truth.before)
    # The upper end of the truth's rise must be small: a standstill that noise may hide is not told.
    if truth.gain + 3 * truth.error > most or reward_without_truth(history, stage):
        return ""
    return (
        f"the reward rises ({paid.words} in {paid.steps} steps) while what is measured and not"
        f" paid {'stays' if truth.sure > -3 else 'falls'} ({truth.words} +-"
        f" {2 * truth.error:.2g}): the policy learns what is paid and not what is meant. Read what is paid best"
        " (posttrain show RUN). In order: say in the rubric or the reward what those answers lack, add a source that"
        " pays it, or a larger KL to the start (pull=kl, or beta of a preference algorithm)"
    )


@played_rule
def heldout_falls(history: Sequence[Step], stage: Stage) -> str:
    """The held-out reward is lower than at an earlier evaluation by more than 3 standard errors, while the training
    reward rises by more than 3."""
    measured = [(s, g) for s in history if (g := s.gauges.get("eval/reward")) is not None and g.count]
    # Only at a step that was measured, so that the note stands where the figure is new.
    if len(measured) < 2 or measured[-1][0] is not history[-1]:
        return ""
    (now, e_now), (best, e_best) = measured[-1], max(measured, key=lambda m: m[1].mean)
    tasks = min(e_now.count, e_best.count)
    # The variance of one task. For a share m it is m (1 - m), at most 0.25, with a floor: a measured share near 0 or 1
    # is less certain than the formula says.
    task_variance = max(0.25 * min(1.0, 4 * e_best.mean * (1 - e_best.mean)), 0.02)
    if graded(history):
        # For grades the spread of a step's rewards is the best guess of it. Without one the error is infinite, and the
        # rule is silent.
        task_variance = max(known(history, "rollout/reward_std"), default=0.0) ** 2 or float("inf")
    error = (2 * task_variance / tasks) ** 0.5
    # The steps from shortly before the best evaluation on, so that rise and fall are of the same time.
    reward = trend([s for s in history if s.index >= best.index - 2], "rollout/reward", 6)
    if e_best.mean - e_now.mean < 3 * error or reward is None or reward.sure < 3:
        return ""
    return (
        f"held-out reward fell from {reward_text(e_best.mean, error)} (step {best.index}) to"
        f" {reward_text(e_now.mean, error)} (step {now.index}) while the training reward rose from {reward.words}. In"
        " order: the training tasks are learned by heart (use more prompts, fewer steps), training prompts show their"
        f" answers, or the reward is exploited. The best weights are those of step {best.index}"
    )


@rule
def reward_is_flat(history: Sequence[Step], stage: Reinforce) -> str:
    """The reward has not risen in 30 steps or more, and noise does not hide a rise: the error of its change is below a
    twentieth of it. The likely causes are named in order."""
    reward = trend(history, "rollout/reward", FLAT)
    # With nearly all answers right a flat reward is no fault. A gain of half its error already counts as a rise.
    if reward is None or average(last(history, "rollout/solved", SAME)) > 0.85 or reward.gain > 0.5 * reward.error:
        return ""
    # An error as large as a twentieth of the reward hides the rise of a policy that learns slowly.
    if broken(history) or reward.error > EXACT * _level(history, reward):
        return ""
    # Rules with a definite cause come first: this one lists likely causes, and is silent where another has spoken.
    definite = (siblings_agree, too_hard, cut_off_before_the_answer, never_stops, reward_is_constant, collapse)
    if any(condition(history, stage) for condition in definite):
        return ""
    what = "the reward falls" if reward.sure < -3 else "the reward is flat"
    return (
        f"{what}: {reward.words} (+- {reward_text(2 * reward.error)}) in {reward.steps} steps."
        f" Likely causes, in order: {'; '.join(f'{i}. {c}' for i, c in enumerate(causes(history, stage), 1))}"
    )


def _level(history: Sequence[Step], reward: Trend) -> float:
    """Returns the size with which the error of a change of the reward is compared.

    For rewards in [0, 1] it is the reward itself, but at most two standard deviations. For others it is two standard
    deviations, which is about the mean of a share.
    """
    # Rewards below 0 or above 1 have no zero to hold an error against.
    highest = max(abs(reward.before), abs(reward.after))
    spread = 2 * scale(history, "rollout/reward", highest)
    return min(highest, spread) if all(0 <= x <= 1 for x in known(history, "rollout/reward")) else spread


def causes(history: Sequence[Step], stage: Reinforce) -> list[str]:
    """Returns the reasons why the reward may not rise, by the gauges of the last eight steps, the likeliest first.

    Each says what to change.
    """
    # The last eight steps: what is wrong now, and not what the stage began with.
    gauges = {
        n: average(known(history[-8:], n))
        for n in ("rollout/truncated", "rollout/solved", "credit/silent", "policy/kl_step", "canary/mute_sources")
    }
    name, far = stage.name, gauges["policy/kl_step"]
    reasons: list[str] = []
    if gauges["canary/mute_sources"] > 0:
        reasons.append("a reward source gives 0 to right answers too (posttrain check RUN)")
    if gauges["rollout/truncated"] > 0.3:
        reasons.append(
            f"{gauges['rollout/truncated']:.0%} of the answers are cut off ({name}.sampling.max_tokens="
            f"{2 * stage.sampling.max_tokens})"
        )
    if gauges["credit/silent"] > 0.7:
        easy = gauges["rollout/solved"] > 0.5
        reason = f"the tasks are too {'easy' if easy else 'hard'}"
        remedy = "use harder ones" if easy else "teach first, or use easier ones"
        if graded(history):
            reason, remedy = "siblings earn the same", "use finer grades, or tasks of another difficulty"
        reasons.append(
            f"{gauges['credit/silent']:.0%} of the groups have no spread: {reason} ({remedy}, or {name}.siblings="
            f"{2 * stage.siblings})"
        )
    # Healthy steps change the policy by 1e-4 to 1e-2 nats a token, and stay below 0.05 (`policy_rules`).
    if 0 < far < 20 * NEAR:
        reasons.append(f"a step changes the policy by only {far:.1g} nats a token ({better_lr(stage, far)})")
    if far > 0.05:
        reasons.append(
            f"a step changes the policy by {far:.1g} nats a token, too much to go anywhere ({better_lr(stage, far)})"
        )
    # The last two reasons are always possible, and no gauge shows them.
    return [
        *reasons,
        "the reward does not depend on what the policy can change (look at rewards beside answers: posttrain show RUN)",
        f"the batch is too noisy to learn from ({name}.prompts={2 * stage.prompts})",
    ]
