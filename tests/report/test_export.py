"""`posttrain export`: a model card with every model, and a push to a hub that a small local server plays."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import posttrain
from posttrain.cli import main
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.record.checkpoint import find
from posttrain.report.export import certify_export, hub
from posttrain.report.export.model_card import _kind, code, model_card
from posttrain.report.run_result import RolloutView
from posttrain.system.errors import ConfigError
from tests.tiny import only_rl, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mine"
    posttrain.run(only_rl(tiny_run(steps=2)), out=folder, quiet=True)
    return folder


# --- the card ---------------------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_every_export_has_a_card(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), str(tmp_path / "my-model")]) == 0
    assert capsys.readouterr().out.startswith(f"wrote {tmp_path / 'my-model'}\ncertified: ")
    card = (tmp_path / "my-model" / "README.md").read_text()
    front = card.split("---\n")[1]
    assert "library_name: transformers" in front and '- "reinforcement-learning"' in front
    for title in ("Lineage", "Data and environment", "Held-out result", "Settings", "Versions", "Checks that ran"):
        assert f"\n## {title}\n" in card, title
    assert "| base | `weights drawn at random for this run` | | |" in card
    assert "- `reinforce` (`Williams 1992`)" in card and "`UpdateCheck`" in card and "`torch`" in card
    assert "on the weights of this model, with" in card, card[card.index("Measured") :][:200]


def test_the_result_is_that_of_the_record_with_its_interval(run: Path) -> None:
    card = model_card(run, find(run), "mine")
    line = next(x for x in card.splitlines() if x.startswith("| accuracy"))
    value, low, high = (float(x) for x in line.replace("[", " ").replace("]", " ").replace(",", " ").split()[3:6])
    assert 0 <= low <= value <= high <= 1 and low < high


@pytest.mark.prove
def test_the_stage_of_the_weights_is_the_last_that_was_done(tmp_path: Path) -> None:
    """The end of a run of two stages has a checkpoint named after its last stage with step 0."""
    posttrain.run(tiny_run(steps=2), out=tmp_path / "run", quiet=True)
    card = model_card(tmp_path / "run", find(tmp_path / "run"), "mine")
    assert "Weights of stage `rl` at its end" in card and "## Algorithm of `rl`: `grpo`" in card
    assert "| `rl` | `sft` | 2 | learns from reward, `grpo` |" in card
    assert "Measured at stage `rl`, step 2, on the weights of this model" in card


@pytest.mark.prove
def test_rewards_and_prompts_are_named(run: Path, tmp_path: Path) -> None:
    rows = tmp_path / "mine.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(9)))
    tiny = ("model.hidden=32", "model.ffn=64", "model.heads=2", "model.kv_heads=1", "slots=4", "rl.steps=1")
    small = ("rl.prompts=2", "rl.siblings=2", "rl.eval_every=0", "rl.sampling.max_tokens=4", "env.heldout=2")
    data = (f"env.prompts={rows}", "env.rewards=exact")
    posttrain.run("grpo", *tiny, *small, *data, out=tmp_path / "run", quiet=True)
    card = model_card(tmp_path / "run", find(tmp_path / "run"), "mine")
    assert f"`{rows.name}` | `exact (weight 1)`" in card and str(tmp_path) not in card


HOSTILE = "x`|\n<script>alert(1)</script> ![](http://a/b) \x1b[2J"


CELL = re.compile(r"(?:\\[!-/:-@\[-`{-~]|[^|\n])+")
"""A cell of a table: a backslash takes the mark behind it along."""


@pytest.mark.parametrize("text", ["a|b", "a\\|b", "a\\\\|b", "|", "\\|\\\\|\\\\\\|x", "`|`", "a\n| b |", "``` | ```"])
def test_text_stays_in_its_cell(text: str) -> None:
    shown = code(text)
    assert shown.startswith("`") and shown.endswith("`") and "`" not in shown[1:-1]
    assert CELL.findall(f"| {shown} | last |") == [f" {shown} ", " last "], shown


def test_names_of_a_strangers_folder_are_no_markup(run: Path, tmp_path: Path) -> None:
    assert code(HOSTILE) == r"`x'\|\n<script>alert(1)</script> ![](http://a/b) \x1b[2J`"
    card = model_card(run, find(run), HOSTILE)
    title = next(x for x in card.splitlines() if x.startswith("# "))
    assert title == f"# {code(HOSTILE)}" and "\x1b" not in card
    data = json.loads((run / "run.json").read_text())
    data["run"]["recipe"], data["argv"] = HOSTILE, ["posttrain", "run", "x", "```\n# not a title"]
    copied = tmp_path / "copied"
    copied.mkdir()
    for path in run.iterdir():
        if path.name != "run.json":
            (copied / path.name).symlink_to(path)
    (copied / "run.json").write_text(json.dumps(data))
    card = model_card(copied, find(run), "mine")
    assert f"recipe {code(HOSTILE)}" in card
    fences = [i for i, x in enumerate(card.splitlines()) if x.startswith("```")]
    assert len(fences) == 4 and "'''" in card  # two blocks, each closed where we close it


# --- the hub ----------------------------------------------------------------------------------------------------------


@dataclass
class LocalHub:
    """What a hub was asked, and the files that it was given."""

    url: str = ""
    refuse: int = 0
    made: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    tokens: set[str | None] = field(default_factory=set[str | None])


@contextmanager
def local_hub(refuse: int = 0) -> Iterator[LocalHub]:
    """A server on loopback that speaks the endpoints of the hub which a push needs."""
    seen = LocalHub(refuse=refuse)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def _answer(self, data: Any, status: int = 200) -> None:
            body = json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            seen.tokens.add(self.headers.get("Authorization"))
            path = self.path.partition("?")[0]
            if seen.refuse:
                self._answer({"error": "no"}, seen.refuse)
            elif path == "/api/repos/create":
                asked = json.loads(body)
                seen.made.append(asked)
                name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                self._answer({"url": f"{seen.url}/{name}", "name": name})
            elif path == "/api/validate-yaml":
                self._answer({"errors": [], "warnings": []})
            elif "/preupload/" in path:
                files = json.loads(body)["files"]
                self._answer(
                    {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
                )
            elif "/commit/" in path:
                for line in body.splitlines():
                    row = json.loads(line)
                    if row["key"] == "file":
                        seen.files[row["value"]["path"]] = base64.b64decode(row["value"]["content"])
                self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{seen.url}/me/x/commit/0"})
            else:
                self._answer({"error": f"unknown {path}"}, 404)

        def do_GET(self) -> None:
            data = {"id": "me/x", "private": True, "sha": "0" * 40, "siblings": []}
            self._answer({"error": "no"} if seen.refuse else data, seen.refuse or 200)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    seen.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No token and no proxy of whoever runs the tests; the current folder is empty."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(hub, "_token", lambda: None)
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_a_push_makes_a_private_repository_with_the_model_and_its_card(
    run: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    alone.setattr(hub, "_token", lambda: "hf_test")
    with local_hub() as seen:
        alone.setenv("HF_ENDPOINT", seen.url)
        alone.setattr("huggingface_hub.constants.ENDPOINT", seen.url)  # read when that library was imported
        assert main(["export", str(run), "hub:me/my-model"]) == 0
        assert capsys.readouterr().out.startswith(f"pushed to {seen.url}/me/my-model\ncertified: ")
    assert seen.made[0]["name"] == "my-model" and seen.made[0]["visibility"] == "private"
    assert seen.tokens == {"Bearer hf_test"}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= seen.files.keys()
    assert b"# `me/my-model`" in seen.files["README.md"]
    assert not list(tmp_path.iterdir())  # no folder of that name


def test_public_only_if_asked(run: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    alone.setattr(hub, "_token", lambda: "hf_test")
    with local_hub() as seen:
        alone.setenv("HF_ENDPOINT", seen.url)
        alone.setattr("huggingface_hub.constants.ENDPOINT", seen.url)  # read when that library was imported
        assert posttrain.export(run, "hub:me/open", public=True) == f"{seen.url}/me/open"
    assert seen.made[0]["visibility"] == "public"
    assert main(["export", str(run), "folder", "--public"]) == 2
    assert "--public is about a repository" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "says"), [(401, "token is not valid"), (403, "may not write to me/x")])
def test_a_refusal_says_what_to_change(status: int, says: str, run: Path, alone: pytest.MonkeyPatch) -> None:
    alone.setattr(hub, "_token", lambda: "hf_test")
    with local_hub(refuse=status) as seen:
        alone.setenv("HF_ENDPOINT", seen.url)
        alone.setattr("huggingface_hub.constants.ENDPOINT", seen.url)  # read when that library was imported
        with pytest.raises(Exception, match=says):
            posttrain.export(run, "hub:me/x")


def test_without_token_or_network_it_says_so_at_once(
    run: Path, alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["export", str(run), "hub:me/x"]) == 2
    assert "no token for the hub" in capsys.readouterr().err
    alone.setattr(hub, "_token", lambda: "hf_test")
    alone.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["export", str(run), "hub:me/x"]) == 4
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err
    alone.setenv("HF_HUB_OFFLINE", "1")
    assert main(["export", str(run), "hub:me/x"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("address", ["https://h:abc", "https://h:99999", "https://[x", "h"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="no address of a hub"):
        hub._unreachable(address)


def test_an_address_that_is_no_host_name_is_said_at_once(
    alone: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "label" in hub._unreachable("https://hub..example.com")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["hub:", "hub:a/b/c", "hub:me/two words", "hub:../x", "hub:me/.."])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="hub:USER/NAME"):
        hub.ready(name)


# --- what was recorded ------------------------------------------------------------------------------------------------


def test_a_prompt_with_calls_is_shown() -> None:
    """A message of the assistant may have calls and no content."""
    call = {"function": {"name": "add", "arguments": "{}"}}
    prompt = ({"role": "user", "content": "2+2"}, {"role": "assistant", "content": None, "tool_calls": [call]})
    record: Any = SimpleNamespace(episode=SimpleNamespace(task=SimpleNamespace(prompt=prompt)))
    shown = RolloutView("rl", 1, False, record).prompt
    assert shown == "user: 2+2\nassistant: [calls add {}]"


def test_a_card_says_nothing_of_later_steps(run: Path) -> None:
    card = model_card(run, replace(find(run), name="00000001-rl-000001"), "mine")
    assert "after step 1" in card and ", over 1 steps" in card


def test_prompts_that_cannot_be_rendered_are_not_counted_as_compared() -> None:
    prompts: Any = [
        SimpleNamespace(prompt="a", name="a", ids=np.array([1])),
        SimpleNamespace(prompt="", name="b", ids=()),
    ]
    side: Any = SimpleNamespace(tokenizer=None, stop_ids=())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(certify_export, "rendered", lambda *x: np.array([1]) if x[-1] else "no prompt")
        assert certify_export._same_ids(side, side, prompts, "whole", "recorded").count == 1


def test_a_card_of_pairs_that_were_sampled_learns_from_preferences() -> None:
    assert _kind(OnlinePreference(name="x")) == "learns from preferences, `oaif`"
