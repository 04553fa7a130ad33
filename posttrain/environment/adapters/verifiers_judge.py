"""The final state of an episode of `verifiers`, and its judgement by the rubric."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.environment.adapters.verifiers_talk import MODEL, PolicyClient, from_package
from posttrain.environment.scripted_policy import ScriptedPolicy
from posttrain.verifier.reward_source import as_verdict
from posttrain.verifier.timed_calls import call
from posttrain.verifier.user_code import failed_call

SECONDS = 60.0
"""The most seconds of one function of a rubric; of a rubric with its own way of scoring, for each of its functions.
Beyond it the verdict is failed."""
LONGEST = 20_000
"""The most characters of an entry of a state that a record keeps."""
_LOOP_ENTRIES = (
    "input task client model sampling_args is_completed is_truncated stop_condition tool_defs trajectory "
    "completion usage usage_tracker trajectory_id reward advantage metrics error final_env_response timing "
    "prompt answer info example_id prompt_too_long timed_out"
)
LOOP_ENTRIES = frozenset(_LOOP_ENTRIES.split())
"""Names of the entries of a state that belong to the package's loop. All others belong to the environment."""


def recordable(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state in the form that a record can store: the conversation after the prompt, the environment's own entries,
    and the names of those that cannot be stored."""
    entries: dict[str, Any] = {}
    not_stored: list[str] = []
    for name, value in state.items():
        if name in LOOP_ENTRIES:
            continue
        try:
            # Through JSON and back, so that a judging from the record gets the same value as one now.
            text = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            text = ""
        if 0 < len(text) <= LONGEST:
            entries[name] = json.loads(text)
        else:
            not_stored.append(name)
    conversation = [dict(from_package(m)) for m in state.get("completion") or ()]
    return {"completion": conversation, "state": entries, "lost": not_stored}


async def rebuilt_state(env: Any, row: dict[str, Any], attempt: Attempt) -> Any:
    """The state at the end of the episode, rebuilt from its record. It opens nothing: the environment's own set-up
    (`setup_state`) does not run."""
    state = await env.init_state(row, PolicyClient(ScriptedPolicy(()), attempt.task.id).client(), MODEL, {})
    record = attempt.state if isinstance(attempt.state, Mapping) else {}
    conversation = record.get("completion") or [{"role": "assistant", "content": t} for t in attempt.turns]
    normalize: Any = importlib.import_module("verifiers.utils.message_utils").normalize_messages
    messages = normalize([_to_package(m) for m in conversation])
    # The package made the state of an episode's start. The environment's own entries get the values of the end.
    state.update(record.get("state", {}))
    state["completion"] = messages
    prompt = list(state["prompt"])
    for i, message in enumerate(messages):
        if message.role == "assistant":
            step = {"prompt": [*prompt, *messages[:i]], "completion": [message], "response": None, "tokens": None}
            further = {"reward": None, "advantage": None, "is_truncated": False, "extras": {}}
            state["trajectory"].append({**step, **further, "trajectory_id": state["trajectory_id"]})
    state["is_completed"] = True
    return state


def _to_package(message: Mapping[str, Any]) -> dict[str, Any]:
    """One of our messages in the package's form."""
    converted = dict(message)
    if converted.get("tool_calls"):
        converted["tool_calls"] = [{"id": c["id"], **c["function"]} for c in converted["tool_calls"]]
    return converted


def environments(env: Any) -> Iterator[Any]:
    """The single environments of an environment, which may be a group."""
    if isinstance(env, importlib.import_module("verifiers.envs.env_group").EnvGroup):
        for member in env.envs:
            yield from environments(member)
    else:
        yield env


def rubrics(rubric: Any, state: Mapping[str, Any]) -> Iterator[Any]:
    """The single rubrics of a rubric, which may be a group. Of a group of environments, those of the environment that
    played the episode: the group's own scoring would make a 0 of a function that raises."""
    info: Any = state.get("info") or {}
    route: Any = info.get("env_id") or ()
    yield from _of_route(rubric, (route,) if isinstance(route, str) else tuple(route))


def _of_route(rubric: Any, route: tuple[str, ...]) -> Iterator[Any]:
    """The single rubrics of a rubric. `route`: names of environments of groups, the outermost first."""
    group: Any = importlib.import_module("verifiers.rubrics.rubric_group").RubricGroup
    of_environments: Any = importlib.import_module("verifiers.envs.env_group").EnvGroupRubric
    if type(rubric) is group:
        for part in rubric.rubrics:
            yield from _of_route(part, route)
    elif type(rubric) is of_environments and route and route[0] in rubric.env_map:
        yield from _of_route(rubric.env_map[route[0]].rubric, route[1:])
    else:
        yield rubric


def weights(rubric: Any) -> list[float]:
    """The weights of all functions. A rubric with its own way of scoring counts as one function."""
    return [w for r in _of_route(rubric, ()) for w in ([1.0] if _own_way(r) else r.weights)]


def _own_way(rubric: Any) -> bool:
    """Returns whether a rubric has its own way of scoring."""
    base: Any = importlib.import_module("verifiers.rubrics.rubric").Rubric
    return type(rubric).score_rollout is not base.score_rollout


async def score(rubric: Any, state: Any) -> list[Judged]:
    """A rubric's verdicts about an ended episode."""
    if _own_way(rubric):
        return await _rubric_verdicts(rubric, state)
    return [await _function_verdict(rubric, f, w, state) for f, w in zip(rubric.funcs, rubric.weights, strict=True)]


async def _function_verdict(rubric: Any, function: Any, weight: float, state: Any) -> Judged:
    """The verdict of one function, called as the package does. An exception is a failure here and not a 0."""
    name = getattr(function, "__name__", type(function).__name__)
    raised: list[Exception] = []

    async def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return await call(function, SECONDS, *args, **kwargs)
        except Exception as error:
            raised.append(error)
            # The package would turn an exception into 0. So the exception is kept in `raised`, and the package gets
            # NaN.
            return float("nan")

    watched.__name__ = name
    watched.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    returned = await rubric._call_individual_reward_func(watched, state)
    verdict = failed_call(raised[0], function, SECONDS) if raised else _numbered(returned)
    # A function of weight 0 is a metric. Its failure must not leave the episode without a reward.
    if weight == 0 and verdict.state is State.FAILED:
        verdict = Verdict.abstain(f"{verdict.kind}: {verdict.why}")
    return Judged(name, float(weight), redacted(verdict))


async def _rubric_verdicts(rubric: Any, state: Any) -> list[Judged]:
    """The verdicts of a rubric with its own way of scoring: its reward as one source, its metrics with weight 0."""
    name = type(rubric).__name__
    seconds = SECONDS * max(1, len(rubric._get_reward_func_names()))
    try:
        await call(rubric.score_rollout, seconds, state)
    except Exception as error:  # a rubric's own code may raise anything
        return [Judged(name, 1.0, redacted(failed_call(error, None, seconds)))]
    metrics = {k: _numbered(x) for k, x in (state["metrics"] or {}).items()}
    return [
        Judged(name, 1.0, _numbered(state["reward"])),
        *(Judged(k, 0.0, v if v.state is State.VALUE else Verdict.abstain(v.why)) for k, v in metrics.items()),
    ]


def _numbered(given: Any) -> Verdict:
    """The verdict for the value of a function of the package. There True is 1 and False is 0."""
    return as_verdict(float(given) if isinstance(given, bool) else given)
