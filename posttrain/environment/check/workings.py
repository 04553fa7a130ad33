"""Probes of how judging works: repeated, under load and in groups, on odd texts, its speed, and its sandboxes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from posttrain.core.content import prompt_words
from posttrain.core.ports import Attempt
from posttrain.core.stop import StepNumber
from posttrain.core.types import Stop, Task
from posttrain.core.verdict import State
from posttrain.environment.check.probe import TEXTS, Answer, JudgedAnswer, Mark, Probe
from posttrain.environment.check.probe_answers import ODD
from posttrain.environment.check.subject import Subject
from posttrain.environment.tools.offered import OfferedTools
from posttrain.sandbox.backends import Unconfined
from posttrain.sandbox.choose_backend import HELP
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.selftest import selftest
from posttrain.verifier.batch_functions import misplaced

REPEATS = 3
"""How often the same answers are judged, one at a time."""
CONCURRENT = 192
"""The number of answers that the probe `pool` judges at once."""
DEPTH = 4
"""The depth to which attributes of the environment are searched for sandboxes."""
SECONDS = 0.5
"""The seconds for which throughput is measured."""


def _comparable(answer: JudgedAnswer) -> Mapping[str, object]:
    """The comparable part of the verdicts: for each source its score, or its state if it has none."""
    verdicts = {j.source: j.verdict for j in answer.judged if j.counts}
    return {source: v.score if v.state is State.VALUE else v.state.value for source, v in verdicts.items()}


def _mixed(s: Subject) -> list[tuple[Task, Sequence[str]]]:
    """Right, wrong and empty answers in turn."""
    if not s.gold:
        return [(t, ("",)) for t in s.tasks]
    return [
        x for t in s.tasks if t.id in s.gold for x in ((t, s.right(t)), (t, s.near(t)), (t, ("",) * len(s.right(t))))
    ]


def _differ(one: Sequence[JudgedAnswer], two: Sequence[JudgedAnswer]) -> str:
    """Returns the difference between two rounds of verdicts about the same answers; '' if there is none."""
    changed = [(a, b) for a, b in zip(one, two, strict=True) if _comparable(a) != _comparable(b)]
    if not changed:
        return ""
    a, b = changed[0]
    return (
        f"{len(changed)} of {len(one)} answers, such as {a.said} to {prompt_words(a.task.prompt)}:"
        f" {dict(_comparable(a))} and then {dict(_comparable(b))}"
    )


async def repeats(s: Subject) -> Answer:
    """Judges one answer at a time, so that concurrency cannot be the reason for a difference."""
    cases = _mixed(s)[:24]
    first = [await s.judge(*case) for case in cases]
    for _ in range(REPEATS - 1):
        if why := _differ(first, [await s.judge(*case) for case in cases]):
            return Mark.FAIL, why
    return Mark.OK, f"{len(cases)} answers judged {REPEATS} times"


async def pool(s: Subject) -> Answer:
    """Judges many answers at once, in another order and with frequent thread switches."""
    cases = _mixed(s)[:24]
    alone = [await s.judge(*case) for case in cases]
    # A verifier whose verdicts change even one at a time would fail here too, and not because of the crowd.
    if _differ(alone, [await s.judge(*case) for case in cases]):
        return Mark.SKIP, "the verdicts differ even one at a time"
    crowd = [i % len(cases) for i in range(CONCURRENT)]
    s.random("crowd").shuffle(crowd)
    with _frequent_switches():
        judged = await s.judge_all([cases[i] for i in crowd])
    why = _differ([alone[i] for i in crowd], judged)
    return (Mark.FAIL, why) if why else (Mark.OK, f"{CONCURRENT} judged at once say what they said one at a time")


@contextmanager
def _frequent_switches() -> Iterator[None]:
    """Threads take turns every 10 microseconds instead of every 5 milliseconds, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def siblings(s: Subject) -> Answer:
    """Judges groups of four answers in other orders, where a reward gets whole groups."""
    if (together := s.env.abilities.together) is None:
        return Mark.SKIP, "no reward gets the answers of a group in one call"
    for n, task in enumerate(s.tasks[:8]):
        texts = (s.right(task)[-1], s.near(task)[-1]) if task.id in s.gold else TEXTS[-2:]
        attempts = [Attempt(task, (text,), Stop.SAID) for text in (*texts, *TEXTS[:2])]
        if why := await misplaced(together, attempts, StepNumber(), n):
            what = "go to the wrong answers of their group" if why == "siblings" else "change with the order of a group"
            return Mark.FAIL if why == "siblings" else Mark.WARN, f"scores {what}: {prompt_words(task.prompt)}"
    return Mark.OK, "groups of four answers, judged in another order"


async def episodes(s: Subject) -> Answer:
    """Plays the right turns of several tasks one after another, in the other order, and at once."""
    tasks = [t for t in s.tasks if t.id in s.gold and len(s.right(t)) > 1][:8]
    rounds = [{t.id: await s.seen(t) for t in order} for order in (tasks, tasks[::-1])]
    rounds.append(dict(zip(rounds[0], await asyncio.gather(*map(s.seen, tasks)), strict=True)))
    for task in tasks:
        for again in rounds[1:]:
            if (was := rounds[0][task.id]) != (now := again[task.id]):
                return Mark.FAIL, f"to {prompt_words(task.prompt)} the world answers {was!r:.80}, and then {now!r:.80}"
    # If different turns always get the same answer, the tools may not have been reached at all.
    if len(tasks) > 2 and all(x == rounds[0][tasks[0].id] for x in rounds[0].values()):
        return Mark.WARN, f"in {len(tasks)} tasks the world answers the same to different turns"
    return Mark.OK if tasks else Mark.SKIP, f"{len(tasks)} right answers with several turns, in any order and at once"


async def odd(s: Subject) -> Answer:
    """Judges texts on which a parser may fail."""
    judged = [(kind, await s.judge(s.tasks[0], (text,), repeat=True)) for kind, text in ODD.items()]
    if failures := [(kind, answer.failed) for kind, answer in judged if answer.failed]:
        kind, j = failures[0]
        assert j is not None
        return Mark.FAIL, (
            f"{kind} breaks {j.source} ({j.verdict.kind}: {j.verdict.why}), one of {len(failures)} of {len(judged)}"
            " texts that do"
        )
    return Mark.OK, f"{len(judged)} texts, each a verdict"


async def throughput(s: Subject) -> Answer:
    """Measures how many answers are judged in a second, 64 at a time, and how long one takes alone (the median)."""
    cases, judged_count, singles = _mixed(s), 0, list[float]()
    for case in cases[:8]:
        begun = time.perf_counter()
        await s.judge(*case)
        singles.append(time.perf_counter() - begun)
    begun = time.perf_counter()
    while (seconds := time.perf_counter() - begun) < SECONDS or not judged_count:
        wave = [cases[(judged_count + i) % len(cases)] for i in range(64)]
        await s.judge_all(wave)
        judged_count += len(wave)
    rate, single = judged_count / seconds, sorted(singles)[len(singles) // 2]
    detail = f"{rate:.3g} answers/s with 64 at once, {single * 1000:.3g} ms one alone; expected {s.rate:.3g}/s"
    return (Mark.OK if rate >= s.rate else Mark.FAIL), detail


async def sandbox(s: Subject) -> Answer:
    """Runs the attacks of the self-test on the sandboxes of this environment."""
    boxes = sandboxes(s)
    if not boxes:
        return Mark.SKIP, "nothing here runs programs that a model wrote"
    for box in boxes:
        # Without a sandbox the attacks would succeed on the user's own machine, so they are not run.
        if isinstance(box.backend, Unconfined):
            return Mark.FAIL, "none: programs that a model wrote run with your user's full rights"
        if wrong := await asyncio.to_thread(selftest, box.backend):
            return Mark.FAIL, f"{box.name}: {'; '.join(wrong)}"
    return Mark.OK, ", ".join(f"{box.name} withstood every attack" for box in boxes)


def sandboxes(s: Subject) -> list[Sandbox]:
    """The sandboxes in the attributes of the environment, its tools and its sources."""
    boxes: dict[int, Sandbox] = {}
    # Objects are remembered by their identity: they may refer to each other in circles, and equal ones may differ.
    visited: set[int] = set()
    waiting: list[tuple[object, int]] = [(s.env, 0)]
    while waiting:
        thing, depth = waiting.pop()
        if id(thing) in visited or depth > DEPTH:
            continue
        visited.add(id(thing))
        if isinstance(thing, Sandbox):
            boxes[id(thing)] = thing
        elif isinstance(thing, list | tuple):
            waiting += [(x, depth + 1) for x in thing if not isinstance(x, str | int | float)]
        elif not isinstance(thing, type):
            if isinstance(thing, OfferedTools) and "python" in thing.names:
                waiting.append((thing.interpreters, depth + 1))  # opens the sandbox, because the probe needs it
            # `__dict__` and not `dir`, so that no property is called and the walk changes nothing.
            waiting += [(x, depth + 1) for x in getattr(thing, "__dict__", {}).values()]
    return list(boxes.values())


WORKINGS = (
    Probe(
        "the same twice",
        "a verdict depends on task and text alone",
        "take chance, time and memory of earlier answers out of the verifier; a judge model needs temperature 0",
        repeats,
    ),
    Probe(
        "the same in a crowd",
        "verdicts do not change when many are judged at once",
        "give the function processes of its own (env.rewards.N.workers=4), or keep no global state in it",
        pool,
    ),
    Probe(
        "the same siblings",
        "scores go to the answer that they are about",
        "return one score for each completion, in their order",
        siblings,
    ),
    Probe(
        "episodes apart",
        "what the world answers depends on its own episode alone",
        "keep the state of tools in the episode: no cache and no global that another episode reads",
        episodes,
    ),
    Probe(
        "odd texts",
        "any text gets a verdict",
        "a policy that breaks the verifier when it is wrong is never told so: catch what parsing raises and return 0",
        odd,
    ),
    Probe(
        "throughput",
        "answers are judged as fast as they are expected (--rate)",
        "make it cheaper, or judge side by side (env.rewards.N.workers=4); generation waits for the last verdict of a"
        " step",
        throughput,
    ),
    Probe("sandbox", "model-written programs cannot get out", HELP, sandbox),
)
