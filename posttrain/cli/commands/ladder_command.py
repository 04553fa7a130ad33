"""`posttrain ladder`: the algorithms as a tree of patches, and on the batches of a run."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "ladder",
        ladder,
        "print the algorithms as a tree of patches, one of them in full, the difference of two, or what they would do "
        "with a run's batches",
        "posttrain ladder\n  posttrain ladder grpo\n  posttrain ladder --table\n  posttrain ladder --diff grpo dapo\n"
        "  posttrain ladder --diff dpo simpo\n  posttrain ladder --diff grpo mine.py:NAME\n"
        "  posttrain ladder --on runs/mine --step 20 --against dapo,maxrl,gspo",
    )
    p.add_argument("name", nargs="?", help="show this algorithm in full; path.py:NAME: one of your own")
    p.add_argument(
        "--table", action="store_true", help="those of reward in one table: credit, trust region, weight, anchor, cost"
    )
    p.add_argument("--diff", nargs=2, metavar=("A", "B"), help="the choices in which two algorithms differ")
    on = p.add_argument_group("on the recorded batches of a run, which is only read")
    on.add_argument(
        "--on",
        metavar="RUN",
        help="a run folder; evaluates algorithms on what it sampled, at the weights it sampled with",
    )
    on.add_argument("--against", default="", metavar="NAME,NAME", help="these algorithms (default: the whole ladder)")
    on.add_argument(
        "--step", default="", metavar="N,N", help="recorded steps (default: the last one whose first weights were kept)"
    )
    on.add_argument("--stage", metavar="NAME", help="a reinforcement stage, where there are several")
    on.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="evaluate at these weights instead: a checkpoint, last, best, or a kept name",
    )
    on.add_argument("--device", metavar="NAME", help="compute here instead of on the run's device")
    on.add_argument("--json", action="store_true", help="print JSON")
    add_trust(on)


def ladder(o: Namespace) -> int:
    from posttrain.cli import ladder_tables as view

    if o.on:
        from posttrain.cli import ablation_tables

        against = [w for w in (o.name or "", *o.against.split(",")) if w]
        ablation_tables.show(
            o.on, against, ablation_tables.AblateOptions(o.step, o.stage, o.checkpoint, o.device), o.json, o.trust
        )
    # These options are about a run. Without --on they would have no effect, so they are refused.
    elif given := [
        f"--{n}" for n in ("against", "step", "stage", "checkpoint", "device", "json", "trust") if getattr(o, n)
    ]:
        raise ConfigError(f"{', '.join(given)} belongs to a run: say which with --on RUN")
    elif o.diff:
        tell(view.diff(*o.diff))
    elif o.table:
        tell(view.table())
    else:
        tell(view.one(o.name) if o.name else view.tree())
    return 0
