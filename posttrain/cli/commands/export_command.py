"""`posttrain export`: a run's weights as a Hugging Face directory, or on the hub."""

from __future__ import annotations

from argparse import Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "export",
        export,
        "write a run's weights as a plain Hugging Face directory with a model card, or push that to the hub",
        "posttrain export runs/mine my-model --checkpoint best\n  posttrain export runs/mine hub:me/my-model",
    )
    p.add_argument("run", help="a run folder")
    p.add_argument(
        "folder",
        metavar="FOLDER",
        help="where to write, must not exist or be empty; or hub:USER/NAME: a private repository of the Hugging Face "
        "hub (log in with `hf auth login`, or set HF_TOKEN; HF_ENDPOINT is another hub)",
    )
    p.add_argument("--checkpoint", default="last", metavar="NAME", help="last (default), best, or a checkpoint's name")
    p.add_argument("--public", action="store_true", help="on the hub: everybody can read a repository made here")
    p.add_argument(
        "--adapter", action="store_true", help="of a run with model.lora: write the adapter alone, as PEFT does"
    )
    p.add_argument("--ema", action="store_true", help="of a run with optimizer.ema: the moving average of the weights")
    add_trust(p)


def export(o: Namespace) -> int:
    from posttrain.report.export.hub import is_hub

    if o.public and not is_hub(o.folder):
        raise ConfigError("--public is about a repository of the hub: export to hub:USER/NAME, or leave it out")
    from posttrain.api import main

    written, certificate = main.certified_export(o.run, o.folder, o.checkpoint, o.trust, o.public, o.adapter, o.ema)
    tell(f"pushed to {written}" if is_hub(o.folder) else f"wrote {written}")
    tell(certificate.line)
    return 0
