"""A scripted judge of conversations, which stands for a model that judges: any OpenAI-compatible server.

It reads the persona in the task, and gives 10 points where each turn of the assistant ends with it, less in proportion.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TURN = re.compile(r"=== \w+ assistant\n(.*?)\n?(?==== )", re.S)


def score(text: str) -> float:
    """What the judge gives, from 0 to 10, to the conversation in what it is asked."""
    task, turns = re.search(r"=== \w+ task\n<(\w)>", text), TURN.findall(text)
    if task is None or not turns:
        return 0.0
    return 10.0 * sum(turn.strip().endswith(task[1]) for turn in turns) / len(turns)


class Judge(BaseHTTPRequestHandler):
    """The two routes that a judge needs."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": "scripted", "object": "model", "owned_by": "me"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps({"reason": "scripted", "score": score(body["messages"][-1]["content"])})
        self._answer({"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]})

    def _answer(self, body: Any) -> None:
        raw = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: object) -> None:
        """It logs nothing."""


@contextmanager
def served() -> Iterator[str]:
    """The judge on a free port of this machine. Yields its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
