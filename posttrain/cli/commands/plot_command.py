"""`posttrain plot`: a picture of one run or of several."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.system.terminal_output import tell

OUT = "plot.svg"


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "plot",
        plot,
        "draw reward and held-out accuracy by step, or any gauge, of one run or of several",
        "posttrain plot runs/mine\n  posttrain plot runs/a runs/b --gauge rollout/reward --gauge policy/entropy "
        "--out both.png",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folders, finished or being written")
    p.add_argument("--out", metavar="FILE", default=OUT, help=f"file to write: .svg, .png or .pdf (default: {OUT})")
    p.add_argument(
        "--gauge",
        action="append",
        metavar="NAME",
        help="a gauge of docs/reference/metrics.md; may be given several times (default: rollout/reward and"
        " eval/accuracy; of runs with neither, the loss and the agreement with judgements)",
    )


def plot(o: Namespace) -> int:
    from posttrain.report import plots

    plots.plot(o.runs, tuple(o.gauge or plots.DEFAULT), o.out)
    tell(f"written: {o.out}")
    return 0
