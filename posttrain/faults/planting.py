"""Planted faults: each is data that names one function of the real code and has a buggy replacement for it, the twin.

The real code has no `if fault`. A fault is registered like this:

    @fault("std_ddof", seam="posttrain.algorithm.credit.step_credit:_std", ...)
    def _(real, rewards):
        return float(np.std(rewards))

`planted(name)` puts the twin in place of the function inside a block; everything else is the real code. `posttrain
faults` lists the faults of the package. docs/research/trust.md lists which check catches each, and after how many
steps.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from posttrain.system.errors import ConfigError, nearest

Twin = Callable[[Callable[..., Any]], Callable[..., Any]]
SMALL = ("run arithmetic sft.steps=40 rl.steps=20 FAULT",)
"""A run of a few seconds in which most faults act."""


@dataclass(frozen=True)
class Fault:
    """One bug that has occurred in practice."""

    name: str
    what: str
    """The fault, in a sentence."""
    harm: str
    """Its effect on a run."""
    source: str
    """Its source: a pain or trap of `docs/design/pains.md`, an entry of `docs/design/papers.md`, or the mistake in
    words."""
    seam: str
    """`module:name.name`: the one function, method or property that is replaced, where it is looked up."""
    twin: Twin
    """A function from the real function to the buggy one."""
    shows: tuple[str, ...] = ()
    """Overrides of the smallest run in which it acts: a temperature other than 1, several micro-batches."""
    needs: str = ""
    """What that run needs in addition to overrides, as one word; '' for nothing.

    Kinds of stages: `sft` (a supervised stage), `preference` (it learns from pairs), `online` (it learns from pairs of
    its own samples), `reject` (it imitates its own samples), `reward_model` (it trains one), `regenerate` (it says
    wrong answers anew from their first wrong step), `search` (`posttrain eval` with searches, of a run with a process
    reward model).

    What pays: `judge` (a reward model), `judge_anew` (a reward model with its own chat template, for messages),
    `judging` (the policy itself learns to judge), `votes` (a judge of pairs), `yes` (a judge that says Yes or No),
    `process` (a process reward model, trained on labels of steps), `implicit` (an algorithm with implicit process
    rewards), `meta` (rows for a meta reward model, from a judge's votes).

    The model and its world: `tool` (an environment with observations), `bos`, `chat`, `state` (a recurrent state),
    `experts` (a mixture of experts).

    The system: `resume`, `ahead` (groups asked ahead of the updates), `ahead_resume` (the same, resumed), `pool` (two
    engines in processes, one of which is killed), `worlds` (episodes in two processes, one of which dies), `fickle`
    (the same, with a world that shows something else when it is played again), `ranks` (two ranks), `rank_experts` (a
    mixture over two ranks that hold whole experts).
    """
    lesson: str = ""
    """What it teaches, which is why the package has it; '' where only tests plant it."""
    caught_by: str = ""
    """The check or rule that ends or marks the last run of `see`."""
    see: tuple[str, ...] = SMALL
    """Commands that show it caught, without the program's name. `FAULT` stands for `shows`, the fault and the flag that
    allows it, and `RUN` for a run folder."""

    def commands(self) -> list[list[str]]:
        """The words of each command of `see`."""
        fault_words = [*self.shows, f"fault={self.name}", "--allow-fault"]
        run = f"runs/{self.name}"
        return [
            [w for word in c.split() for w in (fault_words if word == "FAULT" else [word.replace("RUN", run)])]
            for c in self.see
        ]

    def __reduce__(self) -> tuple[Callable[..., Fault], tuple[str, str]]:
        """Pickles the fault by its name, with the module that registers it in the other process."""
        # Twins cannot be pickled themselves: they are all called `_`.
        return _registered, (self.twin.__module__, self.name)


REGISTERED: dict[str, Fault] = {}
"""Every fault by name, filled by the modules that define them, in their order."""


def fault(name: str, **about: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the buggy form of the function at `seam`; `about` are the fields of `Fault`.
    It gets the real function before the arguments of a call. If the real function is its only parameter, it returns
    the buggy form when the fault is planted."""

    def register(buggy: Callable[..., Any]) -> Callable[..., Any]:
        assert name not in REGISTERED, f"two faults are called {name!r}"
        twin = buggy if len(inspect.signature(buggy).parameters) == 1 else _called_with_real(buggy)
        REGISTERED[name] = Fault(name=name, twin=twin, **about)
        return buggy

    return register


def _called_with_real(buggy: Callable[..., Any]) -> Twin:
    """The twin whose function calls `buggy` with the real function first."""

    @wraps(buggy)
    def twin(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: buggy(real, *args, **kwargs)

    return twin


def _registered(module: str, name: str) -> Fault:
    """The fault that this module registers."""
    importlib.import_module(module)
    return REGISTERED[name]


def find(name: str) -> Fault:
    """The fault of that name, or ConfigError with the nearest one."""
    if name not in REGISTERED:
        raise ConfigError(f"fault={name}: no such fault; {nearest(name, REGISTERED)}")
    return REGISTERED[name]


def named(name: str | None) -> Fault | None:
    """The fault of a run: None where it plants none."""
    return None if name is None else find(name)


def refuse_silent(name: str | None, allowed: bool) -> None:
    """Refuse a run with a planted fault unless it is also allowed explicitly.

    Raises:
        ConfigError: no fault has this name, or it was not allowed.
    """
    if name is None:
        return
    chosen = find(name)
    if not allowed:
        raise ConfigError(
            f"fault={name} plants a bug on purpose ({chosen.what}), so nothing this run measures could be used. "
            "To watch it being caught add --allow-fault (from Python: allow_fault=True); for a real run leave fault out"
        )


@contextmanager
def planted(fault: Fault | str | None) -> Iterator[None]:
    """Replace the real function by the fault's twin inside the block; None changes nothing."""
    chosen = named(fault) if isinstance(fault, str) else fault
    if chosen is None:
        # Nothing is imported or replaced in a real run.
        yield
        return
    owner, attribute = _place(chosen.seam)
    # The twin of an inherited method is put into the subclass and deleted at the end: the parent stays.
    in_class = attribute in vars(owner)
    # `getattr` would call a property and unwrap a static method. Here the object itself is needed.
    real = inspect.getattr_static(owner, attribute)
    setattr(owner, attribute, _like(real, chosen.twin, owner, attribute))
    try:
        yield
    finally:
        # Restored however the block ends, since the next run of this process must not have the fault.
        if in_class:
            setattr(owner, attribute, real)
        else:
            delattr(owner, attribute)


def _place(seam: str) -> tuple[Any, str]:
    """(owner, attribute) of `module:Class.method` or `module:function`."""
    module, _, path = seam.partition(":")
    *outer, last = path.split(".")
    owner: Any = importlib.import_module(module)
    for name in outer:
        owner = getattr(owner, name)
    return owner, last


def _like(real: Any, twin: Twin, owner: Any, attribute: str) -> Any:
    """The twin in the form of the real one: property, static or class method, or function."""
    if isinstance(real, property):
        assert real.fget is not None
        return property(twin(real.fget))
    if isinstance(real, cached_property):
        lazy = cached_property(twin(real.func))
        # A cached property learns its name when its class is made, which is over by now.
        lazy.__set_name__(owner, attribute)
        return lazy
    if isinstance(real, staticmethod | classmethod):
        return type(real)(twin(real.__func__))
    return twin(real)
