"""A scripted judge: an OpenAI-compatible server on this machine whose answers a function of the test writes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Says = Callable[[str], str | int]
"""From the text of a request to what the judge says, or to a status of an error."""


@dataclass
class ScriptedJudge:
    """Where it listens, and what it was asked."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    keys: list[str] = field(default_factory=list[str])
    busy: int = 0
    most: int = 0
    """Most requests at once."""


@contextmanager
def scripted_judge(says: Says) -> Iterator[ScriptedJudge]:
    """A server that answers each request with `says(text of the request)`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"id": "judge", "object": "model", "owned_by": "test"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                judge.bodies.append(body)
                judge.keys.append(self.headers.get("Authorization", ""))
                judge.busy += 1
                judge.most = max(judge.most, judge.busy)
            text = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
            said = says(text)
            with lock:
                judge.busy -= 1
            if isinstance(said, int):
                self._send(said, {"error": {"message": "out of order"}})
            else:
                self._send(200, {"choices": [{"index": 0, "message": {"role": "assistant", "content": said}}]})

        def _send(self, status: int, body: object) -> None:
            raw = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    judge = ScriptedJudge(f"http://127.0.0.1:{server.server_address[1]}/v1")
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()


def scored(score: float, reason: str = "because") -> str:
    """A judgement in the form that a judge is asked for."""
    return json.dumps({"reason": reason, "score": score})
