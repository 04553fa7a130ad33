"""`posttrain show`: read what a run's model said."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "show",
        show,
        "read what a run's model said: the episodes of a step, one episode token by token, or two steps compared",
        "posttrain show runs/mine\n  posttrain show runs/mine --step 20 --wrong\n"
        "  posttrain show runs/mine --step 20 --episode 3\n  posttrain show runs/mine --eval --worst --full\n"
        "  posttrain show runs/mine --compare 0 40 --worst",
    )
    p.add_argument("run", help="a run folder, finished or being written")
    p.add_argument(
        "--stage", help="name of a stage (default: the last one with episodes whose weights the run went on with)"
    )
    p.add_argument("--step", type=int, metavar="N", help="step of the stage (default: the last one)")
    p.add_argument("--eval", action="store_true", help="episodes of the held-out evaluation instead of training")
    p.add_argument(
        "--episode", type=int, metavar="N", help="one episode token by token: who said it, log-prob, advantage, version"
    )
    p.add_argument(
        "--compare",
        type=int,
        nargs=2,
        metavar=("STEP", "STEP"),
        help="answers to the same held-out prompts at two steps of the stage, one below the other (training steps have "
        "other prompts each)",
    )
    p.add_argument(
        "--wrong",
        action="store_true",
        help="only episodes that are not right (env.right, or else less than 1 of the main reward source)",
    )
    p.add_argument("--failed", action="store_true", help="only episodes that could not be judged, and why")
    p.add_argument("--best", action="store_true", help="highest reward first; with --compare: largest gain first")
    p.add_argument("--worst", action="store_true", help="lowest reward first; with --compare: largest loss first")
    p.add_argument("--full", action="store_true", help="whole texts; with --compare every sample")
    p.add_argument(
        "--limit", type=int, default=32, metavar="N", help="at most this many episodes or prompts (default 32; 0: all)"
    )


def show(o: Namespace) -> int:
    from posttrain.cli import show_rollouts as view

    wanted = view.ShowOptions(
        stage=o.stage,
        step=o.step,
        kind="eval" if o.eval else None,
        episode=o.episode,
        wrong=o.wrong,
        best=o.best,
        limit=o.limit,
        failed=o.failed,
        worst=o.worst,
        compare=None if o.compare is None else (o.compare[0], o.compare[1]),
        full=o.full,
    )
    for line in view.lines(o.run, wanted):
        tell(line, coloured=True)
    return 0
