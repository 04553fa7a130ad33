"""Planted faults: each is data with one function of the real code and its buggy replacement, the twin. The real code
has no `if fault`.

    @fault("std_ddof", seam="posttrain.algorithm.credit.step_credit:_std", ...)
    def _(real):
        return lambda rewards: float(np.std(rewards))

`planted(name)` puts the twin in place of the function inside a block; everything else is the real code. `posttrain
faults` lists the faults. docs/trust.md lists which check catches each, and after how many steps.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from posttrain.system.errors import ConfigError, nearest

Twin = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """One bug that has occurred in practice."""

    name: str
    what: str
    """The fault, in a sentence."""
    harm: str
    """Its effect on a run."""
    source: str
    """Its source: the trap or pain in the collection that the design is based on."""
    seam: str
    """`module:name.name`: the one function, method or property that is replaced, where it is looked up."""
    twin: Twin
    """A function from the real function to the buggy one."""
    shows: tuple[str, ...] = ()
    """Overrides of the smallest run in which it acts: a temperature other than 1, several micro-batches."""
    needs: str = ""
    """Needs of that run in addition to overrides: `resume`, `tool` (an environment with observations), `bos`, `chat`,
    `sft` (a supervised stage), `preference` (a stage that learns from pairs), `online` (one that learns from pairs of
    its own samples), `reject` (one that imitates its own samples), `reward_model` (a stage that trains one), `judge`
    (reinforcement against one), `judge_anew` (the same of messages, with one that has its own chat template), `judging`
    (a policy that learns to judge), `votes` and `yes` (reinforcement paid by a judge of pairs, and by one that says Yes
    or No), `process` (labels of steps, a process reward model, reinforcement with it), `implicit` (an algorithm with
    implicit process rewards), `meta` (rows for a meta reward model, from a judge's votes), `regenerate` (a stage that
    says wrong answers anew from their first wrong step), `state` (a model with a recurrent state), `ahead` (groups
    asked ahead of the updates), `ahead_resume` (the same, resumed), `pool` (two engines in processes, one of which is
    killed), `worlds` (episodes in two processes, one of which dies), `fickle` (the same, of a world that shows
    something else when it is played again), `ranks` (two ranks),
    `experts` (a mixture of experts), `rank_experts` (one over two ranks that hold whole experts), `search`
    (`posttrain eval` with searches, of a run with a process reward model).
    """


FAULTS: dict[str, Fault] = {}
"""Every fault by name, filled by the modules of this package in the order they define them."""


def fault(
    name: str, *, seam: str, what: str, harm: str, source: str, shows: tuple[str, ...] = (), needs: str = ""
) -> Callable[[Twin], Twin]:
    """Register the decorated function as the twin of the function at `seam`."""

    def register(twin: Twin) -> Twin:
        assert name not in FAULTS, f"two faults are called {name!r}"
        FAULTS[name] = Fault(name, what, harm, source, seam, twin, shows, needs)
        return twin

    return register


def find(name: str) -> Fault:
    """The fault of that name, or ConfigError with the nearest one."""
    if name not in FAULTS:
        raise ConfigError(f"fault={name}: no such fault; {nearest(name, FAULTS)}")
    return FAULTS[name]


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
def planted(name: str | None) -> Iterator[None]:
    """Replace the real function by the fault's twin inside the block; None changes nothing."""
    if name is None:
        yield
        return
    chosen = find(name)
    owner, attribute = _place(chosen.seam)
    own = attribute in vars(owner)
    real = inspect.getattr_static(owner, attribute)
    setattr(owner, attribute, _like(real, chosen.twin, owner, attribute))
    try:
        yield
    finally:
        if own:
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
        lazy.__set_name__(owner, attribute)
        return lazy
    if isinstance(real, staticmethod | classmethod):
        return type(real)(twin(real.__func__))
    return twin(real)
