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
    from posttrain.cli.screen_text import hanging, screen_width
    from posttrain.faults import FAULTS, find

    if o.name is None:
        width = max(map(len, FAULTS))
        for f in FAULTS.values():
            for line in hanging(f"{f.name:<{width}}  ", f.what, screen_width()):
                tell(line)
        return 0
    f = find(o.name)
    rows = {
        "what": f.what,
        "harm": f.harm,
        "from": f.source,
        "teaches": f.lesson,
        "replaces": f.seam,
        "caught by": f.caught_by,
    }
    for name, text in rows.items():
        for line in hanging(f"{name:<10} ", text, screen_width()):
            tell(line)
    for i, words in enumerate(f.commands()):
        tell(f"{'' if i else 'to see it':<10} {command_line(*words)}")  # on one line, so that it can be copied
    return 0
