"""Checks that an environment keeps its promises. The tests of the gallery run it, and so does `posttrain check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from posttrain.core.content import prompt_words
from posttrain.core.ports import Environment
from posttrain.core.seeds import generator
from posttrain.core.types import Task
from posttrain.core.verdict import outcome
from posttrain.environment.scripted_policy import judged
from posttrain.environment.single import SingleTurn


@dataclass(frozen=True)
class Check:
    """One claim, whether it held, and the number or the example that shows it."""

    name: str
    passed: bool
    detail: str
    advice: str = ""
    """The change to make if the claim did not hold."""


async def prove(env: SingleTurn, samples: int = 2000) -> tuple[Check, ...]:
    """Check an environment's own verifier and its split, on all held-out tasks and `samples` training tasks.

    Gold answers must earn 1. Distractors and empty answers must earn 0, or less than 1 if the verifier gives partial
    credit. No constant answer may earn more than the share of the most common answer plus 0.02. All `claims` must hold.
    The user's rewards are left out.
    """
    # A copy without the user's rewards, because the environment promises nothing about them.
    env = replace(env, rewards=())
    heldout, training = ([t for t in tasks if env.knows_gold(t)] for tasks in (env.heldout, _train(env, 200)))
    wrong_below = 1.0 if env.pays_parts else 0.0
    # A reward below 0 is fine for a wrong answer too.
    right, wrong = (lambda r: r == 1.0), (lambda r: r == 0.0 or r < wrong_below)
    return (
        await _scores("gold scores 1", env, heldout, [env.gold(t) for t in heldout], right),
        await _scores("gold scores 1 in training", env, training, [env.gold(t) for t in training], right),
        await _scores("distractor scores 0", env, heldout, [env.distractor(t) for t in heldout], wrong),
        await _scores("silence scores 0", env, heldout, [("",) * len(env.gold(t)) for t in heldout], wrong),
        await _constant(env, heldout),
        *await claims(env, samples),
    )


async def claims(env: SingleTurn, samples: int = 2000) -> tuple[Check, ...]:
    """Checks of what an environment states about its tasks, whatever its verifier: held-out tasks are distinct and not
    in training, tasks are a function of the seed, the alphabet covers prompts and answers, and demonstrations are right
    or wrong as asked."""
    heldout, train = list(env.heldout), _train(env, samples)
    bare = replace(env, rewards=())
    texts = bare.abilities.demonstrations
    styles = texts.styles if texts is not None and texts.false else ()
    return (
        _distinct(env, heldout),
        _disjoint(env, heldout, train),
        _determined(env, heldout, train),
        _alphabet(env, [*heldout, *train[:200]]),
        *[await _demonstrations(bare, style, train[:200], wrong) for style in styles for wrong in (0.0, 1.0)],
    )


def _train(env: SingleTurn, most: int) -> list[Task]:
    """The first training tasks, at most `most`."""
    count = env.train.count
    return [env.train.task(i) for i in range(most if count is None else min(most, count))]


async def reward(env: Environment, task: Task, turns: Sequence[str]) -> float | None:
    """The reward of one scripted episode; None if it could not be judged."""
    return outcome(await judged(env, task, turns))


async def _scores(
    name: str, env: Environment, tasks: Sequence[Task], turns: Sequence[Sequence[str]], fits: Callable[[float], bool]
) -> Check:
    """Checks that the rewards of these turns, one entry for each task, all fit."""
    for task, answer in zip(tasks, turns, strict=True):
        paid = await reward(env, task, answer)
        if paid is None or not fits(paid):
            return Check(name, False, f"task {task.id!r} ({prompt_words(task.prompt)}): {list(answer)} scored {paid}")
    return Check(name, bool(tasks), f"{len(tasks)} tasks")


async def _constant(env: SingleTurn, held: Sequence[Task]) -> Check:
    """Tries each of the five most common final answers on every held-out task, in all turns of an episode."""
    if not held:
        return Check("constant answer earns its share", False, "0 tasks")
    answers = Counter(env.gold(t)[-1] for t in held)
    share = answers.most_common(1)[0][1] / len(held)
    best_answer, best = "", 0.0
    for answer, _ in answers.most_common(5):
        rewards = [await reward(env, t, [answer] * len(env.gold(t))) for t in held]
        mean = sum(r or 0.0 for r in rewards) / len(held)
        if mean > best:
            best_answer, best = answer, mean
    return Check(
        "constant answer earns its share",
        best <= share + 0.02,
        f"{best_answer!r} everywhere earns {best:.3f}; the modal answer's share is {share:.3f}",
    )


def _distinct(env: SingleTurn, held: Sequence[Task]) -> Check:
    """Checks that no two held-out tasks have the same id or key."""
    keys, ids = {env.key(t) for t in held}, {t.id for t in held}
    # Rows of a user may have equal prompts. They are held out together (`own_prompts`), so equal keys are no fault.
    return Check(
        "held-out tasks are distinct",
        len(ids) == len(held) and (len(keys) == len(held) or env.abilities.rows is not None),
        f"{len(held)} tasks, {len(keys)} keys, {len(ids)} ids",
        "tasks that count twice make held-out accuracy less sure than it looks: draw until they differ by key()",
    )


def _disjoint(env: SingleTurn, held: Sequence[Task], train: Sequence[Task]) -> Check:
    """Checks that no training task is a held-out task."""
    keys, asked = {env.key(t) for t in held}, {as_asked(t) for t in held}
    # Tasks are compared by the environment's own key, and by all that a policy or a reward can see of a task. The
    # second finds equal tasks that `key` takes for different ones.
    shared = [t for t in train if env.key(t) in keys or (t.answer is not None and as_asked(t) in asked)]
    return Check(
        "held-out is disjoint from train",
        not shared,
        f"{len(train)} training tasks, {len(shared)} of them held out"
        + (f", such as {prompt_words(shared[0].prompt)}" if shared else ""),
        "held-out accuracy would measure memory: draw training tasks again where key() is that of a held-out one",
    )


def as_asked(task: Task) -> str:
    """All of a task except its id, as text. If it is equal, two tasks are the same to a policy, whatever `key` says."""
    return repr((task.prompt, task.answer, task.info, task.tools))


def _determined(env: SingleTurn, held: Sequence[Task], train: Sequence[Task]) -> Check:
    """Checks that tasks repeat under the same seed, and that another seed changes training tasks only."""
    # New objects, so that nothing comes from a cache.
    again, other = replace(env), replace(env, seed=env.seed + 1)
    repeated, reseeded = ([e.train.task(i) for i in range(len(train))] for e in (again, other))
    unchanged = list(again.heldout) == list(held) == list(other.heldout) and repeated == list(train)
    # A finite list is the same under every seed.
    moved = env.train.count is not None or reseeded != list(train)
    return Check(
        "tasks are a function of the seed",
        unchanged and moved,
        f"repeated: {unchanged}; training differs under another seed: {moved}",
        "make task i from posttrain.core.seeds.generator(self.seed, name, i) alone, and held-out tasks from"
        " HELDOUT_SEED",
    )


def _alphabet(env: SingleTurn, tasks: Sequence[Task]) -> Check:
    """Checks that the alphabet has every character of these tasks."""
    # The wrong answer of a user's prompt is its answer with a `?`, which the data need not have.
    wrong_answer = env.distractor if env.knows_distractor and env.abilities.rows is None else lambda _: ()
    answered = [t for t in tasks if env.knows_gold(t)]
    texts = [x for t in answered for x in (t.prompt, *env.gold(t), *wrong_answer(t)) if isinstance(x, str)]
    used = {c for text in texts for c in text}
    outside = "".join(sorted(used - set(env.alphabet))) if env.alphabet else ""
    name, advice = "the alphabet covers prompts and answers", "add these characters to alphabet()"
    return Check(name, not outside, f"outside: {outside!r}", advice)


async def _demonstrations(env: SingleTurn, style: str, tasks: Sequence[Task], wrong: float) -> Check:
    """Checks the demonstrations of one style, all right (`wrong` is 0) or all wrong (1).

    Right ones must score 1. Wrong ones must score 0, or less than 1 if the verifier gives partial credit. Documents
    have no prompt, so only their alphabet is checked.
    """
    name = f"style {style}, wrong={wrong:g}"
    for i, task in enumerate(tasks):
        prompt, text = env.demonstrate(task, style, generator(env.seed, "prove", style, i), wrong)
        turns = [text] if isinstance(text, str) else list(text)
        if env.alphabet and set("".join(turns)) - set(env.alphabet):
            return Check(name, False, f"{text!r} leaves the alphabet")
        score = await reward(env, task, turns) if prompt else 1.0 - wrong  # a document passes
        if score != 1.0 - wrong and not (wrong and env.pays_parts and score is not None and score < 1.0):
            return Check(name, False, f"{prompt_words(prompt)} -> {text!r} scored {score}")
    return Check(name, True, f"{len(tasks)} texts")
