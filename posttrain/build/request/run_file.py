"""The argument of `posttrain run`: the name of a recipe, a YAML file, or `my_run.py:run`, a function or a `Run` in a
Python file of the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from posttrain.build.request.trust_prompt import list_file
from posttrain.config.run import Run
from posttrain.recipe.recipes import recipe as shipped
from posttrain.record.external_access import ask_of, code_of
from posttrain.verifier.user_code import named_object, user_module

YAML = (".yaml", ".yml")


def is_recipe(given: str | Run) -> bool:
    """True where the argument is the name of a recipe, and not a run that the user wrote whole."""
    return not isinstance(given, Run) and Path(given).suffix not in YAML and ":" not in given


def run_of(given: str | Run) -> Run:
    """The run of a recipe's name, a file, or the run itself."""
    if isinstance(given, Run):
        return given
    if is_recipe(given):
        return shipped(given)
    if is_yaml(given):
        return _of_yaml(given)
    return _of_python(given)


def is_yaml(given: str | Run) -> bool:
    """True where the argument is a YAML file, which may come from elsewhere."""
    return not isinstance(given, Run) and Path(given).suffix in YAML


def _of_yaml(given: str) -> Run:
    """The run of a YAML file. The Python files of its algorithms are imported here, and listed before."""
    from posttrain.build.request.yaml_config import algorithm_files, read_run

    path = Path(given).expanduser()
    list_file(given, [a for word in algorithm_files(path) if (a := ask_of("algorithm", code_of(word)))])
    return read_run(path)


def _of_python(given: str) -> Run:
    """The run of `path.py:name`: a `Run`, or a function without arguments that returns one."""
    return named_object(given, "", Run, partial(user_module, what="run"), "a Run")
