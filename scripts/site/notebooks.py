"""Notebooks with what they print: `python -m scripts.site.notebooks` executes each and writes it as a page beside it,
with its pictures. It needs posttrain with its notebook extra and nbclient, and takes some minutes."""

from __future__ import annotations

import base64
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.site.pictures import WAITING

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
HEAD = "<!-- generated from {name}.ipynb by `python -m scripts.site.notebooks`; edit the notebook, not this page -->\n"
LONGEST = 60
"""Lines of one output that are kept."""


def executed(path: Path, folder: Path) -> Any:
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=3600, kernel_name="python3", resources=place).execute()
    return notebook


def page(name: str, notebook: Any) -> tuple[str, dict[str, bytes]]:
    """The Markdown of an executed notebook, and its pictures by file name."""
    out, pictures = [HEAD.format(name=name)], dict[str, bytes]()
    for cell in notebook.cells:
        source = cell.source.strip("\n")
        if cell.cell_type == "markdown":
            out.append(source)
        elif cell.cell_type == "code":
            out.append(f"```python\n{source}\n```")
            out += _shown(name, cell.outputs, pictures)
    return "\n\n".join(out) + "\n", pictures


def _shown(name: str, outputs: list[Any], pictures: dict[str, bytes]) -> Iterator[str]:
    text = ""
    for o in outputs:
        data = o.get("data", {})
        if "image/png" in data:
            if text:
                yield _block(text)
                text = ""
            file = f"notebook-{name}-{len(pictures) + 1}.png"
            pictures[file] = base64.b64decode(data["image/png"])
            yield f"![What the cell draws](../docs/pictures/{file})"
        elif o.output_type == "error":
            raise SystemExit(f"{name}: a cell raised {o.ename}: {o.evalue}")
        else:
            text += o.get("text", "") or str(data.get("text/plain", "")) + "\n"
    if text.strip():
        yield _block(text)


WARNED = re.compile(r"^\S*site-packages\S* \w+Warning: .*\n(?:  .*\n)?", re.M)
"""What another package warns of on the machine that runs the notebook."""


def plain(text: str) -> str:
    """Output as a terminal leaves it: without colours, and a line that was written over is its last state."""
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in bare.strip("\n").split("\n")]
    return "\n".join(line for line in lines if not WAITING.match(line))


def _block(text: str) -> str:
    lines = WARNED.sub("", f"{plain(text)}\n").strip("\n").split("\n")
    if len(lines) > LONGEST:
        lines = [*lines[: LONGEST // 2], f"... {len(lines) - LONGEST} lines ...", *lines[-LONGEST // 2 :]]
    return "```text\n" + "\n".join(lines) + "\n```"


def main() -> None:
    chosen = sys.argv[1:]
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # so that advice says `posttrain`
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        if chosen and path.stem not in chosen:
            continue
        with tempfile.TemporaryDirectory() as folder:
            text, pictures = page(path.stem, executed(path, Path(folder)))
        path.with_suffix(".md").write_text(text, encoding="utf-8")
        PICTURES.mkdir(exist_ok=True)
        for file, data in pictures.items():
            (PICTURES / file).write_bytes(data)
        print(f"notebooks/{path.stem}.md, {len(pictures)} pictures", flush=True)


if __name__ == "__main__":
    main()
