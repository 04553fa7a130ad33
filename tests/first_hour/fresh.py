"""A fresh environment: a wheel built from the tree, a virtual environment, and pip."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

OTHERS = {".git", ".venv", ".venv-vllm", "runs", "build", "dist", "__pycache__", ".pytest_cache", ".ruff_cache"}
EXTRAS = ("gym", "data", "math", "verifiers", "notebook")


def source(root: Path) -> list[Path]:
    """The files of a tree that are its own, relative to it: not what is ignored, built or left by runs."""
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True)
    if listed.returncode == 0 and listed.stdout:
        names = [Path(n.decode()) for n in listed.stdout.split(b"\0") if n]
    else:
        names = [p.relative_to(root) for p in root.rglob("*") if not OTHERS & {*p.relative_to(root).parts}]
    return sorted(p for p in set(names) if (root / p).is_file() and p.suffix != ".pyc")


def wheel(root: Path, folder: Path) -> Path:
    """Build the wheel of a tree, from a copy of its own files, so that nothing else gets in."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in source(root):
        copy = folder / "source" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((root / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-qq", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(folder / "source")], check=True)
    return next(folder.glob("posttrain-*.whl"))


def environment(made: Path, folder: Path, constraints: Path, say=print) -> Path:
    """A virtual environment with the wheel and its extras, as a user makes it. Returns its folder. One that is there
    already is taken, with the new wheel: for who plays a page again and again."""
    begun = time.monotonic()
    if (folder / "bin/posttrain").exists():
        again = [str(folder / "bin/python"), "-m", "pip", "install", "-qq", "--no-deps", "--force-reinstall", str(made)]
        subprocess.run(again, check=True)
        say(f"the environment of the last time, and in it the new wheel: {time.monotonic() - begun:.0f} s")
        return folder
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
    outside = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # pip counts what lies there as installed
    subprocess.run([*pip, "--constraint", str(constraints), f"{made}[{','.join(EXTRAS)}]"], check=True, env=outside)
    say(f"fresh environment with posttrain[{','.join(EXTRAS)}]: {time.monotonic() - begun:.0f} s")
    return folder
