"""Commands that read what a run recorded: `posttrain summary`, `compare`, `plot` and `show`."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, flag, option
from posttrain.system.terminal_output import tell

OUT = "plot.svg"


def add_summary(sub: Subparsers) -> None:
    p = add_command(
        sub,
        summary,
        "did it learn? held-out scores and gains with intervals, the curve, a sentence, and what to try",
        "posttrain summary runs/mine\n  posttrain summary runs/mine --markdown > report.md",
    )
    p.add_argument("run", help="a run folder: finished, running, killed, or somebody else's")
    flag(p, "--markdown", "print it as a Markdown page, without colours or curve")


def summary(o: Namespace) -> int:
    from posttrain.report.run_summary import summarize

    summarize(o.run, as_markdown=o.markdown)
    return 0


def add_compare(sub: Subparsers) -> None:
    p = add_command(
        sub,
        compare,
        "which run is better? the settings that differ, and the gain over the same held-out prompts with its interval",
        "posttrain compare runs/grpo runs/dapo\n"
        "  posttrain compare runs/grpo-0 runs/grpo-1 runs/dapo-0 runs/dapo-1   # seeds are grouped",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="two run folders or more; the first one is compared with")
    flag(p, "--all", "list every setting that differs (default: ten)", dest="every")
    option(p, "--stage", "NAME", "compare at the end of this stage (default: each run's last)")


def compare(o: Namespace) -> int:
    from posttrain.report import compare_runs as runs

    runs.compare(*o.runs, stage=o.stage, every=o.every)
    return 0


def add_plot(sub: Subparsers) -> None:
    p = add_command(
        sub,
        plot,
        "draw reward and held-out accuracy by step, or any gauge, of one run or of several",
        "posttrain plot runs/mine\n  posttrain plot runs/a runs/b --gauge rollout/reward --gauge policy/entropy "
        "--out both.png",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="run folders, finished or being written")
    option(p, "--out", "FILE", f"file to write: .svg, .png or .pdf (default: {OUT})", default=OUT)
    option(
        p,
        "--gauge",
        "NAME",
        "a gauge of docs/reference/metrics.md; may be given several times (default: rollout/reward and"
        " eval/accuracy; of runs with neither, the loss and the agreement with judgements)",
        action="append",
    )


def plot(o: Namespace) -> int:
    from posttrain.report import plots

    plots.plot(o.runs, tuple(o.gauge or plots.DEFAULT), o.out)
    tell(f"written: {o.out}")
    return 0


def add_show(sub: Subparsers) -> None:
    p = add_command(
        sub,
        show,
        "read what a run's model said: the episodes of a step, one episode token by token, or two steps compared",
        "posttrain show runs/mine\n  posttrain show runs/mine --step 20 --wrong\n"
        "  posttrain show runs/mine --step 20 --episode 3\n  posttrain show runs/mine --eval --worst --full\n"
        "  posttrain show runs/mine --compare 0 40 --worst",
    )
    p.add_argument("run", help="a run folder, finished or being written")
    text = "name of a stage (default: the last one with episodes whose weights the run went on with)"
    option(p, "--stage", None, text)
    option(p, "--step", "N", "step of the stage (default: the last one)", type=int)
    flag(p, "--eval", "episodes of the held-out evaluation instead of training")
    option(p, "--episode", "N", "one episode token by token: who said it, log-prob, advantage, version", type=int)
    option(
        p,
        "--compare",
        ("STEP", "STEP"),
        "answers to the same held-out prompts at two steps of the stage, one below the other (training steps have "
        "other prompts each)",
        type=int,
        nargs=2,
    )
    flag(p, "--wrong", "only episodes that are not right (env.right, or else less than 1 of the main reward source)")
    flag(p, "--failed", "only episodes that could not be judged, and why")
    flag(p, "--best", "highest reward first; with --compare: largest gain first")
    flag(p, "--worst", "lowest reward first; with --compare: largest loss first")
    flag(p, "--full", "whole texts; with --compare every sample")
    option(p, "--limit", "N", "at most this many episodes or prompts (default 32; 0: all)", type=int, default=32)


def show(o: Namespace) -> int:
    from posttrain.cli import show_rollouts as view

    same = ("stage", "step", "episode", "wrong", "best", "limit", "failed", "worst", "full")
    wanted = view.ShowOptions(
        **{name: getattr(o, name) for name in same},
        kind="eval" if o.eval else None,
        compare=None if o.compare is None else (o.compare[0], o.compare[1]),
    )
    for line in view.lines(o.run, wanted):
        tell(line, coloured=True)
    return 0
