"""A fresh environment: a wheel built from the tree, a virtual environment, and pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

EXTRAS = ("gym", "data", "math", "verifiers", "serve")


def wheel(root: Path, folder: Path) -> Path:
    """Build the wheel of a tree, from a copy of what is under version control, so that nothing else gets in."""
    shutil.rmtree(folder, ignore_errors=True)
    source = folder / "source"
    source.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True)
    if listed.returncode == 0:
        names = [n.decode() for n in listed.stdout.split(b"\0") if n]
    else:
        names = [str(p.relative_to(root)) for p in root.rglob("*") if ".venv" not in p.parts and "runs" not in p.parts]
    for name in names:
        if (root / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((root / name).read_bytes())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True)
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
    subprocess.run([*pip, "--constraint", str(constraints), f"{made}[{','.join(EXTRAS)}]"], check=True)
    say(f"fresh environment with posttrain[{','.join(EXTRAS)}]: {time.monotonic() - begun:.0f} s")
    return folder
