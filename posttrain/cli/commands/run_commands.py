"""Commands about runs to be made: `posttrain run`, `plan`, `check` and `new`."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from typing import TYPE_CHECKING, get_args

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust, flag, option
from posttrain.config.rank_limits import SECONDS, Parallel, RankOptions, torchrun_rank, under_torchrun
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

if TYPE_CHECKING:
    from posttrain.build.request.run_request import RunRequest


def add_run(sub: Subparsers) -> None:
    p = add_command(
        sub,
        run,
        "run a recipe, or go on with a run that was cut or that shall be longer",
        "posttrain run ladder seed=1 algorithm=grpo clip.high=0.28 rl.steps=80 --out runs/mine\n"
        "  posttrain run --resume runs/mine\n"
        "  posttrain run --resume runs/mine rl.steps=200\n"
        "  posttrain run grpo model=runs/mine env.prompts=mine.jsonl env.rewards=mine.py:reward",
        add_help=False,
    )
    p.add_argument(
        "recipe",
        nargs="?",
        help="its name (--help lists them), a YAML file of --dry-run, or my_run.py:NAME, a Run or a function that "
        "returns one",
    )
    flag(p, "--dry-run", "check the run and print all its settings as YAML; posttrain run FILE.yaml runs them")
    option(p, "--out", "FOLDER", "run folder (default: runs/RECIPE-DATE-TIME)")
    text = (
        "go on with this run folder, or with one of its checkpoints (RUN/checkpoints/NAME); with rl.steps=N for longer"
    )
    option(p, "--resume", "RUN", text)
    text = "start although fault=NAME plants a bug on purpose (posttrain faults lists them); its numbers mean nothing"
    flag(p, "--allow-fault", text)
    flag(
        p,
        "--accept-changed",
        "with --resume: go on although data, rewards or models that it reads are not as they were when it was begun; "
        "run.json records it",
    )
    option(
        p,
        "--nproc",
        "N",
        "train with N processes (ranks) on this machine, each with a part of the weights; under torchrun its processes "
        "are the ranks, and this is left out (docs/guides/ranks.md)",
        type=int,
    )
    text = "how long a rank waits for the others before the run stops and says for whom (default: %(default)g)"
    option(p, "--rank-timeout", "SECONDS", text, type=float, default=SECONDS)
    text = "copies of the weights among the ranks; each copy is cut over N / R of them (default: %(default)d)"
    option(p, "--replicas", "R", text, type=int, default=1)
    option(
        p,
        "--parallel",
        None,
        "how the ranks share the model: rows of every weight, columns and rows of each layer (tensor parallelism), or "
        "whole experts of a mixture (default: %(default)s)",
        choices=get_args(Parallel),
        default="rows",
    )
    add_trust(p)
    text = "this text; after a recipe's name its main settings, and with NAME those of a group, one setting, or all"
    p.add_argument("-h", "--help", nargs="?", const="", metavar="NAME", help=text)
    p.usage = "posttrain run [RECIPE] [key=value ...] [--out FOLDER]\n       posttrain run --resume RUN [key=value ...]"
    p.set_defaults(text=p.format_help)


def run(o: Namespace) -> int:
    if o.help is not None:
        tell(_help(o))
        return 0
    if o.dry_run and o.resume:
        raise ConfigError(
            "--dry-run is about a new run: leave out --resume. posttrain show RUN shows what one recorded"
        )
    from posttrain.build.request.run_request import RunOptions, requested

    ranks = RankOptions(nproc=o.nproc, seconds=o.rank_timeout, replicas=o.replicas, parallel=o.parallel)
    # Under torchrun only rank 0 reads the words and writes the run folder. The other processes wait for its orders.
    if under_torchrun() and torchrun_rank() > 0:
        from posttrain.build.distributed_run import follow

        return follow(ranks)
    given = {n: getattr(o, n) for n in ("out", "resume", "allow_fault", "trust", "accept_changed")}
    with requested(o.recipe or "", o.overrides, RunOptions(**given, ranks=ranks)) as request:
        if o.dry_run:
            tell(_written(o, request))
            return 0
        # This imports torch. It stands here, so that wrong settings are reported before.
        from posttrain.api.session import open_session

        with open_session(request) as session:
            asyncio.run(session.play())
    return 0


def _written(o: Namespace, request: RunRequest) -> str:
    """The run as YAML. Comments give the recipe's values where they differ, and the notes of the request."""
    from posttrain.build.request.run_file import is_recipe, run_of, to_yaml

    comments = ["# checked, and not started. Save it as FILE.yaml, and posttrain run FILE.yaml runs it"]
    comments += [f"# {line}" for line in request.notes]
    recipe = run_of(o.recipe) if o.recipe and is_recipe(o.recipe) else None
    yaml = to_yaml(request.run, recipe, request.recorded.get("chosen"), request.objects.algorithms)
    return "\n".join([*comments, yaml]).rstrip()


def _help(o: Namespace) -> str:
    """The help of the command with the list of recipes, or the settings of one recipe."""
    from posttrain.cli.settings_help import settings_text, width
    from posttrain.recipe.recipes import RECIPES, listed

    recipe, topic, overrides = o.recipe, o.help, list(o.overrides)
    # `--help grpo` may be meant as `grpo --help`, and `--help rl.staleness=1` as an override whose help is asked.
    if recipe is None and topic in RECIPES:
        recipe, topic = topic, ""
    if "=" in topic:
        overrides, topic = [*overrides, topic], ""
    if recipe is None:
        return f"{o.text()}\n{listed(width())}"
    from posttrain.build.request.run_file import run_of
    from posttrain.config.overrides import apply

    text = settings_text(apply(run_of(recipe), overrides), topic, width())
    return text if topic else f"{text}\nposttrain run --help: the options of the command"


def add_plan(sub: Subparsers) -> None:
    p = add_command(
        sub,
        plan,
        "memory and time of a stage before anything is loaded: does it fit, what fills the memory when, how long a "
        "step takes and why, what to change first",
        "posttrain plan grpo model=Qwen2.5-0.5B machine=H100\n"
        "  posttrain plan grpo model=Qwen2.5-7B machine=8xH100 rl.sampling.max_tokens=4096 --answer 1500\n"
        "  posttrain plan sft model=Qwen2.5-1.5B machine=RTX-4090 --fit context\n"
        "  posttrain plan grpo model=Qwen2.5-7B machine=8xH100 placement=processes --sweep staleness=0,1,2,4\n"
        "  posttrain plan --forces",
    )
    p.usage = "posttrain plan RECIPE [key=value ...] [machine=NAME] [options]"
    p.add_argument("recipe", nargs="?", help="as of posttrain run; model= may also be the name of a known model")
    option(p, "--stage", "NAME", "the stage that is planned (default: the last that learns from reward)")
    option(p, "--prompt", "TOKENS", "tokens of a prompt (default: 256, assumed)", type=int)
    option(p, "--answer", "TOKENS", "mean tokens of an answer (default: half of the longest)", type=int)
    option(p, "--spread", "X", "standard deviation of answers, in means (default: .5)", type=float)
    option(p, "--nproc", "N", "ranks that train together (default: all devices)", type=int)
    option(p, "--replicas", "R", "copies of the weights among the ranks", type=int, default=1)
    option(p, "--parallel", None, "how ranks share the model", choices=get_args(Parallel), default="rows")
    option(p, "--reward", "SECONDS", "time to judge one answer (default: 0)", type=float, default=0.0)
    option(p, "--judges", "N", "answers that are judged at once", type=int, default=1)
    option(p, "--kept", "SHARE", "share of groups that a filter keeps", type=float, default=1.0)
    option(p, "--accepted", "P", "chance that a drafted token is accepted", type=float, default=0.0)
    option(p, "--fit", "WHAT", "find the largest model, context, siblings or batch that fits")
    option(p, "--sweep", "KNOB=A,B", "simulate each value of a setting: who waits for whom, how old tokens are")
    option(p, "--out", "FILE", "with --sweep: also a picture (.svg, .png or .pdf)")
    flag(p, "--forces", "from signal, estimator and cost to a recipe, as a table")
    flag(p, "--probe", "measure this machine once (5 s) and keep the figures")
    option(p, "--against", "RUN", "a run beside its plan: memory by role, the five times, the residual")
    option(p, "--budget", "RUN", "what to make faster first in this run, by what each change brings")
    option(p, "--calibrate", "RUN", "multiply times by measured / predicted of this run's first steps")
    option(p, "--machines", "64xH100", "find a layout for these devices: who samples, learns, and K")
    option(p, "--days", "D", "with --machines: days that there are", type=float, default=7.0)
    flag(p, "--json", "print JSON")


def plan(o: Namespace) -> int:
    from posttrain.cli import plan as view

    if o.forces:
        view.forces()
    elif o.probe:
        from posttrain.api.machine_speed import probe

        view.probed(probe())
    # These two read the settings from a run folder, so no recipe is needed.
    elif o.against is not None or o.budget is not None:
        from posttrain.cli import plan_of_run

        plan_of_run.against(o) if o.against is not None else plan_of_run.budget(o)
    elif o.recipe is None:
        raise ConfigError("no recipe given: posttrain plan RECIPE machine=NAME; posttrain run --help lists recipes")
    else:
        view.show(o)
    return 0


def add_check(sub: Subparsers) -> None:
    p = add_command(
        sub,
        check,
        "try an environment and its verifiers: right answers, near misses, noise and tricks; ends with 1 where a probe "
        "failed",
        "posttrain check arithmetic env.args.max_operand=99\n  posttrain check gym:chain_sum --tasks 64\n"
        "  posttrain check mine.py:MyTask --json\n  posttrain check prompts env.prompts=mine.jsonl env.rewards=math\n"
        "  posttrain check prompts env.prompts=mine.jsonl env.rewards=math model=PATH",
    )
    p.usage = "posttrain check ENV [key=value ...] [options]"
    text = "what env.name may be: a gallery name, gym:TASK, verifiers:ID, prompts, path.py:Class; or a run folder"
    p.add_argument("target", metavar="ENV", help=text)
    option(p, "--tasks", "N", "tasks that are tried (default 32)", type=int, default=32)
    text = "answers that must be judged a second (default: as many as the rollouts of a run brought, else 16)"
    option(p, "--rate", "N", text, type=float)
    flag(p, "--json", "print JSON")
    add_trust(p)


def check(o: Namespace) -> int:
    from posttrain.evaluation import check_environment as checker

    return checker.show(o.target, *o.overrides, tasks=o.tasks, rate=o.rate, as_json=o.json, trust=o.trust)


def add_new(sub: Subparsers) -> None:
    p = add_command(
        sub,
        new,
        "write a working environment or reward function to change, and its test",
        "posttrain new env sort_letters        # one question, one answer\n"
        "  posttrain new env stock_room --tools  # tools and several turns\n"
        "  posttrain new env replies --judged    # answers judged by a known taste\n"
        "  posttrain new env host --dialog       # a conversation with a simulated user\n"
        "  posttrain new env bench --rubric FILE # a benchmark, paid by a judge with its rubric\n"
        "  posttrain new reward close_enough     # a reward, and rows to try it on",
    )
    p.add_argument("what", choices=("env", "reward"), help="what to write")
    p.add_argument(
        "name",
        metavar="NAME",
        help="of the file, in lower case: sort_letters makes sort_letters.py with class SortLetters, or with function "
        "sort_letters",
    )
    kind = p.add_mutually_exclusive_group()
    flag(kind, "--tools", "of an environment: with tools and several turns")
    flag(kind, "--judged", "of an environment: its answers are judged by a taste that it knows")
    flag(kind, "--dialog", "of an environment: a conversation with a simulated user, in which a persona is to be kept")
    option(
        kind,
        "--rubric",
        "FILE",
        "of an environment: the items of a benchmark file, paid by a judge with the file's rubric, and measured by"
        " a judge that is held out",
    )
    option(p, "--folder", "FOLDER", "where to write (default: here)", default=".")


def new(o: Namespace) -> int:
    from posttrain.cli.skeletons import new_files as files

    if o.what == "reward":
        if given := next((word for word in ("tools", "judged", "dialog", "rubric") if getattr(o, word)), ""):
            raise ConfigError(f"--{given} belongs to an environment: posttrain new env NAME --{given}")
        reward, test, rows = files.new_reward(o.name, o.folder)
        tell(f"wrote {reward}, {test} and {rows}: a working reward function to change")
        steps = files.reward_steps(reward, test, rows, o.name)
    elif o.rubric is not None:
        run, test, rows, rubric, heldout = files.new_benchmark(o.name, o.rubric, o.folder)
        tell(
            f"wrote {run} and {test}, {rows} (its items), {rubric} (who pays) and {heldout} (who measures): look at"
            " these"
        )
        steps = files.benchmark_steps(run, test, rows, rubric)
    else:
        kind = "tools" if o.tools else "judged" if o.judged else "dialog" if o.dialog else "env"
        env, test = files.new_env(o.name, o.folder, kind)
        judged = f", and {env.with_suffix('.md')}, the rubric of its judge" if kind == "dialog" else ""
        tell(f"wrote {env} and {test}: a working environment to change{judged}")
        steps = files.next_steps(env, test, files.class_name(o.name), kind)
    for line in ("what next:", *(f"  {step}" for step in steps)):
        tell(line)
    return 0
