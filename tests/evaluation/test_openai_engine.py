"""Endpoints as samplers: by tokens and by text, over our own server; and over prepared answers for what ours never
says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.api.main import evaluate
from posttrain.build.build_environments import make_environment
from posttrain.cli import main as cli
from posttrain.config.run import Env, Evaluation
from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import OUTSIDE, Message, SampledTurn, Stop, Top
from posttrain.engine.endpoint import RemoteModel, TextSampler, TextVocabulary, TokenSampler, discover
from posttrain.engine.endpoint.endpoint_sampler import fields
from posttrain.evaluation.evaluate_endpoint import EndpointOptions, remote_rollout, remote_run
from posttrain.ladder.rollout_request import RolloutRequest
from posttrain.role.heldout_evaluation import evaluate as measure
from posttrain.system.errors import ConfigError, DataError, EndpointError, EngineError, InvariantError
from posttrain.verifier.http_client import Endpoint
from tests.serve.serve_parts import TOKEN, Up, save_model, up
from tests.verifier.http_parts import QUICK, reply, server

ENV = Env(name="arithmetic", args={"max_terms": 2, "max_operand": 4}, heldout=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", TOKEN)


def endpoint(u: Up | str) -> Endpoint:
    return Endpoint(
        u if isinstance(u, str) else u.url,
        "rollout",
        key_env=None if isinstance(u, str) else "TEST_KEY",
        patience=QUICK,
    )


# --- by tokens --------------------------------------------------------------------------------------------------------


async def test_min_tokens_beyond_the_context_end_with_it(model: Path) -> None:
    """Six positions are left of the ten that must be said: as in the engine itself, the context ends the turn."""
    async with up(model) as u, endpoint(u) as e:
        contract, prompt = (
            Sampling(max_tokens=20, min_tokens=10, stop_ids=tuple(range(60, 120))),
            np.full(90, 5, np.int32),
        )
        got = await TokenSampler(e, await discover(e)).generate(prompt, contract, 3)
        own = await u.engine.generate(prompt, contract, seeds.key(3, "serve", 0))
        assert got.ids.tolist() == own.ids.tolist() and len(got.ids) == 6
        assert got.stop is own.stop is Stop.CONTEXT


@pytest.mark.parametrize(
    "contract",
    [
        Sampling(max_tokens=12),
        Sampling(max_tokens=200),
        Sampling(max_tokens=12, temperature=0.6, top=3),
        Sampling(max_tokens=9, greedy=True),
        Sampling(max_tokens=40, stop_ids=tuple(range(60, 120))),
        Sampling(max_tokens=5, stop_ids=()),
        Sampling(max_tokens=40, stop=("a", "\n"), min_tokens=2),
        Sampling(max_tokens=9, repetition_penalty=1.4, logit_bias=((30, 2.5),), allowed_ids=tuple(range(100))),
    ],
)
async def test_tokens_come_as_the_engine_says_them(model: Path, contract: Sampling) -> None:
    async with up(model) as u, endpoint(u) as e:
        sampler = TokenSampler(e, await discover(e))
        contract = contract.resolve(u.served.renderer.stop_ids)
        for place in (3, 2**127 + 5):
            ids = np.int32([5, 7, 11])
            got = await sampler.generate(ids, contract, place)
            own = await u.engine.generate(ids, contract, seeds.key(place & (2**63 - 1), "serve", 0))
            assert got.ids.tolist() == own.ids.tolist() and got.stop is own.stop
            assert np.array_equal(got.logp, own.logp) and got.version.tolist() == [0] * len(own.ids)
            if contract.top:
                assert (
                    got.top is not None
                    and np.array_equal(got.top.ids, own.top.ids)
                    and np.array_equal(got.top.logp, own.top.logp)
                )
        assert sampler.context == 96 and not sampler.keeps_sets
        assert sampler.gauges()["engine/requests"].sum == 2 and sampler.gauges()["engine/requests"].sum == 0
        assert np.array_equal(
            await sampler.score(np.int32([5, 7, 11, 3])), await u.engine.score(np.int32([5, 7, 11, 3]))
        )


async def test_what_by_tokens_cannot_be_asked(model: Path) -> None:
    async with up(model) as u, endpoint(u) as e:
        found = await discover(e)
        sampler = TokenSampler(e, found)
        with pytest.raises(DataError, match="leaves no room"):
            await sampler.generate(np.zeros(96, np.int32), Sampling(stop_ids=()), 0)
        with pytest.raises(EngineError, match="non-empty"):
            await sampler.generate(np.zeros(0, np.int32), Sampling(stop_ids=()), 0)
        with pytest.raises(EngineError, match="not resolved"):
            await sampler.generate(np.int32([1]), Sampling(), 0)
        with pytest.raises(EngineError, match="no way to take weights"):
            await sampler.load(1, [])
        with pytest.raises(ConfigError, match="not known to take prompts as token ids"):
            TokenSampler(e, replace(found, dialect="compatible"))
        with pytest.raises(EndpointError, match="status 400.*token id 5000"):
            await sampler.generate(np.int32([5000]), Sampling(stop_ids=()), 0)


async def test_training_is_admitted_only_where_log_probs_are_those_of_the_draws(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with up(model) as u, endpoint(u) as e:
        sampler = TokenSampler(e, await discover(e))
        await sampler.for_training(Sampling(stop_ids=()))
        with pytest.raises(ConfigError, match="does not store the kept sets"):
            await sampler.for_training(Sampling(top_p=0.9, stop_ids=()))
        real = u.engine.generate

        async def raw(ids: Any, s: Sampling, place: int, **more: Any) -> SampledTurn:
            """As vLLM does by default: log-probs before the temperature."""
            said = await real(ids, s, place, **more)
            assert said.top is not None
            top = Top(said.top.ids, said.top.logp * np.float32(s.temperature))
            return replace(said, top=top)

        monkeypatch.setattr(u.engine, "generate", raw)
        with pytest.raises(ConfigError, match="not those of the distribution it draws from.*processed_logprobs"):
            await sampler.for_training(Sampling(stop_ids=()))
        nothing = Top(np.int32([[1, 2, 3]]), np.float32([[-1, np.nan, -2]]))

        async def no_number(*given: Any) -> SampledTurn:
            return SampledTurn(np.int32([1]), np.float32([-1]), np.int32([0]), Stop.LENGTH, None, nothing)

        monkeypatch.setattr(sampler, "generate", no_number)
        with pytest.raises(ConfigError, match="not those of the distribution it draws from"):
            await sampler.for_training(Sampling(stop_ids=()))


async def test_truncation_is_asked_for_and_never_believed(model: Path) -> None:
    """An endpoint tells no kept sets: what it cut is evaluated, marked, and cannot be learned from."""
    run = replace(remote_run("x"), env=ENV)
    contract = Sampling(max_tokens=6, top_k=1)
    async with up(model) as u:
        how = EndpointOptions(key_env="TEST_KEY", tokenizer=str(model))
        async with remote_rollout(u.url, how, make_environment(run), contract, connections=4, seed=0) as (
            rollout,
            told,
            _,
        ):
            assert not told.truncated
            task = rollout.environment.heldout[0]
            group = await rollout.group(task, 0, RolloutRequest(groups=1, siblings=3), told, "x")
            greedy = await rollout.group(task, 0, RolloutRequest(groups=1, siblings=1), replace(told, greedy=True), "x")
    assert {tuple(e.segments[0].ids.tolist()) for e in (*group.episodes, *greedy.episodes)} == {
        tuple(greedy.episodes[0].segments[0].ids.tolist())
    }
    spoken = group.episodes[0].segments[0]
    assert set(spoken.version[spoken.mask].tolist()) == {OUTSIDE}


# --- by text ----------------------------------------------------------------------------------------------------------


async def test_a_conversation_by_text(model: Path) -> None:
    async with up(model) as u, endpoint(u) as e:
        found = await discover(e)
        pieces = TextVocabulary()
        contract = Sampling(max_tokens=6, stop_ids=(), greedy=True)
        chat, plain = TextSampler(e, found, pieces), TextSampler(e, found, pieces, way="completions")

        async def talk(sampler: TextSampler, *content: Any) -> tuple[list[str], Transcript]:
            dialogue, transcript, turns = sampler.dialogue("t"), Transcript(contract), []
            for shown in content:
                transcript.see(dialogue.see(shown))
                said = await sampler.generate(transcript.ids, contract, 0)
                transcript.say(said)
                turns.append(dialogue.said(said.ids))
            return turns, transcript

        first, later = (
            [Message(role="system", content="s"), Message(role="user", content="one")],
            [Message(role="user", content="two")],
        )
        turns, transcript = await talk(chat, first, later)
        messages: list[Any] = [*first, {"role": "assistant", "content": turns[0]}, *later]
        own = await u.client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
        assert turns[1] == own.choices[0].message.content
        assert transcript.segment().spoken == 12, "tokens are counted as the endpoint counts them"
        turns, _ = await talk(plain, "user says", " and then")
        own = await u.client.completions.create(
            model="tiny", prompt=f"user says{turns[0]} and then", max_tokens=6, temperature=0
        )
        assert turns[1] == own.choices[0].text
        turns, _ = await talk(chat, "user says")
        own = await u.client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "user says"}], max_tokens=6, temperature=0
        )
        assert turns[0] == own.choices[0].message.content
        with pytest.raises(ConfigError, match="lists of messages, and completions take plain text"):
            await talk(plain, first)
        with pytest.raises(ConfigError, match="cannot be trained on: neither the tokens it said"):
            await chat.for_training(contract)
        with pytest.raises(EngineError, match="set stop_ids=()"):
            await chat.generate(transcript.ids, replace(contract, stop_ids=(3,)), 0)
        with pytest.raises(EngineError, match="scores nothing"):
            await chat.score(transcript.ids)


def test_tokens_of_a_foreign_server_enter_no_batch() -> None:
    from posttrain.role.pack import _batch
    from tests.engine.engine_parts import segments

    class Credit:
        def __init__(self, segment: Any) -> None:
            self.episode, self.scored = type("E", (), {"segments": (segment,)}), None

    own = segments(1)[0]
    foreign = replace(own, version=np.where(own.mask, OUTSIDE, -1).astype(np.int32))
    with pytest.raises(InvariantError, match="nothing can be learned from them"):
        _batch([Credit(foreign)], np.ones(1))  # type: ignore[list-item]


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def serving(model: Path) -> Iterator[str]:
    """A server in a thread of its own; yields its address."""
    box: dict[str, Any] = {}
    ready = threading.Event()

    async def work() -> None:
        async with up(model) as u:
            box.update(url=u.url, stop=asyncio.Event(), loop=asyncio.get_running_loop())
            ready.set()
            await box["stop"].wait()

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    assert ready.wait(60)
    yield box["url"]
    box["loop"].call_soon_threadsafe(box["stop"].set)
    thread.join()


def test_an_address_is_evaluated_like_the_model_behind_it(
    serving: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "env=arithmetic",
        "env.heldout=6",
        "env.args.max_terms=2",
        "env.args.max_operand=4",
        "slots=8",
        "threads=1",
    )
    here = evaluate(model, *words, samples=2, max_tokens=8, quiet=True)
    there = evaluate(
        serving,
        *words,
        samples=2,
        max_tokens=8,
        quiet=True,
        remote=EndpointOptions(key_env="TEST_KEY", tokenizer=str(model)),
    )
    assert here.greedy == there.greedy and here.accuracy.prompts == there.accuracy.prompts == 6
    command = ["eval", serving, *words, "--samples", "2", "--max-tokens", "8", "--key-env", "TEST_KEY"]
    assert cli(command) == 0
    assert "dialect posttrain; by text (chat)" in capsys.readouterr().out
    assert cli([*command, "--api", "completions"]) == 0
    assert "accuracy (sampled)" in capsys.readouterr().out
    for more, message in (
        (["--model", "gpt"], "no such model"),
        (["--dialect", "vlm"], "did you mean 'vllm'"),
        (["eval.sampling.bad_words=x"], "knows no sampling.bad_words"),
    ):
        assert cli([*command, *more]) == 2 and message in capsys.readouterr().err
    assert (
        cli(["eval", str(model), "--api", "completions", *words]) == 2
        and "belongs to an endpoint" in capsys.readouterr().err
    )
    assert cli([*command[:-2]]) == 6 and "no key was sent" in capsys.readouterr().err


# --- requests and answers ---------------------------------------------------------------------------------------------

SEEN = RemoteModel("m", "vllm", 100, "vllm")


def test_every_field_is_sent_and_unknown_ones_are_refused_by_name() -> None:
    s = Sampling(temperature=0.7, stop=("x",), stop_ids=())
    plain = fields(s, replace(SEEN, dialect="compatible"), 2**64 + 7, chat=True)
    assert plain == {
        "model": "m",
        "n": 1,
        "stream": False,
        "temperature": 0.7,
        "top_p": 1.0,
        "seed": 7,
        "max_tokens": 64,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": ["x"],
        "logit_bias": {},
    }
    assert fields(s, replace(SEEN, dialect="openai"), 0, chat=True)["max_completion_tokens"] == 64
    full = fields(replace(s, min_tokens=3, repetition_penalty=1.1, top_k=4, allowed_ids=(1, 2)), SEEN, 0, chat=False)
    assert (
        full["top_k"] == 4
        and full["min_tokens"] == 3
        and full["repetition_penalty"] == 1.1
        and full["allowed_token_ids"] == [1, 2]
    )
    assert full["skip_special_tokens"] is False and full["include_stop_str_in_output"] is True
    greedy = fields(Sampling(greedy=True, top_k=3, top_p=0.5), SEEN, 0, chat=False)
    assert (greedy["temperature"], greedy["top_p"], greedy["top_k"]) == (0.0, 1.0, 0)
    refused: dict[str, dict[str, Any]] = {
        "top_k": {"top_k": 2},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.1},
        "min_tokens": {"min_tokens": 1},
        "allowed_ids": {"allowed_ids": (1,)},
        "bad_ids": {"bad_ids": ((1,),)},
        "bad_words": {"bad_words": ("x",)},
    }
    for name, change in refused.items():
        with pytest.raises(ConfigError, match=f"knows no sampling.{name}"):
            fields(Sampling(**change), replace(SEEN, dialect="openai"), 0, chat=True)
    with pytest.raises(ConfigError, match="takes 4"):
        fields(Sampling(stop=tuple("abcde")), replace(SEEN, dialect="openai"), 0, chat=True)


def answer(**changes: Any) -> bytes:
    choice = {
        "finish_reason": "length",
        "token_ids": [4, 5],
        "prompt_token_ids": [1],
        "logprobs": {"token_logprobs": [-1.0, -2.0], "top_logprobs": [{"token_id:4": -1.0}, {"token_id:5": -2.0}]},
    }
    return reply(200, {"choices": [choice | changes], "usage": {"completion_tokens": 2}})


def counted(tokens: Any) -> bytes:
    return reply(200, {"choices": [{}], "usage": {"completion_tokens": tokens}})


def alternatives(token: int, logp: Any) -> dict[str, Any]:
    return {"token_logprobs": [-1, -2], "top_logprobs": [{f"token_id:{token}": logp}, {"token_id:5": -2.0}]}


NUMBERLESS = ("a", "-1", None, float("nan"), float("-inf"), 10**400)
GOOD = Sampling(max_tokens=2, stop_ids=(9,))
BROKEN: list[tuple[bytes, Sampling, str]] = [
    (answer(token_ids=None), GOOD, "returned no token_ids, so what was said is known as text only"),
    (answer(token_ids=[4]), GOOD, "returned 1 token_ids and counted 2"),
    (answer(prompt_token_ids=[1, 2]), GOOD, "read another prompt than it was sent"),
    (answer(logprobs=None), GOOD, "no log-prob for each of 2"),
    (answer(logprobs={"token_logprobs": [-1.0, None]}), GOOD, "no log-prob for each of 2"),
    (answer(finish_reason="stop"), GOOD, "ended with reason 'stop', which neither"),
    (answer(finish_reason="abort"), GOOD, "ended with reason 'abort'"),
    (answer(), replace(GOOD, max_tokens=3), "2 tokens ended with reason 'length'"),
    (answer(), replace(GOOD, max_tokens=1), "said 2 tokens where at most 1"),
    (answer(), replace(GOOD, top=2), "fewer than 2 alternatives"),
    (
        answer(logprobs={"token_logprobs": [-1, -2], "top_logprobs": [{"a": -1}, {"b": -2}]}),
        replace(GOOD, top=1),
        "by their text",
    ),
    (reply(200, {"choices": []}), GOOD, "without exactly one choice"),
    (reply(200, [1]), GOOD, "without exactly one choice"),
    (reply(200, {"choices": [{}]}), GOOD, "without usage.completion_tokens"),
    (counted(-2), GOOD, "without usage.completion_tokens"),
    (counted(True), GOOD, "without usage.completion_tokens"),
    (answer(token_ids=[4, 2**40]), GOOD, "returned no token_ids"),
    (answer(token_ids=[4, -5]), GOOD, "returned no token_ids"),
    *((answer(logprobs={"token_logprobs": [-1.0, x]}), GOOD, "no log-prob for each of 2") for x in NUMBERLESS),
    *((answer(logprobs=alternatives(4, x)), replace(GOOD, top=1), "with their log-probs") for x in NUMBERLESS),
    (answer(logprobs=alternatives(10**30, -1.0)), replace(GOOD, top=1), "their ids are not known"),
]


@pytest.mark.prove
async def test_answers_that_cannot_be_right_are_refused() -> None:
    for said, contract, message in BROKEN:
        async with server(said) as (url, _), endpoint(url) as e:
            with pytest.raises(EndpointError, match=message):
                await TokenSampler(e, SEEN).generate(np.int32([1]), contract, 0)
    async with server(answer()) as (url, asked), endpoint(url) as e:
        said = await TokenSampler(e, SEEN).generate(np.int32([1]), GOOD, 0)
        body = json.loads(asked[0].partition("\r\n\r\n")[2])
    assert said.ids.tolist() == [4, 5] and said.stop is Stop.LENGTH
    assert (
        body["stop_token_ids"] == [9]
        and body["ignore_eos"] is True
        and body["prompt"] == [1]
        and body["return_token_ids"] is True
    )
    async with server(answer(finish_reason="stop")) as (url, _), endpoint(url) as e:
        assert (await TokenSampler(e, SEEN).generate(np.int32([1]), replace(GOOD, stop=("x",)), 0)).stop is Stop.STRING


async def test_log_probs_of_a_prompt_that_are_no_numbers_are_refused() -> None:
    for logp in NUMBERLESS:
        rows = [None, {"2": {"logprob": logp}}]
        said = reply(200, {"choices": [{"prompt_logprobs": rows}], "usage": {"completion_tokens": 1}})
        async with server(said) as (url, _), endpoint(url) as e:
            with pytest.raises(EndpointError, match="a log-prob is no number"):
                await TokenSampler(e, SEEN).score(np.int32([1, 2]))


async def test_text_answers_that_cannot_be_right() -> None:
    def text(**choice: Any) -> bytes:
        return reply(
            200,
            {
                "choices": [{"finish_reason": "stop", "message": {"content": "hi"}} | choice],
                "usage": {"completion_tokens": 3},
            },
        )

    async def say(said: bytes) -> SampledTurn:
        async with server(said) as (url, _), endpoint(url) as e:
            sampler = TextSampler(e, replace(SEEN, dialect="compatible"), TextVocabulary())
            ids = sampler.dialogue("t").see("hello")
            out = await sampler.generate(ids, Sampling(stop_ids=()), 0)
            assert sampler.dialogue("t").said(out.ids) in ("hi", "")
            return out

    assert (await say(text())).stop is Stop.SAID and len((await say(text())).ids) == 3
    assert (await say(text(message={"content": None}))).stop is Stop.SAID
    assert (await say(text(finish_reason="content_filter"))).stop is Stop.ERROR
    with pytest.raises(EndpointError, match="reason 'tool_calls'; known are"):
        await say(text(finish_reason="tool_calls"))
    for strange, says in ((["stop"], r"reason \['stop'\]"), (None, "reason None")):
        with pytest.raises(EndpointError, match=says):
            await say(text(finish_reason=strange))
    with pytest.raises(EndpointError, match="its message is no object but str"):
        await say(text(message="hi"))
    with pytest.raises(EndpointError, match="no text but list"):
        await say(text(message={"content": []}))


async def test_looking_at_endpoints() -> None:
    def models(*cards: dict[str, Any]) -> bytes:
        return reply(200, {"data": list(cards)})

    vllm = {"id": "a", "owned_by": "vllm", "max_model_len": 50}
    cases: list[tuple[bytes, dict[str, Any], Any]] = [
        (models(vllm), {}, RemoteModel("a", "vllm", 50, "vllm")),
        (models(vllm), {"dialect": "compatible"}, RemoteModel("a", "compatible", 50, "vllm")),
        (models({"id": "b", "owned_by": "me"}), {"model": "b"}, RemoteModel("b", "compatible", 2**31 - 1, "me")),
        (models(vllm, {"id": "b"}), {}, "serves 2 models; say which with --model: a, b"),
        (models(vllm), {"model": "A"}, "has no such model"),
        (reply(200, {"object": "list"}), {}, "lists no models"),
    ]
    for said, how, expected in cases:
        async with server(said) as (url, _), endpoint(url) as e:
            if isinstance(expected, RemoteModel):
                assert await discover(e, **how) == expected
            else:
                with pytest.raises((ConfigError, EndpointError), match=expected):
                    await discover(e, **how)


async def test_an_evaluation_over_a_server_that_dies_is_an_error_not_a_score(model: Path) -> None:
    run = replace(remote_run("x"), env=ENV)
    dying = reply(200, {"data": [{"id": "m", "owned_by": "me"}]})
    async with server(dying, reply(500, "out of memory")) as (url, _):
        how = EndpointOptions(patience=QUICK)
        async with remote_rollout(url, how, make_environment(run), Sampling(max_tokens=4), connections=2, seed=0) as (
            rollout,
            told,
            _,
        ):
            with pytest.raises(EndpointError, match=r"rollout .*status 500: out of memory \(tried 4 times\)"):
                await measure(rollout, rollout.environment.heldout, told, Evaluation(samples=1))
