"""Loads user code: a function or a class in a Python file of the user's, named `path.py:name`."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from posttrain.core.verdict import Verdict
from posttrain.system.errors import ConfigError, PosttrainError, nearest
from posttrain.verifier.timed_calls import Raised, TimedOut


def load(path: Path, attribute: str, what: str = "reward", kind: str = "function") -> Callable[..., Any]:
    """The function or class of a Python file. If there is none, the ConfigError lists what exists.

    Args:
        what: what the run uses it for (such as reward), for messages.
        kind: `function` or `class`.
    """
    if not path.is_file():
        python_files = sorted(p.name for p in path.parent.glob("*.py")) if path.parent.is_dir() else []
        has = f"{path.parent} has {', '.join(python_files) or 'no Python file'}"
        hint = has if path.parent.is_dir() else f"there is no folder {path.parent}"
        raise ConfigError(f"{what} {path}:{attribute}: no such file; {hint}")
    module = user_module(path.resolve(), what)
    member = getattr(module, attribute, None)
    fits = inspect.isclass if kind == "class" else callable
    if member is None:
        candidates = [
            n for n, v in vars(module).items() if fits(v) and getattr(v, "__module__", None) == module.__name__
        ]
        raise ConfigError(f"{what} {path}:{attribute}: no such {kind}; {nearest(attribute, candidates)}")
    if not fits(member):
        raise ConfigError(f"{what} {path}:{attribute} is a {type(member).__name__}, not a {kind}")
    return member


def named_object(word: str, setting: str, kind: Any, read: Callable[[Path], ModuleType], wanted: str) -> Any:
    """The object that `path.py:NAME` names, or what it returns where it is a function without arguments.

    Args:
        setting: what stands before the word in messages, such as `algorithm=`.
        kind: the type that the object must have, or a tuple of types.
        read: imports the file.
        wanted: the type in words, for messages.
    """
    name, _, attribute = word.rpartition(":")
    path, named = Path(name).expanduser(), f"{setting}{word}"
    if not path.is_file():
        raise ConfigError(f"{named}: there is no file {path}; write path.py:NAME")
    module = read(path.resolve())
    value = getattr(module, attribute, None)
    if value is None:
        public = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        functions = [n for n, v in public.items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        candidates = [n for n, v in public.items() if isinstance(v, kind)] + functions
        raise ConfigError(f"{named}: {path} has no {attribute!r}; {nearest(attribute, candidates)}")
    verb = "is"
    if callable(value):
        verb = "is a function that returned"
        try:
            value = value()
        except PosttrainError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{named} failed: {where(error)}") from error
    if not isinstance(value, kind):
        raise ConfigError(
            f"{named} {verb} a {type(value).__name__}: {wanted} is wanted, or a function without arguments that returns"
            " one"
        )
    return value


def module_name(path: Path) -> str:
    """The name under which a file of the user's is imported."""
    return "posttrain_user_" + hashlib.blake2b(str(path).encode(), digest_size=8).hexdigest()


def user_module(path: Path, what: str) -> ModuleType:
    """Import a file under a name made from its path. Its folder is added to `sys.path`, as for a script."""
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{what} file {path} is not Python source; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # The module is registered before it is executed, as `import` does, because dataclasses and pickle look up the
    # module of a class by its name. A module that fails is removed, so that the next attempt imports it again.
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        # The folder goes to the end of the path, so that no file of the user hides an installed module.
        sys.path.append(str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, KeyboardInterrupt):
            raise
        error_place = where(error)
        if isinstance(error, SyntaxError):  # of a file that this one imports, perhaps
            error_place = f"{Path(error.filename or path).name}:{error.lineno}: {error.msg}"
        raise ConfigError(f"{what} file {path} cannot be imported: {error_place}") from error
    return module


def where(error: BaseException, function: Any = None) -> str:
    """Type, message and line of an exception: `ZeroDivisionError: division by zero (rewards.py:12)`. The line is that
    of the deepest frame in the function's file, or of the deepest frame of all if none is in that file."""
    if isinstance(error, Raised) and error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    # The deepest frame may lie in a library; the user looks for the line of their own file.
    frames = traceback.extract_tb(error.__traceback__)
    function_code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    frames = [f for f in frames if function_code is not None and f.filename == function_code.co_filename] or frames
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else text


def failed_call(error: Exception, function: Any, seconds: float) -> Verdict:
    """The verdict where a call of a user's function raised, or took more than these seconds."""
    if isinstance(error, TimedOut):
        return Verdict.failed("timeout", f"no result within {seconds:g} s")
    return Verdict.failed("raised", where(error, function))
