"""Probes of what is rewarded: right answers in any form have to be, and other texts must not be (`PAYMENT`)."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.core.content import conversation, prompt_words, shown
from posttrain.core.types import Task
from posttrain.environment.check.probe import Answer, Mark, Probe
from posttrain.environment.check.probe_answers import (
    NOISE_LENGTHS,
    PARAPHRASES,
    PHRASES,
    SHAPES,
    SILENCE,
    WORDS,
    lists,
    noise,
    spellings,
)
from posttrain.environment.check.subject import WRITTEN, Attack, Subject
from posttrain.verifier.builtin import contains

TASKS_EACH = 12
"""The number of tasks on which each of many texts is tried."""
FEWEST = 4
"""With fewer rows, the probe of completions is skipped."""
NOTHING_KNOWN: Answer = (
    Mark.SKIP,
    "no right answer is known here: give the rows an answer or a completion. env.args.answer_column names the column:"
    " notes from which a judge judges will do",
)
NOTHING_RIGHT: Answer = (Mark.SKIP, "no reward looks at the answer, so no text is right or wrong")
NOTHING_PAID: Answer = (Mark.SKIP, "no right answer is paid, so nothing can be compared with it")


async def gold(s: Subject) -> Answer:
    """Compares right answers with wrong ones: all of them must be judged, and paid more, on every task."""
    if not s.gold:
        return NOTHING_KNOWN
    broken = [answer.failed for answer in s.gold.values() if answer.failed is not None]
    if broken:
        first = broken[0]
        return Mark.FAIL, (
            f"{len(broken)} of {len(s.gold)} right answers could not be judged: {first.source} {first.verdict.kind}:"
            f" {first.verdict.why}"
        )
    if not s.sources:
        if reads_no_answer := _text_alone(s):
            return reads_no_answer
        example = next(iter(s.gold.values()))
        return Mark.FAIL, (
            f"no source pays a right answer more than a wrong one; {example.said} to"
            f" {prompt_words(example.task.prompt)} earned {dict(example.scores)}"
        )
    # Only an environment that promises full reward is held to exactly 1; the user's rewards may be on any scale.
    if s.env.vouches_for_gold and (less := [a for a in s.gold.values() if a.scores.get(s.env.name) != 1.0]):
        example = less[0]
        return Mark.FAIL, (
            f"{example.said} is right for {prompt_words(example.task.prompt)}, and the environment pays"
            f" {example.scores.get(s.env.name)}, not 1"
        )
    scored = [(a, source) for a in s.gold.values() for source in s.sources if source in a.scores]
    if lost := [(a, source) for a, source in scored if source not in s.deciding(a.task)]:
        example, source = lost[0]
        return Mark.FAIL, (
            f"{source} pays {len(lost)} of {len(s.gold)} right answers no more than a wrong one, such as"
            f" {example.said} to {prompt_words(example.task.prompt)} ({example.scores[source]:g})"
        )
    # `shape` is the name of the form in which right answers earn most; `shaped` writes a text in this form; `shaping`
    # are the other sources.
    form = {"bare": "", WRITTEN: ", as the completions are written"}.get(s.shape, f", written {s.shaped('X')!r}")
    other_sources = f"; do not tell right answers from wrong ones: {', '.join(s.shaping)}" if s.shaping else ""
    return Mark.OK, f"{len(s.gold)} right answers paid by {', '.join(s.sources)}{form}{other_sources}"


def _text_alone(s: Subject) -> Answer | None:
    """The result of `gold` if no source looks at the answer; None if one does, or if this cannot be known."""
    if not s.depends or any(d.on_answer for d in s.depends.values()):
        return None
    graded = {name: d for name, d in s.depends.items() if not d.constant}
    if not graded:
        name, d = next(iter(s.depends.items()))
        return Mark.FAIL, (
            f"{name} pays every text that was tried the same ({d.lowest:g}), right answers in {len(SHAPES)} forms among"
            " them: nothing can be learned from it. If it wants another form, give the rows a column completion that"
            " has it"
        )
    all_ = ", ".join(f"{name} ({d.lowest:.3g} to {d.highest:.3g})" for name, d in graded.items())
    other_columns = any(d.on_task for d in graded.values())
    what = "other columns" if other_columns else "the text alone"
    return Mark.SKIP, (
        f"{all_} read{'s' * (len(graded) == 1)} {what}: with another answer of the task the same is paid. So no text is"
        " right or wrong here, and what compares them is left out"
        + ("; give the rows a column completion that is right" if other_columns else "")
    )


def _where_paid(probe: Callable[[Subject], Awaitable[Answer]]) -> Callable[[Subject], Awaitable[Answer]]:
    """A probe that compares right answers with others. It is skipped, with a reason, where none is paid."""

    @functools.wraps(probe)
    async def asked(s: Subject) -> Answer:
        if s.known:
            return await probe(s)
        if s.gold and (read := _text_alone(s)) is not None and read[0] is Mark.SKIP:
            return NOTHING_RIGHT
        return NOTHING_PAID if s.gold else NOTHING_KNOWN

    return asked


@_where_paid
async def distractor(s: Subject) -> Answer:
    """Judges wrong answers that look right."""
    # A wrong answer fails if it earns as much as the right one to its task, or as much as the best right one anywhere.
    best = {source: max(a.scores.get(source, 0.0) for a in s.gold.values()) for source in s.sources}
    for judged in s.wrong.values():
        for source in s.sources:
            score = judged.scores.get(source, 0.0)
            if source not in s.deciding(judged.task) or (score >= best[source] and best[source] > 0):
                return Mark.FAIL, (
                    f"{judged.said} to {prompt_words(judged.task.prompt)} is wrong and earns {score:g} with {source}"
                )
    return Mark.OK, f"{len(s.wrong)} wrong answers that look right earn less"


@_where_paid
async def order(s: Subject) -> Answer:
    """Compares a right answer with a wrong one and with silence, by the sum of all sources: what the policy is paid."""
    for task in s.known:
        right, wrong = s.gold[task.id].outcome, s.wrong[task.id].outcome
        silent = (await s.judge(task, ("",), repeat=True)).outcome
        for name, other in (("a wrong one", wrong), ("silence", silent)):
            if right is not None and other is not None and other >= right:
                return Mark.FAIL, (
                    f"to {prompt_words(task.prompt)} the right answer earns {right:g} in all, and {name} {other:g}"
                )
    return Mark.OK, f"over {len(s.known)} tasks, all sources added up"


@dataclass
class VariantCount:
    """How often one kind of answer was tried, paid less than the right one, and paid no more than a wrong one."""

    tried: int = 0
    less: int = 0
    lost: int = 0


async def _variants(s: Subject, say: Callable[[Task], Mapping[str, str]]) -> tuple[Mapping[str, VariantCount], str]:
    """(counts of each kind of answer of `say`, in place of the last right turn; an example that was not paid)."""
    attempts = [(t, kind, text) for t in s.known[:TASKS_EACH] for kind, text in say(t).items()]
    judged = await s.judge_all([(t, s.last(t, text)) for t, _, text in attempts])
    counts, example = dict[str, VariantCount](), ""
    for (task, kind, _), answer in zip(attempts, judged, strict=True):
        count = counts.setdefault(kind, VariantCount())
        count.tried += 1
        # Three outcomes: paid in full, paid in part, or paid like a wrong answer. A graded reward may pay some forms
        # less, and that is no loss.
        deciding = set(s.deciding(task))
        if set(s.paid(answer)) == deciding:
            continue
        if set(s.part_paid(answer)) == deciding:
            count.less += 1
        else:
            count.lost += 1
            example = example or f"{answer.said}, where {s.gold[task.id].said} is right"
    return counts, example


def _losses(counts: Mapping[str, VariantCount], example: str) -> Answer:
    """The result of a probe of variants, from their counts."""
    if not counts:
        return Mark.SKIP, "no other spelling of these answers is known"
    lost = [f"{kind} ({n.lost} of {n.tried})" for kind, n in counts.items() if n.lost]
    less = [kind for kind, n in counts.items() if n.less and not n.lost]
    full = [kind for kind, n in counts.items() if not n.less and not n.lost]
    in_part = [f"paid less: {', '.join(less)}"] * bool(less)
    if lost:
        return Mark.WARN, "; ".join([f"not paid: {', '.join(lost)}", *in_part, f"such as {example}"])
    return Mark.OK, "; ".join([f"paid all the same: {', '.join(full)}"] * bool(full) + in_part)


@_where_paid
async def paraphrase(s: Subject) -> Answer:
    """Tries right answers with other text around them."""
    return _losses(*await _variants(s, lambda t: {k: f.replace("{}", s.right(t)[-1]) for k, f in PARAPHRASES.items()}))


@_where_paid
async def spelling(s: Subject) -> Answer:
    """Tries other spellings of the answer itself. A form such as a box stays around it."""

    def say(task: Task) -> dict[str, str]:
        right, core = s.right(task)[-1], s.core(task)
        variants = spellings(core) if core in right else {}
        return {kind: right.replace(core, text) if core else text for kind, text in variants.items()}

    return _losses(*await _variants(s, say))


@_where_paid
async def declared(s: Subject) -> Answer:
    """Tries `SingleTurn.paraphrases`, the answers that the environment itself calls right."""
    attempts = [(t, turns) for t in s.known for turns in s.env.paraphrases(t)]
    if not attempts:
        return Mark.SKIP, "the environment names no other ways to be right (paraphrases)"
    for (task, _), judged in zip(attempts, await s.judge_all(attempts), strict=True):
        if set(s.paid(judged)) != set(s.deciding(task)):
            return Mark.FAIL, (
                f"{judged.said} to {prompt_words(task.prompt)} is right by the environment's own word and earns"
                f" {dict(judged.scores)}"
            )
    return Mark.OK, f"{len(attempts)} answers"


def _above_chance(s: Subject, attacks: Sequence[Attack], what: str) -> Answer:
    """Fails if a text that does not depend on the question is rewarded more often than chance allows."""
    # One text for all tasks is right where it happens to be the answer, so a share of the tasks is allowed.
    over = [a for a in attacks if a.hits and a.share > s.chance(a.tried)]
    if over:
        return Mark.FAIL, over[0].shown + (f"; so do {', '.join(a.kind for a in over[1:4])}" if over[1:] else "")
    best = attacks[0]
    return Mark.OK, (
        f"{what}: the best is paid on {best.share:.0%} of tasks, of which chance allows {s.chance(best.tried):.0%}"
    )


@_where_paid
async def silence(s: Subject) -> Answer:
    """Tries texts that say nothing."""
    attacks = await s.attack(lambda _: {repr(x): x for x in SILENCE}, s.known)
    return _above_chance(s, attacks, f"{len(SILENCE)} ways to say nothing")


@_where_paid
async def constant(s: Subject) -> Answer:
    """Tries one answer for all tasks: common short words, and the most common right answers."""
    texts = list(dict.fromkeys([*s.answers()[:5], *WORDS]))
    attacks = await s.attack(lambda _: {repr(x): s.shaped(x) for x in texts}, s.known)
    return _above_chance(s, attacks, f"{len(texts)} answers, each to every task")


@_where_paid
async def random_strings(s: Subject) -> Answer:
    """Tries random strings, alone and in the form of right answers."""
    rng = s.random("noise")

    def say(_: Task) -> dict[str, str]:
        texts = enumerate(noise(rng, s.env.alphabet))
        # The number in the name is that of the alphabet, of which `noise` gives one string of each length.
        strings = {f"a random string of {len(x)} characters ({i // len(NOISE_LENGTHS)})": x for i, x in texts}
        return {**strings, **{f"{kind}, as an answer": s.shaped(x) for kind, x in strings.items() if s.shape != "bare"}}

    return _above_chance(s, await s.attack(say, s.known[:TASKS_EACH]), "random strings")


@_where_paid
async def templates(s: Subject) -> Answer:
    """Tries phrases without an answer, forms without content, and the prompt itself."""

    def say(task: Task) -> dict[str, str]:
        prompt = task.prompt if isinstance(task.prompt, str) else shown(task.prompt[-1]["content"])
        answers = {repr(x): x for x in PHRASES} | {f"{x!r} as the answer": s.shaped(x) for x in PHRASES}
        answers |= {f"an empty {name}": form.format("") for name, form in SHAPES.items() if name != "bare"}
        return {**answers, "the prompt": prompt, "the prompt as the answer": s.shaped(prompt)}

    return _above_chance(s, await s.attack(say, s.known[:TASKS_EACH]), "templates, empty forms and the prompt itself")


@_where_paid
async def several(s: Subject) -> Answer:
    """Tries lists of all answers, and a right answer with a wrong one, which must not be rewarded in both orders."""
    rng, answers = s.random("lists"), s.answers()[:200]
    attacks = await s.attack(lambda t: lists(answers, s.core(t), rng), s.known)
    if (answer := _above_chance(s, attacks, "lists of all answers"))[0] is not Mark.OK:
        return answer
    # A pair is left out if one answer contains the other (12 and 2): a verifier may read either one.
    tasks = [t for t in s.known if s.near(t)[-1] not in s.right(t)[-1] and s.right(t)[-1] not in s.near(t)[-1]]
    pairs = [(t, (s.right(t)[-1], s.near(t)[-1])) for t in tasks]
    right_first, right_last = [
        await s.judge_all([(t, s.last(t, "\n".join(texts[::step]))) for t, texts in pairs]) for step in (1, -1)
    ]
    if both := [a for a, b in zip(right_first, right_last, strict=True) if set(s.paid(a)) & set(s.paid(b))]:
        by_chance = len(both) / len(tasks) <= s.chance(len(tasks))
        return Mark.WARN if by_chance else Mark.FAIL, (
            f"a right answer beside a wrong one is paid in either order on {len(both)} of {len(tasks)} tasks, such"
            f" as {both[0].said}"
        )
    return answer


async def demonstrations(s: Subject) -> Answer:
    """Judges the completions of the data, also with the answers of the rows beside them."""
    rows = [r.task for r in s.env.abilities.rows or () if r.completion is not None and r.task.answer is not None]
    if not s.sources or len(rows) < FEWEST:
        return Mark.SKIP, "it needs rows with an answer that a reward reads, and a completion beside it"
    same_row, row_before, row_after = [await _share_paid(s, rows, by) for by in (0, -1, 1)]
    detail = f"{same_row:.0%} of {min(len(rows), TASKS_EACH)} completions of the data are paid"
    # If a column was moved by one row, the completions fit the answers of the neighbouring rows.
    if (neighbour := max(row_before, row_after)) > max(0.5, 2 * same_row):
        return (
            Mark.FAIL,
            f"{detail}, and {neighbour:.0%} with the answer of the row before or after: a column is shifted",
        )
    return (Mark.OK if same_row >= 0.5 else Mark.WARN), detail


async def _share_paid(s: Subject, rows: Sequence[Task], by: int) -> float:
    """The share of completions that are paid, each judged with the answer of the row `by` rows below its own."""
    pairs = [(t, replace(t, answer=rows[(i + by) % len(rows)].answer)) for i, t in enumerate(rows[:TASKS_EACH])]
    answers = await s.judge_all([(changed, (s.completions[t.id],)) for t, changed in pairs])
    return sum(any(a.scores.get(x, 0.0) > 0 for x in s.sources) for a in answers) / len(pairs)


async def told(s: Subject) -> Answer:
    """Looks for the answers in the prompts, and for those of other tasks to see how much is chance."""
    tasks = [t for t in s.tasks if t.answer is not None and s.core(t).strip()]
    # For each prompt: whether its own answer stands in it, and whether that of the next task does, which can be so by
    # chance only. The share of the second is subtracted.
    contained = [
        [bool(contains(replace(t, answer=s.core(of)), conversation(t.prompt)).score) for of in (t, following)]
        for t, following in zip(tasks, tasks[1:] + tasks[:1], strict=True)
    ]
    own_share, chance = (
        (sum(x) / max(1, len(contained)) for x in zip(*contained, strict=True)) if contained else (0.0, 0.0)
    )
    detail = f"the answer stands in {own_share:.0%} of {len(tasks)} prompts, and that of another task in {chance:.0%}"
    return (Mark.WARN if own_share - chance > 0.5 else Mark.OK if tasks else Mark.SKIP), detail


UNPAID = (
    "on such tasks being right is not paid. Mend the verifier, the rubric or the answers; posttrain show RUN --wrong"
    " shows what a model says"
)
HOLE = (
    "the policy will find this sooner than you: make the verifier read one answer from one place, and refuse everything"
    " else; where a model judges, say so in its rubric"
)
PAYMENT = (
    Probe("gold", "right answers are paid more than wrong ones, on every task", UNPAID, gold),
    Probe("distractor", "an answer that looks right and is not earns less than a right one", HOLE, distractor),
    Probe(
        "order",
        "with all sources added up a right answer earns most",
        "lower the weights of sources that do not look at the answer (env.rewards.N.weight)",
        order,
    ),
    Probe(
        "paraphrase",
        "a right answer in other words is still paid",
        "say in the prompt in which form you want the answer, or read it more generously; a policy learns the form from"
        " reward alone otherwise",
        paraphrase,
    ),
    Probe(
        "gold variants",
        "a right answer spelled otherwise is still paid (false negatives)",
        "normalise before comparing (strip white space, read numbers as numbers), or say in the prompt which spelling"
        " counts",
        spelling,
    ),
    Probe("declared variants", "what the environment itself calls right is paid", UNPAID, declared),
    Probe("silence", "saying nothing earns nothing", HOLE, silence),
    Probe(
        "constant",
        "one answer to everything earns its share at most",
        "balance the answers of your tasks, or judge more than the answer",
        constant,
    ),
    Probe("random strings", "noise earns nothing", HOLE, random_strings),
    Probe("templates", "forms without content, pleas and the prompt itself earn nothing", HOLE, templates),
    Probe(
        "demonstrations",
        "the completions of the data are paid",
        "look whether answers and completions belong to the same rows, and are written in the form that is rewarded",
        demonstrations,
    ),
    Probe(
        "answer in the prompt",
        "the prompt does not give its answer away",
        "where it is not meant to be read there, take it out: the policy learns to copy it",
        told,
    ),
    Probe("several answers", "whoever names every answer earns nothing", HOLE, several),
)
