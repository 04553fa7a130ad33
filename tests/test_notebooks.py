"""The notebooks are stored without outputs, and each runs from top to bottom in a real kernel, at toy size."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
TOY = "SFT_STEPS = 3\nRL_STEPS = 3\nSTEPS = 4\n"
"""Replaces the cell with the tag `parameters`."""


def test_there_are_three() -> None:
    assert [p.stem for p in NOTEBOOKS] == ["1-first-run", "2-own-task", "3-reading-a-run"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    data = json.loads(path.read_text())
    code = [c for c in data["cells"] if c["cell_type"] == "code"]
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    assert sum("parameters" in c["metadata"].get("tags", ()) for c in code) == 1


def client(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A kernel of this very interpreter, in an empty folder."""
    nbclient, spec = pytest.importorskip("nbclient"), pytest.importorskip("jupyter_client.kernelspec")
    pytest.importorskip("ipykernel")
    kernels = folder / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernels / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "here", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    manager = spec.KernelSpecManager(ensure_native_kernel=False)
    assert manager.get_kernel_spec("python3").argv == argv
    place = {"metadata": {"path": folder}}
    made = nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=place)
    made.create_kernel_manager()
    made.km.kernel_spec_manager = manager
    return made


@pytest.mark.prove
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if "parameters" in cell.metadata.get("tags", ()):
            cell.source = TOY
    client(notebook, tmp_path, monkeypatch).execute()
    outputs = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in outputs if o.output_type == "error"]
    if path.stem == "1-first-run":
        lines = [o.data["text/plain"] for o in outputs if o.output_type == "display_data" and "text/plain" in o.data]
        assert any("rl [" in text and "3/3" in text for text in lines), "the progress line was not updated to its end"


INTERRUPTED = """
import posttrain
try:
    posttrain.run("arithmetic", sft=None, rl={"steps": 100000, "eval": False, "eval_every": 0}, out="r")
except Exception as error:
    print(type(error).__name__, error)
result = posttrain.load("r")
print("STEPS", len(result.frame()))
import threading
print("LEFT", [t.name for t in threading.enumerate() if t.name == "posttrain"])
"""


@pytest.mark.prove
def test_an_interrupt_of_the_kernel_ends_the_run_after_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(INTERRUPTED)])
    made = client(notebook, tmp_path, monkeypatch)

    def interrupt() -> None:
        steps = tmp_path / "r" / "steps.jsonl"
        for _ in range(1200):
            if steps.is_file() and steps.read_text().count("\n") >= 2:
                os.kill(made.km.provisioner.pid, signal.SIGINT)
                return
            time.sleep(0.1)

    threading.Thread(target=interrupt, daemon=True).start()
    made.execute()
    said = "".join(o.get("text", "") for o in notebook.cells[0].outputs)
    assert "Interrupted stopped at rl step" in said and "the last checkpoint is complete" in said
    assert "LEFT []" in said and "STEPS" in said
