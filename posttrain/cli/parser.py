"""The parser of the command line. It imports nothing heavy; each command does that when it runs."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import fields
from itertools import pairwise
from typing import NoReturn, cast

from posttrain.cli import commands
from posttrain.core.visible import visible
from posttrain.serve.limits import CallerLimits

_OVERRIDE = re.compile(r"[A-Za-z_][\w.]*=")
_VALUED = {
    *(
        "--out",
        "--resume",
        "--samples",
        "--checkpoint",
        "--max-tokens",
        "--temperature",
        "--stage",
        "--step",
        "--episode",
        "--limit",
    ),
    *("--tasks", "--rate"),
    *(
        "--host",
        "--port",
        "--token",
        "--token-env",
        "--name",
        "--model",
        "--key-env",
        "--tokenizer",
        "--api",
        "--dialect",
    ),
}
LIMITS = tuple(f.name for f in fields(CallerLimits))

EXIT_CODES = """\
exit codes: 0 done, 1 a bug (with traceback), 2 wrong usage or configuration, 3 an invariant broke, 4 data or model
cannot be read, 5 the run folder, 6 the engine, 7 the reward function, 130 Ctrl-C, 143 SIGTERM"""


def split_overrides(words: list[str]) -> tuple[list[str], list[str]]:
    """(other words, overrides). For `run`, `eval`, `serve` and `check`, `key=value` words may be anywhere."""
    if not words or words[0] not in ("run", "eval", "serve", "check"):
        return words, []
    rest, overrides = [words[0]], list[str]()
    for before, word in pairwise(words):
        (overrides if _OVERRIDE.match(word) and before not in _VALUED else rest).append(word)
    return rest, overrides


class _CommandParser(ArgumentParser):
    """A parser whose errors escape unknown words, because a shell may have expanded file names into them."""

    def error(self, message: str) -> NoReturn:
        super().error(visible(message))


def parser() -> ArgumentParser:
    """The whole command line."""
    make = cast("type[ArgumentParser]", _CommandParser)
    top = make(
        prog="posttrain",
        description="RL post-training for language models: the whole loop, from one laptop command.",
        epilog=f"example:\n  posttrain run ladder seed=1 algorithm=dapo rl.steps=40\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    sub = top.add_subparsers(required=True, metavar="COMMAND")
    _run(sub)
    _ladder(sub)
    _eval(sub)
    _serve(sub)
    _check(sub)
    _new(sub)
    _show(sub)
    _export(sub)
    _faults(sub)
    return top


def _command(
    sub: argparse._SubParsersAction[ArgumentParser],
    name: str,
    call: object,
    text: str,
    example: str,
    add_help: bool = True,
) -> ArgumentParser:
    p = sub.add_parser(
        name,
        help=text,
        description=text,
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=add_help,
    )
    p.set_defaults(command=call)
    return p


def _trust(p: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add --trust, for folders made by somebody else."""
    p.add_argument(
        "--trust",
        action="store_true",
        help="of a run folder that was not made here by you: allow the code, addresses, secrets and files that it asks "
        "for, which are listed",
    )


def _run(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "run",
        commands.run,
        "run a recipe, or go on with a run that was cut",
        "posttrain run ladder seed=1 algorithm=grpo clip.high=0.28 rl.steps=80 --out runs/mine\n"
        "  posttrain run --resume runs/mine",
        add_help=False,
    )
    p.add_argument("recipe", nargs="?", help="which one: --help lists them; after its name, all its settings")
    p.add_argument("--out", metavar="FOLDER", help="run folder (default: runs/RECIPE-DATE-TIME)")
    p.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run folder, or with one of its checkpoints (RUN/checkpoints/NAME)",
    )
    p.add_argument(
        "--allow-fault",
        action="store_true",
        help="start although fault=NAME plants a bug on purpose (posttrain faults lists them); its numbers mean "
        "nothing",
    )
    _trust(p)
    p.add_argument("-h", "--help", action="store_true", help="this text; after a recipe's name also its settings")
    p.usage = "posttrain run [RECIPE] [key=value ...] [--out FOLDER] | posttrain run --resume RUN"
    p.set_defaults(text=p.format_help)


def _ladder(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "ladder",
        commands.ladder,
        "print the algorithms as a tree of patches, one of them in full, the difference of two, or what they would do "
        "with a run's batches",
        "posttrain ladder\n  posttrain ladder grpo\n  posttrain ladder --table\n  posttrain ladder --diff grpo dapo\n"
        "  posttrain ladder --on runs/mine --step 20 --against dapo,maxrl,gspo",
    )
    p.add_argument("name", nargs="?", help="show this algorithm in full")
    p.add_argument(
        "--table", action="store_true", help="all algorithms in one table: credit, trust region, weight, anchor, cost"
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
    _trust(on)


def _eval(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "eval",
        commands.evaluate,
        "held-out accuracy, mean reward and pass@k of a run, a model directory, a hub id, or of what is served at an "
        "address",
        "posttrain eval runs/mine --checkpoint best --samples 16\n"
        "  posttrain eval my-model env=arithmetic env.args.terms=4\n"
        "  posttrain eval http://127.0.0.1:8000/v1 env=arithmetic --tokenizer my-model --key-env MY_KEY",
    )
    p.usage = "posttrain eval TARGET [key=value ...] [options]"
    p.add_argument(
        "target", help="a run folder, a model directory, a hub id, or the address of an OpenAI-compatible endpoint"
    )
    p.add_argument("--samples", type=int, metavar="N", help="samples a prompt (default: those of the run)")
    p.add_argument(
        "--checkpoint",
        default="last",
        metavar="NAME",
        help="of a run folder: last (default), best, or a checkpoint's name",
    )
    p.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    p.add_argument("--temperature", type=float, metavar="T", help="sampling temperature")
    _trust(p)
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


def _serve(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "serve",
        commands.serve,
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
        help=f"on callers, as often as wanted: {', '.join(LIMITS)}",
    )
    p.add_argument("--name", help="what callers call the model (default: the last part of TARGET)")
    p.add_argument(
        "--checkpoint",
        default="last",
        metavar="NAME",
        help="of a run folder: last (default), best, or a checkpoint's name",
    )
    _trust(p)


def _check(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "check",
        commands.check,
        "try an environment and its verifiers: right answers, near misses, noise and tricks; ends with 1 where a probe "
        "failed",
        "posttrain check arithmetic env.args.max_operand=99\n  posttrain check gym:chain_sum --tasks 64\n"
        "  posttrain check mine.py:MyTask --json\n  posttrain check prompts env.prompts=mine.jsonl env.rewards=math",
    )
    p.usage = "posttrain check ENV [key=value ...] [options]"
    p.add_argument(
        "target",
        metavar="ENV",
        help="what env.name may be: a gallery name, gym:TASK, verifiers:ID, prompts, path.py:Class; or a run folder",
    )
    p.add_argument("--tasks", type=int, default=32, metavar="N", help="tasks that are tried (default 32)")
    p.add_argument(
        "--rate",
        type=float,
        metavar="N",
        help="answers that must be judged a second (default: as many as the rollouts of a run brought, else 16)",
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    _trust(p)


def _new(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "new",
        commands.new,
        "write the skeleton of an environment that works as it stands, and its test",
        "posttrain new env sort_letters\n  posttrain check sort_letters.py:SortLetters",
    )
    p.add_argument("what", choices=("env",), help="what to write")
    p.add_argument(
        "name",
        metavar="NAME",
        help="of the file, in lower case: sort_letters makes sort_letters.py with class SortLetters",
    )
    p.add_argument("--folder", default=".", metavar="FOLDER", help="where to write (default: here)")


def _show(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "show",
        commands.show,
        "read what a run's model said: a line an episode, or one episode token by token",
        "posttrain show runs/mine\n  posttrain show runs/mine --step 20 --wrong\n"
        "  posttrain show runs/mine --step 20 --episode 3",
    )
    p.add_argument("run", help="a run folder, finished or being written")
    p.add_argument("--stage", help="name of a stage (default: the last one with episodes)")
    p.add_argument("--step", type=int, metavar="N", help="step of the stage (default: the last one)")
    p.add_argument("--eval", action="store_true", help="episodes of the held-out evaluation instead of training")
    p.add_argument(
        "--episode", type=int, metavar="N", help="one episode token by token: who said it, log-prob, advantage, version"
    )
    p.add_argument("--wrong", action="store_true", help="only episodes whose main reward source gave less than 1")
    p.add_argument("--best", action="store_true", help="highest reward first")
    p.add_argument("--limit", type=int, default=32, metavar="N", help="at most this many lines (default 32; 0: all)")


def _export(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "export",
        commands.export,
        "write a run's weights as a plain Hugging Face directory",
        "posttrain export runs/mine my-model --checkpoint best",
    )
    p.add_argument("run", help="a run folder")
    p.add_argument("folder", help="where to write; must not exist or be empty")
    p.add_argument("--checkpoint", default="last", metavar="NAME", help="last (default), best, or a checkpoint's name")
    _trust(p)


def _faults(sub: argparse._SubParsersAction[ArgumentParser]) -> None:
    p = _command(
        sub,
        "faults",
        commands.faults,
        "list the bugs that can be planted into a run to see them caught, or tell one in full",
        "posttrain faults\n  posttrain faults std_ddof\n  posttrain run arithmetic fault=std_ddof --allow-fault",
    )
    p.add_argument("name", nargs="?", help="tell this fault in full")


__all__ = ["Namespace", "parser", "split_overrides"]
