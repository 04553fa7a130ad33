"""Objects that a Python program hands to a run: rows, functions, environments and algorithms.

`posttrain.run(env=..., rewards=[...])` and `posttrain.evaluate` come here. The run tree can only have names, so it gets
`inline:NAME`. The objects themselves go beside the tree (`record.runtime_objects`). This file also checks the objects
that are handed to a resumed run, and makes overrides from keyword settings.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from posttrain.build.request.own_pieces import own_classes
from posttrain.build.request.rows_in_memory import jsonl
from posttrain.config.env import Env, Reward
from posttrain.config.run import Run
from posttrain.config.trl_names import our_name
from posttrain.environment.rows.columns import Columns, JudgedColumns
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.single import SingleTurn
from posttrain.ladder.both_ladders import AnyAlgorithm, algorithm_type, learns_from
from posttrain.record.run_reader import run_file
from posttrain.record.runtime_objects import (
    INLINE,
    OBJECTS,
    ObjectNote,
    RuntimeObjects,
    is_inline,
    own_pieces,
    rows_digest,
)
from posttrain.system.errors import ConfigError, nearest

GivenReward = str | Reward | Callable[..., Any] | tuple[Any, float]
"""One reward: a built-in or `path.py:function` by name, a `Reward`, a function, or one of these with its weight."""
JUDGED = tuple(f.name for f in fields(JudgedColumns) if f.name not in {c.name for c in fields(Columns)})
"""The settings that only judged rows have, such as `chosen_column`."""


@dataclass(frozen=True)
class PromptData:
    """Prompts of yours, as `env=` takes them. Made by `prompts`."""

    env: Env
    data: Mapping[str, str]

    def __repr__(self) -> str:
        rows_or_path = f"{next(iter(self.data.values())).count(chr(10))} rows" if self.data else str(self.env.prompts)
        named = "".join(f", {name}={value!r}" for name, value in self.env.args.items())
        return f"posttrain.prompts({rows_or_path}{named})"


def prompts(
    rows: Any,
    *,
    prompt_column: str = "prompt",
    messages_column: str = "messages",
    answer_column: str = "answer",
    completion_column: str = "completion",
    id_column: str = "id",
    split: str = "train",
    tools: str | Sequence[str] = "",
    turns: int = 8,
    **judged: str,
) -> PromptData:
    """Prompts of yours, or completions that somebody judged, as the environment of a run.

    Args:
        rows: a list of dicts, a `datasets.Dataset`, a pandas data frame, or the path of a JSONL, JSON or parquet file,
            of a folder of `save_to_disk`, or a hub id. Rows in memory are kept in the run folder. Of a path only the
            path is kept, so the file must stay where it is.
        prompt_column, messages_column, answer_column, completion_column, id_column: the names of your columns.
            Every other column is a keyword argument of batch rewards.
        split: which split is read, if there are several.
        tools: names of tools for every episode: calculator, python, files, database, store.
        turns: with tools, the largest number of turns of the policy.
        judged: settings of judged rows by their names, such as `chosen_column="better"`, `attribute="helpfulness"` or
            `leave_out="identical"` (docs/guides/preference_data.md). The defaults are the names that TRL uses.

    Raises:
        ConfigError: these are no rows, or a setting has no such name.
    """
    defaults = {f.name: f.default for f in fields(PromptsEnv)}
    for name in judged:
        if name not in JUDGED:
            raise ConfigError(f"prompts({name}=...): there is no such setting; {nearest(name, JUDGED)}")
    settings: dict[str, Any] = {
        "prompt_column": prompt_column,
        "messages_column": messages_column,
        "answer_column": answer_column,
        "completion_column": completion_column,
        "id_column": id_column,
        "split": split,
        "tools": tools if isinstance(tools, str) else ",".join(tools),
        "turns": turns,
        **judged,
    }
    # Defaults are left out, so that the tree holds only what was asked for.
    args = {name: value for name, value in settings.items() if value != defaults[name]}
    if isinstance(rows, str | Path):
        return PromptData(Env(name="prompts", args=args, prompts=str(rows)), {})
    text = jsonl(rows, split)
    digest = rows_digest(text)
    return PromptData(Env(name="prompts", args=args, prompts=f"{INLINE}{digest}"), {digest: text})


@dataclass(frozen=True)
class UserObjects:
    """What a program hands to a run or an evaluation: `env`, `rewards` and `algorithm` that are no text."""

    env: Any = None
    rewards: Any = None
    algorithm: AnyAlgorithm | None = None
    files: Mapping[str, tuple[str, AnyAlgorithm]] = field(default_factory=dict[str, tuple[str, AnyAlgorithm]])
    """Algorithms that were named by `path.py:NAME`: (that word, the algorithm), by the name of the stage. The name ''
    stands for the only stage that can have such an algorithm."""

    def place(self, run: Run) -> tuple[Run, RuntimeObjects]:
        """(the run with the names of these objects in its tree, the objects)."""
        objects = RuntimeObjects()
        if self.env is not None:
            run, objects = _with_env(run, self.env, objects)
        if self.rewards is not None:
            words, functions = named_rewards(self.rewards)
            # A resumed run is handed its functions once more. Then its own settings of these rewards stay.
            again = _handed_again(run.env.rewards, words, self.rewards)
            run = replace(run, env=replace(run.env, rewards=again or words, right=run.env.right if again else None))
            objects = replace(objects, rewards=functions)
        if self.algorithm is not None:
            run = _with_algorithm(run, self.algorithm)
        for stage, (_, algorithm) in self.files.items():
            run = _with_algorithm(run, algorithm, stage)
        return run, replace(objects, pieces=own_classes(run), algorithms=dict(self.files.values()))

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the settings that these objects give."""
        paths = ["env.name", "env.prompts"] if self.env is not None else []
        # An environment's settings may come with rewards.
        rewards = self.rewards is not None or (isinstance(self.env, Env) and self.env.rewards)
        return frozenset([*paths, "env.rewards"] if rewards else paths)


def _with_env(run: Run, env: Any, objects: RuntimeObjects) -> tuple[Run, RuntimeObjects]:
    """`env=`: an `Env`, `prompts(...)`, rows, or an environment of the program."""
    if isinstance(env, Env):
        return replace(run, env=env), objects
    # The most special kind comes first. An environment of one turn has settings for the tree. Any other environment is
    # only an object. Anything else must be rows.
    if isinstance(env, SingleTurn) or (inspect.isclass(env) and issubclass(env, SingleTurn)):
        return _with_single(run, env, objects)
    if callable(getattr(env, "judge", None)) and callable(getattr(env, "play", None)):
        env = env() if inspect.isclass(env) else env
        name = _plain_name(type(env).__name__)
        tree = Env(name=f"{INLINE}{name}", heldout=len(env.heldout))
        return _named(run, tree), replace(objects, environments={name: env})
    data = env if isinstance(env, PromptData) else prompts(env)
    before = run.env
    # Rewards of a recipe with rows read columns, so they can judge the user's rows too; those of others cannot.
    kept = before.rewards if before.name == "prompts" else ()
    placed = replace(data.env, rewards=kept, heldout=before.heldout, limits=before.limits, sandbox=before.sandbox)
    return replace(run, env=placed), replace(objects, data=data.data)


def _with_single(run: Run, env: Any, objects: RuntimeObjects) -> tuple[Run, RuntimeObjects]:
    """`env=` as a class derived from `SingleTurn`, or an object of one. Its plain settings go into the tree."""
    cls: Any = env if inspect.isclass(env) else type(env)
    name = _plain_name(cls.__name__)
    if inspect.isclass(env):
        tree = Env(name=f"{INLINE}{name}", heldout=run.env.heldout)
    else:
        settings = {n: getattr(env, n) for n in cls.settings()}
        tree = Env(
            name=f"{INLINE}{name}",
            args={n: v for n, v in settings.items() if isinstance(v, str | int | float | bool)},
            heldout=env.heldout_count,
            limits=env.limits,
            sandbox=env.sandbox,
            resolution=env.resolution,
        )
    return _named(run, tree), replace(objects, environments={name: env})


def _named(run: Run, env: Env) -> Run:
    """The run with this environment. If the tree already names it, as in a resumed run, its settings there stay."""
    return run if run.env.name == env.name else replace(run, env=env)


def _handed_again(
    own: tuple[Reward, ...], words: Sequence[Reward], rewards: Sequence[GivenReward] | GivenReward
) -> tuple[Reward, ...]:
    """The run's own rewards, if the given ones are handed to it again; else ().

    A run that is resumed or evaluated already names its functions, with weights. A function that is handed again
    without a weight keeps the weight that it has; one with a weight gets that.

    Args:
        own: the rewards of the run.
        words: the given rewards, as the tree names them.
        rewards: the same, as the program gave them.
    """
    named, handed = {r.function: r for r in own}, {r.function for r in words}
    # All rewards of the run, or some of its functions. Some built-ins alone could as well be meant as new rewards.
    if not handed <= named.keys() or not (handed == named.keys() or all(map(is_inline, handed))):
        return ()
    for thing, word in zip(_one_by_one(rewards), words, strict=True):
        if isinstance(thing, Reward):
            named[word.function] = thing
        elif isinstance(thing, tuple):
            named[word.function] = replace(named[word.function], weight=word.weight)
    return tuple(named.values())


def named_rewards(
    rewards: Sequence[GivenReward] | GivenReward,
) -> tuple[tuple[Reward, ...], dict[str, Callable[..., Any]]]:
    """(the rewards as the tree names them, the functions among them by their names)."""
    words, functions = list[Reward](), dict[str, Callable[..., Any]]()
    for number, reward in enumerate(_one_by_one(rewards), 1):
        thing, weight = _weighed(reward)
        if isinstance(thing, Reward):
            words.append(thing if thing is reward else replace(thing, weight=weight))
        elif isinstance(thing, str):
            words.append(Reward(function=thing, weight=weight))
        elif callable(thing):
            name = _function_name(thing, number)
            if name in functions:
                raise ConfigError(f"rewards: two functions are called {name!r}; rename one of them")
            functions[name] = thing
            words.append(Reward(function=f"{INLINE}{name}", weight=weight))
        else:
            raise ConfigError(
                f"rewards: {thing!r:.80} is a {type(thing).__name__}; give a function, a name such as 'exact' or"
                " 'path.py:function', or one of these with its weight: (function, 0.5)"
            )
    return tuple(words), functions


def _one_by_one(rewards: Sequence[GivenReward] | GivenReward) -> Sequence[Any]:
    """The rewards of a list, or the only one. A tuple is one reward with its weight."""
    return cast("list[Any]", rewards) if isinstance(rewards, list) else (rewards,)


def _weighed(reward: Any) -> tuple[Any, float]:
    """(what judges, its weight): of a tuple as it says, else 1."""
    try:
        thing, weight = cast("tuple[Any, Any]", reward) if isinstance(reward, tuple) else (reward, 1.0)
        return thing, float(weight)
    except (TypeError, ValueError) as error:  # not two things, or the second is no number
        raise ConfigError(
            f"rewards: {reward!r:.80} is no reward with its weight, such as (function, 0.5); give several rewards as a"
            " list: [function, 'exact']"
        ) from error


def _function_name(thing: Any, number: int) -> str:
    """The name of a function in the tree; a lambda gets `reward_N` with its number."""
    inner = thing.func if isinstance(thing, functools.partial) else thing
    name = getattr(inner, "__name__", type(inner).__name__)
    return f"reward_{number}" if name == "<lambda>" else _plain_name(name)


def _plain_name(name: str) -> str:
    """A name of letters, digits and underscores."""
    return re.sub(r"\W", "_", name)


def _with_algorithm(run: Run, algorithm: AnyAlgorithm, stage: str = "") -> Run:
    """The run with the algorithm in this stage. stage='': in the only stage with an algorithm of the same ladder."""
    can = [s for s in run.stages if isinstance(algorithm, algorithm_type(type(s)) or ())]
    fits = [s for s in can if stage in ("", s.name)]
    if len(fits) != 1:
        raise ConfigError(
            f"algorithm: the run has {len(can)} stages that learn from {learns_from(type(algorithm))}"
            f" ({', '.join(s.name for s in can) or 'none'}), as {algorithm.name} does. Name one of them,"
            " STAGE.algorithm=path.py:NAME, or give a Run whose stages have their algorithms"
        )
    changed: Any = fits[0]
    placed = tuple(replace(changed, algorithm=algorithm) if s is fits[0] else s for s in run.stages)
    return replace(run, stages=placed)


def setting_words(settings: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Keyword settings as overrides: `steps=50`, and `sampling={"max_tokens": 64}` as `sampling.max_tokens=64`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from setting_words(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={_setting(value, prefix + name)}"


def _setting(value: Any, name: str) -> str:
    """The value of a keyword setting as the word of an override."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        text = ",".join(words := [_setting(v, name) for v in items])
        plain = words == [w.strip() for w in text.split(",")] and text[:1] not in ("", "[") and text.lower() != "none"
        # JSON, where a comma, a blank or the word `none` inside an element would be read as something else.
        if not plain or any(isinstance(v, list | tuple) for v in items):
            return json.dumps(items, default=lambda v: _setting(v, name))
        return text
    if isinstance(value, str | int | float | Path):
        return str(value)
    if isinstance(folder := getattr(value, "folder", None), Path):  # the result of another run
        return str(folder)
    if known := our_name(name):
        raise ConfigError(f"{name}: no such setting; {known}")
    if hasattr(value, "save_pretrained"):  # a model or tokenizer of transformers
        raise ConfigError(f"{name}: give a directory or hub id: write the object with save_pretrained(FOLDER) first")
    if hasattr(value, "item"):  # a number of NumPy or torch
        return str(value.item())
    raise ConfigError(
        f"{name}: a {type(value).__name__} is no setting; give text, a number, true or false, a list, or a dict"
    )


def recorded(given: RuntimeObjects) -> dict[str, Any]:
    """Returns the entry of the objects in run.json; an empty one where there are no objects."""
    notes = given.notes()
    return {OBJECTS: [note.plain() for note in notes]} if notes else {}


def given_again(folder: Path, handed: UserObjects) -> RuntimeObjects:
    """Returns the objects handed to a run that goes on. ConfigError where they are not those that the run names."""
    run = run_file(folder).run
    placed, handed_objects = handed.place(run)
    objects = replace(handed_objects, folder=folder)
    envs = [run.env, *(s.env for s in run.stages if s.env is not None)]
    rewards = [r.function for e in envs for r in e.rewards if is_inline(r.function)]
    env_names = [e.name for e in envs if is_inline(e.name)]
    if why := objects.lacking(rewards, env_names):
        raise ConfigError(why)
    named = {n.removeprefix(INLINE) for n in (*rewards, *env_names)}
    # `lacking` has found that nothing is missing. Nor may anything be handed that the run does not name.
    strange = [n for n in (*handed_objects.rewards, *handed_objects.environments) if n not in named]
    known = {r.function for r in run.env.rewards}
    strange += [r.function for r in placed.env.rewards if r.function not in known and not is_inline(r.function)]
    if handed.env is not None and (placed.env.name, placed.env.prompts) != (run.env.name, run.env.prompts):
        strange += ["env" if is_inline(placed.env.prompts) else placed.env.prompts or placed.env.name]
    why = f"the run has no object {strange[0]!r}; it was handed {', '.join(sorted(named)) or 'none'}" if strange else ""
    if why := why or next(_changed(run.env, placed.env, handed), ""):
        raise ConfigError(
            f"{folder}: {why}. What it learns from cannot be changed while it goes on: begin a new run from its weights"
            f" with model={folder}"
        )
    return objects


def _changed(own: Env, placed: Env, handed: UserObjects) -> Iterator[str]:
    """Yields a sentence for each object that is handed again with another weight or setting than the run has."""
    before = {r.function: r for r in own.rewards}
    if {r.function for r in placed.rewards} != before.keys():
        named = [", ".join(r.function.removeprefix(INLINE) for r in e.rewards) for e in (own, placed)]
        yield f"the run has the rewards {named[0]}, and was handed {named[1]}"
        return
    for r in placed.rewards:
        name, was = r.function.removeprefix(INLINE), before[r.function]
        for f in fields(Reward):
            if (x := getattr(was, f.name)) != (y := getattr(r, f.name)):
                yield f"reward {name!r} has {f.name} {x} in this run, and was handed with {y}"
    if isinstance(handed.env, PromptData):
        for name, value in handed.env.env.args.items():
            if own.args.get(name) != value:
                yield f"env.args.{name} is {own.args.get(name)!r} in this run, and was handed as {value!r}"


def given_notes(folder: Path, given: RuntimeObjects) -> Iterator[str]:
    """Lines about objects that differ from those with which the run was begun."""
    then: Any = run_file(folder).facts.get(OBJECTS)
    objects: Any = [o for o in then if isinstance(o, dict)] if isinstance(then, list) else []
    before = {str(o.get("name")): o.get("digest") for o in objects}
    files = {p.name: {*p.files.values()} for p in own_pieces({OBJECTS: then})}
    for note in given.notes():
        texts, then_texts = {*note.files.values()}, files.get(note.name, set[str]())
        # The texts of the whole files are compared, where both are known; else the source of the object alone.
        same = texts == then_texts if texts and then_texts else before.get(note.name) in (None, note.digest)
        if not same:
            what = "the text of its file differs" if texts and then_texts else "its source text differs"
            done = "computed with" if note.kind == "piece" else "judged by"
            yield (
                f"note: {note.kind} {note.name!r} is not as it was when the run was begun ({what}). What follows is"
                f" {done} the new one"
            )


def object_notes(given: RuntimeObjects) -> Iterator[str]:
    """Lines about objects at the start of a run: where they run, and what is needed to go on."""
    notes: list[ObjectNote] = [n for n in given.notes() if n.kind != "piece"]
    if not notes:
        return
    names = ", ".join(n.name for n in notes)
    yield (
        f"note: {names}: handed as Python objects, so they run in this process, never in workers. To go on with this"
        " run, hand them again: posttrain.run(resume=FOLDER, ...)"
    )
    for n in notes:
        if n.closes_over:
            yield (
                f"note: {n.name} reads {', '.join(n.closes_over)} from where it was defined; run.json records its"
                " source text and not these values"
            )
