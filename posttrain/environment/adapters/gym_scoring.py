"""Scoring with reasoning-gym's own scorers, in worker processes, where an endless search can be killed.

The policy's text must never be evaluated. Scorers that want a Python literal get `ast.literal_eval` in place of `eval`.
Others give a formula to sympy, whose parser evaluates it: they get numbers, operators and elementary functions alone.
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
from posttrain.verifier.reward_source import as_verdict
from posttrain.verifier.user_code import where
from posttrain.verifier.workers.worker_pool import WorkerPool, reply_of
from posttrain.verifier.workers.worker_process import Spec

SECONDS = 30
"""Most processor time of scoring one answer. Beyond it the score is 0 (`timeout`), if the scorer still works."""
WORKERS = 2
CHUNK = 1000
"""How many items a data set of one reasoning-gym seed has. Some of its tasks are slow, or refuse, if there are many."""

FORMULAS = frozenset(
    {"countdown", "puzzle24", "simple_integration", "intermediate_integration", "polynomial_multiplication"}
)
"""Tasks whose scorers give the answer to sympy's parser."""
_LITERALS = ("algorithmic.binary_matrix", "algorithmic.spiral_matrix", "algorithmic.string_insertion", "games.n_queens")
"""Modules whose scorers give the answer to `eval`."""
# Names of functions and constants that a formula may have: `sqrt`, `asinh`, `Abs`, `pi`.
_FUNCTIONS = re.compile(
    r"sqrt|cbrt|exp|log|ln|a?(sin|cos|tan|cot|sec|csc)h?|[aA]bs|sign|pi|oo|Rational|Integral|erfi?|[SCE]i|li|fresnel[sc]",
    re.ASCII,
)
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Only the characters of a formula, such as `3*x**2 + sqrt(2)`, and no point before a letter, as `x.real` has.
_FORMULA = re.compile(r"(?!.*\.\s*[A-Za-z_])[\w\s+\-*/^().,=!|]*", re.ASCII | re.DOTALL)


class ScoringRequest(NamedTuple):
    """One answer to score, with everything that its scorer needs."""

    task: str
    args: tuple[tuple[str, Any], ...]
    seed: int
    """Seed of the item's data set."""
    entry: Mapping[str, Any]
    answer: str
    gold: str
    """The right answer of the data, if there is one. It is used to test whether the scorer works."""


def scored(data: Any, request: ScoringRequest) -> Verdict:
    """The verdict of a data set's scorer. `failed` if the scorer raises, and raises on the gold answer too."""
    # The answer is checked before the scorer gets it, because the scorer's parser would evaluate it.
    if request.task in FORMULAS and (why := _no_formula(request.answer)):
        return Verdict.value(0.0, "unparsable", why)
    try:
        score = data.score_answer(request.answer, request.entry)
    except MemoryError:  # the worker ends, and the pool tries the request again
        raise
    except Exception as error:  # scorers raise anything on an answer that they cannot read
        try:
            # The same scorer on an answer that is known to be right: if it raises there as well, the answer is
            # not to blame.
            data.score_answer(request.gold, request.entry)
        except Exception as gold_error:
            return Verdict.failed(
                "raised", f"the scorer of {request.task!r} raises on the right answer too: {where(gold_error)}"
            )
        return Verdict.value(0.0, "unparsable", where(error))
    return as_verdict(float(score) if isinstance(score, bool) else score)


def _no_formula(answer: str) -> str:
    """The reason why an answer may not go to a parser that evaluates; '' if it may."""
    # No attribute (a point before a letter), no quote, no bracket of an index: nothing but a formula is left.
    if not _FORMULA.fullmatch(answer):
        return "no formula: it has characters that numbers, operators and functions do not need"
    # Single letters are variables; longer names have to be known functions.
    foreign = next((n for n in _NAME.findall(answer) if len(n) > 1 and not _FUNCTIONS.fullmatch(n)), None)
    return "" if foreign is None else f"no formula: {foreign[:40]!r} is no elementary function"


_SHARED: WeakValueDictionary[str, WorkerPool] = WeakValueDictionary()


def workers() -> WorkerPool:
    """The pool of scoring processes, which all environments share. It ends when none refers to it."""
    pool = _SHARED.get("gym")
    if pool is None:
        spec = Spec(f"{__name__}:handler", cpu=SECONDS, wall=2.0 * SECONDS + 20, preload=True, quiet=True)
        pool = _SHARED["gym"] = WorkerPool(spec, WORKERS, "gym")
    return pool


async def verdict(pool: WorkerPool, request: ScoringRequest) -> Verdict:
    """The scorer's verdict. An answer that ended the process scores 0 only if the gold answer is scored after it."""
    try:
        scored_answer = (await pool.ask(request)).one
        if scored_answer.kind in ("timeout", "memory", "crash") and scored_answer.score is not None:
            # If the right answer ends the process too, the scorer is broken, and the answer is not to blame.
            scored_gold = (await pool.ask(request._replace(answer=request.gold))).one
            if scored_gold.state is State.FAILED or scored_gold.kind == scored_answer.kind:
                return Verdict.failed(
                    scored_answer.kind,
                    f"{scored_answer.why}, and the scorer of {request.task!r} does not answer the right answer either",
                )
        return scored_answer
    except Exception as error:  # an item that cannot be pickled, a pool that was closed
        return Verdict.failed("worker", f"{type(error).__name__}: {error}")


def handler(_: str) -> Callable[[Any], dict[str, Any]]:
    """Runs in the worker: a function from a `ScoringRequest` to its verdict."""
    factory: Any = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")
    evaluate_literals_only()

    @lru_cache(maxsize=64)
    def data(task: str, args: tuple[tuple[str, Any], ...], seed: int) -> Any:
        return factory.create_dataset(task, seed=seed, size=CHUNK, **dict(args))

    def answer(fields: Any) -> dict[str, Any]:
        request = ScoringRequest(*fields)
        return reply_of(scored(data(request.task, request.args, request.seed), request))

    return answer


def evaluate_literals_only() -> None:
    """In the scorers that evaluate the answer, replace `eval` by `ast.literal_eval`."""
    for name in _LITERALS:
        with contextlib.suppress(ImportError):  # another version of the package
            # A module's own name is found before the builtin one.
            vars(importlib.import_module(f"reasoning_gym.{name}"))["eval"] = ast.literal_eval
