"""Scoring with reasoning-gym's own scorers, in worker processes: a search without end is killed there, and holds nobody
up.

Some of them evaluate the answer as Python, which the policy's text must never be here. Those that want a Python literal
are given `ast.literal_eval` in place of `eval`; those that want a formula for sympy, whose parser evaluates, see only
answers made of numbers, operators and names of elementary functions.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from posttrain.core.verdict import State, Verdict
from posttrain.verifier.functions import as_verdict
from posttrain.verifier.user_code import where
from posttrain.verifier.workers.pool import WorkerPool, reply_of
from posttrain.verifier.workers.process import Spec

SECONDS = 30
"""Processor time of scoring one answer; beyond it the answer is worth 0, with kind `timeout`, if its scorer still
works."""
WORKERS = 2
CHUNK = 1000
"""Items generated under one reasoning-gym seed; some of its tasks slow down or refuse with very many."""

FORMULAS = frozenset(
    {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
)
"""Tasks whose scorers hand the answer to sympy's parser."""
_LITERALS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules whose scorers hand the answer to `eval`."""
_FUNCTIONS = re.compile(
    r"sqrt|cbrt|exp|log|ln|a?(sin|cos|tan|cot|sec|csc)h?|[aA]bs|sign|pi|oo|Rational|Integral|erfi?|[SCE]i|li|fresnel[sc]",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_FORMULA = re.compile(r"(?!.*\.\s*[A-Za-z_])[\w\s+\-*/^().,=!|]*", re.ASCII | re.DOTALL)


class ScoringRequest(NamedTuple):
    """One answer to score, with all that its scorer reads."""

    task: str
    args: tuple[tuple[str, Any], ...]
    seed: int
    """Of the data set that the item is from."""
    entry: Mapping[str, Any]
    answer: str
    gold: str
    """What proves that the scorer works: the answer that the data hold, where they hold one."""


def scored(data: Any, asked: ScoringRequest) -> Verdict:
    """What the scorer of a data set says. Where it raises, the gold answer decides whose fault that is: if it raises
    there too, ours."""
    if asked.task in FORMULAS and (why := _no_formula(asked.answer)):
        return Verdict.value(0.0, "unparsable", why)
    try:
        score = data.score_answer(asked.answer, asked.entry)
    except MemoryError:  # the worker's matter: it ends, and the request is tried again
        raise
    except Exception as error:
        try:
            data.score_answer(asked.gold, asked.entry)
        except Exception as ours:
            return Verdict.failed(
                "raised", f"the scorer of {asked.task!r} raises on the right answer too: {where(ours)}"
            )
        return Verdict.value(0.0, "unparsable", where(error))
    return as_verdict(float(score) if isinstance(score, bool) else score)


def _no_formula(answer: str) -> str:
    """Why an answer is kept from a parser that evaluates; '' where it may read it."""
    if not _FORMULA.fullmatch(answer):
        return "no formula: it has characters that numbers, operators and functions do not need"
    foreign = next((n for n in _NAME.findall(answer) if len(n) > 1 and not _FUNCTIONS.fullmatch(n)), None)
    return "" if foreign is None else f"no formula: {foreign[:40]!r} is no elementary function"


# --- processes -------------------------------------------------------------------------------------------------------

_SHARED: WeakValueDictionary[str, WorkerPool] = WeakValueDictionary()


def workers() -> WorkerPool:
    """The processes that score, shared by the environments of this program: they end when the last of these lets go of
    them."""
    pool = _SHARED.get("gym")
    if pool is None:
        spec = Spec(f"{__name__}:handler", cpu=SECONDS, wall=2.0 * SECONDS + 20, preload=True, quiet=True)
        pool = _SHARED["gym"] = WorkerPool(spec, WORKERS, "gym")
    return pool


async def verdict(pool: WorkerPool, asked: ScoringRequest) -> Verdict:
    """The scorer's verdict. What ended the process is the answer's fault only if the gold answer is scored after it."""
    try:
        found = await pool.ask(asked)
        if found.kind in ("timeout", "memory", "crash") and found.score is not None:
            known = await pool.ask(asked._replace(answer=asked.gold))
            if known.state is State.FAILED or known.kind == found.kind:
                return Verdict.failed(
                    found.kind, f"{found.why}, and the scorer of {asked.task!r} does not answer the right answer either"
                )
        return found
    except Exception as error:  # an item that cannot be pickled, a pool that was closed
        return Verdict.failed("worker", f"{type(error).__name__}: {error}")


def handler(_: str) -> Callable[[Any], dict[str, Any]]:
    """In the worker: (an `ScoringRequest`) -> its verdict."""
    factory: Any = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")
    evaluate_literals_only()

    @lru_cache(maxsize=64)
    def data(task: str, args: tuple[tuple[str, Any], ...], seed: int) -> Any:
        return factory.create_dataset(task, seed=seed, size=CHUNK, **dict(args))

    def answer(request: Any) -> dict[str, Any]:
        asked = ScoringRequest(*request)
        return reply_of(scored(data(asked.task, asked.args, asked.seed), asked))

    return answer


def evaluate_literals_only() -> None:
    """In those scorers that evaluate the answer, put what reads literals in the place of what runs programs."""
    for name in _LITERALS:
        with contextlib.suppress(ImportError):  # another version of the package
            vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
