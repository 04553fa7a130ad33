"""A real HTTP server that gives prepared answers, for what a good server never does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from posttrain.verifier.http_client import Patience

QUICK = Patience(connect=2, answer=2, tries=4, first=0.0, longest=0.01)


def reply(status: int, body: object, *headers: str) -> bytes:
    text = body if isinstance(body, str) else json.dumps(body)
    return "\r\n".join([f"HTTP/1.1 {status} x", f"Content-Length: {len(text)}", *headers, "", text]).encode()


@asynccontextmanager
async def server(*answers: bytes | None) -> AsyncIterator[tuple[str, list[str]]]:
    """Gives one answer after another, the last one again and again; None drops the connection. Yields address and
    requests."""
    asked: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                text = head.decode()
                length = next(
                    (int(x.split(":")[1]) for x in text.lower().split("\r\n") if x.startswith("content-length")), 0
                )
                asked.append(text + (await reader.readexactly(length)).decode())
                answer = answers[min(len(asked), len(answers)) - 1]
                if answer is None:
                    return
                if answer == b"hang":
                    await asyncio.sleep(60)
                writer.write(answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}/v1", asked
    finally:
        listening.close()
