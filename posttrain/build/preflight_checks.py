"""Checks before the first step, on the parts of the run: prompts, verifier, user's rewards, templates and split. The
complete check of an environment is `posttrain.environment.conformance`; here its claims are tested on a few tasks, with
those that need the policy's tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from posttrain.build.request.chat_or_plain import other_form
from posttrain.checks.data_checks import as_written, sameness
from posttrain.core.content import conversation, prompt_words
from posttrain.core.ports import Attempt, Environment, Seat, Utterance
from posttrain.core.sampling import Sampling
from posttrain.core.types import Message, Task
from posttrain.core.verdict import State, Verdict, outcome
from posttrain.diagnose.rules.data_notes import data_notes
from posttrain.environment.check.probe_answers import SHAPES
from posttrain.environment.conformance import as_asked
from posttrain.environment.scripted_policy import attempt, judged
from posttrain.environment.templates import template_process
from posttrain.environment.templates.chat_template import PROBE, Chat
from posttrain.environment.templates.renderer import Renderer
from posttrain.environment.templates.template_lint import template_findings
from posttrain.role.episode_conversation import DemonstrationTalk
from posttrain.role.judging import JUDGE_RETRIES
from posttrain.stages.run_parts import RunParts, StageSetting
from posttrain.system.errors import DataError, InvariantError, PosttrainError

TASKS = 8
"""Tasks of each split that are tested."""
TURNS, PLAYED = 3, 30.0
"""Turns that are played in an environment without known right answers, and the most seconds of a scripted episode."""
ANSWERS, MOMENT = 4, 1.0
"""Number of different answers with which the user's rewards are tried, and the seconds after which that ends."""
LEAKS, SECONDS = 500, 0.3
"""Most training tasks compared with the held-out ones, and most seconds spent on it."""


async def prove_start(parts: RunParts, tokenizer: Any) -> list[str]:
    """Test every claim of the run's environments; returns notes for the user.

    Raises:
        InvariantError: the first claim about prompts, verifier or split that does not hold.
        DataError: the data cannot be read.
    """
    # By identity: stages that share an environment are tested once.
    settings = {id(s.environment): s for s in map(parts.setting, parts.run.stages)}
    notes = [note for s in settings.values() for note in await _prove(parts, s, tokenizer)]
    pairs = [(parts.setting(s).environment, parts.other_environments(s)) for s in parts.run.stages]
    # Each environment is compared once with the same others.
    for env, others in {(id(env), *map(id, others)): (env, others) for env, others in pairs}.values():
        notes += split_is_clean(env, others)
    return list(dict.fromkeys(notes))


async def _prove(parts: RunParts, setting: StageSetting, tokenizer: Any) -> list[str]:
    """All tests of one environment except `split_is_clean`; returns notes."""
    env = setting.environment
    held, train = (
        [t for t in tasks if len(t.prompt)]  # a text that is learned whole has no prompt
        for tasks in (env.heldout[:TASKS], _first_tasks(env.train, TASKS))
    )
    prompts_begin_once(setting, tokenizer, [*held, *train])
    await gold_is_paid(env, [*held, *train])
    await near_misses_are_not(env, [*held, *train])
    notes = [
        *await rewards_tell(env, [*train, *held]),
        # Several judgements may be about one prompt, which is then no repeat.
        *data_notes(env.train, env.heldout, repeats=env.abilities.judgements is not None),
        *lint_notes(parts, env),
        *other_form(parts, env, [*train, *held]),
    ]
    observes = [await conversations_append(parts, setting, task) for task in [*train[:1], *held[:1]]]
    imitates = any(s.demonstrated or s.judged is not None for s in parts.run.stages)
    render, roles_that_follow = cast("Renderer", parts.renderer), ["user"] if any(observes) else []
    findings = template_findings(render, env, [*held, *train], roles_that_follow, imitates)
    notes += [f"{f.name}: {f.seen}; {f.advice}" for f in findings if f.warns]
    return [*notes, *(observations_can_be_written(parts, env.name) if any(observes) else [])]


def lint_notes(parts: RunParts, env: Environment) -> list[str]:
    """Notes of what the environment finds in its own data: all warnings, and the figures on lengths."""
    if env.abilities.lint is None:
        return []

    def length(task: Task, completion: str) -> int:
        return sum(len(ids) for ids in parts.renderer.pair(task.prompt, completion, task.id, task.tools))

    findings = [f for f in env.abilities.lint(length, parts.sampler.context) if f.warns or f.name == "length bias"]
    return [f"{f.name}: {f.seen}{f'; {f.advice}' if f.advice else ''}" for f in findings]


def observations_can_be_written(parts: RunParts, environment: str) -> list[str]:
    """Checks that the tokenizer can encode every observation. A note says that missing characters will be replaced.

    Raises:
        DataError: the tokenizer cannot encode the replacement either. The message names the environment.
    """
    writable = cast("Renderer", parts.renderer).writable
    try:
        writable.check()
    except DataError as error:
        raise DataError(f"environment {environment!r} shows the policy what its world answers: {error}") from error
    if writable.everything:
        return []
    return [
        "the tokenizer has no token for some characters; where the world answers with one, the policy is shown"
        f" {writable.stand_in!r}"
    ]


def prompts_begin_once(setting: StageSetting, tokenizer: Any, tasks: Sequence[Task]) -> None:
    """Checks that a rollout's prompt is what the model's own tokenizer writes: one begin token, nothing appended."""
    special = set(tokenizer.all_special_ids)
    for task in tasks:
        if not isinstance(task.prompt, str) and any(
            s in str(m.get("content")) for m in task.prompt for s in tokenizer.all_special_tokens
        ):
            # posttrain encodes such a message as text, and the model's own tokenizer as the special token.
            continue
        got = np.asarray(setting.rollout.dialogue(task.id).see(task.prompt)).tolist()
        if isinstance(task.prompt, str):
            # Allowed is what the tokenizer writes, without any number of the special tokens at its end: a prompt may
            # begin with special tokens, and must not end in one. If the text itself begins with a special token, the
            # tokens without any added ones are allowed too.
            full, bare = (
                tokenizer(task.prompt)["input_ids"],
                tokenizer(task.prompt, add_special_tokens=False)["input_ids"],
            )
            options = [
                full[: len(full) - n] for n in range(len(full)) if all(i in special for i in full[len(full) - n :])
            ]
            options += [bare] if bare[:1] and bare[0] in special else []
        else:
            text = template_process.apply(tokenizer, Chat(tokenizer, ()).readable(task.prompt), generate=True)
            options = [tokenizer(text, add_special_tokens=False)["input_ids"]]
        if got not in options:
            raise InvariantError(
                f"task {task.id!r}: a rollout would be shown {tokenizer.decode(got)!r} ({len(got)} tokens), and the"
                f" model's own tokenizer writes {tokenizer.decode(options[0])!r} ({len(options[0])}). Special tokens"
                " are doubled or lost, or another template is used; the policy would be trained on beginnings it is"
                " never served"
            )


async def gold_is_paid(env: Environment, tasks: Sequence[Task]) -> None:
    """Checks that the environment's own verifier gives known right answers a score of 1."""
    gold = env.abilities.gold
    if gold is None or gold.verdict is None:
        return
    for task, right in gold.known(tasks):
        result = await _own_verdict(env, gold.verdict, task, right)
        if result.score != 1.0:
            raise InvariantError(
                f"verifier {env.name!r} scores the right answer {right} to task {task.id!r}"
                f" ({prompt_words(task.prompt)}) {result.score} ({result.why or result.kind}), not 1: the policy could"
                " never be right. Mend verify() or gold(); where verify() gives grades of another scale, set"
                " vouches_for_gold = False in the class"
            )


async def near_misses_are_not(env: Environment, tasks: Sequence[Task]) -> None:
    """Checks that the environment's own verifier gives a score of 0 to an empty answer and to one that looks right.

    A verifier with partial credit must give less than 1.
    """
    gold = env.abilities.gold
    if gold is None or gold.verdict is None:
        return
    for task, right in gold.known(tasks):
        wrong = [gold.wrong(task)] if gold.wrong is not None else []
        # Two wrong answers: one that looks right, where the environment gives it, and silence.
        for turns in (*wrong, ("",) * len(right)):
            result = await _own_verdict(env, gold.verdict, task, turns)
            if result.score != 0.0 and not (gold.pays_parts and result.score is not None and result.score < 1):
                raise InvariantError(
                    f"verifier {env.name!r} pays {result.score} for {list(turns)}, which is no answer to task"
                    f" {task.id!r} ({prompt_words(task.prompt)}; right: {right}). The policy will find this out sooner"
                    " than you: mend verify()"
                )


async def rewards_tell(env: Environment, tasks: Sequence[Task]) -> list[str]:
    """Notes on the user's rewards, from a few answers that are judged within `MOMENT`. `posttrain check` tries more."""
    gold = env.abilities.gold
    # Answers that the environment vouches for are tried by `gold_is_paid`. Without a judge there is no reward to try.
    if gold is None or env.abilities.vouched or not env.abilities.judges:
        return []
    # `ANSWERS` tasks with different answers, so that one task's right answer is wrong for the next task.
    known = [(t, a) for a, t in {turns[0]: t for t, turns in gold.known(tasks) if len(turns) == 1}.items()][:ANSWERS]
    if len(known) < ANSWERS:
        return []

    async def earned(said: Sequence[str]) -> np.ndarray:
        """The reward of one answer to each task, in order; NaN where it was not judged."""
        rewards = [outcome(await judged(env, t, [text])) for (t, _), text in zip(known, said, strict=True)]
        return np.array([np.nan if x is None else x for x in rewards])

    try:
        async with asyncio.timeout(MOMENT):
            return await _won_without_answers([t for t, _ in known], [a for _, a in known], earned)
    except TimeoutError:
        return []  # a slow reward is left to `posttrain check`


async def _won_without_answers(
    tasks: Sequence[Task], answers: Sequence[str], earned: Callable[[Sequence[str]], Awaitable[np.ndarray]]
) -> list[str]:
    """Notes where rewards seem inverted, or can be won without an answer. Answers are tried in each form of `SHAPES`,
    such as inside a box, until right ones earn more than those of other tasks; then compared with no answers."""
    for form in SHAPES.values():
        said = [form.format(a) for a in answers]
        # Each task gets its own answer, and then that of the next one.
        right, wrong = await earned(said), await earned([*said[1:], said[0]])
        if np.all(right < wrong):
            return ["rewards may be inverted: right answers earn less than wrong ones. Try them: posttrain check"]
        if np.all(right > wrong):
            break
    else:
        return []  # the rewards look at something else than the answer
    texts = {
        "saying nothing": [""] * len(said),
        "one answer to everything": said[:1] * len(said),
        "the prompt itself": [conversation(t.prompt) for t in tasks],
        "a list of all answers": [form.format(", ".join([*answers, "0"]))] * len(said),
    }
    won = [name for name, each in texts.items() if np.all(await earned(each) >= right)]
    return [f"rewards may be won without an answer, by {' and '.join(won)}. Try them: posttrain check"] if won else []


async def _own_verdict(
    env: Environment, verdict: Callable[[Attempt], Awaitable[Verdict]], task: Task, turns: Sequence[str]
) -> Verdict:
    """The verdict on a scripted episode. A verifier that fails is asked again, as often as in a rollout.

    Raises:
        InvariantError: it fails each time, which says nothing about the answer.
    """
    played = await _play(env, task, turns)
    result = await verdict(played)
    # A verifier may fail now and then in a rollout too.
    for _ in range(JUDGE_RETRIES):
        if result.state is not State.FAILED:
            break
        result = await verdict(played)
    if result.state is State.FAILED:
        raise InvariantError(
            f"verifier {env.name!r} fails on task {task.id!r} ({result.kind}: {result.why or 'without a reason'}), each"
            f" of {JUDGE_RETRIES + 1} times. This is no verdict on the answer: look at what it needs, its sandbox or"
            " its services, and start again"
        )
    return result


async def _play(env: Environment, task: Task, turns: Sequence[str]) -> Attempt:
    """One scripted episode. InvariantError where the environment asks for more turns than its known answer has."""
    try:
        return await attempt(env, task, turns)
    except IndexError as error:
        raise InvariantError(
            f"task {task.id!r}: {error}. gold() and distractor() must give every turn the environment asks for"
        ) from error


async def conversations_append(parts: RunParts, setting: StageSetting, task: Task) -> bool:
    """Play one scripted episode with the policy's own chat template, to see that each turn appends to one sequence;
    DataError where the template rewrites or refuses messages. Returns whether the environment may send observations."""
    render: Any = parts.renderer
    # Each turn is a sequence of its own, so nothing must append. There may be observations.
    if render.history == "rewrite":
        return True
    env = setting.environment
    gold = env.abilities.gold
    # Known right answers lead furthest into an episode. Without them a script of neutral texts shows the observations.
    turns = (gold.right(task) if gold is not None and env.abilities.vouched else None) or (_probe_text(render),) * TURNS
    chat, dialogue = not isinstance(task.prompt, str), setting.rollout.dialogue

    def scripted(said: Sequence[str]) -> _ScriptedTalk:
        return _ScriptedTalk(render, dialogue(task.id), said, Sampling(), chat=chat, task=task.id)

    talk = scripted(turns)
    talk.other = lambda: scripted((_probe_text(render),) * TURNS)
    try:
        async with asyncio.timeout(PLAYED):
            await env.play(task, talk)
    except (_ScriptEnded, TimeoutError):
        pass  # what was played so far has shown what the template does
    except PosttrainError:
        raise
    except Exception:
        pass  # an error of the environment is not the template's; in an episode it becomes a failed verdict
    # `shown` counts the prompt too, so more than 1 means that an observation was sent.
    if task.tools:  # tools of the row itself: they are only offered, and one message ends the episode
        return talk.shown > 1
    if talk.tools and (why := render.rewrites([Message(role="tool", content="")], talk.tools)):
        raise DataError(f"task {task.id!r}: {why}")
    # Raises DataError where the template cannot write the answer of a tool. Mistral's wants ids of 9 characters.
    if talk.tools and not isinstance(task.prompt, str):
        answer = Message(role="tool", name="tool", content="0", tool_call_id="call00000")
        render.encode(render.template.between(list(task.prompt), [answer], talk.tools).text)
    return talk.shown > 1 or bool(talk.tools) or env.abilities.tools is not None


def _probe_text(render: Renderer) -> str:
    """A neutral text for a turn: `PROBE`, or some other text that this tokenizer can encode."""
    try:
        return PROBE if len(render.encode(PROBE)) else ""
    except DataError:
        return next((text for i in range(64) if i not in render.stop_ids and (text := render.decode([i])).strip()), "")


class _ScriptEnded(Exception):
    """The script has no more turns."""


class _ScriptedTalk(DemonstrationTalk):
    """Scripted turns in the policy's chat template.

    It records the tools that are offered (`tools`), and how often the policy was shown something (`shown`): the prompt,
    then observations.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    shown = 0
    other: Callable[[], _ScriptedTalk]
    """Makes the talk of a seat that is not trained, as if the policy played it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._seats: dict[str, _ScriptedTalk] = {}

    def seat(self, name: str) -> Seat:
        return self._seats.setdefault(name, self.other())

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = self.tools or tools
        self.shown += 1
        super().see(content, tools)

    async def say(self, most: int | None = None) -> Utterance:
        if len(self.turns) == len(self._script):
            raise _ScriptEnded
        return await super().say(most)


def split_is_clean(env: Environment, others: Sequence[Environment] = ()) -> list[str]:
    """Checks that none of the first training tasks is a held-out task of `env` or of `others`, which are measured too.

    Tasks of different environments are the same if their prompts are written alike. Later training tasks are compared
    when a step asks for them. Returns a note if two tasks have the same prompt and answer, and the environment's key
    says that they differ.
    """
    same = sameness(env)
    # By the environment's own key, which decides; those of other environments by the text of the prompt; and by prompt
    # and answer, to find a key that tells equal tasks apart.
    held = {same(t): t.id for t in env.heldout}
    elsewhere = {as_written(t): t.id for other in others for t in other.heldout}
    asked = {as_asked(t): t.id for t in env.heldout if t.answer is not None}
    begun = time.perf_counter()
    for task in _first_tasks(env.train, LEAKS):
        if (twin := held.get(same(task), elsewhere.get(as_written(task)))) is not None:
            raise InvariantError(
                f"training task {task.id!r} ({prompt_words(task.prompt)}) is held-out task {twin!r}: held-out accuracy"
                " would measure memory. Take it out of one of the two"
            )
        if twin := asked.get(as_asked(task)):
            return [
                f"told apart: training task {task.id!r} has the prompt and the answer of held-out task {twin!r}, which"
                " the environment's key tells apart. Held-out accuracy measures memory: make key() depend on both alone"
            ]
        if time.perf_counter() - begun > SECONDS:
            break
    return []


def _first_tasks(source: Any, most: int) -> Any:
    """The first tasks of a source, in order. DataError where the source is empty."""
    if source.count == 0:
        raise DataError("there are no training tasks: every prompt went to the held-out split, or the source is empty")
    return (source.task(i) for i in range(most if source.count is None else min(most, source.count)))
