"""Tools by name, for the user's own prompts: `env.args.tools=python,files`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.config.env import SandboxSettings
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Task
from posttrain.environment.tools.database import Database
from posttrain.environment.tools.library_tools import Calculator, Files, KeyValue
from posttrain.environment.tools.python import AT_ONCE, InterpreterSlots, Python
from posttrain.environment.tools.tool import Toolbox, Toolboxes, ToolError
from posttrain.sandbox.choose_backend import choose, open_sandbox
from posttrain.system.errors import ConfigError, DataError, nearest

NAMES = ("calculator", "python", "files", "database", "store")


@dataclass(frozen=True)
class OfferedTools:
    """The tools of every episode of an environment, created anew for each. The initial content of `files`, `database`
    (a script of SQL) and `store` is the task's column of that name."""

    names: tuple[str, ...]
    where: SandboxSettings = SandboxSettings()
    """The sandbox in which Python runs."""
    seconds: float = EpisodeLimits().tool_seconds
    """The most seconds of one call."""

    @staticmethod
    def of(
        text: str, where: SandboxSettings = SandboxSettings(), seconds: float = EpisodeLimits().tool_seconds
    ) -> OfferedTools:
        """From text such as `python,files`. ConfigError if a name is unknown or given twice."""
        names = tuple(n.strip() for n in text.split(","))
        for n in names:
            if n not in NAMES:
                raise ConfigError(f"env.args.tools={text!r}: no tool {n!r}: {nearest(n, NAMES)}")
            if names.count(n) > 1:
                raise ConfigError(f"env.args.tools={text!r} names {n!r} twice: give it once")
        tools = OfferedTools(names, where, seconds)
        _ = tools.contained  # raises here, before anything starts, if this machine has no sandbox
        return tools

    @cached_property
    def contained(self) -> tuple[str, ...]:
        """Name of the sandbox in which Python runs, if it is one of the tools."""
        return (choose(self.where.name, token=self.where.token).name,) if "python" in self.names else ()

    @cached_property
    def interpreters(self) -> InterpreterSlots:
        """The slots in which Python runs; opened once."""
        box = open_sandbox(self.where.name, sessions=AT_ONCE, token=self.where.token)
        return InterpreterSlots(box, self.seconds)

    def box(self, task: Task) -> Toolbox:
        """The tools of one episode, with the initial content that the task gives."""
        return Toolboxes([self._toolbox(name, task) for name in self.names])

    def check(self, task: Task) -> None:
        """DataError if a tool cannot start from the task's column of its name."""
        # Python starts empty and reads no column. The other tools are made here once, so that a bad row is found before
        # training.
        for name in self.names:
            if name != "python":
                self._toolbox(name, task)

    def _toolbox(self, name: str, task: Task) -> Toolbox:
        """One toolbox by its name. DataError if the task's column of that name does not fit."""
        make: Mapping[str, Callable[[Any], Toolbox]] = {
            "calculator": lambda _: Calculator(),
            "python": lambda _: Python(self.interpreters),
            "files": lambda column: Files(_texts(column)),
            "database": lambda column: Database(str(column or "")),
            "store": lambda column: KeyValue(_texts(column)),
        }
        try:
            return make[name](task.info.get(name))
        except ToolError as error:
            raise DataError(f"task {task.id!r}, column {name!r}: {error}") from None
        except Exception as error:  # a column of any content: a wrong type, a script that is no SQL
            raise DataError(
                f"task {task.id!r}: column {name!r} does not say how {name} begins: {type(error).__name__}: {error}"
            ) from error

    def gauges(self) -> Gauges:
        """Attempts of Python code to reach a network, all refused, since the last call."""
        if "interpreters" not in vars(self):
            return {}
        return {"tools/python/network": Gauge(*self.interpreters.sandbox.network.take())}

    def close(self) -> None:
        if "interpreters" in vars(self):
            self.interpreters.sandbox.close()


def _texts(column: Any) -> dict[str, str]:
    """Texts by name, from a column; TypeError for anything else."""
    if column is None:
        return {}
    if not isinstance(column, Mapping) or not all(isinstance(k, str) and isinstance(v, str) for k, v in column.items()):
        raise TypeError("wanted an object of texts by name")
    return dict(column)
