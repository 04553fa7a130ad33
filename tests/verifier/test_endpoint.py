"""Calls to a server that refuses, stutters, hangs and lies: a real one, over loopback."""

from __future__ import annotations

import asyncio

import pytest

from posttrain.system.errors import ConfigError, EndpointError, EngineError
from posttrain.verifier import http_client
from posttrain.verifier.http_client import Endpoint, Patience
from tests.verifier.http_parts import QUICK, reply, server


async def test_what_passes_is_tried_again() -> None:
    busy = reply(429, {"error": {"message": "slow down"}}, "Retry-After: 7")
    async with (
        server(busy, reply(503, "starting"), None, reply(200, {"ok": 1})) as (url, asked),
        Endpoint(url, "judge", patience=QUICK) as e,
    ):
        assert await e.post("/x", {"a": 1}) == {"ok": 1}
        assert len(asked) == 4 and e.retried == 3
        assert all(text.endswith('{"a":1}') for text in asked)


async def test_half_of_a_surrogate_pair_in_a_text_is_sent_too() -> None:
    async with server(reply(200, {"ok": 1})) as (url, asked), Endpoint(url, "judge", patience=QUICK) as e:
        assert await e.post("/x", {"a": "\ud800"}) == {"ok": 1} and asked[0].endswith('{"a":"\\ud800"}')


async def test_the_last_try_says_who_failed_and_how() -> None:
    async with (
        server(reply(503, {"error": {"message": "no worker"}})) as (url, asked),
        Endpoint(url, "judge", patience=QUICK) as e,
    ):
        with pytest.raises(
            EndpointError, match=r"judge \(http.*\): POST /x: status 503: no worker \(tried 4 times\)"
        ) as failed:
            await e.post("/x", {})
        assert (
            failed.value.status == 503
            and failed.value.role == "judge"
            and failed.value.exit_code == EngineError.exit_code
        )
        assert len(asked) == 4


async def test_what_changes_the_server_is_not_sent_twice() -> None:
    async with server(None, reply(200, {})) as (url, asked), Endpoint(url, "rollout", patience=QUICK) as e:
        with pytest.raises(EndpointError, match="the connection failed") as failed:
            await e.post("/load", {}, again=False)
        assert len(asked) == 1 and failed.value.status is None


async def test_a_server_that_hangs_is_given_up_in_time() -> None:
    patience = Patience(answer=0.05, tries=2, first=0, longest=0)
    async with server(b"hang") as (url, asked), Endpoint(url, "rollout", patience=patience) as e:
        with pytest.raises(EndpointError, match=r"rollout .*no answer in 0.05 s \(tried 2 times\)"):
            await e.get("/models")
        assert len(asked) == 2


async def test_a_silent_server_is_asked_by_one_call_at_a_time_until_it_answers() -> None:
    """A short silence is waited out; one that lasts, or was there from the start, fails the other calls at once."""
    down, good = reply(503, {}), reply(200, {"n": 1})
    async with (
        server(*[down] * 3, good, *[down] * 5, good) as (url, asked),
        Endpoint(url, "judge", patience=QUICK, silent=0.0) as e,
    ):
        assert await e.post("/x") == {"n": 1} and len(asked) == 4  # three tries without an answer, and no end
        with pytest.raises(EndpointError, match="tried 4 times"):
            await e.post("/x")
        found = await asyncio.gather(*(e.post("/x") for _ in range(5)), return_exceptions=True)
        assert len(asked) == 9 and all(isinstance(x, EndpointError) and url in str(x) for x in found)
        assert await e.post("/x") == {"n": 1}


async def test_nobody_there() -> None:
    async with server(reply(200, {})) as (url, _):
        pass
    async with Endpoint(url, "rollout", patience=QUICK) as e:
        with pytest.raises(EndpointError, match="the connection failed"):
            await e.get("/models")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(400, {"error": {"message": "no such parameter: top_z"}}), "status 400: no such parameter: top_z"),
        (reply(401, {"detail": "who are you"}), "who are you .no key was sent"),
        (reply(307, "", "Location: http://127.0.0.2/v1"), "redirects to http://127.0.0.2/v1; give that address"),
        (reply(200, "<html>"), "the answer is no JSON: <html>"),
        (reply(200, "[" * 200_000), "the answer is no JSON: "),
        (reply(400, "[" * 200_000), "status 400: "),
        (b"HTTP/1.1 400 x\r\nContent-Length: 3\r\n\r\n\xff\xfe?", "status 400: .*[?]"),
    ],
)
async def test_what_does_not_pass_is_said_at_once(answer: bytes, message: str) -> None:
    async with server(answer) as (url, asked), Endpoint(url, "judge", patience=QUICK) as e:
        with pytest.raises(EndpointError, match=message):
            await e.post("/x", {})
        assert len(asked) == 1


async def test_what_cannot_be_unpacked_may_pass() -> None:
    async with (
        server(reply(200, "no gzip", "Content-Encoding: gzip"), reply(200, {"ok": 1})) as (url, asked),
        Endpoint(url, "judge", patience=QUICK) as e,
    ):
        assert await e.get("/x") == {"ok": 1} and len(asked) == 2


async def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER", 3 << 20)
    async with (
        server(reply(200, '"' + "x" * (5 << 20) + '"')) as (url, asked),
        Endpoint(url, "judge", patience=QUICK) as e,
    ):
        with pytest.raises(EndpointError, match="the answer is longer than 3 MiB"):
            await e.get("/x")
        assert len(asked) == 1


async def test_a_key_is_sent_and_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODDLY_NAMED", "sk-very-private")
    refusal = reply(403, {"error": {"message": "key sk-very-private is not allowed"}})
    async with server(refusal) as (url, asked), Endpoint(url, "judge", key_env="ODDLY_NAMED", patience=QUICK) as e:
        with pytest.raises(EndpointError) as failed:
            await e.post("/x", {})
    assert "authorization: bearer sk-very-private" in asked[0].lower()
    assert "key [ODDLY_NAMED] is not allowed (the key in ODDLY_NAMED)" in str(failed.value)
    assert "private" not in repr(e) and "private" not in str(failed.value)


def test_addresses_that_cannot_be_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    monkeypatch.setenv("TWO_LINES", "a secret\nb")
    for url, key, message in (
        ("127.0.0.1:8000", None, "no address of a server"),
        ("http://", None, "no address of a server"),
        ("http://[::1/v1", None, "no address of a server"),
        ("http://host:99999/v1", None, "no address of a server"),
        ("http://me:secret@host/v1", None, "would be recorded"),
        ("http://host/v1?key=secret", None, "would be recorded"),
        ("http://host/v1", "NO_SUCH_KEY", "NO_SUCH_KEY is empty"),
        ("http://host/v1", "TWO_LINES", "TWO_LINES holds no key"),
        ("http://10.0.0.7:8000/v1", "PATH", "would send the key in PATH in the clear"),
    ):
        with pytest.raises(ConfigError, match=message) as failed:
            Endpoint(url, "judge", key_env=key)
        assert "secret" not in str(failed.value)


def test_an_endpoint_serves_one_loop_after_another() -> None:
    async def once(e: Endpoint) -> object:
        async with server(reply(200, {"ok": 1})) as (address, _):
            e.url = address
            return await e.get("/x")

    e = Endpoint("http://127.0.0.1:1", "judge", patience=QUICK)
    assert asyncio.run(once(e)) == asyncio.run(once(e)) == {"ok": 1}


def test_pauses_grow_and_are_bounded() -> None:
    p = Patience(first=1, longest=5)
    for failed, most in ((1, 1), (2, 2), (3, 4), (4, 5), (9, 5)):
        assert most / 2 <= p.pause(failed, None) <= most
    assert p.pause(1, 3.0) == 3 and p.pause(1, 100.0) == 5 and p.pause(5000, None) <= 5
