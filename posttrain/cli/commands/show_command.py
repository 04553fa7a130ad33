"""`posttrain show`: read what a run's model said."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.command import Subparsers, add_command
from posttrain.core.visible import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "show",
        show,
        "read what a run's model said: a line an episode, or one episode token by token",
        "posttrain show runs/mine\n  posttrain show runs/mine --step 20 --wrong\n"
        "  posttrain show runs/mine --step 20 --episode 3",
    )
    p.add_argument("run", help="a run folder, finished or being written")
    p.add_argument("--stage", help="name of a stage (default: the last one with episodes)")
    p.add_argument("--step", type=int, metavar="N", help="step of the stage (default: the last one)")
    p.add_argument("--eval", action="store_true", help="episodes of the held-out evaluation instead of training")
    p.add_argument(
        "--episode", type=int, metavar="N", help="one episode token by token: who said it, log-prob, advantage, version"
    )
    p.add_argument("--wrong", action="store_true", help="only episodes whose main reward source gave less than 1")
    p.add_argument("--best", action="store_true", help="highest reward first")
    p.add_argument("--limit", type=int, default=32, metavar="N", help="at most this many lines (default 32; 0: all)")


def show(o: Namespace) -> int:
    from posttrain.cli import show as view

    wanted = view.ShowOptions(o.stage, o.step, "eval" if o.eval else None, o.episode, o.wrong, o.best, o.limit)
    for line in view.lines(o.run, wanted):
        tell(line, coloured=True)
    return 0
