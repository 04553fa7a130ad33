"""The suites of the sandbox, the server and killed runs once more, as an ordinary user: what root may do hides what
others meet.

Root makes the user: a number that owns nothing but one folder, with a home and a place for temporary files in it. Where
only root may enter the folder that Python or this tree lies in, both are shown to the user in a mount namespace.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytestmark = pytest.mark.prove

ROOT = Path(__file__).parents[2]
USER = 65534
PLACES = sorted({Path(os.path.realpath(p)) for p in (sys.base_prefix, sys.prefix, ROOT)})
"""What the user has to read: Python, the environment, this tree."""


@dataclass(frozen=True)
class Suite:
    """Test files by pattern, how many cases must pass and may be skipped, and settings of this suite."""

    patterns: tuple[str, ...]
    passed: int
    skipped: int
    settings: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def files(self) -> list[str]:
        return sorted({str(p.relative_to(ROOT)) for pattern in self.patterns for p in ROOT.glob(f"tests/{pattern}.py")})


SUITES = {
    "sandbox": Suite(("sandbox/test_*", "verifier/test_code_reward"), 400, 20),
    "serve": Suite(("serve/test_*", "conformance/test_served"), 80, 2),
    "kill": Suite(
        ("prove/test_kill_sweep", "engine/test_stop_strings", "record/test_run_folder"),
        55,
        2,
        {"POSTTRAIN_SWEEP_KILLS": "6"},
    ),
}


def closed(path: Path) -> Path | None:
    """The outermost folder around a path that others may not enter."""
    return next((p for p in [*reversed(path.parents), path] if p.is_dir() and not p.stat().st_mode & 0o001), None)


def opened(paths: list[Path], stage: Path) -> str:
    """Shell commands that show these paths to everybody, in a mount namespace of their own: root's home may hold our
    Python. They are held under `stage` meanwhile."""
    lines = ["set -e"]
    for folder in {f for p in paths if (f := closed(p))}:
        inside = [p for p in paths if folder in (p, *p.parents)]
        stages = [f"mkdir -p {stage}/{i}; mount --bind {shlex.quote(str(p))} {stage}/{i}" for i, p in enumerate(inside)]
        back = [
            f"mkdir -p {shlex.quote(str(p))}; mount --bind {stage}/{i} {shlex.quote(str(p))}"
            for i, p in enumerate(inside)
        ]
        lines += [*stages, f"mount -t tmpfs -o mode=755 none {shlex.quote(str(folder))}", *back]
    return "\n".join(lines)


def namespace() -> list[str]:
    """What begins a command in mounts of its own; nothing where that is not allowed."""
    words = ["unshare", "--mount"]
    return words if subprocess.run([*words, "true"], capture_output=True).returncode == 0 else []


def play(suite: Suite, folder: Path) -> subprocess.CompletedProcess[str]:
    """All of it, by that user, who owns nothing but a folder in here."""
    folder.chmod(0o755)
    home = folder / "h"
    home.mkdir()
    (home / "tmp").mkdir()
    for path in (home, home / "tmp"):
        os.chown(path, USER, USER)
    needed = [*PLACES, Path(os.path.realpath(home))]
    small, disk = "", home / "small"
    apart = namespace()
    if apart:
        small = f"mkdir {disk}; mount -t tmpfs -o size=256k,mode=755,uid={USER} none {disk}"
    own = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": str(home),
        "TMPDIR": f"{home}/tmp",
        "PYTHONPATH": str(ROOT),
        "HYPOTHESIS_STORAGE_DIRECTORY": f"{home}/h",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        **({"POSTTRAIN_SMALL_DISK": str(disk)} if apart else {}),
    } | suite.settings
    options = f"-m pytest -q -rs -p no:cacheprovider --basetemp {home}/t"
    test = [sys.executable, *options.split(), "-m", "prove or not prove", *suite.files]
    become = [
        "setpriv",
        f"--reuid={USER}",
        f"--regid={USER}",
        "--clear-groups",
        "env",
        "-i",
        *(f"{k}={v}" for k, v in own.items()),
    ]
    script = (
        f"{opened(needed, folder / 'stage')}\n{small}\ncd {shlex.quote(str(ROOT))}\nexec {shlex.join([*become, *test])}"
    )
    return subprocess.run([*apart, "bash", "-c", script], capture_output=True, text=True, timeout=1800)


@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user already")
@pytest.mark.parametrize("name", SUITES)
def test_the_suite_holds_for_an_ordinary_user(name: str) -> None:
    """Every case that is skipped there says why; few may be: those that only root can try."""
    if shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("util-linux is not installed: unshare and setpriv make the ordinary user")
    hidden = next(filter(None, map(closed, PLACES)), None)
    if hidden and not namespace():
        pytest.skip(
            f"only root may enter {hidden}, and without a mount namespace what lies there cannot be shown to another"
            " user"
        )
    # where sockets fit: their paths have 108 bytes at most
    with tempfile.TemporaryDirectory(prefix="user", dir="/tmp") as short:
        done = play(SUITES[name], Path(short))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = int(re.findall(r"(\d+) passed", done.stdout)[-1])
    skipped = sum(int(n) for n in re.findall(r"(\d+) skipped", done.stdout)[-1:])
    print(f"\n{passed} passed, {skipped} skipped as user {USER}")
    assert passed >= SUITES[name].passed and skipped <= SUITES[name].skipped, done.stdout[-3000:]
