"""`posttrain check`: probe an environment and its verifiers."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "check",
        check,
        "try an environment and its verifiers: right answers, near misses, noise and tricks; ends with 1 where a probe "
        "failed",
        "posttrain check arithmetic env.args.max_operand=99\n  posttrain check gym:chain_sum --tasks 64\n"
        "  posttrain check mine.py:MyTask --json\n  posttrain check prompts env.prompts=mine.jsonl env.rewards=math\n"
        "  posttrain check prompts env.prompts=mine.jsonl env.rewards=math model=PATH",
    )
    p.usage = "posttrain check ENV [key=value ...] [options]"
    p.add_argument(
        "target",
        metavar="ENV",
        help="what env.name may be: a gallery name, gym:TASK, verifiers:ID, prompts, path.py:Class; or a run folder",
    )
    p.add_argument("--tasks", type=int, default=32, metavar="N", help="tasks that are tried (default 32)")
    p.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="answers that must be judged a second (default: as many as the rollouts of a run brought, else 16)",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    add_trust(p)


def check(o: Namespace) -> int:
    from posttrain.evaluation import check_environment as checker

    return checker.show(o.target, *o.overrides, tasks=o.tasks, rate=o.rate, as_json=o.json, trust=o.trust)
