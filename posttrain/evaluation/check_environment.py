"""`posttrain check`: probes an environment and prints the findings. `check` is for Python, `show` for the terminal."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from posttrain.build.request.trust_prompt import admitted
from posttrain.config import overrides as dotted
from posttrain.config.env import Env
from posttrain.config.run import Run
from posttrain.core.abilities import LintFinding
from posttrain.environment import check as probes
from posttrain.environment.check import CheckReport, Mark
from posttrain.environment.gallery import GALLERY
from posttrain.environment.make import environment
from posttrain.environment.make import names as environment_names
from posttrain.environment.single import SingleTurn
from posttrain.environment.templates.renderer import Renderer
from posttrain.environment.templates.template_lint import template_findings
from posttrain.recipe.recipes import RECIPES
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record.run_reader import episode_files, is_run, read_episodes, steps
from posttrain.report.console import Group, PlainConsole
from posttrain.report.console import table as columns
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line
from posttrain.system.terminal_output import tell
from posttrain.verifier.user_code import named_object, user_module

PATIENCE = 10.0
"""Least seconds between two lines of progress where the output is a file."""
COLOURS = {Mark.OK: "green", Mark.WARN: "yellow", Mark.FAIL: "bold red", Mark.SKIP: "dim"}


def check(
    env: str | Path | Env | SingleTurn,
    *overrides: str,
    tasks: int = probes.TASKS,
    rate: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
    trust: bool = False,
) -> CheckReport:
    """Probe an environment and its verifiers: `posttrain.check("arithmetic", "env.args.max_operand=99").passed`.

    Args:
        env: what `env.name` may be, a run folder, `path.py:NAME` of a `Run` or an `Env`, an `Env`, or an environment of
            your own.
        overrides: dotted changes of `env` and `seed`, and `model=PATH`: a model whose template is tried.
        tasks: number of held-out tasks to try.
        rate: answers per second that must be judged. None: the rate of the run's rollouts, or 16 without a run.
        progress: called with the name of each probe before it begins.
        trust: allow what the environment of a run folder made by somebody else asks for.

    Raises:
        ConfigError: the environment or a setting does not exist.
        DataError: the user's prompts cannot be read.
    """
    rate = expected_rate(env) if rate is None else rate
    for name, value in (("tasks", tasks), ("rate", rate)):
        if not value > 0:
            raise ConfigError(f"--{name} {value}: must be more than 0")
    # Overrides of `model` do not change the environment: they name the model whose chat template is tried.
    model = [w for w in overrides if w.partition("=")[0].split(".")[0] == "model"]
    others = [w for w in overrides if w not in model]
    if isinstance(env, SingleTurn):
        if others:
            raise ConfigError(f"{others[0]}: an environment that is already built takes no overrides")
        # One that is already built is the caller's, and stays open.
        return _wait(env, tasks, rate, progress, model_findings(env, model) if model else [])
    with closing(build(env, *others, trust=trust)) as built:
        model_lint = model_findings(built, model) if model else []
        return _wait(built, tasks, rate, progress, model_lint, earned(env) if isinstance(env, str | Path) else ())


def expected_rate(env: str | Path | Env | SingleTurn) -> float:
    """Answers per second of a run's rollouts, where their time includes generation and waiting. Without a run: the
    default."""
    if isinstance(env, str | Path) and is_run(env):
        played = [s for s in steps(env) if "rollout/tokens" in s.gauges]
        # A run that has just begun has no time yet, and nothing to divide by.
        if seconds := math.fsum(s.clock["rollout"] for s in played):
            # The gauge is a mean over episodes, so its count is the number of answers.
            return math.fsum(s.gauges["rollout/tokens"].count for s in played) / seconds
    return probes.RATE


def earned(target: str | Path) -> list[float]:
    """Returns the rewards of a run's last recorded training step; an empty list where the target is no run."""
    files = [f for f in episode_files(target) if f.kind == "train"] if is_run(target) else []
    episodes = [r.episode for r in read_episodes(files[-1].path)] if files else []
    return [e.reward for e in episodes if e.reward is not None]


def build(env: str | Path | Env, *overrides: str, trust: bool = False) -> SingleTurn:
    """The environment given by its name, by a run that used it, or by its configuration."""
    # The settings of an environment are a part of a run, so a shipped recipe is the run around them.
    run = shipped("arithmetic")
    if unknown := [w for w in overrides if w.partition("=")[0].split(".")[0] not in ("env", "seed")]:
        raise ConfigError(
            f"{unknown[0]}: a check reads the environment alone, and with model=PATH the chat template of a model:"
            " env.args.NAME, env.rewards, env.prompts, env.heldout, seed and model"
        )
    if not isinstance(env, Env) and is_run(env):
        # A foreign run is asked about its environment alone, since nothing else of it is used.
        run = admitted(env, *overrides, parts=("env",), allow=trust)
    else:
        if not isinstance(env, Env):
            _refuse_others(str(env))
            env = _of_file(str(env)) or env
        run = replace(run, env=env) if isinstance(env, Env) else dotted.apply(run, [f"env={env}"])
        run = dotted.apply(run, list(overrides))
    return environment(run.env, run.seed)


def model_findings(env: SingleTurn, words: Sequence[str]) -> list[LintFinding]:
    """The stop tokens of the model that these overrides name, and what its chat template does with the data."""
    from posttrain.engine.adapters.saved_adapter import saved_adapter
    from posttrain.engine.files.pretrained_files import read_tokenizer
    from posttrain.engine.model.stop_tokens import resolve_stops, turn_end

    model = dotted.apply(shipped("arithmetic"), list(words)).model
    if model.path is None:
        raise ConfigError(f"{' '.join(words)}: name the model whose chat template is checked: model=PATH_OR_HUB_ID")
    saved = saved_adapter(model.path)
    # A run keeps its tokenizer beside its record; an adapter has that of the model beneath it.
    path = str(Path(model.path, "tokenizer")) if is_run(model.path) else model.path if saved is None else saved.base
    tokenizer, config = read_tokenizer(path, model.trust_remote_code)
    stops = resolve_stops(tokenizer, config)
    stop_words = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)!r} ({i})" for i in stops)
    advice = "correct generation_config.json or the chat template"
    findings = [LintFinding("model: stop tokens", f"a turn ends at {stop_words}")]
    findings += [LintFinding("model: stop tokens", n, warns=True, advice=advice) for n in turn_end(tokenizer, stops)]
    untyped: Any = tokenizer
    # An environment with a `play` of its own may answer in later turns, which the template then has to write.
    follows = [] if type(env).play is SingleTurn.play else ["user"]
    of_template = template_findings(Renderer(untyped, stops), env, [*env.heldout, env.train.task(0)], follows)
    return [*findings, *(of_template or [LintFinding("template", "prompts are text, so no chat template is used")])]


def _of_file(target: str) -> Env | None:
    """The settings in `path.py:NAME`, where NAME is a `Run`, an `Env`, or a function that returns one.

    None where NAME is the class of an environment, or where the target is no such file.
    """
    path, _, name = target.rpartition(":")
    if Path(path).suffix != ".py" or not Path(path).is_file():
        return None
    read = partial(user_module, what="check")
    # Read once here, to see what the name is, and once more where an Env or a Run is built from it.
    named = getattr(read(Path(path).resolve()), name, None)
    if named is None or isinstance(named, type):
        return None
    settings = named_object(target, "", (Run, Env), read, "a class of an environment, a Run or an Env")
    return settings.env if isinstance(settings, Run) else settings


def _refuse_others(target: str) -> None:
    """ConfigError for a target that is a recipe or an ordinary folder; it says what to check instead."""
    if target in RECIPES and target not in GALLERY:
        env = shipped(target).env
        mine = ("env.prompts=mine.jsonl", "env.rewards=exact") if env.name == "prompts" else ()
        raise ConfigError(
            f"{target} is a recipe, and what is checked is an environment: this one's is {env.name}.\n"
            f"  {command_line('check', env.name, *mine)}\n"
            "A run folder of it can be checked too, such as runs/mine"
        )
    if ("/" in target or Path(target).is_dir()) and ":" not in target:
        why = "it has no run.json" if Path(target).is_dir() else "there is no such folder"
        raise ConfigError(
            f"{target} is no run folder ({why}), and no environment: {', '.join(environment_names())}, or a run folder"
        )


def _wait(
    env: SingleTurn,
    tasks: int,
    rate: float,
    progress: Callable[[str], None],
    model_lint: Sequence[LintFinding],
    rewards: Sequence[float] = (),
) -> CheckReport:
    """Run the probes to their end. Where an event loop is already running (notebooks), they run in a new thread."""
    probing = partial(probes.check, env, tasks=tasks, rate=rate, progress=progress, found=model_lint, earned=rewards)
    outcome: list[CheckReport | BaseException] = []

    def body() -> None:
        try:
            outcome.append(asyncio.run(probing()))
        except BaseException as error:  # raised again in the thread that waits
            outcome.append(error)

    try:
        # A running loop cannot wait for another one in its thread.
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(probing())
    thread = threading.Thread(target=body, name="posttrain check")
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def show(target: str, *overrides: str, tasks: int, rate: float | None, as_json: bool, trust: bool = False) -> int:
    """Print the report. Returns 0 if nothing failed, else 1."""
    if as_json:
        report = check(target, *overrides, tasks=tasks, rate=rate, trust=trust)
        tell(json.dumps(report.plain(), indent=2))
        return 0 if report.passed else 1
    console = PlainConsole()
    with console.status("building") as status:
        last_line_at = [time.monotonic()]

        def progress(name: str) -> None:
            status.update(Text(name))
            if not console.is_terminal and time.monotonic() - last_line_at[0] > PATIENCE:
                last_line_at[0] = time.monotonic()
                console.print(name)

        report = check(target, *overrides, tasks=tasks, rate=rate, progress=progress, trust=trust)
    console.print(table(report))
    for reason, names in skipped(report).items():
        console.print(Text("skipped ", COLOURS[Mark.SKIP]) + Text(f"{', '.join(names)}: {reason}"))
    for finding in report.findings:
        if finding.advice:
            console.print(
                Text(finding.probe, COLOURS[finding.mark]) + Text(f": {finding.means}. To do: {finding.advice}")
            )
    failed, warned = report.marked(Mark.FAIL), report.marked(Mark.WARN)
    console.print(
        Text(report.verdict, "bold red" if failed else "green") + Text(f"; {len(warned)} to look at" if warned else "")
    )
    return 1 if failed else 0


def skipped(report: CheckReport) -> dict[str, list[str]]:
    """The probes that were not asked, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for f in report.findings:
        if f.mark is Mark.SKIP:
            by_reason.setdefault(f.detail, []).append(f.probe)
    return by_reason


def table(report: CheckReport) -> Group:
    """One row per probe that was asked."""
    sources = f", judged by {', '.join(report.sources)}" if report.sources else ""
    asked = [f for f in report.findings if f.mark is not Mark.SKIP]
    rows = [(Text(f.mark.value, COLOURS[f.mark]), f.probe, f.detail) for f in asked]
    heads = ("", "probe", "what was seen")
    return columns(f"{report.env}: {report.tasks} tasks{sources}", heads, rows, words=heads)
