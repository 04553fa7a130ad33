"""`posttrain serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import fields

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust
from posttrain.serve.caller_limits import CallerLimits

LIMITS = tuple(f.name for f in fields(CallerLimits))
"""Names of the limits that `--limit NAME=N` sets."""


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "serve",
        serve,
        "serve a run, a model directory or a hub id to OpenAI's clients: completions, chat, streaming, log-probs",
        "posttrain serve runs/mine --checkpoint best\n"
        "  posttrain serve my-model slots=128 --port 9000 --token-env MY_TOKEN",
    )
    p.usage = "posttrain serve TARGET [key=value ...] [options]"
    p.add_argument("target", help="a run folder, a model directory or a hub id")
    p.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: this machine only)"
    )
    p.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port (default 8000; 0: any free one, which is printed)"
    )
    p.add_argument("--token", metavar="TEXT", help="the token callers must send (default: one is made up and printed)")
    p.add_argument(
        "--token-env", metavar="NAME", help="the environment variable that holds it, which no process list shows"
    )
    p.add_argument(
        "--no-token", action="store_true", help="serve everybody on this machine; refused on any other address"
    )
    p.add_argument(
        "--limit",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"a limit on callers; may be given several times. Names: {', '.join(LIMITS)}",
    )
    p.add_argument("--name", help="what callers call the model (default: the last part of TARGET)")
    p.add_argument(
        "--checkpoint",
        default="last",
        metavar="NAME",
        help="of a run folder: last (default), best, or a checkpoint's name",
    )
    add_trust(p)


def serve(o: Namespace) -> int:
    from posttrain.serve import command as server
    from posttrain.serve.caller_limits import read_limits

    limits = read_limits(o.limit)
    where = server.ServerAddress(
        host=o.host, port=o.port, token=o.token, token_env=o.token_env, no_token=o.no_token, limits=limits
    )
    return server.serve(o.target, *o.overrides, where=where, name=o.name, checkpoint=o.checkpoint, trust=o.trust)
