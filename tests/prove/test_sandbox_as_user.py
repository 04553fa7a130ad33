"""The sandbox's suite once more, as an ordinary user: what contains programs then is not root's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.prove

ROOT = Path(__file__).parents[2]
USER = 65534
FILES = sorted(
    str(p.relative_to(ROOT))
    for name in ("test_sandbox*", "test_code*", "test_hostile_cases", "test_honest_programs")
    for p in ROOT.glob(f"tests/rooms/{name}.py")
)


def closed(path: Path) -> Path | None:
    """The outermost folder around a path that others may not enter."""
    return next((p for p in [*reversed(path.parents), path] if p.is_dir() and not p.stat().st_mode & 0o001), None)


def opened(paths: list[Path], stage: Path) -> str:
    """Shell commands that show these paths to everybody, in a mount namespace of their own: root's home may hold our Python. They
    are held under `stage` meanwhile."""
    lines = ["set -e"]
    for folder in {f for p in paths if (f := closed(p))}:
        inside = [p for p in paths if folder in (p, *p.parents)]
        stages = [f"mkdir -p {stage}/{i}; mount --bind {shlex.quote(str(p))} {stage}/{i}" for i, p in enumerate(inside)]
        back = [f"mkdir -p {shlex.quote(str(p))}; mount --bind {stage}/{i} {shlex.quote(str(p))}" for i, p in enumerate(inside)]
        lines += [*stages, f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}", *back]
    return "\n".join(lines)


def suite(folder: Path) -> subprocess.CompletedProcess[str]:
    """All of it, by that user, who owns nothing but a folder in here."""
    folder.chmod(0o755)
    home = folder / "h"
    home.mkdir()
    os.chown(home, USER, USER)
    needed = [Path(os.path.realpath(p)) for p in {sys.base_prefix, sys.prefix, str(ROOT), str(home)}]
    places = {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(home),
        "PYTHONPATH": str(ROOT),
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{home}/h",
    }
    own = places | {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    options = f"-m pytest -q -rs -p no:cacheprovider --basetemp {home}/t"
    test = [sys.executable, *options.split(), "-m", "prove or not prove", *FILES]
    become = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "env", "-i", *(f"{k}={v}" for k, v in own.items())]
    script = f"{opened(needed, folder / 'stage')}\ncd {shlex.quote(str(ROOT))}\nexec {shlex.join([*become, *test])}"
    return subprocess.run(["unshare", "--mount", "bash", "-c", script], capture_output=True, text=True, timeout=1200)


@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user already")
def test_the_suite_holds_for_an_ordinary_user() -> None:
    """Every case that is skipped there says why; few may be: those that only root can try."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("util-linux is not installed: unshare and setpriv make the ordinary user")
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace here, so root's Python cannot be shown to another user")
    with tempfile.TemporaryDirectory(prefix="user", dir="/tmp") as short:  # where sockets fit: their paths have 108 bytes at most
        done = suite(Path(short))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(re.findall(r"(\d+) passed", done.stdout)[-1])
    skipped = sum(int(n) for n in re.findall(r"(\d+) skipped", done.stdout)[-1:])
    print(f"\n{passed} passed, {skipped} skipped as user {USER}")
    assert passed > 400 and skipped < 20, done.stdout[-3000:]
