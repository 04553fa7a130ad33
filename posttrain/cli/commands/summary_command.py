"""`posttrain summary`: did it learn? The report of a run that is finished, running or killed."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "summary",
        summary,
        "did it learn? held-out scores and gains with intervals, the curve, a sentence, and what to try",
        "posttrain summary runs/mine\n  posttrain summary runs/mine --markdown > report.md",
    )
    p.add_argument("run", help="a run folder: finished, running, killed, or somebody else's")
    p.add_argument("--markdown", action="store_true", help="print it as a Markdown page, without colours or curve")


def summary(o: Namespace) -> int:
    from posttrain.report.run_summary import summarize

    summarize(o.run, as_markdown=o.markdown)
    return 0
