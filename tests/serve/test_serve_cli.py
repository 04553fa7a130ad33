"""`posttrain serve` as a user meets it: a process, its banner, its signals, its refusals."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from posttrain.cli import main
from tests.engine.run_parts import LADDER
from tests.serve.serve_parts import save_model

START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background hands down that Ctrl-C is ignored
from posttrain.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("a") / "my-model", context=512)


@contextmanager
def serving(*words: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, str]]]:
    """A server that has said all of its banner."""
    command = [sys.executable, "-c", START, "serve", *words, "--port", "0", "threads=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None and child.stderr is not None
            lines = []
            while (line := child.stdout.readline()) and "Ctrl-C" not in line:
                lines.append(line)
            text = "".join(lines)
            found = {
                n: m[1]
                for n, p in (("url", r"at (http\S+/v1)"), ("token", r"token: (\S+)"), ("curl", r"try: (.*)"))
                if (m := re.search(p, text))
            }
            assert "url" in found, text + child.stderr.read()
            yield child, found | {"text": text}
        finally:
            if child.poll() is None:
                child.kill()


@pytest.mark.prove
def test_a_model_is_served_and_ctrl_c_lets_requests_end(model: Path) -> None:
    with serving(str(model)) as (child, said):
        assert (
            "Qwen3ForCausalLM" in said["text"]
            and "serving my-model at http://127.0.0.1:" in said["text"]
            and "stop tokens: '<eos>'" in said["text"]
        )
        curl = subprocess.run(["bash", "-c", said["curl"]], capture_output=True, text=True, check=True)
        assert json.loads(curl.stdout)["choices"][0]["message"]["role"] == "assistant"
        client = openai.OpenAI(base_url=said["url"], api_key=said["token"], max_retries=0)
        stream = client.completions.create(
            model="my-model",
            prompt="user",
            max_tokens=400,
            seed=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        ids = list(next(iter(stream)).choices[0].model_extra["token_ids"])
        child.send_signal(signal.SIGINT)
        for chunk in stream:
            ids += chunk.choices[0].model_extra["token_ids"]
        assert len(ids) == 400, "what was being answered came to its end"
        out, error = child.communicate(timeout=60)
        assert child.returncode == 130 and error == "" and out.endswith("stopped\n")
        with pytest.raises(openai.APIConnectionError):
            client.models.list()


@pytest.mark.prove
def test_a_run_is_served_and_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """A run folder without a saved model: its weights, its own tokenizer of digits, no chat."""
    assert main(["run", *LADDER, "--out", str(tmp_path / "mine")]) == 0
    with serving(str(tmp_path / "mine"), "--no-token", "--name", "digits", "model.kernels=torch") as (child, said):
        assert (
            "no chat" in said["text"]
            and "token: none" in said["text"]
            and "engine: embedded, torch's operations" in said["text"]
        )
        client = openai.OpenAI(base_url=said["url"], api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError, match="this tokenizer has no token for some of"):
            client.completions.create(model="digits", prompt="no letters here")
        stream = client.completions.create(
            model="digits", prompt=["1+1="] * 1024, max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        assert next(iter(stream)).choices[0].index == 0
        child.send_signal(signal.SIGTERM)
        assert child.stdout is not None and child.stdout.readline().startswith("stopping: 1 requests have")
        child.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError):
            for _ in stream:
                pass
        _, error = child.communicate(timeout=60)
        assert child.returncode == 143 and error == ""


def test_what_cannot_be_served_says_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> str:
        assert main(["serve", *words]) == 2
        return capsys.readouterr().err

    path = str(model)
    assert "would serve everybody" in refused(path, "--host", "0.0.0.0", "--no-token")
    assert "give one" in refused(path, "--no-token", "--token", "x" * 20)
    assert "at least 16" in refused(path, "--token", "short")
    assert "NO_SUCH: that environment variable is empty" in refused(path, "--token-env", "NO_SUCH")
    assert "0..65535" in refused(path, "--port", "70000")
    assert "nothing of it is read" in refused(path, "eval.temperature=2")
    assert "posttrain serve answers from the embedded engine" in refused(path, "engine=vllm")
    assert "a server has none" in refused(path, "engine.timeline=true")
    assert "a server's weights stay" in refused(path, "engine.update=stale")
    assert "both draft" in refused(path, "engine.lookup=2", "engine.draft=somewhere")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is in use" in refused(path, "threads=1", "--port", str(port))
    for host in ("203.0.113.7", "a..b"):
        assert f"cannot listen on {host}" in refused(path, "threads=1", "--host", host, "--port", "0")


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0 and "posttrain serve runs/mine --checkpoint best" in text and "--token-env" in text
