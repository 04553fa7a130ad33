"""The Python surface behind the command line: run, evaluate, export. Works inside a running event loop too."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from posttrain.api import overrides as dotted
from posttrain.api.admit import to_stderr
from posttrain.api.branch import TOKENIZER
from posttrain.api.build import make_policy, make_roles, use_threads
from posttrain.api.console import PlainConsole
from posttrain.api.endpoint import EndpointOptions, evaluate_remote, is_url, refuse, remote_run
from posttrain.api.environments import make_environment
from posttrain.api.request import RunOptions, requested
from posttrain.api.session import open_session
from posttrain.api.summary import show_report
from posttrain.api.target import kept_policy, run_and_checkpoint, target_run
from posttrain.controller.stages import StageResult
from posttrain.core.checkpoint import find
from posttrain.core.errors import ConfigError, RunFolderError
from posttrain.core.files import full
from posttrain.core.reader import is_run
from posttrain.core.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.core.shell import command_line
from posttrain.engine.learner import HFLearner
from posttrain.environment.gallery import GALLERY
from posttrain.role.evaluate import EvaluationReport
from posttrain.role.evaluate import evaluate as measure
from posttrain.role.weights import load_weights

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a finished run returns: its folder, its settings and the results of its stages."""

    folder: Path
    run: Run
    stages: tuple[StageResult, ...]

    @property
    def accuracy(self) -> float | None:
        """Share of held-out answers that are right, with the final weights; None if it was not measured."""
        return self._last.accuracy[0] if self._last is not None and self._last.accuracy is not None else None

    @property
    def reward(self) -> float | None:
        """Mean held-out reward of the same weights. It differs from `accuracy` where a reward gives partial credit."""
        return self._last.reward[0] if self._last is not None and self._last.reward is not None else None

    @property
    def _last(self) -> StageResult | None:
        """The stage whose weights the run ended with; None if it was measured on an environment of its own."""
        last = next((s for s in reversed(self.stages) if s.hands_on), None)
        return last if last is not None and self.run.env_of(self.run.stage(last.name)) == self.run.env else None


def wait(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end. Where an event loop is already running (notebooks), it runs in a new thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    box: list[Any] = []

    def body() -> None:
        try:
            box.append((True, asyncio.run(work)))
        except BaseException as error:
            box.append((False, error))

    thread = threading.Thread(target=body, name="posttrain")
    thread.start()
    thread.join()
    ok, value = box[0]
    if not ok:
        raise value
    return value


def run(
    recipe: str | Run = "",
    *overrides: str,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    quiet: bool = False,
    allow_fault: bool = False,
    trust: bool = False,
) -> Result:
    """Run a recipe, or resume a run that was cut.

    Args:
        recipe: name of a shipped recipe, or a `Run` of your own.
        overrides: dotted `key=value` changes.
        out: run folder; default runs/RECIPE-DATE-TIME.
        resume: an existing run folder to continue; then no recipe and no overrides are given.
        allow_fault: start even though `fault=NAME` plants a bug on purpose (`posttrain faults`).
        trust: allow what a folder made by somebody else asks for: code, addresses, secrets, files elsewhere.
    """
    options = RunOptions(out=out, resume=resume, quiet=quiet, allow_fault=allow_fault, trust=trust)
    with requested(recipe, overrides, options) as request, open_session(request) as session:
        wait(session.play())
    return Result(session.book.folder, session.run, session.results)


def evaluate(
    target: str | Path,
    *overrides: str,
    samples: int | None = None,
    checkpoint: str = "last",
    max_tokens: int | None = None,
    temperature: float | None = None,
    remote: EndpointOptions = EndpointOptions(),
    quiet: bool = False,
    trust: bool = False,
) -> EvaluationReport:
    """Held-out accuracy, mean reward and pass@k of a run, a model directory or hub id, or the model at an address.

    Args:
        target: a run folder or one of its checkpoints, a model, or the address of an OpenAI-compatible endpoint. For
            the last two an override names the environment: `env=arithmetic`, or `env.prompts=` and `env.rewards=`.
        overrides: dotted changes of `env.*`, `seed`, `slots` (of an endpoint: requests at once), `threads`.
        samples: samples per prompt; by default the run's own number.
        checkpoint: of a run folder: `last`, `best` or a checkpoint's name.
        remote: how to reach an endpoint and what to ask it.
        trust: allow what a run folder made by somebody else asks for: code, addresses, secrets, files elsewhere.
    """
    target, checkpoint = run_and_checkpoint(target, checkpoint)
    run, weights = _asked_run(target, checkpoint, overrides, quiet, trust)
    how = run.evaluation if samples is None else replace(run.evaluation, samples=samples)
    contract = _contract(run, max_tokens, temperature)
    use_threads(run.threads)
    written = Path(target) / TOKENIZER if weights is not None and any(s.env for s in run.stages) else None
    run = _evaluated(run, contract)
    environment = make_environment(run)
    if not environment.heldout:
        raise ConfigError("env.heldout=0 leaves no task to evaluate on; say how many, for example env.heldout=100")
    console = PlainConsole(soft_wrap=True, quiet=quiet)
    if is_url(target):
        report = wait(evaluate_remote(str(target), remote, run, environment, contract, how, console.print))
        show_report(console, str(target), environment.name, report)
        return report
    refuse(remote)
    policy = make_policy(run, environment, written=written, own=Path(target) if weights is not None else None)
    roles = make_roles(run, policy, environment)
    if weights is not None:
        load_weights(weights, roles.learner)

    async def work() -> EvaluationReport:
        await roles.sync.push(roles.engine.version + 1)
        return await measure(
            roles.rollout, environment.heldout, contract.resolve(policy.stop_ids, roles.renderer.spell), how
        )

    try:
        report = wait(work())
    finally:
        roles.close()
        environment.close()
    show_report(console, str(target), environment.name, report)
    return report


def _asked_run(
    target: str | Path, checkpoint: str, overrides: tuple[str, ...], quiet: bool, trust: bool
) -> tuple[Run, Path | None]:
    """(the run whose environment and model are evaluated, the weights to load into its policy or None)."""
    if not is_run(target):
        overrides = with_environment(str(target), overrides)
    if is_url(target):
        return dotted.apply(remote_run(str(target)), list(overrides)), None
    say: Callable[[str], None] = (lambda _: None) if quiet else to_stderr
    return target_run(target, checkpoint, *overrides, parts=("model", "env", "engine"), allow=trust, say=say)


def with_environment(target: str, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """The overrides with `env=prompts` where they give prompts alone. ConfigError where they name no environment."""
    keys = {text.partition("=")[0].strip() for text in overrides}
    if keys & {"env", "env.name"}:
        return overrides
    if "env.prompts" in keys:
        return ("env=prompts", *overrides)
    raise ConfigError(
        f"{target} is a model, and a model has no tasks of its own: say what to evaluate it on.\n"
        f"  {command_line('eval', target, 'env.prompts=mine.jsonl', 'env.rewards=exact')}\n"
        f"  {command_line('eval', target, 'env=arithmetic')}  # or another of the gallery: {', '.join(GALLERY)}\n"
        "posttrain new env writes an environment of your own (env=mine.py:Mine); a run folder has one already"
    )


def _evaluated(run: Run, contract: Sampling) -> Run:
    """The run with only its RL stages, made independent of the stages that were removed."""
    alone = {"start": None, "time_of": None, "hands_on": True, "sampling": contract}
    asked = tuple(replace(s, **alone) for s in run.stages if isinstance(s, Reinforce))
    return replace(run, stages=asked or run.stages)


def _contract(run: Run, max_tokens: int | None, temperature: float | None) -> Sampling:
    """The sampling contract of the run's first RL stage, with the caller's changes."""
    contract = next((s.sampling for s in run.stages if isinstance(s, Reinforce)), Sampling())
    wanted = {"max_tokens": max_tokens, "temperature": temperature}
    return replace(contract, **{k: v for k, v in wanted.items() if v is not None})


def export(run_folder: str | Path, folder: str | Path, checkpoint: str = "last", trust: bool = False) -> Path:
    """Write a run's weights as a plain `save_pretrained` directory (model, tokenizer, generation config).

    It is made from the run folder alone where that is enough. Otherwise (a model with code of its own, or a folder of
    an older version) the model that the run started from is loaded.
    """
    source, target = Path(run_folder), Path(folder)
    if target.exists() and any(target.iterdir()):
        raise RunFolderError(f"{target} exists and is not empty: choose another folder")
    weights = find(source, checkpoint).folder
    policy = kept_policy(source, allow=trust)
    load_weights(weights, HFLearner(policy))
    try:
        policy.save(target)
    except Exception as error:
        if (why := full(error)) is None:
            raise
        for path in target.glob("*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise RunFolderError(
            f"{why[0]}: {target} was not written, and what was begun of it is removed. {why[1]} and export again"
        ) from error
    return target
