"""Plays Python in the fresh environment. Without further arguments: the blocks of one page, in one namespace; each line
of standard input names a file with a block and one for what it prints. With `SCRIPT ARGUMENT ...`: that program. After
`--toy` every run in it is made small; what is added to it is printed."""

import ast
import asyncio
import contextlib
import inspect
import runpy
import shutil
import sys
import traceback
import types
from pathlib import Path

from words import sizes


def prepare(toy: bool) -> None:
    """From here on `posttrain.run` appends small sizes, if that is asked for, and a folder that is written again makes
    room: a page may show the same run as a command and as a program."""
    import posttrain
    from posttrain.config.run import Run
    from posttrain.recipe.recipes import recipe as shipped

    full, export = posttrain.run, posttrain.export

    def run(recipe=None, *overrides, **named):
        small = []
        if toy and recipe is not None:
            tree = recipe if isinstance(recipe, Run) else shipped(recipe)
            small = sizes(tree, [*overrides, *settings(named)])
            print(f"[toy] posttrain.run({tree.recipe!r}, ...) with {' '.join(small)}")
        paths = {s.partition("=")[0] for s in small}
        kept = [o for o in overrides if o.partition("=")[0] not in paths]
        if named.get("out"):
            shutil.rmtree(named["out"], ignore_errors=True)
        return full(recipe, *kept, *small, **without(named, paths))

    def exported(target, folder, *rest, **named):
        if "://" not in str(folder) and not str(folder).startswith("hub:"):
            shutil.rmtree(folder, ignore_errors=True)
        return export(target, folder, *rest, **named)

    run.__doc__, exported.__doc__ = full.__doc__, export.__doc__
    posttrain.run, posttrain.export = run, exported


def settings(named: dict, prefix: str = "") -> list[str]:
    """Keyword settings, nested ones too, as words; one that is None takes a stage out, and `posttrain.prompts(FILE)` is
    `env.prompts=FILE`."""
    data = getattr(getattr(named.get("env"), "env", None), "prompts", None)
    return [f"env.prompts={data}"] * bool(data) + [
        word
        for name, value in named.items()
        for word in (
            settings(value, f"{prefix}{name}.")
            if isinstance(value, dict)
            else [f"{prefix}{name}={'none' if value is None else value if isinstance(value, str | int) else '...'}"]
        )
    ]


def without(named: dict, paths: set[str], prefix: str = "") -> dict:
    """Keyword settings, nested ones too (`rl={"steps": 60}`), without those at these dotted paths."""
    return {
        name: without(value, paths, f"{prefix}{name}.") if isinstance(value, dict) else value
        for name, value in named.items()
        if f"{prefix}{name}" not in paths
    }


def execute(text: str, name: str, space: dict) -> None:
    """A block; a notebook's may await at the top level, and its last expression is shown."""
    tree = ast.parse(text, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    made = eval(compile(tree, name, "exec", flags), space)
    if inspect.iscoroutine(made):
        asyncio.run(made)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), name, "eval", flags), space)
        shown = asyncio.run(shown) if inspect.iscoroutine(shown) else shown
        if shown is not None:
            print(repr(shown))


def script(words: list[str]) -> None:
    """A program, as `python SCRIPT ...` runs it."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    toy = "--toy" in sys.argv[1:2]
    sys.path.remove(str(Path(__file__).parent))
    prepare(toy)
    if words := sys.argv[2 if toy else 1 :]:
        script(words)
        return
    page = types.ModuleType("page")
    sys.modules["page"] = page
    sys.path.insert(0, "")
    answers = sys.stdout
    for line in sys.stdin:
        block, output = line.rstrip("\n").split("\t")
        with open(output, "w") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                with open(block) as file:
                    execute(file.read(), block, page.__dict__)
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
                code = 1
        print(code, file=answers, flush=True)


if __name__ == "__main__":
    main()
