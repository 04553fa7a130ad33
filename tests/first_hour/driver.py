"""Executes the Python blocks of one page, in one namespace: each line of standard input names a file with a block and
one for what it prints. The argument is a table of sizes by recipe; what is added to a run is printed."""

import ast
import asyncio
import contextlib
import inspect
import json
import shutil
import sys
import traceback
import types


def prepare(table: dict) -> None:
    """From here on `posttrain.run` appends the sizes of its recipe, and a folder that is written again makes room: a
    page may show the same run as a command and as a program."""
    import posttrain
    from posttrain.core.run import Run

    full, export = posttrain.run, posttrain.export

    def run(recipe, *overrides, **named):
        name = recipe.recipe if isinstance(recipe, Run) else str(recipe)
        stages = [s.name for s in recipe.stages] if isinstance(recipe, Run) else None
        added = [o for o in table.get(name, ()) if stages is None or o.split(".")[0] in (*stages, "env", "evaluation")]
        none = {o.partition("=")[0] for o in overrides if o.endswith("=none")}
        added = [o for o in added if o.split(".")[0] not in none]
        print(f"[toy] posttrain.run({name!r}, ...) with {' '.join(added)}" if added else "[as printed]")
        kept = [o for o in overrides if o.split("=")[0] not in {a.split("=")[0] for a in added}]
        if named.get("out"):
            shutil.rmtree(named["out"], ignore_errors=True)
        return full(recipe, *kept, *added, **without(named, {a.split("=")[0] for a in added}))

    def exported(target, folder, *rest, **named):
        if "://" not in str(folder) and not str(folder).startswith("hub:"):
            shutil.rmtree(folder, ignore_errors=True)
        return export(target, folder, *rest, **named)

    run.__doc__, exported.__doc__ = full.__doc__, export.__doc__
    posttrain.run, posttrain.export = run, exported


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
    prepare(json.loads(sys.argv[1]))
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
