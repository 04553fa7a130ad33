"""The log-prob contract in vLLM's words and back, without vLLM: what is sent, what is refused, what an answer must
hold."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from posttrain.config.engines import VLLM, Embedded
from posttrain.config.run import Reinforce, Run
from posttrain.core.sampling import Sampling
from posttrain.core.types import Stop
from posttrain.engine.vllm import launch, spawn_server
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.engine.vllm.launch import NEEDED, arguments
from posttrain.engine.vllm.sampler_requests import UpdateGate
from posttrain.engine.vllm.sampling_parameters import BANNED, Answer, Capabilities, check, fields, said
from posttrain.engine.vllm.spawn_server import SpawnedServer
from posttrain.engine.vllm.vllm_server import VLLMServer
from posttrain.system.errors import ConfigError, EngineError
from posttrain.system.machine import is_linux
from tests.verifier.http_parts import reply, server

LIMITS = Capabilities(vocabulary=50, context=32, eos=49, sequences=True)
OVER_HTTP = replace(LIMITS, sequences=False)


def answer(**changes: object) -> Answer:
    """Tokens 3 and 4 under top_k=2, whole."""
    rows = [([3, 4], [-0.5, -0.9]), ([4, 3, *range(5, 14)], [-0.7, -0.7, *[-9999.0] * 9])]
    return Answer(**({"ids": [3, 4], "rows": rows, "finish": "length", "why": None, "spans": [("7", 0, 2)]} | changes))  # type: ignore[arg-type]


def test_every_field_that_moves_a_probability_is_sent() -> None:
    sent = fields(Sampling(stop_ids=(1,)), 5, 9, LIMITS)
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "seed",
    ):
        assert name in sent, name
    assert (sent["max_tokens"], sent["stop_token_ids"], sent["ignore_eos"], sent["detokenize"]) == (9, [1], True, False)
    assert (sent["logit_bias"], sent["allowed_token_ids"], sent["bad_words"], sent["stop"]) == (None, None, [], [])


def test_places_become_seeds_that_fit() -> None:
    a, b = (fields(Sampling(stop_ids=()), place, 9, LIMITS)["seed"] for place in (2**127 + 3, 2**127 + 4))
    assert 0 <= a < 2**63 and a != b


def test_log_probs_asked_for_cover_the_kept_set() -> None:
    def asked(**changes: object) -> int:
        return fields(Sampling(stop_ids=(), **changes), 0, 9, LIMITS)["logprobs"]  # type: ignore[arg-type]

    assert [asked(), asked(top=3), asked(top_k=5), asked(top_p=0.9), asked(greedy=True, top_k=5)] == [0, 4, 14, 50, 0]


def test_bans_over_http_are_biases() -> None:
    wanted = Sampling(stop_ids=(), bad_ids=((5,), (6,)), logit_bias=((7, 1.0),))
    assert fields(wanted, 0, 9, OVER_HTTP)["logit_bias"] == {7: 1.0, 5: BANNED, 6: BANNED}
    assert fields(wanted, 0, 9, LIMITS)["logit_bias"] == {7: 1.0}


@pytest.mark.parametrize(
    ("changes", "limits", "message"),
    [
        ({"temperature": 2.5}, LIMITS, "takes 0.01 to 2.0"),
        ({"temperature": 0.001}, LIMITS, "takes 0.01 to 2.0"),
        ({"min_tokens": 2, "stop_ids": (1,)}, LIMITS, "Add it to stop_ids"),
        ({"bad_ids": ((5, 6),)}, OVER_HTTP, "no sequences of several tokens"),
    ],
)
def test_what_vllm_would_sample_otherwise_is_refused(
    changes: dict[str, object], limits: Capabilities, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(Sampling(**changes), limits)  # type: ignore[arg-type]
    check(Sampling(min_tokens=2, stop_ids=(49,), bad_ids=((5,),)), limits)


def test_an_answer_becomes_a_turn() -> None:
    turn = said(answer(), Sampling(top_k=2, top=1, stop_ids=()), 2, Stop.CONTEXT, LIMITS)
    assert (turn.ids.tolist(), turn.version.tolist(), turn.stop) == ([3, 4], [7, 7], Stop.CONTEXT)
    assert turn.kept is not None and [k.tolist() for k in turn.kept.sets()] == [[3, 4], [3, 4]]
    assert turn.top is not None and turn.top.ids.tolist() == [[3], [3]]
    assert np.allclose(turn.logp, [-0.5, -0.7])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spans": [("default", 0, 2)]}, "posttrain did not send"),
        ({"spans": [("7", 0, 1)]}, "every token needs its version"),
        ({"spans": []}, "every token needs its version"),
        ({"rows": [([3, 4], [-0.5, -0.9])]}, "with 1 log-probs"),
        ({"rows": [([4], [-0.5]), ([4], [-0.7])]}, "no log-prob of token 3"),
        ({"rows": [([3], [-9999.0]), ([4], [-0.7])]}, "probability zero"),
        ({"rows": [(list(range(12)), [-2.0] * 12), ([4], [-0.7])]}, "border of top_k"),
        ({"finish": "abort"}, "finish_reason='abort'"),
        ({"finish": "stop", "why": 9}, "finish_reason='stop'"),
        ({"ids": [3]}, "with 2 log-probs"),
    ],
)
def test_an_answer_that_contradicts_the_contract_is_an_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        said(answer(**changes), Sampling(top_k=2, stop_ids=()), 2, Stop.LENGTH, LIMITS)


def test_an_update_waits_for_turns_and_turns_wait_for_it() -> None:
    seen: list[str] = []

    async def turn(gate: UpdateGate, name: str) -> None:
        async with gate.turn():
            seen.append(name)
            await asyncio.sleep(0.01)
            seen.append(name)

    async def update(gate: UpdateGate, name: str) -> None:
        async with gate.update():
            seen.append(name)
            await asyncio.sleep(0)
            seen.append(name)

    async def main() -> None:
        gate = UpdateGate()
        first = [asyncio.create_task(turn(gate, name)) for name in "ab"]
        await asyncio.sleep(0)
        later = [asyncio.create_task(x) for x in (update(gate, "U"), turn(gate, "c"), update(gate, "V"))]
        lost = asyncio.create_task(update(gate, "W"))
        await asyncio.sleep(0)
        lost.cancel()
        await asyncio.gather(*first, *later)
        assert gate.turns == 0

    asyncio.run(main())
    assert "".join(seen) == "ababUUVVcc"


def test_turns_that_may_stay_go_on_during_an_update() -> None:
    """An update waits for the others, and new turns of both kinds wait for it."""
    seen: list[str] = []

    async def turn(gate: UpdateGate, name: str, stays: bool) -> None:
        async with gate.turn(stays):
            for _ in range(6 if stays else 2):
                seen.append(name)
                await asyncio.sleep(0.01)

    async def update(gate: UpdateGate) -> None:
        async with gate.update():
            seen.append("U")
            await asyncio.sleep(0.015)
            seen.append("U")

    async def main() -> None:
        gate = UpdateGate()
        first = [asyncio.create_task(turn(gate, "s", True)), asyncio.create_task(turn(gate, "t", False))]
        await asyncio.sleep(0)
        await asyncio.gather(*first, update(gate), turn(gate, "x", True))
        assert gate.turns == 0

    asyncio.run(main())
    begun, ended = (i for i, name in enumerate(seen) if name == "U")
    assert "t" in seen[:begun] and "t" not in seen[begun:], "it waited for the turn that may not stay"
    assert "s" in seen[begun:ended], "the other one went on"
    assert seen.index("x") > ended, "a new one waited"


async def test_a_score_that_waited_for_an_update_names_the_new_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update has unloaded the old one."""
    made, bodies = VLLMServer.__new__(VLLMServer), list[dict[str, Any]]()
    made._gate, made._adapter = UpdateGate(), "old"

    async def post(path: str, body: dict[str, Any], **_: object) -> object:
        bodies.append(body)
        return {"prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}

    monkeypatch.setattr(made, "_post", post)
    monkeypatch.setattr(made, "_salt", lambda: f"salt of {made._adapter}")
    async with made._gate.update():
        waits = asyncio.create_task(made.score(np.array([1, 2], np.int32)))
        await asyncio.sleep(0)
        made._adapter = "new"
    assert (await waits).tolist() == [-1.0]
    assert [(b["model"], b["cache_salt"]) for b in bodies] == [("new", "salt of new")]


async def test_a_turn_that_is_cancelled_stays_so_where_its_engine_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = VLLMEngine.__new__(VLLMEngine)
    made._capabilities, made._empty, made._timeout, made.version = LIMITS, -1, 60.0, 0
    monkeypatch.setattr(made, "_send", lambda command: None)
    turn = asyncio.create_task(made.generate(np.array([1, 2], np.int32), Sampling(top_k=2, stop_ids=()), 0))
    await asyncio.sleep(0)

    def failed(command: object) -> None:
        raise EngineError("the engine has failed")

    monkeypatch.setattr(made, "_send", failed)
    turn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await turn


def test_a_server_is_started_with_what_is_needed() -> None:
    made = arguments(["--model", "m", "--port", "1"])
    assert all(
        name in made and (value is None or made[made.index(name) + 1] == value) for name, value in NEEDED.items()
    )
    assert made[made.index("--host") + 1] == "127.0.0.1"
    assert "127.0.0.1" not in arguments(["--host=0.0.0.0"])
    assert ("--no-enable-chunked-prefill" in made) == (not torch.cuda.is_available()), "CPUs cannot take back a draw"
    with pytest.raises(ConfigError, match="leave it out"):
        arguments(["--logprobs-mode=raw_logprobs"])


@pytest.mark.parametrize("dash", ["-", "_"])
def test_both_spellings_of_a_flag_are_heard(dash: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own parser takes them."""
    entry = "vllm.entrypoints.launchers.api_server.entry"
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.launchers", "vllm.entrypoints.launchers.api_server"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, entry, cast("Any", SimpleNamespace(main=lambda: None)))
    monkeypatch.setattr(launch, "installed", lambda: None)
    monkeypatch.setattr(sys, "argv", ["launch", f"--enable{dash}lora", f"--enforce{dash}eager"])
    names = "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "TORCHDYNAMO_DISABLE"
    for name in (*names, "VLLM_SERVER_DEV_MODE", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"):
        monkeypatch.setenv(name, "0")
    launch.main()
    assert [os.environ[name] for name in names] == ["1", "1"]


async def test_a_server_of_this_machine_is_asked_without_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not speak HTTP is no server yet."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    made = SpawnedServer.__new__(SpawnedServer)
    made.ended, made.folder = lambda: "", tmp_path  # type: ignore[method-assign]
    async with server(reply(200, {})) as (made.url, _):
        await asyncio.to_thread(made._wait)
    monkeypatch.setattr(spawn_server, "START", 0.0)
    (tmp_path / "log").write_text("loading\n")
    async with server(b"SSH-2.0\r\n\r\n") as (made.url, _):
        with pytest.raises(EngineError, match="did not answer in 0 s. Its last words:\nloading"):
            await asyncio.to_thread(made._wait)


HANGS = """
import os, signal, time
from posttrain.engine.vllm import launch
launch.GRACE = 0.2
with launch.ending_with_parent():
    signal.signal(signal.SIGTERM, lambda *_: None)
    print(os.getpid(), flush=True)
    while True:
        time.sleep(1)
"""
"""A server that does not end by the signal."""
KILLED = """
import os, signal, subprocess, sys
from posttrain.engine.vllm import launch
launch.GRACE = 0.2
with launch.ending_with_parent():
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    core = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
    core.stdout.readline()
    print(core.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A server that is killed, and leaves a process that does not end by the signal."""
STARTS = """
import os, subprocess, sys
from posttrain.engine.vllm.launch import FOLDER, PARENT
told = {PARENT: str(os.getpid()), FOLDER: sys.argv[2]}
subprocess.run([sys.executable, "-c", sys.argv[1]], env=os.environ | told, start_new_session=True)
"""


@pytest.mark.prove
@pytest.mark.skipif(not is_linux(), reason="elsewhere nobody tells a process that its parent has ended")
@pytest.mark.parametrize("ends", [HANGS, KILLED], ids=["hangs", "was killed"])
def test_a_server_that_ends_badly_leaves_no_process_and_no_folder(ends: str, tmp_path: Path) -> None:
    """When its run ends, or, where the server itself is killed, at once."""
    (folder := tmp_path / "folder").mkdir()
    run = subprocess.Popen([sys.executable, "-c", STARTS, ends, str(folder)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    server = int(run.stdout.readline())
    assert folder.exists() or ends is KILLED
    run.kill()
    run.wait()
    run.stdout.close()
    until = time.monotonic() + 30
    while (Path(f"/proc/{server}").exists() or folder.exists()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not Path(f"/proc/{server}").exists() and not folder.exists()


def test_settings_that_mean_nothing_are_refused() -> None:
    for settings, message in (
        ({"server": True, "url": "http://x"}, "keep one of them"),
        ({"key_env": "KEY"}, "only a server given by engine.url"),
        ({"share": "/x"}, "without a folder"),
        ({"cache_gib": 0.0}, "must be > 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            VLLM(**settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="engine=embedded"):
        Run(recipe="x", stages=(Reinforce(name="rl"),), engine=VLLM(), deterministic=True)
    assert Run(recipe="x", stages=(Reinforce(name="rl"),), deterministic=True).engine == Embedded()
