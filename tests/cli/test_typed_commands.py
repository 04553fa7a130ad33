"""Commands that are printed to be typed next run as printed, however the program was started."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.system import shell
from posttrain.system.version import VERSION

SOURCE = Path(__file__).parents[2]
SCRIPT = "import sys\nfrom posttrain.cli import main\nsys.exit(main())\n"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with `.venv/bin/python` and `.venv/bin/posttrain`, as pip makes them."""
    folder = tmp_path / "project" / ".venv" / "bin"
    folder.mkdir(parents=True)
    python = folder / "python"
    python.symlink_to(sys.executable)
    (folder.parent / "pyvenv.cfg").write_text(Path(sys.prefix, "pyvenv.cfg").read_text() if _in_venv() else "")
    script = folder / "posttrain"
    script.write_text(f"#!{python}\nimport sys\nsys.path[:0] = {[str(SOURCE), *sys.path]!r}\n{SCRIPT}")
    script.chmod(0o755)
    return tmp_path / "project"


def _in_venv() -> bool:
    return Path(sys.prefix, "pyvenv.cfg").exists()


def _shell(line: str, folder: Path, path: str = os.defpath) -> str:
    """What a shell prints that has only this PATH."""
    home = {"HOME": str(folder), "PYTHONPATH": os.pathsep.join([str(SOURCE), *filter(None, sys.path)])}
    done = subprocess.run(["sh", "-c", line], cwd=folder, env={"PATH": path, **home}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "word",
    [
        *("a\nb", "'\n'; echo $(id)", "\\\n'", "\x1b[2J\u202e", "\\'\x00 \t`x`", "plain", "a b'c"),
        *("a\xa0b", "\x85\xad\u2028\U000e0001", os.fsdecode(b"caf\xe9\n")),
    ],
)
def test_a_word_is_one_word_on_one_line(word: str) -> None:
    """bash reads it as text, and as the word itself where that can be printed."""
    line = shell.command_line("show", word)
    assert line.isprintable()
    told = f"printf '<%s>' {line.partition(' show ')[2]}"
    done = subprocess.run(["bash", "-c", told], capture_output=True, text=True, errors="surrogateescape")
    assert done.stdout.count("<") == 1 and done.stderr == "" and "uid=" not in done.stdout
    assert "\x00" in word or done.stdout == f"<{word}>"


@pytest.mark.parametrize(
    ("typed", "path", "printed"),
    [
        (".venv/bin/posttrain", os.defpath, ".venv/bin/posttrain"),
        ("./.venv/bin/posttrain", os.defpath, ".venv/bin/posttrain"),
        ("posttrain", f"{{bin}}:{os.defpath}", "posttrain"),
        ("{bin}/posttrain", f"{{bin}}:{os.defpath}", "posttrain"),
        (".venv/bin/python -m posttrain", os.defpath, ".venv/bin/python -m posttrain"),
        ("python -m posttrain", f"{{bin}}:{os.defpath}", "python -m posttrain"),
    ],
)
def test_the_welcome_names_commands_that_run(installed: Path, typed: str, path: str, printed: str) -> None:
    words = {"bin": str(installed / ".venv" / "bin")}
    typed, path = typed.format(**words), path.format(**words)
    said = _shell(typed, installed, path)
    lines = [line.partition("#")[0].strip() for line in said.splitlines()]
    assert f"{printed} run ladder" in lines, said
    command = next(line for line in lines if line.endswith("posttrain --help"))
    assert "usage: posttrain" in _shell(command, installed, path)


def test_from_another_folder_the_whole_path_is_printed(installed: Path, tmp_path: Path) -> None:
    script = installed / ".venv" / "bin" / "posttrain"
    other = tmp_path / "other"
    other.mkdir()
    assert f"  {script} run ladder" in _shell(str(script), other)


def test_a_program_of_the_same_name_elsewhere_is_not_taken(installed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(installed / ".venv/bin/posttrain", other / "posttrain")
    assert "  .venv/bin/posttrain run ladder" in _shell(".venv/bin/posttrain", installed, f"{other}:{os.defpath}")


def test_words_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "program", lambda: "posttrain")
    assert shell.command_line("show", "runs/a b; rm -r x") == "posttrain show 'runs/a b; rm -r x'"
    assert shell.command_line("run", "arithmetic", "rl.steps=2") == "posttrain run arithmetic rl.steps=2"


def test_version_names_what_decides_the_numbers_and_imports_none_of_it() -> None:
    code = """
import sys
from posttrain.cli import main
try: main(["--version"])
finally: print(sorted({"torch", "numpy"} & {*sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"posttrain {VERSION} (") and lines[-1] == "[]"
    names = ["python", "torch", "transformers", "tokenizers", "numpy", "platform"]
    assert [line.split()[0] for line in lines[1:-1]] == names
