"""`posttrain eval`: measures a run, a model, what an address serves, a reward model, or searches over steps."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from posttrain.cli.shared_arguments import Subparsers, add_command, add_trust
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import tell

PICTURE = "search.svg"
"""The picture of searches, if the user names no file."""


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "eval",
        evaluate,
        "held-out accuracy, mean reward and pass@k of a run, a model directory, a hub id, or of what is served at an "
        "address; of a reward model how it orders judged completions; with search=... what searches are worth and cost",
        "posttrain eval runs/mine --checkpoint best --samples 16\n"
        "  posttrain eval my-model env=arithmetic env.args.terms=4\n"
        "  posttrain eval my-reward-model env.prompts=pairs.jsonl\n"
        "  posttrain eval my-reward-model env=replies --answers runs/mine --answers my-model\n"
        "  posttrain eval runs/prm search=best_of.count=4,8 search=beam.width=4 search=vote\n"
        "  posttrain eval http://127.0.0.1:8000/v1 env=arithmetic --tokenizer my-model --key-env MY_KEY",
    )
    p.usage = "posttrain eval TARGET [key=value ...] [options]"
    p.add_argument(
        "target", help="a run folder, a model directory, a hub id, or the address of an OpenAI-compatible endpoint"
    )
    p.add_argument(
        "--samples", type=int, metavar="N", help="samples a prompt (default: those of the run; of searches 1)"
    )
    p.add_argument(
        "--checkpoint",
        default="last",
        metavar="NAME",
        help="of a run folder: last (default), best, or a checkpoint's name",
    )
    p.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    p.add_argument("--temperature", type=float, metavar="T", help="sampling temperature")
    p.add_argument("--ema", action="store_true", help="of a run with optimizer.ema: the moving average of the weights")
    p.add_argument(
        "--answers",
        action="append",
        default=[],
        metavar="POLICY",
        help="of a reward model: score what this policy (a run or a model) answers to the held-out prompts, and "
        "compare with what the environment knows or verifies; may be repeated",
    )
    add_trust(p)
    _add_search(p)
    at = p.add_argument_group("at an address (slots=N: requests at once)")
    at.add_argument("--model", metavar="NAME", help="which of its models (default: the only one)")
    at.add_argument(
        "--key-env", metavar="NAME", help="environment variable that holds the key; it is never written down"
    )
    at.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="send token ids of this tokenizer (vLLM, posttrain serve); default: text alone",
    )
    at.add_argument("--api", choices=("chat", "completions"), default="chat", help="how text is sent (default: chat)")
    at.add_argument(
        "--dialect", metavar="NAME", help="openai, compatible, vllm or posttrain (default: told from the model's owner)"
    )


def _add_search(p: ArgumentParser) -> None:
    by = p.add_argument_group(
        "searches",
        "search=NAME.SETTING=VALUE,... for each, with several values for several sizes: best_of (count), vote (count,"
        " weighted, answer), beam (width, expand), tree (expansions, expand, exploration, rule); all have aggregate,"
        " how the scores of steps become one number (min, product, mean, last). search.by=model:PATH, judge:PATH or"
        " verifier: what scores (default: the reward model of the run). search.budget=N: a search that has said N"
        " tokens for a task begins nothing more.",
    )
    by.add_argument("--out", metavar="FILE", help=f"the picture: .svg, .png or .pdf (default: {PICTURE})")
    by.add_argument("--allow-fault", action="store_true", help="plant the bug of fault=NAME (posttrain faults)")


def _search(o: Namespace) -> int:
    """Evaluate searches over steps. Options that mean nothing for them are refused."""
    from posttrain.evaluation.evaluate_search import evaluate_searches

    other_options = {
        "--answers": o.answers,
        "--model": o.model,
        "--key-env": o.key_env,
        "--tokenizer": o.tokenizer,
        "--dialect": o.dialect,
        "--api": o.api != "chat",
        "--ema": o.ema,
    }
    if strange := [name for name, value in other_options.items() if value]:
        raise ConfigError(f"{strange[0]} does not go with search=...: leave one of them out")
    evaluate_searches(
        o.target,
        *o.overrides,
        samples=1 if o.samples is None else o.samples,
        checkpoint=o.checkpoint,
        max_tokens=o.max_tokens,
        temperature=o.temperature,
        out=o.out or PICTURE,
        trust=o.trust,
        allow_fault=o.allow_fault,
    )
    return 0


def evaluate(o: Namespace) -> int:
    # Four cases, the one that is cheapest to recognize first: searches (by the words alone), an address (by its form),
    # a reward model (by its files), and else a policy.
    from posttrain.evaluation.search_words import asks_search

    if asks_search(o.overrides):
        return _search(o)
    if o.out is not None or o.allow_fault:
        raise ConfigError("--out and --allow-fault are for searches: add search=best_of, say, or leave them out")
    from posttrain.api import main
    from posttrain.evaluation.evaluate_endpoint import EndpointOptions, is_url
    from posttrain.evaluation.reward_report import is_reward_model

    if not is_url(o.target) and is_reward_model(o.target, o.checkpoint):
        for line in _of_reward_model(o):
            tell(line)
        return 0
    if o.answers:
        raise ConfigError(f"--answers is about a reward model, and {o.target} is none: leave it out")
    remote = EndpointOptions(model=o.model, key_env=o.key_env, tokenizer=o.tokenizer, api=o.api, dialect=o.dialect)
    options = {
        "samples": o.samples,
        "checkpoint": o.checkpoint,
        "max_tokens": o.max_tokens,
        "temperature": o.temperature,
        "trust": o.trust,
        "ema": o.ema,
    }
    main.evaluate(o.target, *o.overrides, **options, remote=remote)
    return 0


def _of_reward_model(o: Namespace) -> list[str]:
    """The report on how a reward model orders judged completions, or with --answers the answers of policies."""
    from posttrain.api.reward_transfer import transfer
    from posttrain.evaluation.reward_report import evaluate_reward_model

    sampling_words = {"--samples": o.samples, "--max-tokens": o.max_tokens, "--temperature": o.temperature}
    weights = {"checkpoint": o.checkpoint, "trust": o.trust, "ema": o.ema}
    if o.answers:
        sampling = {"samples": o.samples, "max_tokens": o.max_tokens, "temperature": o.temperature}
        reports = transfer(o.target, o.answers, *o.overrides, **weights, **sampling)
        return [line for report in reports for line in report.lines()]
    if strange := [name for name, value in sampling_words.items() if value is not None]:
        raise ConfigError(
            f"{o.target} is a reward model, and nothing is sampled from it: leave {strange[0]} out, or name a policy"
            " whose answers are scored (--answers)"
        )
    return evaluate_reward_model(o.target, *o.overrides, **weights).lines()
