"""One function per command. It imports what it needs and returns the exit code."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from posttrain.core.errors import ConfigError
from posttrain.core.visible import tell


def run(o: Namespace) -> int:
    if o.help:
        from posttrain.recipe.recipes import listed

        tell(o.text())
        tell(_settings(o.recipe, o.overrides) if o.recipe else listed())
        return 0
    from posttrain.api.session import RunOptions, open_session

    options = RunOptions(out=o.out, resume=o.resume, allow_fault=o.allow_fault, trust=o.trust)
    with open_session(o.recipe or "", o.overrides, options) as session:
        asyncio.run(session.play())
    return 0


def ladder(o: Namespace) -> int:
    from posttrain.cli import ladder as view

    if o.on:
        from posttrain.cli import ablate

        against = [w for w in (o.name or "", *o.against.split(",")) if w]
        ablate.show(o.on, against, ablate.AblateOptions(o.step, o.stage, o.checkpoint, o.device), o.json, o.trust)
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


def evaluate(o: Namespace) -> int:
    from posttrain.api import main
    from posttrain.api.endpoint import EndpointOptions

    remote = EndpointOptions(model=o.model, key_env=o.key_env, tokenizer=o.tokenizer, api=o.api, dialect=o.dialect)
    how = {
        "samples": o.samples,
        "checkpoint": o.checkpoint,
        "max_tokens": o.max_tokens,
        "temperature": o.temperature,
        "trust": o.trust,
    }
    main.evaluate(o.target, *o.overrides, **how, remote=remote)
    return 0


def serve(o: Namespace) -> int:
    from posttrain.serve import command as server
    from posttrain.serve.limits import read_limits

    limits = read_limits(o.limit)
    where = server.ServerAddress(
        host=o.host, port=o.port, token=o.token, token_env=o.token_env, no_token=o.no_token, limits=limits
    )
    return server.serve(o.target, *o.overrides, where=where, name=o.name, checkpoint=o.checkpoint, trust=o.trust)


def check(o: Namespace) -> int:
    from posttrain.api import check as checker

    return checker.show(o.target, *o.overrides, tasks=o.tasks, rate=o.rate, as_json=o.json, trust=o.trust)


def new(o: Namespace) -> int:
    from posttrain.api.new import class_name, new_env, next_steps

    env, test = new_env(o.name, o.folder)
    tell(f"wrote {env} and {test}: a working environment to change. What next:")
    for line in next_steps(env, test, class_name(o.name)):
        tell(f"  {line}")
    return 0


def show(o: Namespace) -> int:
    from posttrain.cli import show as view

    wanted = view.ShowOptions(o.stage, o.step, "eval" if o.eval else None, o.episode, o.wrong, o.best, o.limit)
    for line in view.lines(o.run, wanted):
        tell(line, coloured=True)
    return 0


def export(o: Namespace) -> int:
    from posttrain.api import main

    tell(f"wrote {main.export(o.run, o.folder, o.checkpoint, o.trust)}")
    return 0


def faults(o: Namespace) -> int:
    from posttrain.faults import FAULTS, find

    if o.name is None:
        width = max(map(len, FAULTS))
        for f in FAULTS.values():
            tell(f"{f.name:<{width}}  {f.what}")
        return 0
    f = find(o.name)
    rows = (("what", f.what), ("harm", f.harm), ("from", f.source), ("replaces", f.seam))
    for name, text in (
        *rows,
        ("to see it", " ".join(("posttrain run arithmetic", *f.shows, f"fault={f.name}", "--allow-fault"))),
    ):
        tell(f"{name:<10} {text}")
    if f.needs:
        tell(f"{'needs':<10} {f.needs}")
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
