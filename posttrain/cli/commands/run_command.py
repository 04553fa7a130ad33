"""`posttrain run`: run a recipe, resume a run, or print its settings (--dry-run, --help)."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, get_args

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust
from posttrain.config.rank_limits import SECONDS, Parallel, RankOptions, torchrun_rank, under_torchrun
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

if TYPE_CHECKING:
    from posttrain.build.request.run_request import RunRequest


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "run",
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
    p.add_argument(
        "--dry-run",
        action="store_true",
        help="check the run and print all its settings as YAML; posttrain run FILE.yaml runs them",
    )
    p.add_argument("--out", metavar="FOLDER", help="run folder (default: runs/RECIPE-DATE-TIME)")
    p.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run folder, or with one of its checkpoints (RUN/checkpoints/NAME); with rl.steps=N for "
        "longer",
    )
    p.add_argument(
        "--allow-fault",
        action="store_true",
        help="start although fault=NAME plants a bug on purpose (posttrain faults lists them); its numbers mean "
        "nothing",
    )
    p.add_argument(
        "--accept-changed",
        action="store_true",
        help="with --resume: go on although data, rewards or models that it reads are not as they were when it was "
        "begun; run.json records it",
    )
    _add_ranks(p)
    add_trust(p)
    p.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="NAME",
        help="this text; after a recipe's name its main settings, and with NAME those of a group, one setting, or all",
    )
    p.usage = "posttrain run [RECIPE] [key=value ...] [--out FOLDER]\n       posttrain run --resume RUN [key=value ...]"
    p.set_defaults(text=p.format_help)


def _add_ranks(p: ArgumentParser) -> None:
    p.add_argument(
        "--nproc",
        type=int,
        metavar="N",
        help="train with N processes (ranks) on this machine, each with a part of the weights; under torchrun its "
        "processes are the ranks, and this is left out (docs/guides/ranks.md)",
    )
    p.add_argument(
        "--rank-timeout",
        type=float,
        default=SECONDS,
        metavar="SECONDS",
        help="how long a rank waits for the others before the run stops and says for whom (default: %(default)g)",
    )
    p.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="R",
        help="copies of the weights among the ranks; each copy is cut over N / R of them (default: %(default)d)",
    )
    p.add_argument(
        "--parallel",
        choices=get_args(Parallel),
        default="rows",
        help="how the ranks share the model: rows of every weight, columns and rows of each layer (tensor "
        "parallelism), or whole experts of a mixture (default: %(default)s)",
    )


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
    options = RunOptions(**given, ranks=ranks)
    with requested(o.recipe or "", o.overrides, options) as request:
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
    return "\n".join(
        [*comments, to_yaml(request.run, recipe, request.recorded.get("chosen"), request.objects.algorithms)]
    ).rstrip()


def _help(o: Namespace) -> str:
    """The help of the command with the list of recipes, or the settings of one recipe."""
    from posttrain.cli.settings_help import width
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
    from posttrain.cli.settings_help import settings_text
    from posttrain.config.overrides import apply

    text = settings_text(apply(run_of(recipe), overrides), topic, width())
    return text if topic else f"{text}\nposttrain run --help: the options of the command"
