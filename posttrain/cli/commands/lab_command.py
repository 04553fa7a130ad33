"""`posttrain lab`: the interactive lessons, on this machine."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "lab",
        lab,
        "interactive lessons: knobs, pictures, and what breaks training, computed by the library itself",
        "posttrain lab\n  posttrain lab grpo\n  posttrain lab 11 --port 8080 --no-browser",
    )
    p.add_argument("page", nargs="?", help="number or name of a page, such as 11 or grpo (default: the map)")
    p.add_argument("--list", action="store_true", help="print the pages and end")
    p.add_argument("--port", type=int, default=0, metavar="N", help="port of 127.0.0.1 (default 0: any free one)")
    p.add_argument("--no-browser", action="store_true", help="print the address and open no browser")
    p.add_argument("--site", metavar="DIR", help="write all pages as files that need no server, and end")


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
