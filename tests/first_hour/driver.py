"""Executes the Python blocks of one page, in one namespace: each line of standard input names a file with a block and
one for what it prints. With `toy` as an argument every run is made small, and what was added is printed."""

import ast
import asyncio
import contextlib
import inspect
import json
import sys
import traceback
import types


def make_small(table: dict) -> None:
    """From here on `posttrain.run` appends the sizes of its recipe."""
    import posttrain
    from posttrain.core.run import Run

    full = posttrain.run

    def run(recipe, *overrides, **named):
        name = recipe.recipe if isinstance(recipe, Run) else recipe
        stages = [s.name for s in recipe.stages] if isinstance(recipe, Run) else None
        added = [o for o in table.get(name, ()) if stages is None or o.split(".")[0] in (*stages, "env", "evaluation")]
        print(f"[toy] posttrain.run({name!r}, ...) with {' '.join(added)}")
        kept = [o for o in overrides if o.split("=")[0] not in {a.split("=")[0] for a in added}]
        return full(recipe, *kept, *added, **without(named, {a.split("=")[0] for a in added}))

    run.__doc__ = full.__doc__
    posttrain.run = run


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


def main() -> None:
    page = types.ModuleType("page")
    sys.modules["page"] = page
    sys.path.insert(0, "")
    if len(sys.argv) > 1:
        make_small(json.loads(sys.argv[1]))
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
