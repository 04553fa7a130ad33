"""`posttrain run`: run a recipe, or resume a run that was cut."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from posttrain.cli.command import Subparsers, add_command, add_trust
from posttrain.core.visible import tell


def add(sub: Subparsers) -> None:
    p = add_command(
        sub,
        "run",
        run,
        "run a recipe, or go on with a run that was cut or that shall be longer",
        "posttrain run ladder seed=1 algorithm=grpo clip.high=0.28 rl.steps=80 --out runs/mine\n"
        "  posttrain run --resume runs/mine\n"
        "  posttrain run --resume runs/mine rl.steps=200\n"
        "  posttrain run grpo model=runs/mine env.prompts=mine.jsonl env.rewards=mine.py:reward",
        add_help=False,
    )
    p.add_argument("recipe", nargs="?", help="which one: --help lists them; after its name, all its settings")
    p.add_argument("--out", metavar="FOLDER", help="run folder (default: runs/RECIPE-DATE-TIME)")
    p.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with this run folder, or with one of its checkpoints (RUN/checkpoints/NAME); with rl.steps=N for "
        "longer",
    )
    p.add_argument(
        "--allow-fault",
        action="store_true",
        help="start although fault=NAME plants a bug on purpose (posttrain faults lists them); its numbers mean "
        "nothing",
    )
    add_trust(p)
    p.add_argument("-h", "--help", action="store_true", help="this text; after a recipe's name also its settings")
    p.usage = "posttrain run [RECIPE] [key=value ...] [--out FOLDER] | posttrain run --resume RUN [key=value ...]"
    p.set_defaults(text=p.format_help)


def run(o: Namespace) -> int:
    if o.help:
        from posttrain.recipe.recipes import listed

        tell(o.text())
        tell(_settings(o.recipe, o.overrides) if o.recipe else listed())
        return 0
    from posttrain.api.request import RunOptions, requested

    options = RunOptions(out=o.out, resume=o.resume, allow_fault=o.allow_fault, trust=o.trust)
    with requested(o.recipe or "", o.overrides, options) as request:
        from posttrain.api.session import open_session  # imports torch: only now, so that a wrong setting is told first

        with open_session(request) as session:
            asyncio.run(session.play())
    return 0


def _settings(recipe: str, overrides: list[str]) -> str:
    """Every setting of a recipe with its value (`...` for several) and its valid values."""
    from posttrain.api.overrides import apply, surface, value
    from posttrain.core.formula import word
    from posttrain.recipe.recipes import recipe as shipped

    chosen = apply(shipped(recipe), overrides)
    short = {"model": chosen.model.path, "env": chosen.env.name}
    rows = [
        (path, word(short[path] if path in short else value(chosen, path)), valid) for path, valid in surface(chosen)
    ]
    stages = ", ".join(s.name for s in chosen.stages)
    return f"settings of {recipe} (stages: {stages}; STAGE=none leaves one out):\n" + "\n".join(
        f"  {f'{path}={now}':<44} {valid}" for path, now, valid in rows
    )
