"""Commands about weights: `posttrain eval`, `serve` and `export`."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import fields
from typing import Any

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust, flag, option
from posttrain.serve.caller_limits import CallerLimits
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

PICTURE = "search.svg"
"""The picture of searches, if the user names no file."""
LIMITS = tuple(f.name for f in fields(CallerLimits))
"""Names of the limits that `serve --limit NAME=N` sets."""


def _add_checkpoint(p: ArgumentParser) -> None:
    option(p, "--checkpoint", "NAME", "of a run folder: last (default), best, or a checkpoint's name", default="last")


def add_evaluate(sub: Subparsers) -> None:
    p = add_command(
        sub,
        evaluate,
        "held-out accuracy, mean reward and pass@k of a run, a model directory, a hub id, or of what is served at an "
        "address; of a reward model how it orders judged completions; with search=... what searches are worth and cost",
        "posttrain eval runs/mine --checkpoint best --samples 16\n"
        "  posttrain eval my-model env=arithmetic env.args.terms=4\n"
        "  posttrain eval my-reward-model env.prompts=pairs.jsonl\n"
        "  posttrain eval my-reward-model env=replies --answers runs/mine --answers my-model\n"
        "  posttrain eval runs/prm search=best_of.count=4,8 search=beam.width=4 search=vote\n"
        "  posttrain eval http://127.0.0.1:8000/v1 env=arithmetic --tokenizer my-model --key-env MY_KEY",
        name="eval",
    )
    p.usage = "posttrain eval TARGET [key=value ...] [options]"
    text = "a run folder, a model directory, a hub id, or the address of an OpenAI-compatible endpoint"
    p.add_argument("target", help=text)
    option(p, "--samples", "N", "samples a prompt (default: those of the run; of searches 1)", type=int)
    _add_checkpoint(p)
    option(p, "--max-tokens", "N", "most tokens of an answer", type=int)
    option(p, "--temperature", "T", "sampling temperature", type=float)
    flag(p, "--ema", "of a run with optimizer.ema: the moving average of the weights")
    option(
        p,
        "--answers",
        "POLICY",
        "of a reward model: score what this policy (a run or a model) answers to the held-out prompts, and compare "
        "with what the environment knows or verifies; may be repeated",
        action="append",
        default=[],
    )
    add_trust(p)
    by = p.add_argument_group(
        "searches",
        "search=NAME.SETTING=VALUE,... for each, with several values for several sizes: best_of (count), vote (count,"
        " weighted, answer), beam (width, expand), tree (expansions, expand, exploration, rule); all have aggregate,"
        " how the scores of steps become one number (min, product, mean, last). search.by=model:PATH, judge:PATH or"
        " verifier: what scores (default: the reward model of the run). search.budget=N: a search that has said N"
        " tokens for a task begins nothing more.",
    )
    option(by, "--out", "FILE", f"the picture: .svg, .png or .pdf (default: {PICTURE})")
    flag(by, "--allow-fault", "plant the bug of fault=NAME (posttrain faults)")
    at = p.add_argument_group("at an address (slots=N: requests at once)")
    option(at, "--model", "NAME", "which of its models (default: the only one)")
    option(at, "--key-env", "NAME", "environment variable that holds the key; it is never written down")
    text = "send token ids of this tokenizer (vLLM, posttrain serve); default: text alone"
    option(at, "--tokenizer", "PATH", text)
    option(at, "--api", None, "how text is sent (default: chat)", choices=("chat", "completions"), default="chat")
    option(at, "--dialect", "NAME", "openai, compatible, vllm or posttrain (default: told from the model's owner)")


def evaluate(o: Namespace) -> int:
    # The cheapest to recognize first: searches (by the words), an address (its form), a reward model (its files), a
    # policy.
    from posttrain.evaluation.search_words import asks_search

    sampling = {"max_tokens": o.max_tokens, "temperature": o.temperature}
    if asks_search(o.overrides):
        _search(o, sampling)
        return 0
    if o.out is not None or o.allow_fault:
        raise ConfigError("--out and --allow-fault are for searches: add search=best_of, say, or leave them out")
    from posttrain.api import main
    from posttrain.evaluation.evaluate_endpoint import EndpointOptions, is_url
    from posttrain.evaluation.reward_report import is_reward_model

    options = {"samples": o.samples, **sampling, "checkpoint": o.checkpoint, "trust": o.trust, "ema": o.ema}
    if not is_url(o.target) and is_reward_model(o.target, o.checkpoint):
        for line in _of_reward_model(o, options):
            tell(line)
        return 0
    if o.answers:
        raise ConfigError(f"--answers is about a reward model, and {o.target} is none: leave it out")
    remote = EndpointOptions(model=o.model, key_env=o.key_env, tokenizer=o.tokenizer, api=o.api, dialect=o.dialect)
    main.evaluate(o.target, *o.overrides, **options, remote=remote)
    return 0


def _search(o: Namespace, sampling: dict[str, Any]) -> None:
    """Evaluate searches over steps. Options that mean nothing for them are refused."""
    from posttrain.evaluation.evaluate_search import evaluate_searches

    others = ("answers", "model", "key_env", "tokenizer", "dialect", "ema")
    if strange := [name for name in others if getattr(o, name)]:
        raise ConfigError(f"--{strange[0].replace('_', '-')} does not go with search=...: leave one of them out")
    samples, out = 1 if o.samples is None else o.samples, o.out or PICTURE
    more = {"checkpoint": o.checkpoint, "trust": o.trust, "allow_fault": o.allow_fault}
    evaluate_searches(o.target, *o.overrides, samples=samples, out=out, **sampling, **more)


def _of_reward_model(o: Namespace, options: dict[str, Any]) -> list[str]:
    """The report on how a reward model orders judged completions, or with --answers the answers of policies."""
    from posttrain.api.reward_transfer import transfer
    from posttrain.evaluation.reward_report import evaluate_reward_model

    if o.answers:
        reports = transfer(o.target, o.answers, *o.overrides, **options)
        return [line for report in reports for line in report.lines()]
    if strange := [n for n in ("samples", "max_tokens", "temperature") if options.pop(n) is not None]:
        raise ConfigError(
            f"{o.target} is a reward model, and nothing is sampled from it: leave --{strange[0].replace('_', '-')} out,"
            " or name a policy whose answers are scored (--answers)"
        )
    return evaluate_reward_model(o.target, *o.overrides, **options).lines()


def add_serve(sub: Subparsers) -> None:
    p = add_command(
        sub,
        serve,
        "serve a run, a model directory or a hub id to OpenAI's clients: completions, chat, streaming, log-probs",
        "posttrain serve runs/mine --checkpoint best\n"
        "  posttrain serve my-model slots=128 --port 9000 --token-env MY_TOKEN",
    )
    p.usage = "posttrain serve TARGET [key=value ...] [options]"
    p.add_argument("target", help="a run folder, a model directory or a hub id")
    option(p, "--host", "ADDRESS", "address to listen on (default: this machine only)", default="127.0.0.1")
    option(p, "--port", "N", "port (default 8000; 0: any free one, which is printed)", type=int, default=8000)
    option(p, "--token", "TEXT", "the token callers must send (default: one is made up and printed)")
    option(p, "--token-env", "NAME", "the environment variable that holds it, which no process list shows")
    flag(p, "--no-token", "serve everybody on this machine; refused on any other address")
    text = f"a limit on callers; may be given several times. Names: {', '.join(LIMITS)}"
    option(p, "--limit", "NAME=N", text, action="append", default=[])
    option(p, "--name", None, "what callers call the model (default: the last part of TARGET)")
    _add_checkpoint(p)
    add_trust(p)


def serve(o: Namespace) -> int:
    from posttrain.serve import command as server
    from posttrain.serve.caller_limits import read_limits

    words = {n: getattr(o, n) for n in ("host", "port", "token", "token_env", "no_token")}
    where = server.ServerAddress(**words, limits=read_limits(o.limit))
    return server.serve(o.target, *o.overrides, where=where, name=o.name, checkpoint=o.checkpoint, trust=o.trust)


def add_export(sub: Subparsers) -> None:
    p = add_command(
        sub,
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
    option(p, "--checkpoint", "NAME", "last (default), best, or a checkpoint's name", default="last")
    flag(p, "--public", "on the hub: everybody can read a repository made here")
    flag(p, "--adapter", "of a run with model.lora: write the adapter alone, as PEFT does")
    flag(p, "--ema", "of a run with optimizer.ema: the moving average of the weights")
    add_trust(p)


def export(o: Namespace) -> int:
    from posttrain.report.export.hub import is_hub

    if o.public and not is_hub(o.folder):
        raise ConfigError("--public is about a repository of the hub: export to hub:USER/NAME, or leave it out")
    from posttrain.api import main

    choice = {n: getattr(o, n) for n in ("checkpoint", "trust", "adapter", "ema")}
    written, certificate = main.certified_export(o.run, o.folder, o.public, **choice)
    tell(f"pushed to {written}" if is_hub(o.folder) else f"wrote {written}")
    tell(certificate.line)
    return 0
