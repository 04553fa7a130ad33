"""`posttrain new`: skeletons that work as they stand."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "new",
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
    kind.add_argument("--tools", action="store_true", help="of an environment: with tools and several turns")
    kind.add_argument(
        "--judged", action="store_true", help="of an environment: its answers are judged by a taste that it knows"
    )
    kind.add_argument(
        "--dialog",
        action="store_true",
        help="of an environment: a conversation with a simulated user, in which a persona is to be kept",
    )
    kind.add_argument(
        "--rubric",
        metavar="FILE",
        help="of an environment: the items of a benchmark file, paid by a judge with the file's rubric, and measured by"
        " a judge that is held out",
    )
    p.add_argument("--folder", default=".", metavar="FOLDER", help="where to write (default: here)")


def new(o: Namespace) -> int:
    from posttrain.cli.skeletons.new_files import (
        benchmark_steps,
        class_name,
        new_benchmark,
        new_env,
        new_reward,
        next_steps,
        reward_steps,
    )

    if o.what == "reward":
        if given := next((word for word in ("tools", "judged", "dialog", "rubric") if getattr(o, word)), ""):
            raise ConfigError(f"--{given} belongs to an environment: posttrain new env NAME --{given}")
        reward, test, rows = new_reward(o.name, o.folder)
        tell(f"wrote {reward}, {test} and {rows}: a working reward function to change")
        steps = reward_steps(reward, test, rows, o.name)
    elif o.rubric is not None:
        run, test, rows, rubric, heldout = new_benchmark(o.name, o.rubric, o.folder)
        tell(
            f"wrote {run} and {test}, {rows} (its items), {rubric} (who pays) and {heldout} (who measures): look at"
            " these"
        )
        steps = benchmark_steps(run, test, rows, rubric)
    else:
        kind = "tools" if o.tools else "judged" if o.judged else "dialog" if o.dialog else "env"
        env, test = new_env(o.name, o.folder, kind)
        judged = f", and {env.with_suffix('.md')}, the rubric of its judge" if kind == "dialog" else ""
        tell(f"wrote {env} and {test}: a working environment to change{judged}")
        steps = next_steps(env, test, class_name(o.name), kind)
    tell("what next:")
    for line in steps:
        tell(f"  {line}")
    return 0
