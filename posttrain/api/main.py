"""The Python surface behind the command line: run, evaluate, export. Works inside a running event loop too.

What needs torch is imported inside the functions, after the request was checked: a wrong setting or a path that is not
there is answered at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from posttrain.build.build_environments import make_environment
from posttrain.build.open_model import check_target, run_and_checkpoint
from posttrain.build.request.branch import TOKENIZER
from posttrain.build.request.run_request import RunOptions, requested
from posttrain.build.request.user_objects import UserObjects, setting_words
from posttrain.config.env import Env
from posttrain.config.rank_limits import SECONDS, Parallel, RankOptions, torchrun_rank, under_torchrun
from posttrain.config.run import Evaluation, Reinforce, Run
from posttrain.core.abilities import declared
from posttrain.core.gauge import Step
from posttrain.core.ports import Environment
from posttrain.core.sampling import Sampling
from posttrain.evaluation.evaluate_endpoint import EndpointOptions, evaluate_remote, is_url, refuse
from posttrain.evaluation.evaluation_target import asked_run, contract_of
from posttrain.ladder.both_ladders import AnyAlgorithm
from posttrain.record.certificate import FAILED, ExportCertificate
from posttrain.record.checkpoint import find
from posttrain.record.run_reader import is_run, run_file
from posttrain.report.console import PlainConsole
from posttrain.report.export.hub import is_hub, push, ready, repository_of
from posttrain.report.run_summary import show_report
from posttrain.role.heldout_evaluation import EvaluationReport
from posttrain.role.heldout_evaluation import evaluate as measure
from posttrain.system.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from posttrain.build.build_run import PolicyRoles
    from posttrain.report.run_result import Result


def run(
    recipe: str | Run = "",
    *overrides: str,
    env: Any = None,
    rewards: Any = None,
    algorithm: str | AnyAlgorithm | None = None,
    out: str | Path | None = None,
    resume: str | Path | None = None,
    on_step: Callable[[Step], object] | None = None,
    quiet: bool = False,
    allow_fault: bool = False,
    trust: bool = False,
    accept_changed: bool = False,
    nproc: int | None = None,
    rank_timeout: float = SECONDS,
    replicas: int = 1,
    parallel: Parallel = "rows",
    **settings: Any,
) -> Result:
    """Run a recipe, or go on with a run that was cut or that shall be longer.

    Args:
        recipe: name of a shipped recipe, or a `Run` of your own.
        overrides: dotted `key=value` changes.
        env: an environment by name, `posttrain.prompts(...)`, rows as that takes them, or a class or object of yours.
        rewards: reward functions, names of built-ins or `path.py:function`, each alone or with its weight:
            `[right, ("think_format", 0.2)]`. Functions run in this process.
        algorithm: by its name, or an `Algorithm` or `PreferenceAlgorithm` of your own.
        out: run folder; default runs/RECIPE-DATE-TIME.
        resume: a run folder, or a checkpoint in it, to go on with. No recipe is given then, and only settings that
            change no past step: `run(resume="runs/mine", steps=200)`. Objects are handed again.
        on_step: called after each step with its `core.gauge.Step`. True ends the stage and the run; `resume` goes on.
        allow_fault: start even though `fault=NAME` plants a bug on purpose (`posttrain faults`).
        trust: allow what somebody else's folder or YAML file asks for: code, addresses, secrets, files elsewhere.
        accept_changed: with `resume`, go on although data, rewards or models were changed.
        nproc: train with so many processes on this machine, each with a part of the weights (docs/design/shards.md).
        rank_timeout: seconds that one of them waits for the others before the run stops and says for whom.
        replicas: copies of the weights among these processes; each is cut over the same number of them.
        parallel: how they share the model: `rows` of weights, `tensor` (columns and rows of layers), or `experts`.
        settings: any other setting by its name: `model="my-model", steps=50, sampling={"max_tokens": 64}`.
    """
    # A text is a setting, as on the command line; anything else is an object that is handed over.
    named = {n: v for n, v in (("env", env), ("algorithm", algorithm)) if isinstance(v, str)}
    words = [*overrides, *setting_words(named | settings)]
    algorithm_object = None if isinstance(algorithm, str) else algorithm
    handed = UserObjects(None if isinstance(env, str) else env, rewards, algorithm_object)
    ranks = RankOptions(nproc=nproc, seconds=rank_timeout, replicas=replicas, parallel=parallel)
    # Before anything of the request is looked at: only rank 0 reads settings and data, and makes environments.
    if under_torchrun() and torchrun_rank() > 0:
        from posttrain.build.distributed_run import follow

        sys.exit(follow(ranks))
    flags = {"quiet": quiet, "allow_fault": allow_fault, "trust": trust, "accept_changed": accept_changed}
    options = RunOptions(out=out, resume=resume, ranks=ranks, handed=handed, on_step=on_step, **flags)
    with requested(recipe, words, options) as request:
        from posttrain.api.session import open_session
        from posttrain.report.run_result import Result
        from posttrain.stages.run_coroutine import wait

        with open_session(request) as session:
            wait(session.play(), session.stopper)
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
    env: Any = None,
    rewards: Any = None,
    ema: bool = False,
) -> EvaluationReport:
    """Held-out accuracy, mean reward and pass@k of a run, a model directory or hub id, or the model at an address.

    Args:
        target: a run folder or one of its checkpoints, a model, or the address of an OpenAI-compatible endpoint. The
            last two need an override: `env=arithmetic`, or `env.prompts=` and `env.rewards=`.
        overrides: dotted changes of `env.*`, `seed`, `slots` (of an endpoint: requests at once), `threads`.
        samples: samples per prompt; by default the run's own number.
        checkpoint: of a run folder: `last`, `best` or a checkpoint's name.
        max_tokens, temperature: in place of those of the run's sampling contract.
        remote: how to reach and ask an endpoint.
        quiet: print nothing.
        trust: allow what a run folder made by somebody else asks for: code, addresses, secrets, files elsewhere.
        env, rewards: as in `run`. A run that was handed objects needs its functions again.
        ema: evaluate the moving average of a run's weights (`optimizer.ema`) in place of the weights.
    """
    target, checkpoint = run_and_checkpoint(target, checkpoint)
    _check_asked(target, checkpoint, remote, ema)
    objects = UserObjects(None if isinstance(env, str) else env, rewards)
    overrides = (f"env={env}", *overrides) if isinstance(env, str) else overrides
    run, weights, runtime_objects = asked_run(target, checkpoint, overrides, objects, quiet, trust)
    evaluation = run.evaluation if samples is None else replace(run.evaluation, samples=samples)
    contract = contract_of(run, max_tokens, temperature)
    folder = None if weights is None else Path(target)
    # A tokenizer that was built has the characters of all environments of the run. Here only one is made, so where
    # stages have environments of their own the tokenizer comes from the folder.
    written = folder / TOKENIZER if folder is not None and any(s.env for s in run.stages) else None
    run = _evaluated(run, contract)
    with closing(make_environment(run, runtime_objects)) as environment:
        judges = declared(environment).judges or run.env.has_reward_models
        _check_measurable(environment, run.env, is_url(target), judges or folder is not None)
        from posttrain.build.build_reward_models import judges_of
        from posttrain.build.build_run import make_policy, make_roles  # imports torch: a wrong setting is told before
        from posttrain.engine.learner.torch_settings import use_threads
        from posttrain.evaluation.heldout_rows import measure_rows
        from posttrain.stages.run_coroutine import wait

        use_threads(run.threads)
        console = PlainConsole(soft_wrap=True, quiet=quiet)
        if is_url(target):
            report = wait(evaluate_remote(str(target), remote, run, environment, contract, evaluation, console.print))
        else:
            # A run's weights come later, by a push whose checks show that the engine serves them.
            policy = make_policy(run, environment, written=written, own=folder)
            with closing(make_roles(run, policy, environment, judges_of(run, policy, folder))) as roles:
                load = partial(_load, weights, ema, roles.learner)
                if folder is not None and not judges:
                    # Without rewards nothing is sampled: held-out rows are measured, and that prints its own table.
                    return wait(measure_rows(run, folder, policy, roles, environment, load, console.print))
                report = wait(_measured(roles, environment, contract, policy.stop_ids, evaluation, load))
        show_report(console, str(target), environment.name, report)
        return report


def _load(weights: Path | None, ema: bool, learner: Any) -> None:
    from posttrain.role.weights.saved_weights import load_average, load_weights

    if weights is not None:
        (load_average if ema else load_weights)(weights, learner)


def _check_asked(target: str | Path, checkpoint: str, remote: EndpointOptions, ema: bool) -> None:
    if ema and not is_run(target):
        raise ConfigError(f"--ema is about a run folder, which keeps averages of its weights, and {target} is none")
    if not is_url(target):
        refuse(remote)
        check_target(target, checkpoint)


def _check_measurable(environment: Environment, config: Env, served: bool, measured: bool) -> None:
    """ConfigError where no task is held out, or nothing is measured. `served`: what answers is at an address."""
    if served and config.has_reward_models:
        raise ConfigError("env.rewards=model:... judges a run or a model directory; at an address only verifiers judge")
    if not environment.heldout:
        raise ConfigError("env.heldout=0 leaves no task to evaluate on; say how many, for example env.heldout=100")
    if not measured:
        raise ConfigError(
            f"environment {environment.name!r} judges no answers: its rows have no reward. Give env.rewards, which"
            " judge what the model samples; what a stage without rewards measured is in posttrain summary"
        )


async def _measured(
    roles: PolicyRoles,
    environment: Environment,
    contract: Sampling,
    stop_ids: tuple[int, ...],
    evaluation: Evaluation,
    load: Callable[[], None],
) -> EvaluationReport:
    load()
    # A push of an adapter tries it first, under the version before.
    await roles.sync.push(roles.engine.version + 2)
    sampling = contract.resolve(stop_ids, roles.renderer.spell)
    return await measure(roles.rollout, environment.heldout, sampling, evaluation)


def _evaluated(run: Run, contract: Sampling) -> Run:
    """The run with only its RL stages, made independent of the stages that were removed. Without RL all stages stay."""
    # Nothing of another stage is named: its weights, its time (`time_of`), and whether one follows (`hands_on`).
    alone = {"start": None, "time_of": None, "hands_on": True, "sampling": contract}
    rl_stages = tuple(replace(s, **alone) for s in run.stages if isinstance(s, Reinforce))
    return replace(run, stages=rl_stages or run.stages)


def export(
    run_folder: str | Path,
    folder: str | Path,
    checkpoint: str = "last",
    trust: bool = False,
    public: bool = False,
    adapter: bool = False,
    ema: bool = False,
) -> Path | str:
    """Write a run's weights as a plain `save_pretrained` directory: model, tokenizer, generation config, model card.

    It is made from the run folder alone where that is enough. Otherwise (a model with code of its own, or a folder of
    an older version) the model that the run started from is loaded.

    Args:
        folder: a new or empty folder; or `hub:me/my-model`, which pushes it to the Hugging Face hub.
        checkpoint, trust: as in `evaluate`.
        public: on the hub: let everybody read a repository that is made here. It is private otherwise.
        adapter: of a run with `model.lora`, write the adapter alone, as PEFT does. It is merged otherwise.
        ema: write the moving average of the weights (`optimizer.ema`) in place of the weights.

    What was written is read back with plain transformers (and PEFT) and compared with the run. `certificate.json` in
    the folder says what was compared, `lineage.json` what the weights come from.

    Returns:
        The folder; or the address of the repository.

    Raises:
        InvariantError: what was read back is not what the run holds. Nothing is kept that could be taken for good.
    """
    return certified_export(run_folder, folder, checkpoint, trust, public, adapter, ema)[0]


def certified_export(
    run_folder: str | Path,
    folder: str | Path,
    checkpoint: str = "last",
    trust: bool = False,
    public: bool = False,
    adapter: bool = False,
    ema: bool = False,
) -> tuple[Path | str, ExportCertificate]:
    """`export`, with the certificate."""
    source, target = Path(run_folder), Path(folder)
    # Both only for their errors, before torch is imported.
    run_file(source)
    find(source, checkpoint)
    if not is_hub(folder):
        # The certificate of an export that failed may lie there; it is no reason to look for another folder.
        if target.exists() and any(p.name != FAILED for p in target.iterdir()):
            raise RunFolderError(f"{target} exists and is not empty: choose another folder")
    else:
        ready(folder)
    from posttrain.report.export.export_model import ExportChoice, export_to

    choice = ExportChoice(checkpoint=checkpoint, trust=trust, adapter=adapter, ema=ema)
    if not is_hub(folder):
        return target, export_to(source, target, target.resolve().name, choice)
    # Nothing reaches the hub before it was read back and compared: `export_to` raises where that fails.
    with TemporaryDirectory(prefix="posttrain-export-") as temporary:
        certificate = export_to(source, where := Path(temporary) / "model", repository_of(folder), choice)
        return push(where, folder, private=not public), certificate
