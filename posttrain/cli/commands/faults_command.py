"""`posttrain faults`: bugs that can be planted to see them caught."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.system.shell import command_line
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "faults",
        faults,
        "list the bugs that can be planted into a run to see them caught, or tell one in full",
        "posttrain faults\n  posttrain faults std_ddof\n  posttrain run arithmetic fault=std_ddof --allow-fault",
    )
    p.add_argument("name", nargs="?", help="tell this fault in full")


def faults(o: Namespace) -> int:
    from posttrain.cli.wrap_text import hanging, screen_width
    from posttrain.faults import FAULTS, find

    if o.name is None:
        width = max(map(len, FAULTS))
        for f in FAULTS.values():
            for line in hanging(f"{f.name:<{width}}  ", f.what, screen_width()):
                tell(line)
        return 0
    f = find(o.name)
    rows = (("what", f.what), ("harm", f.harm), ("from", f.source), ("replaces", f.seam))
    command = ("eval", "RUN") if f.needs == "search" else ("run", "arithmetic")
    ranks = {"ranks": ("--nproc", "2"), "rank_experts": ("--nproc", "2", "--parallel", "experts")}.get(f.needs, ())
    model = ("model.arch=qwen3_moe",) if f.needs in ("experts", "rank_experts") else ()
    see = command_line(*command, *model, *f.shows, f"fault={f.name}", *ranks, "--allow-fault")
    if f.needs == "meta":  # its rows are made outside any run
        see = f"python benchmarks/judges.py --out results --fault {f.name}"
    for name, text in (*rows, ("to see it", see)):
        for line in [f"{name:<10} {text}"] if name == "to see it" else hanging(f"{name:<10} ", text, screen_width()):
            tell(line)
    if f.needs:
        tell(f"{'needs':<10} {f.needs}")
    return 0
