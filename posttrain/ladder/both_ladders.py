"""The two ladders by the type of their algorithms: those that learn from reward, and those that learn from preferences.

A stage has an algorithm of one ladder in its field `algorithm`. Code that reads or writes this field asks here which
ladder it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from posttrain.ladder import policy_rows, preference_rows
from posttrain.ladder.algorithm import Algorithm, choices
from posttrain.ladder.preference_algorithm import PreferenceAlgorithm
from posttrain.system import dataclass_json
from posttrain.system.errors import ConfigError, nearest

AnyAlgorithm = Algorithm | PreferenceAlgorithm
LADDERS: dict[type, Mapping[str, Any]] = {
    Algorithm: policy_rows.LADDER,
    PreferenceAlgorithm: preference_rows.PREFERENCES,
}
"""All algorithms by name, for each type of them. No name is on both."""


class NamedStage(Protocol):
    """A stage of a run, by its name (`config.stages.stage.Stage`)."""

    @property
    def name(self) -> str: ...


def algorithm_type(kind: type[Any]) -> type[Any] | None:
    """The type of the algorithm of a kind of stage; None where it has none."""
    # The declared type of the field is read, because at this point there may be no stage, only its class.
    declared = dataclass_json.hints(kind).get("algorithm")
    return declared if declared in LADDERS else None


def stage_choices(kind: type[Any]) -> tuple[str, ...]:
    """The choices of the algorithm of a kind of stage; () where it has none."""
    declared = algorithm_type(kind)
    return () if declared is None else choices(declared)


def algorithms_of(stages: Sequence[NamedStage]) -> dict[str, AnyAlgorithm]:
    """The algorithms of these stages, by the stage's name, without stages that have none."""
    by_stage = {s.name: getattr(s, "algorithm", None) for s in stages}
    return {name: a for name, a in by_stage.items() if isinstance(a, Algorithm | PreferenceAlgorithm)}


def learns_from(kind: type[Any]) -> str:
    """Returns the source that the algorithms of a ladder learn from, in a word."""
    return "preferences" if kind is PreferenceAlgorithm else "reward"


def named_algorithm(kind: type[Any], name: str) -> Any:
    """The algorithm of this type and name.

    Raises:
        ConfigError: its ladder has no such name. The message names the nearest one, or the other ladder that has it.
    """
    if name in LADDERS[kind]:
        return LADDERS[kind][name]
    # A frequent mistake is algorithm=dpo in a stage that learns from reward: there the other ladder's name helps.
    other = next((k for k, rows in LADDERS.items() if name in rows), None)
    if other is not None:
        raise ConfigError(
            f"algorithm={name} learns from {learns_from(other)}, and this stage does not; it takes one of"
            f" {', '.join(LADDERS[kind])}"
        )
    raise ConfigError(f"algorithm={name}: no such algorithm; {nearest(name, LADDERS[kind])}")


def any_named(name: str) -> AnyAlgorithm:
    """The algorithm of that name on either ladder, or ConfigError with the nearest one."""
    for rows in LADDERS.values():
        if name in rows:
            return rows[name]
    known = [n for rows in LADDERS.values() for n in rows]
    raise ConfigError(f"algorithm={name}: no such algorithm; {nearest(name, known)}")
