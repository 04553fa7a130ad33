"""The server of the lab: who may ask, what a page may do, and that the map needs no library."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import ClientSession, CookieJar, web

from posttrain.lab.overview import listed, map_page
from posttrain.lab.server import Lab
from posttrain.system.errors import ConfigError
from posttrain.web.guard import HEADERS, POLICY
from posttrain.web.html import data, markdown, tag
from posttrain.web.local import bound_socket

RoundSamples = Callable[[ClientSession, str, Lab], Awaitable[None]]


def served(play: RoundSamples, loaded: bool = True) -> None:
    """Plays a caller against a real server on a port of its own."""

    async def whole() -> None:
        lab, at = Lab(), bound_socket(0)
        if loaded:
            lab.load()
        runner = web.AppRunner(lab.app(), access_log=None)
        await runner.setup()
        lab.guard.port = at.getsockname()[1]
        await web.SockSite(runner, at).start()
        try:
            async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as caller:
                await play(caller, f"http://127.0.0.1:{lab.guard.port}", lab)
        finally:
            await runner.cleanup()

    asyncio.run(whole())


def test_the_secret_of_the_first_address_becomes_a_cookie() -> None:
    async def play(caller: ClientSession, base: str, lab: Lab) -> None:
        assert (await caller.get(base)).status == 403
        assert (await caller.get(f"{base}/?token=wrong")).status == 403
        first = await caller.get(f"{base}/grpo?token={lab.guard.token}", allow_redirects=False)
        assert first.status == 303 and first.headers["Location"] == "/grpo"
        assert "HttpOnly" in first.headers["Set-Cookie"] and "SameSite=Strict" in first.headers["Set-Cookie"]
        page = await caller.get(base)
        assert page.status == 200 and page.headers["Content-Security-Policy"] == POLICY
        assert lab.guard.token not in await page.text()

    served(play, loaded=False)


def test_every_answer_limits_the_page_also_a_stream() -> None:
    async def lines(name: str, values: dict[str, Any]) -> AsyncIterator[bytes]:
        yield b"{}\n"

    async def play(caller: ClientSession, base: str, lab: Lab) -> None:
        lab.loaded.set()
        lab.trainings.lines = lines  # type: ignore[method-assign]
        answers = [await caller.get(base), await caller.get(f"{base}/?token={lab.guard.token}", allow_redirects=False)]
        answers += [await caller.get(base), await caller.get(f"{base}/static/none")]
        answers.append(await caller.post(f"{base}/train/grpo", data="{}", headers={"Origin": base}))
        assert [a.status for a in answers] == [403, 303, 200, 404, 200] and await answers[-1].text() == "{}\n"
        assert all(a.headers[name] == value for a in answers for name, value in HEADERS.items())

    served(play, loaded=False)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {},
    ],
)
def test_other_places_may_not_ask(headers: dict[str, str]) -> None:
    async def play(caller: ClientSession, base: str, lab: Lab) -> None:
        await caller.get(f"{base}/?token={lab.guard.token}")
        answer = await caller.post(f"{base}/readout/grpo", data="{}", headers=headers)
        assert answer.status == 403

    served(play, loaded=False)


@pytest.mark.prove
def test_a_readout_follows_the_knobs_and_refuses_what_is_none() -> None:
    async def play(caller: ClientSession, base: str, lab: Lab) -> None:
        await caller.get(f"{base}/?token={lab.guard.token}")
        own = {"Origin": base}

        async def ask(text: str, page: str = "grpo") -> tuple[int, str]:
            answer = await caller.post(f"{base}/readout/{page}", data=text, headers=own)
            return answer.status, await answer.text()

        status, text = await ask('{"a": 1.0, "b": 1.0}')
        assert status == 200 and json.loads(text)["values"]["mean"] == 0.5
        for wrong in ("", "[]", "{", '{"a": 2}', '{"z": 0}', '{"a": "1"}', "[" * 5000):
            status, text = await ask(wrong)
            assert status == 400 and text, wrong
        assert (await ask("{}", "nosuchpage"))[0] == 404
        assert (await ask('{"a": ' + "1" * 20_000 + "}"))[0] == 413

    served(play)


def test_a_page_that_is_asked_for_too_early_says_so_and_comes_back() -> None:
    async def play(caller: ClientSession, base: str, lab: Lab) -> None:
        await caller.get(f"{base}/?token={lab.guard.token}")
        assert await (await caller.get(f"{base}/ready")).json() is False
        page = await (await caller.get(f"{base}/grpo")).text()
        assert "is being loaded" in page and 'http-equiv="refresh"' in page

    served(play, loaded=False)


def test_the_map_and_its_list_import_no_torch() -> None:
    program = (
        "import sys; from posttrain.lab.overview import listed, map_page; listed(); map_page('server');"
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert len(listed()) == 39 and "<script>" not in map_page("server")


def test_a_taken_port_is_named() -> None:
    with bound_socket(0) as taken, pytest.raises(ConfigError, match="choose another with --port"):
        taken.listen()
        bound_socket(taken.getsockname()[1])


def test_text_never_becomes_html() -> None:
    assert tag("p", "<script>", title='"') == '<p title="&quot;">&lt;script&gt;</p>'
    assert "<img" not in markdown("<img src=x onerror=y> [a](javascript:alert(1))")
    assert "</script><" not in data("x", "</script><script>")
