"""Commands that explain: `posttrain ladder`, `faults` and `lab`."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust, flag, option
from posttrain.system.errors import ConfigError
from posttrain.system.shell import command_line
from posttrain.system.terminal_output import tell


def add_ladder(sub: Subparsers) -> None:
    p = add_command(
        sub,
        ladder,
        "print the algorithms as a tree of patches, one of them in full, the difference of two, or what they would do "
        "with a run's batches",
        "posttrain ladder\n  posttrain ladder grpo\n  posttrain ladder --table\n  posttrain ladder --diff grpo dapo\n"
        "  posttrain ladder --diff dpo simpo\n  posttrain ladder --diff grpo mine.py:NAME\n"
        "  posttrain ladder --on runs/mine --step 20 --against dapo,maxrl,gspo",
    )
    p.add_argument("name", nargs="?", help="show this algorithm in full; path.py:NAME: one of your own")
    flag(p, "--table", "those of reward in one table: credit, trust region, weight, anchor, cost")
    option(p, "--diff", ("A", "B"), "the choices in which two algorithms differ", nargs=2)
    on = p.add_argument_group("on the recorded batches of a run, which is only read")
    text = "a run folder; evaluates algorithms on what it sampled, at the weights it sampled with"
    option(on, "--on", "RUN", text)
    option(on, "--against", "NAME,NAME", "these algorithms (default: the whole ladder)", default="")
    text = "recorded steps (default: the last one whose first weights were kept)"
    option(on, "--step", "N,N", text, default="")
    option(on, "--stage", "NAME", "a reinforcement stage, where there are several")
    text = "evaluate at these weights instead: a checkpoint, last, best, or a kept name"
    option(on, "--checkpoint", "NAME", text)
    option(on, "--device", "NAME", "compute here instead of on the run's device")
    flag(on, "--json", "print JSON")
    add_trust(on)


def ladder(o: Namespace) -> int:
    from posttrain.cli import ladder_tables as view

    if o.on:
        from posttrain.cli import ablation_tables

        ablation_tables.show(o)
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


def add_faults(sub: Subparsers) -> None:
    p = add_command(
        sub,
        faults,
        "list the bugs that can be planted into a run to see them caught, or tell one in full",
        "posttrain faults\n  posttrain faults std_ddof\n  posttrain run arithmetic fault=std_ddof --allow-fault",
    )
    p.add_argument("name", nargs="?", help="tell this fault in full")


def faults(o: Namespace) -> int:
    from posttrain.cli.screen_text import hanging, screen_width
    from posttrain.faults import FAULTS, find

    f = None if o.name is None else find(o.name)
    if f is None:
        width = max(map(len, FAULTS))
        rows = [(f"{each.name:<{width}}  ", each.what) for each in FAULTS.values()]
    else:
        told = {"what": f.what, "harm": f.harm, "from": f.source, "teaches": f.lesson, "replaces": f.seam}
        rows = [(f"{name:<10} ", text) for name, text in (told | {"caught by": f.caught_by}).items()]
    for lead, text in rows:
        for line in hanging(lead, text, screen_width()):
            tell(line)
    for i, words in enumerate(f.commands() if f is not None else ()):
        tell(f"{'' if i else 'to see it':<10} {command_line(*words)}")  # on one line, so that it can be copied
    return 0


def add_lab(sub: Subparsers) -> None:
    p = add_command(
        sub,
        lab,
        "interactive lessons: knobs, pictures, and what breaks training, computed by the library itself",
        "posttrain lab\n  posttrain lab grpo\n  posttrain lab 11 --port 8080 --no-browser",
    )
    p.add_argument("page", nargs="?", help="number or name of a page, such as 11 or grpo (default: the map)")
    flag(p, "--list", "print the pages and end")
    option(p, "--port", "N", "port of 127.0.0.1 (default 0: any free one)", type=int, default=0)
    flag(p, "--no-browser", "print the address and open no browser")
    option(p, "--site", "DIR", "write all pages as files that need no server, and end")


def lab(o: Namespace) -> int:
    if o.list:
        from posttrain.lab.overview import listed

        for line in listed():
            tell(line)
        return 0
    if o.site:
        from pathlib import Path

        from posttrain.lab.site import write_site

        return write_site(Path(o.site))
    from posttrain.lab.server import serve_lab

    return serve_lab(o.page, o.port, not o.no_browser)
