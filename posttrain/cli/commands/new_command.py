"""`posttrain new`: skeletons that work as they stand."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.command import Subparsers, add_command
from posttrain.core.errors import ConfigError
from posttrain.core.visible import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "new",
        new,
        "write a working environment or reward function to change, and its test",
        "posttrain new env sort_letters        # one question, one answer\n"
        "  posttrain new env stock_room --tools  # tools and several turns\n"
        "  posttrain new reward close_enough     # a reward, and rows to try it on",
    )
    p.add_argument("what", choices=("env", "reward"), help="what to write")
    p.add_argument(
        "name",
        metavar="NAME",
        help="of the file, in lower case: sort_letters makes sort_letters.py with class SortLetters, or with function "
        "sort_letters",
    )
    p.add_argument("--tools", action="store_true", help="of an environment: with tools and several turns")
    p.add_argument("--folder", default=".", metavar="FOLDER", help="where to write (default: here)")


def new(o: Namespace) -> int:
    from posttrain.api.new import class_name, new_env, new_reward, next_steps, reward_steps

    if o.what == "reward":
        if o.tools:
            raise ConfigError("--tools belongs to an environment: posttrain new env NAME --tools")
        reward, test, rows = new_reward(o.name, o.folder)
        tell(f"wrote {reward}, {test} and {rows}: a working reward function to change")
        tell("what next:")
        steps = reward_steps(reward, test, rows, o.name)
    else:
        env, test = new_env(o.name, o.folder, o.tools)
        tell(f"wrote {env} and {test}: a working environment to change")
        tell("what next:")
        steps = next_steps(env, test, class_name(o.name), o.tools)
    for line in steps:
        tell(f"  {line}")
    return 0
