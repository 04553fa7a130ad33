"""Rules about how much a step changes the policy: too much, too little, and what is left of its variety."""

from __future__ import annotations

from collections.abc import Sequence

from posttrain.config.run import Reinforce
from posttrain.core.gauge import Step
from posttrain.diagnose.rules.rule import average, first, graded, known, last, mean, reward_text, rounded, rule, trend

FAR = 0.75
"""Nats a token by which a step may change the policy. Healthy steps lie below 0.3, at ten times the usual learning
rate; steps that break a policy begin at 1."""
NEAR = 2.5e-6
"""Nats a token below which a step changes nothing that sampling shows. A learning rate ten times too low gives 2e-5, a
hundred times 2e-7."""
STILL = 8
"""The rule speaks after this many steps in a row that change nothing."""
SOLVED_SHARE = 0.9
"""Share of right answers above which a policy has so little left to learn that small steps say nothing."""
GOOD = 2e-3
"""Nats a token of a step that learns well. The learning rate that is named aims at it: the distance grows with its
square."""
AWAY = 0.4
"""Nats a token between the policy and the one at the start of the step. Healthy runs stay below 0.04."""
CERTAIN = 0.02
"""Nats: a policy of less entropy samples its most probable answer nearly always."""


def better_lr(stage: Reinforce, distance: float) -> str:
    """The setting of a learning rate at which a step would change the policy by `GOOD` nats a token. The rate changes
    by a factor of at most 1000, up or down.

    Args:
        distance: the nats a token by which a step changes it at the present rate.
    """
    # The distance grows with the square of the rate, so the factor is the root of the ratio.
    factor = min(1e3, max(1e-3, (GOOD / max(distance, 1e-12)) ** 0.5))
    return f"{stage.name}.optimizer.lr={rounded(stage.optimizer.lr * factor)}"


def warm(stage: Reinforce, step: Step) -> bool:
    """Returns whether the step had the whole learning rate."""
    # During a warm-up steps are small on purpose.
    return (mean(step, "optim/lr") or 0.0) >= 0.99 * stage.optimizer.lr


def broken(history: Sequence[Step]) -> bool:
    """Returns whether a step was so large that it may have broken the policy. Then other symptoms follow from it."""
    return max(known(history, "policy/kl_step"), default=0.0) >= FAR


@rule
def collapse(history: Sequence[Step], stage: Reinforce) -> str:
    """One step changes the policy by more than 0.75 nats a token, and the reward falls to less than half; or the reward
    falls, for two steps, by more than half and more than five times its scatter; or it falls slowly to less than half
    (5 standard errors). Of grades, whose zero means nothing, "half" is the spread of the rewards that a step had."""
    if len(history) < 2 or (now := mean(history[-1], "rollout/reward")) is None:
        return ""
    # The fall is seen in later steps: the rewards of a step are played before its update.
    for i in range(max(0, len(history) - 4), len(history) - 1):
        # The step itself is among them: its rewards were played before its update.
        was = average(known(history[max(0, i - 4) : i + 1], "rollout/reward"))
        far = mean(history[i], "policy/kl_step") or 0.0
        if far >= FAR and was - now > _half(history, was):
            return _collapsed(history, stage, was, now, f"after step {history[i].index}", far)
    # The two last steps are the fall. At least six before them are needed for a scatter.
    before = known(history[:-2], "rollout/reward")[-12:]
    fallen = last(history, "rollout/reward", 2)
    if len(before) < 6 or len(fallen) < 2:
        return ""
    # The scatter is about the mean of the steps before. Both of the last two steps must lie below it by the bound.
    was = average(before)
    scatter = (sum((x - was) ** 2 for x in before) / (len(before) - 1)) ** 0.5
    far = max(known(history[-4:], "policy/kl_step"), default=0.0)
    if was - max(fallen) >= max(5 * scatter, _half(history, was)):
        return _collapsed(history, stage, was, now, f"after step {history[-3].index}", far)
    # A slow fall never stands out of its own scatter, so the trend is asked.
    slow = trend(history, "rollout/reward", 12)
    # The last two steps must be low as well: a trend whose last steps rise again is no collapse.
    if slow is None or slow.sure > -5 or slow.before - max(slow.after, *fallen) < _half(history, slow.before):
        return ""
    return _collapsed(history, stage, slow.before, slow.after, f"within {slow.steps} steps", far)


def _half(history: Sequence[Step], was: float) -> float:
    """The fall of a reward that is a collapse: half of it; of grades the largest spread that a step's rewards had."""
    if graded(history):
        return max(known(history, "rollout/reward_std"), default=0.0) or float("inf")
    # A reward near 0 cannot fall by anything that can be told from noise.
    return 0.5 * was if was > 0.02 else float("inf")


def _collapsed(history: Sequence[Step], stage: Reinforce, was: float, now: float, when: str, far: float) -> str:
    """The message of a collapse: the reward fell from `was` to `now`, and a step changed the policy by `far` nats."""
    reference = mean(history[-1], "policy/kl_reference")
    beyond = f" The policy is {reference:.2g} nats from the reference." if reference is not None else ""
    if far >= 0.05:
        why = (
            f"That step changed the policy by {far:.2g} nats a token (healthy: below 0.05), so the update was too"
            f" large. Lower the learning rate first: {better_lr(stage, far)}"
        )
    else:
        # No step was large. With 20 * GOOD as its distance the advice is a rate that is lower by the root of 20.
        why = (
            f"No step was large (at most {far:.2g} nats a token), so look at what changed in rewards or data first."
            f" Then lower the learning rate: {better_lr(stage, 20 * GOOD)}"
        )
    return (
        f"the policy has collapsed: the reward fell from {reward_text(was)} to {reward_text(now)} {when}.{beyond}"
        f" {why}, with {stage.name}.optimizer.warmup=20. Start again from weights before it"
    )


@rule
def update_too_large(history: Sequence[Step], stage: Reinforce) -> str:
    """Two of the last three steps change the policy by more than 0.75 nats a token each."""
    # Two of three, since one large step may come of an unusual batch.
    far_steps = [s for s in history[-3:] if (mean(s, "policy/kl_step") or 0.0) >= FAR]
    if len(far_steps) < 2 or collapse(history, stage):
        return ""
    distance = average(known(far_steps, "policy/kl_step"))
    lr, update = mean(far_steps[-1], "optim/lr") or 0.0, mean(far_steps[-1], "optim/update")
    size = f" (weights by {update:.1%})" if update is not None else ""
    return (
        f"the learning rate is far too high: at {lr:.2g} a step changes the policy by {distance:.2g} nats a"
        f" token{size}; healthy steps stay below 0.05. Set {better_lr(stage, distance)}; if it is as meant, use fewer"
        f" {stage.name}.minibatches and {stage.name}.epochs"
    )


@rule
def update_too_small(history: Sequence[Step], stage: Reinforce) -> str:
    """Eight steps in a row have credit and the whole learning rate, and none changes the policy by 2.5e-6 nats a
    token, though less than nine in ten answers are right: a policy that is sure and right has little to change."""
    distances = last(history, "policy/kl_step", STILL)
    if not distances or max(distances) >= NEAR:
        return ""
    # Only steps that had credit and the whole rate: others are small for a good reason.
    if not all(warm(stage, s) and mean(s, "credit/advantage_abs") for s in history[-STILL:]):
        return ""
    # With hardly any group that differs there is no credit to move by, whatever the rate.
    no_gradient = min(last(history, "optim/grad_norm", STILL), default=0.0) <= 1e-6
    if no_gradient or average(last(history, "credit/silent", 8)) > 0.9:
        return ""
    if min(last(history, "rollout/solved", STILL), default=0.0) >= SOLVED_SHARE:
        return ""
    update = mean(history[-1], "optim/update")
    size = f" (weights by {update:.1g} of their size)" if update is not None else ""
    return (
        f"the learning rate is far too low: at {stage.optimizer.lr:.2g} none of the last {STILL} steps changed the"
        f" policy by more than {max(distances):.1g} nats a token{size}, although there is credit. Healthy steps change"
        f" it by 1e-4 to 1e-2. Set {better_lr(stage, average(distances))}"
    )


@rule
def policy_runs_away(history: Sequence[Step], stage: Reinforce) -> str:
    """Two steps in a row the policy is more than 0.4 nats a token from the one that played their episodes."""
    distance = last(history, "policy/kl_start", 2)
    if len(distance) < 2 or min(distance) < AWAY:
        return ""
    return (
        f"the policy moves {distance[-1]:.2g} nats a token within one step: lower the learning rate, the number of"
        f" minibatches or the clip ({better_lr(stage, distance[-1])})"
    )


@rule
def entropy_collapses(history: Sequence[Step], stage: Reinforce) -> str:
    """The entropy is below 0.02 nats and below a tenth of what it was, for six steps, and many answers are still wrong;
    of grades, the reward is no higher than at first."""
    began, now = first(history, "rollout/entropy", 3), last(history, "rollout/entropy", 6)
    solved = average(last(history, "rollout/solved", 6))
    # Without an update the entropy follows the prompts of the step.
    if not any(known(history, "optim/steps")):  # nothing was learned, and prompts differ
        return ""
    # Both an absolute and a relative bound: some tasks have little entropy from the start.
    if not began or not now or max(now) >= min(CERTAIN, 0.1 * average(began)) or solved > 0.8:
        return ""
    # A policy that becomes right becomes sure. That is what training is for.
    if (risen := trend(history, "rollout/reward", 12)) is not None and risen.sure > 3:
        return ""
    rewards = (average(first(history, "rollout/reward", 3)), average(last(history, "rollout/reward", 6)))
    grades = graded(history)
    # `rewards` is (at first, now). Of grades `_half` is their spread and does not read its second argument.
    if broken(history) or (grades and rewards[1] > rewards[0] + 0.1 * _half(history, 0.0)):
        return ""
    outcome_words = f"the reward went from {reward_text(rewards[0])} to {reward_text(rewards[1])}"
    outcome_words = outcome_words if grades else f"{1 - solved:.0%} of the answers are wrong"
    return (
        f"the entropy has collapsed: {average(began):.2g} nats a token at first, {now[-1]:.1g} now, and"
        f" {outcome_words}. The policy repeats itself and tries nothing new. In order: lower"
        f" the learning rate ({rounded(stage.optimizer.lr / 3)} for {stage.name}.optimizer.lr), raise"
        f" {stage.name}.sampling.temperature (now {stage.sampling.temperature:g}), set a KL or entropy term"
    )


@rule
def length_drifts(history: Sequence[Step], stage: Reinforce) -> str:
    """Answers have become twice as long and run into the limit, or shrunk to less than half, while the reward does not
    rise."""
    began, now = first(history, "rollout/tokens", 4), last(history, "rollout/tokens", 6)
    cut_then, cut_now = average(first(history, "rollout/truncated", 4)), average(last(history, "rollout/truncated", 6))
    reward = trend(history, "rollout/reward", 16)
    if not began or not now or reward is None or reward.sure > 1 or broken(history):
        return ""
    was, is_ = average(began), average(now)
    # Longer alone may be what the task asks for; running into the limit is not.
    longer = min(now) >= 2 * was and cut_now >= cut_then + 0.25
    # From four tokens on: shorter answers have nothing to lose.
    shorter = max(now) <= 0.4 * was and was >= 4
    if not longer and not shorter:
        return ""
    by_sequence = stage.algorithm.aggregate in ("sequence_mean", "prompt_mean")
    weighs = ", for tokens that weigh less in a long answer (algorithm=dr_grpo weighs all alike)" if by_sequence else ""
    limit = f"{stage.name}.sampling.max_tokens={stage.sampling.max_tokens}"
    cut_words = f"{cut_now:.0%} are cut off at {limit}, {cut_then:.0%} at first"
    return (
        f"answers have become {'longer' if longer else 'shorter'}: {was:.3g} tokens at first, {is_:.3g} now"
        f"{f' ({cut_words})' if longer else ''}, and the reward does not rise with it ({reward.words})."
        f" Look for a reward that reads length{weighs}, and for a reward that does not depend on what is said, under"
        " which a policy drifts"
    )
