"""The files of the interpreter that programs run on. A sandbox makes only these readable."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass

from posttrain.system.errors import ConfigError

ASK = """
import json, sys, sysconfig
v = sysconfig.get_config_vars()
lib = v["INSTSONAME"] if v.get("Py_ENABLE_SHARED") else ""
paths = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), lib and v["LIBDIR"] + "/" + lib]
print(json.dumps([list(sys.version_info[:2]), *paths]))
"""


@dataclass(frozen=True)
class Interpreter:
    """An interpreter's paths on this machine."""

    executable: str
    version: tuple[int, int]
    library: str
    """The standard library's directory."""
    platform_library: str
    shared: str
    """libpython, or '' where it is part of the executable."""


@functools.cache
def python(path: str | None = None) -> Interpreter:
    """The paths of an interpreter (None: this process's own, without its virtual environment)."""
    executable = os.path.realpath(path or sys.executable)
    done = subprocess.run([executable, "-I", "-S", "-c", ASK], capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise ConfigError(f"sandbox: {executable} is no Python that starts: {done.stderr.strip()[-200:]}")
    version, library, platform_library, shared = json.loads(done.stdout)
    if tuple(version) < (3, 11):
        raise ConfigError(f"sandbox: {executable} is Python {version[0]}.{version[1]}; programs need 3.11 or later")
    return Interpreter(executable, (version[0], version[1]), library, platform_library, shared)


def package(name: str) -> tuple[str, ...]:
    """The directories of an installed package, its bundled libraries included."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"sandbox: package {name!r} is not installed beside posttrain: pip install {name}")
    home, *_ = spec.submodule_search_locations
    return tuple(p for p in (home, f"{home}.libs") if os.path.isdir(p))
