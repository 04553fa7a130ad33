"""What is proved before the first step, on the parts as they were built: prompts, verifier, split. Costs a fraction of
a second.

The whole proof of an environment is `posttrain.environment.prove`; these are its claims on a handful of tasks, and
those that need the policy's tokenizer too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from posttrain.checks.data import as_written, sameness
from posttrain.controller.parts import RunParts, StageSetting
from posttrain.core.errors import DataError, InvariantError, PosttrainError
from posttrain.core.ports import Attempt, Environment, Seat, Utterance
from posttrain.core.sampling import Sampling
from posttrain.core.types import Message, Task
from posttrain.environment import templates
from posttrain.environment.chat import PROBE, Chat
from posttrain.environment.render import Renderer
from posttrain.environment.scripted import attempt
from posttrain.role.talk import DemonstrationTalk

TASKS = 8
"""Tasks of each split looked at."""
TURNS, PLAYED = 3, 30.0
"""Turns said to an environment whose right answers are not known, and the most seconds such an episode may take."""
LEAKS, SECONDS = 500, 0.3
"""Training tasks compared with the held-out ones, and the most seconds that may take."""


async def prove_start(parts: RunParts, tokenizer: Any) -> list[str]:
    """Every claim, or the error of the first that does not hold; what is worth telling, for people.

    Raises:
        InvariantError: prompts, verifier or split are not what they claim to be.
        DataError: the data cannot be read.
    """
    settings = {id(s.environment): s for s in map(parts.setting, parts.run.stages)}
    notes = [note for s in settings.values() for note in await _prove(parts, s, tokenizer)]
    pairs = [(parts.setting(s).environment, parts.other_environments(s)) for s in parts.run.stages]
    for env, others in {(id(env), *map(id, others)): (env, others) for env, others in pairs}.values():
        split_is_clean(env, others)
    return list(dict.fromkeys(notes))


async def _prove(parts: RunParts, setting: StageSetting, tokenizer: Any) -> list[str]:
    """The claims of one environment."""
    env = setting.environment
    held = list(env.heldout[:TASKS])
    train = list(_some(env.train, TASKS))
    prompts_begin_once(setting, tokenizer, [*held, *train])
    await gold_is_paid(env, [*held, *train])
    await near_misses_are_not(env, [*held, *train])
    answered = [await conversations_append(parts, setting, task) for task in [*train[:1], *held[:1]]]
    return observations_can_be_written(parts, env.name) if any(answered) else []


def observations_can_be_written(parts: RunParts, environment: str) -> list[str]:
    """Whatever the world answers, the tokenizer can write it, with another character where it lacks one, which is then
    said.

    Raises:
        DataError: not even so; by the environment's name.
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
    """A rollout's prompt is what the model's own tokenizer makes of it, its beginning written once and nothing put
    behind."""
    special = set(tokenizer.all_special_ids)
    for task in tasks:
        if not isinstance(task.prompt, str) and any(
            s in str(m.get("content")) for m in task.prompt for s in tokenizer.all_special_tokens
        ):
            continue  # written out so that it stays text, which the model's own tokenizer does not do
        got = np.asarray(setting.rollout.dialogue(task.id).see(task.prompt)).tolist()
        if isinstance(task.prompt, str):
            full, bare = (
                tokenizer(task.prompt)["input_ids"],
                tokenizer(task.prompt, add_special_tokens=False)["input_ids"],
            )
            options = [
                full[: len(full) - n] for n in range(len(full)) if all(i in special for i in full[len(full) - n :])
            ]
            options += [bare] if bare[:1] and bare[0] in special else []
        else:
            text = templates.apply(tokenizer, Chat(tokenizer, ()).readable(task.prompt), generate=True)
            options = [tokenizer(text, add_special_tokens=False)["input_ids"]]
        if got not in options:
            raise InvariantError(
                f"task {task.id!r}: a rollout would be shown {tokenizer.decode(got)!r} ({len(got)} tokens), and the"
                f" model's own tokenizer writes {tokenizer.decode(options[0])!r} ({len(options[0])}). Special tokens"
                " are doubled or lost, or another template is used; the policy would be trained on beginnings it is"
                " never served"
            )


async def gold_is_paid(env: Environment, tasks: Sequence[Task]) -> None:
    """The environment's own verifier gives a right answer full reward, where the environment vouches for one."""
    gold = env.abilities.gold
    if gold is None or gold.verdict is None:
        return
    for task, right in gold.known(tasks):
        own = await gold.verdict(await _play(env, task, right))
        if own.score != 1.0:
            raise InvariantError(
                f"verifier {env.name!r} scores the right answer {right} to task {task.id!r} ({task.prompt!r:.80})"
                f" {own.score} ({own.why or own.kind}), not 1: the policy could never be right. Mend verify() or gold()"
            )


async def near_misses_are_not(env: Environment, tasks: Sequence[Task]) -> None:
    """The environment's own verifier gives an answer that only looks right, and silence, nothing; less than all where
    it pays parts."""
    gold = env.abilities.gold
    if gold is None or gold.verdict is None:
        return
    for task, right in gold.known(tasks):
        wrong = [gold.wrong(task)] if gold.wrong is not None else []
        for turns in (*wrong, ("",) * len(right)):
            own = await gold.verdict(await _play(env, task, turns))
            if own.score != 0.0 and not (gold.pays_parts and own.score is not None and own.score < 1):
                raise InvariantError(
                    f"verifier {env.name!r} pays {own.score} for {list(turns)}, which is no answer to task {task.id!r}"
                    f" ({task.prompt!r:.80}; right: {right}). The policy will find this out sooner than you: mend"
                    " verify()"
                )


async def _play(env: Environment, task: Task, turns: Sequence[str]) -> Attempt:
    """One scripted episode; InvariantError where the environment asks for more turns than it says an answer takes."""
    try:
        return await attempt(env, task, turns)
    except IndexError as error:
        raise InvariantError(
            f"task {task.id!r}: {error}. gold() and distractor() must give every turn the environment asks for"
        ) from error


async def conversations_append(parts: RunParts, setting: StageSetting, task: Task) -> bool:
    """One episode of scripted turns through the policy's own chat template: where turns cannot be one sequence, the run
    does not start. Whether the world may answer the policy in it.

    Raises:
        DataError: the template rewrites what it wrote before, or refuses the messages; with the place, and what to set.
    """
    render: Any = parts.renderer
    if render.history == "rewrite":
        return True
    env = setting.environment
    gold = env.abilities.gold
    turns = (gold.right(task) if gold is not None and gold.vouched else None) or (_sayable(render),) * TURNS
    chat, dialogue = not isinstance(task.prompt, str), setting.rollout.dialogue
    talk = _Rehearsed(render, dialogue(task.id), turns, Sampling(), chat=chat, task=task.id)
    talk.other = lambda: _Rehearsed(
        render, dialogue(task.id), (_sayable(render),) * TURNS, Sampling(), chat=chat, task=task.id
    )
    try:
        async with asyncio.timeout(PLAYED):
            await env.play(task, talk)
    except (_Over, TimeoutError):
        pass
    except PosttrainError:
        raise
    except Exception:
        pass  # what breaks in the world is no matter of the template; episodes make it a failed verdict
    if talk.tools and (why := render.rewrites([Message(role="tool", content="")], talk.tools)):
        raise DataError(f"task {task.id!r}: {why}")
    if talk.tools and not isinstance(task.prompt, str):
        answer = Message(role="tool", name="tool", content="0", tool_call_id="call00000")
        render.encode(render.template.between(list(task.prompt), [answer], talk.tools).text)
    return talk.shown > 1 or bool(talk.tools) or env.abilities.tools is not None


def _sayable(render: Renderer) -> str:
    """A turn that says nothing in particular: `PROBE`, or what this tokenizer can write."""
    try:
        return PROBE if len(render.encode(PROBE)) else ""
    except DataError:
        return next((text for i in range(64) if i not in render.stop_ids and (text := render.decode([i])).strip()), "")


class _Over(Exception):
    """The script has no further turn."""


class _Rehearsed(DemonstrationTalk):
    """Scripted turns in the template's own words; takes note of the tools that are shown, and how often the world
    spoke."""

    tools: Sequence[Mapping[str, Any]] = ()
    shown = 0
    other: Callable[[], _Rehearsed]
    """A seat that is not trained, rehearsed as if the policy played it."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._seats: dict[str, _Rehearsed] = {}

    def seat(self, name: str) -> Seat:
        return self._seats.setdefault(name, self.other())

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.tools = self.tools or tools
        self.shown += 1
        super().see(content, tools)

    async def say(self, most: int | None = None) -> Utterance:
        if len(self.turns) == len(self._turns):
            raise _Over
        return await super().say(most)


def split_is_clean(env: Environment, others: Sequence[Environment] = ()) -> None:
    """No training task is held out, here or in the `others` that the run is measured on, as far as a short look shows.

    Tasks of another environment are the same where they are written alike. What reinforcement asks later is compared as
    it is asked.
    """
    same = sameness(env)
    held = {same(t): t.id for t in env.heldout}
    elsewhere = {as_written(t): t.id for other in others for t in other.heldout}
    begun = time.perf_counter()
    for task in _some(env.train, LEAKS):
        if (twin := held.get(same(task), elsewhere.get(as_written(task)))) is not None:
            raise InvariantError(
                f"training task {task.id!r} ({task.prompt!r:.80}) is held-out task {twin!r}: held-out accuracy would"
                " measure memory. Take it out of one of the two"
            )
        if time.perf_counter() - begun > SECONDS:
            return


def _some(source: Any, most: int) -> Any:
    """The first tasks of a source, one after another; DataError where there are none at all."""
    if source.count == 0:
        raise DataError("there are no training tasks: every prompt went to the held-out split, or the source is empty")
    return (source.task(i) for i in range(most if source.count is None else min(most, source.count)))
