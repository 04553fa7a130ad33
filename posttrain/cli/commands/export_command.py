"""`posttrain export`: a run's weights as a Hugging Face directory."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.command import Subparsers, add_command, add_trust
from posttrain.core.visible import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "export",
        export,
        "write a run's weights as a plain Hugging Face directory",
        "posttrain export runs/mine my-model --checkpoint best",
    )
    p.add_argument("run", help="a run folder")
    p.add_argument("folder", help="where to write; must not exist or be empty")
    p.add_argument("--checkpoint", default="last", metavar="NAME", help="last (default), best, or a checkpoint's name")
    add_trust(p)


def export(o: Namespace) -> int:
    from posttrain.api import main

    tell(f"wrote {main.export(o.run, o.folder, o.checkpoint, o.trust)}")
    return 0
