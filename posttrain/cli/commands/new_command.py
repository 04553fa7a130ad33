"""`posttrain new`: the skeleton of an environment."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.command import Subparsers, add_command
from posttrain.core.visible import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "new",
        new,
        "write the skeleton of an environment that works as it stands, and its test",
        "posttrain new env sort_letters\n  posttrain check sort_letters.py:SortLetters",
    )
    p.add_argument("what", choices=("env",), help="what to write")
    p.add_argument(
        "name",
        metavar="NAME",
        help="of the file, in lower case: sort_letters makes sort_letters.py with class SortLetters",
    )
    p.add_argument("--folder", default=".", metavar="FOLDER", help="where to write (default: here)")


def new(o: Namespace) -> int:
    from posttrain.api.new import class_name, new_env, next_steps

    env, test = new_env(o.name, o.folder)
    tell(f"wrote {env} and {test}: a working environment to change. What next:")
    for line in next_steps(env, test, class_name(o.name)):
        tell(f"  {line}")
    return 0
