"""`posttrain compare`: which of two runs or more is better on the same held-out prompts."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "compare",
        compare,
        "which run is better? the settings that differ, and the gain over the same held-out prompts with its interval",
        "posttrain compare runs/grpo runs/dapo\n"
        "  posttrain compare runs/grpo-0 runs/grpo-1 runs/dapo-0 runs/dapo-1   # seeds are grouped",
    )
    p.add_argument("runs", nargs="+", metavar="RUN", help="two run folders or more; the first one is compared with")
    p.add_argument("--all", action="store_true", dest="every", help="list every setting that differs (default: ten)")
    p.add_argument("--stage", metavar="NAME", help="compare at the end of this stage (default: each run's last)")


def compare(o: Namespace) -> int:
    from posttrain.report import compare_runs as runs

    runs.compare(*o.runs, stage=o.stage, every=o.every)
    return 0
