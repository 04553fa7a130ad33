"""The server over the embedded engine, asked by OpenAI's own client over loopback."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from posttrain.core import seeds
from posttrain.core.sampling import Sampling
from posttrain.serve.command import make_served
from posttrain.serve.response_format import ResponseFormat, conforms
from tests.serve.serve_parts import TOKEN, save_model, up

CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve café?"}]
FREE = {"extra_body": {"ignore_eos": True, "return_token_ids": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


async def test_completions_are_what_the_engine_says(model: Path) -> None:
    """Ids, log-probs, alternatives and text, under the place that a seed stands for."""
    async with up(model) as u:
        said = await u.client.completions.create(
            model="tiny",
            prompt="user says 7",
            max_tokens=12,
            n=3,
            seed=5,
            temperature=0.8,
            logprobs=2,
            extra_body={"return_token_ids": True},
        )
        ids = u.served.renderer.prompt("user says 7")
        contract = Sampling(temperature=0.8, max_tokens=12, top=2, stop_ids=u.served.renderer.stop_ids)
        own = await asyncio.gather(*[u.engine.generate(ids, contract, seeds.key(5, "serve", i)) for i in range(3)])
    assert [c.index for c in said.choices] == [0, 1, 2]
    for choice, turn in zip(said.choices, own, strict=True):
        extra: Any = choice.model_extra
        assert extra["token_ids"] == turn.ids.tolist() and extra["prompt_token_ids"] == ids.tolist()
        assert choice.text == u.served.renderer.text(turn.ids)
        assert choice.finish_reason == ("stop" if turn.ids[-1] in u.served.renderer.stop_ids else "length")
        assert choice.logprobs is not None and np.array_equal(np.float32(choice.logprobs.token_logprobs), turn.logp)
        for i, table in enumerate(choice.logprobs.top_logprobs or []):
            assert sorted(table.values()) == sorted(map(float, turn.top.logp[i]))
    assert len({c.text for c in said.choices}) > 1
    assert said.usage is not None
    assert said.usage.prompt_tokens == len(ids) and said.usage.completion_tokens == sum(len(t.ids) for t in own)


async def test_chat_shows_the_policy_what_a_rollout_shows_it(model: Path) -> None:
    async with up(model) as u:
        r = u.served.renderer
        said = await u.client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=9,
            seed=1,
            logprobs=True,
            top_logprobs=3,
            extra_body={"return_token_ids": True},
        )
        extra: Any = said.model_extra
        assert extra["prompt_token_ids"] == r.encode("system: be brief<eos>user: naïve café?<eos>assistant: ").tolist()
        own = await u.engine.generate(
            np.int32(extra["prompt_token_ids"]),
            Sampling(max_tokens=9, top=3, stop_ids=r.stop_ids),
            seeds.key(1, "serve", 0),
        )
    choice = said.choices[0]
    assert choice.message.role == "assistant" and choice.message.content == r.text(own.ids)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert np.array_equal(np.float32([t.logprob for t in choice.logprobs.content]), own.logp)
    for t, token in zip(choice.logprobs.content, own.ids.tolist(), strict=True):
        assert bytes(t.bytes or []) == u.served.words.bytes(token) and len(t.top_logprobs) == 3
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    async with up(model) as u:
        both = [
            await u.client.chat.completions.create(model="tiny", messages=m, max_tokens=4, seed=1)
            for m in (parts, [{"role": "user", "content": "ab"}])
        ]
    assert both[0].choices[0].message == both[1].choices[0].message


@pytest.mark.parametrize(
    "options", [{}, {"logprobs": 2}, {"temperature": 0}, {"stop": ["a", "\n", "ca"]}, {"stop": "e", "logprobs": 1}]
)
async def test_a_stream_is_the_same_answer_in_pieces(model: Path, options: dict[str, Any]) -> None:
    asked = {"model": "tiny", "prompt": ["user says", "日本語"], "max_tokens": 24, "n": 2, "seed": 3, **FREE, **options}
    async with up(model) as u:
        whole = await u.client.completions.create(**asked)
        text, ids, logp, finish = dict.fromkeys(range(4), ""), {i: [] for i in range(4)}, {i: [] for i in range(4)}, {}
        chunks = 0
        usage = None
        async for chunk in await u.client.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for c in chunk.choices:
                chunks += 1
                assert "\ufffd" not in c.text or "\ufffd" in whole.choices[c.index].text
                text[c.index] += c.text
                ids[c.index] += c.model_extra["token_ids"]
                logp[c.index] += c.logprobs.token_logprobs if c.logprobs else []
                assert c.index not in finish, "nothing comes after a finish reason"
                if c.finish_reason:
                    finish[c.index] = c.finish_reason
    for c in whole.choices:
        assert (
            text[c.index] == c.text
            and ids[c.index] == c.model_extra["token_ids"]
            and finish[c.index] == c.finish_reason
        )
        assert logp[c.index] == (c.logprobs.token_logprobs if c.logprobs else [])
    assert usage == whole.usage
    if not options:
        assert chunks > 40, "tokens came one by one"


async def test_chat_streams_too(model: Path) -> None:
    asked = {
        "model": "tiny",
        "messages": CHAT,
        "max_completion_tokens": 12,
        "seed": 4,
        "temperature": 0,
        "logprobs": True,
        **FREE,
    }
    async with up(model) as u:
        whole = await u.client.chat.completions.create(**asked)
        deltas = [c async for c in await u.client.chat.completions.create(**asked, stream=True)]
    assert (
        deltas[0].choices[0].delta.role == "assistant"
        and deltas[0].model_extra["prompt_token_ids"] == whole.model_extra["prompt_token_ids"]
    )
    assert "".join(d.choices[0].delta.content or "" for d in deltas) == whole.choices[0].message.content
    assert deltas[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    logp = [t.logprob for d in deltas if d.choices[0].logprobs for t in d.choices[0].logprobs.content or []]
    assert logp == [t.logprob for t in whole.choices[0].logprobs.content] and any(p < 0 for p in logp), (
        "greedy shows the model's own log-probs"
    )


async def test_seeds(model: Path) -> None:
    """A seed decides an answer whoever else is asked; without one, answers differ."""
    async with up(model) as u:

        async def say(prompt: Any, **options: Any) -> list[str]:
            said = await u.client.completions.create(model="tiny", prompt=prompt, max_tokens=16, **options)
            return [c.text for c in said.choices]

        alone = await say("user says", seed=11)
        crowd = await asyncio.gather(
            say("user says", seed=11),
            say(["the", "user says"], seed=11),
            say("user says", seed=12),
            say("user says", seed=11, n=4),
        )
        assert crowd[0] == alone and crowd[1][1] == alone[0] and crowd[2] != alone and crowd[3][0] == alone[0]
        assert len({(await say("user says"))[0] for _ in range(4)}) > 1


async def test_stop_strings_end_the_answer_and_free_the_slot(model: Path) -> None:
    async with up(model) as u:
        free = await u.client.completions.create(model="tiny", prompt="user", max_tokens=60, seed=2, **FREE)
        text = free.choices[0].text
        stop = text[5:8]
        said = await u.client.completions.create(
            model="tiny", prompt="user", max_tokens=60, seed=2, stop=["never!", stop], **FREE
        )
        choice = said.choices[0]
        assert choice.text == text[: text.index(stop)] and choice.finish_reason == "stop"
        assert (
            choice.model_extra["token_ids"]
            == free.choices[0].model_extra["token_ids"][: len(choice.model_extra["token_ids"])]
        )
        assert stop in u.served.words.text(choice.model_extra["token_ids"]) and said.usage.completion_tokens < 60
        assert stop not in u.served.words.text(choice.model_extra["token_ids"][:-1])
        assert not u.engine._scheduler.busy
        own = free.choices[0].model_extra["token_ids"][3]
        by_id = await u.client.completions.create(
            model="tiny",
            prompt="user",
            max_tokens=60,
            seed=2,
            extra_body={"stop_token_ids": [own], "return_token_ids": True, "ignore_eos": True},
        )
        assert by_id.choices[0].finish_reason == "stop" and by_id.choices[0].model_extra["token_ids"][-1] == own


async def test_the_whole_contract_is_served(model: Path) -> None:
    """What a request asks for is what the engine is asked for."""
    rules: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "min_tokens": 6,
        "allowed_token_ids": list(range(20, 260)),
        "top_k": 9,
        "min_p": 0.01,
    }
    async with up(model) as u:
        ids = u.served.renderer.prompt("user says")
        ends = (*u.served.renderer.stop_ids, *range(100, 200))
        said = await u.client.completions.create(
            model="tiny",
            prompt="user says",
            max_tokens=30,
            seed=9,
            logit_bias={"33": 4, "40": -3},
            extra_body={**rules, "stop_token_ids": list(range(100, 200)), "return_token_ids": True},
        )
        contract = Sampling(
            **{k: v for k, v in rules.items() if k != "allowed_token_ids"},
            allowed_ids=tuple(rules["allowed_token_ids"]),
            logit_bias=((33, 4.0), (40, -3.0)),
            max_tokens=30,
            stop_ids=ends,
        )
        own = await u.engine.generate(ids, contract, seeds.key(9, "serve", 0))
        free = await u.engine.generate(ids, Sampling(max_tokens=30, stop_ids=ends), seeds.key(9, "serve", 0))
    got = said.choices[0].model_extra["token_ids"]
    assert got == own.ids.tolist() != free.ids.tolist() and len(got) > 6


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_before_min_tokens_ends_nothing(model: Path, stream: bool) -> None:
    async with up(model) as u:
        free = await u.client.completions.create(model="tiny", prompt="user", max_tokens=60, seed=2, **FREE)
        ids = free.choices[0].model_extra["token_ids"]
        readable = [(i, t) for i, t in enumerate(u.served.words.text([j]) for j in ids) if "\ufffd" not in t]
        early, late = next(t for i, t in readable if i > 1), next(t for i, t in readable if i > 18)
        more = {"extra_body": {**FREE["extra_body"], "min_tokens": 10}}
        said = await u.client.completions.create(
            model="tiny", prompt="user", max_tokens=60, seed=2, stop=[early, late], stream=stream, **more
        )
        chunks = [c.choices[0] async for c in said] if stream else said.choices
        text, got = "".join(c.text for c in chunks), [t for c in chunks for t in c.model_extra["token_ids"]]
    whole = u.served.words.text(got)
    assert got == ids[: len(got)] and 10 < len(got) < 40 and early in text and chunks[-1].finish_reason == "stop"
    assert whole.startswith(text) and any(whole[len(text) :].startswith(s) for s in (early, late))


async def test_prompts_as_token_ids_are_taken_as_they_are(model: Path) -> None:
    async with up(model) as u:
        said = await u.client.completions.create(model="tiny", prompt=[[5, 6, 7], [8]], max_tokens=3, **FREE)
        assert [c.model_extra["prompt_token_ids"] for c in said.choices] == [[5, 6, 7], [8]]
        named = await u.client.completions.create(
            model="tiny",
            prompt=[5, 6],
            max_tokens=3,
            seed=0,
            logprobs=1,
            extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
        )
        c: Any = named.choices[0]
        assert c.logprobs.tokens == [f"token_id:{i}" for i in c.model_extra["token_ids"]]


async def test_the_token_is_asked_for(model: Path) -> None:
    async with up(model) as u, httpx2.AsyncClient() as plain:
        for key in ("wrong", TOKEN + "x"):
            with pytest.raises(openai.AuthenticationError, match="a wrong token"):
                await u.client.with_options(api_key=key).models.list()
        bare = await plain.get(f"{u.url}/models")
        assert (
            bare.status_code == 401
            and bare.headers["www-authenticate"] == "Bearer"
            and "no token" in bare.json()["error"]["message"]
        )
        assert (await plain.get(u.url.replace("/v1", "/health"))).json() == {"status": "ok"}
        models = (await u.client.models.list()).data
        assert [m.id for m in models] == ["tiny"] and models[0].model_extra["max_model_len"] == 96
        assert (await u.client.models.retrieve("tiny")).owned_by == "posttrain"


async def test_without_a_token_only_this_machine_is_served(model: Path) -> None:
    async with up(model, token=None) as u, httpx2.AsyncClient() as plain:
        assert (await plain.get(f"{u.url}/models")).status_code == 200
        for host in ("evil.example", "evil.example:80", "[2001:db8::1]:80"):
            assert (await plain.get(f"{u.url}/models", headers={"Host": host})).status_code == 403
        for host in ("localhost", "localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]"):
            assert (await plain.get(f"{u.url}/models", headers={"Host": host})).status_code == 200
        body = json.dumps({"model": "tiny", "prompt": "x"})
        assert (
            await plain.post(f"{u.url}/completions", content=body, headers={"Content-Type": "text/plain"})
        ).status_code == 415


BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"temprature": 1}, "temprature", "unknown parameter temprature: did you mean 'temperature'"),
    ({"temperature": -1}, "temperature", "greater than or equal to 0"),
    ({"temperature": 1e-9}, None, "temperature must be 0"),
    ({"temperature": "1"}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": True}, "n", "valid integer"),
    ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"prompt": []}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": [True]}, "prompt", "must be a string, a list of token ids"),
    ({"prompt": [100000]}, "prompt", "token id 100000, and the model has 0.."),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": "cat " * 99}, "prompt", "leave no room"),
    ({"prompt": ["x"] * 600, "n": 2}, None, "more than 1024"),
    ({"stop": ""}, "stop.0", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [9999]}, "stop_token_ids", "no tokens of this model"),
    ({"min_tokens": 20}, None, "min_tokens=20 is more than max_tokens=16"),
    ({"logit_bias": [1]}, "logit_bias", "an object from token ids to numbers"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"logit_bias": {"9999": 1}}, "logit_bias", "no tokens of this model"),
    ({"allowed_token_ids": []}, None, "nothing could be said"),
    ({"allowed_token_ids": [5, 9999]}, "allowed_token_ids", "no tokens of this model"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"echo": True}, "echo", "not supported: completions ask for the prompt's log-probs with prompt_logprobs=0"),
    ({"bad_words": ["no"]}, "bad_words", "not supported: a word has many spellings"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"stream_options": {"include_usage": True}}, None, "only read with stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown parameter stream_options.x"),
    ({"prompt": None}, "prompt", "prompt is missing"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "user"}]}, "messages.0.content", "missing"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "'image_url' are not supported",
    ),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "no role wizard"),
    ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages.0.nmae", "unknown parameter"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "missing"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "should be"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema, with a name and a schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "a"}}}},
        "response_format.json_schema.schema",
        "pattern is not read here",
    ),
    *(
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            "response_format.json_schema.schema",
            message,
        )
        for schema, message in (
            ({"type": 5}, "type 5: a type is one of object"),
            ({"items": {"type": None}}, "type None: a type is one of object"),
            ({"type": []}, "type []: a type is one of object"),
            ({"required": [["a"]]}, "required is a list of names"),
        )
    ),
    ({"response_format": {"type": "json_object"}, "stream": True}, None, "leave stream out"),
    ({"top_logprobs": 2}, None, "only read with logprobs=true"),
    ({"max_tokens": 3, "max_completion_tokens": 3}, None, "two names of one number"),
]


async def test_bad_requests_are_refused_by_name(model: Path) -> None:
    asked = [("completions", {"model": "tiny", "prompt": "hi"}, *row) for row in BAD_COMPLETIONS]
    asked += [("chat/completions", {"model": "tiny", "messages": CHAT}, *row) for row in BAD_CHATS]
    async with up(model) as u, httpx2.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}) as plain:
        for path, body, changes, param, message in asked:
            answer = await plain.post(f"{u.url}/{path}", json=body | changes)
            error = answer.json()["error"]
            assert answer.status_code == 400 and error["type"] == "invalid_request_error", answer.text
            assert error["param"] == param and message in error["message"], error
        assert not u.engine.gauges()["engine/tokens"].sum


async def test_what_asks_for_nothing_is_accepted(model: Path) -> None:
    async with up(model) as u:
        await u.client.completions.create(
            model="tiny", prompt="x", presence_penalty=0, echo=False, best_of=1, suffix="", user="me", stop=None
        )
        await u.client.chat.completions.create(
            model="tiny",
            messages=CHAT,
            max_tokens=2,
            frequency_penalty=0,
            response_format={"type": "text"},
            tools=[],
            top_p=None,
        )


async def test_an_answer_is_drawn_until_it_has_the_form(model: Path) -> None:
    """What conforms is answered, and is a function of the seed; what never does is refused, and says what to change."""
    async with up(model) as u:
        digit = {"type": "json_schema", "json_schema": {"name": "digit", "schema": {"type": "integer", "maximum": 6}}}
        ask = {"model": "tiny", "prompt": "x", "max_tokens": 1, "extra_body": {"response_format": digit}}
        ids = [u.served.renderer.encode(str(i)).tolist()[-1] for i in range(10)]
        few = {"logit_bias": {str(i): 100 for i in ids}}
        said = [await u.client.completions.create(**ask, **few, n=8, seed=s) for s in (1, 1, 2)]
        texts = [[c.text for c in s.choices] for s in said]
        assert all(text in "0123456" for row in texts for text in row) and texts[0] == texts[1] != texts[2]
        with pytest.raises(openai.BadRequestError, match="16 answers have not the response_format.*a temperature"):
            await u.client.completions.create(**ask, logit_bias={str(i): 100 for i in ids[7:]})
        with pytest.raises(openai.BadRequestError, match="1 answer has not"):
            await u.client.completions.create(**ask, temperature=0, logit_bias={str(ids[9]): 100})


def test_a_schema_may_require_no_name() -> None:
    schema = {"type": ["object"], "required": []}
    form = ResponseFormat.model_validate({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert form.fits("{}") and not form.fits("[]")


def test_a_number_of_a_schema_is_the_same_with_and_without_a_point() -> None:
    one = [{"type": "integer"}, {"enum": [[{"a": 1}]]}, {"const": [{"a": 1.0}]}]
    values: list[tuple[Any, list[bool]]] = [
        (1, [True, False, False]),
        (1.0, [True, False, False]),
        (1.5, [False, False, False]),
        (True, [False, False, False]),
        ([{"a": 1}], [False, True, True]),
        ([{"a": 1.0}], [False, True, True]),
        ([{"a": True}], [False, False, False]),
        ([{"a": 1}, 1], [False, False, False]),
    ]
    for value, allowed in values:
        assert [conforms(value, schema) for schema in one] == allowed, value


async def test_other_refusals(model: Path, tmp_path: Path) -> None:
    async with up(model) as u:
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'.*only 'tiny'"):
            await u.client.completions.create(model="gpt", prompt="x")
        async with httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
        ) as plain:
            for method, path, content, status in (
                ("GET", "/nowhere", None, 404),
                ("GET", "/completions", None, 405),
                ("GET", "/models/other", None, 404),
                ("POST", "/completions", "{", 400),
                ("POST", "/completions", "[]", 400),
                ("POST", "/completions", "[" * 100_000, 400),
                ("POST", "/completions", " " * (33 << 20), 413),
            ):
                answer = await plain.request(method, u.url + path, content=content)
                assert answer.status_code == status and answer.json()["error"]["message"], answer.text
    async with up(save_model(tmp_path / "plain", template=None)) as u:
        with pytest.raises(openai.BadRequestError, match="no chat template.*use /v1/completions"):
            await u.client.chat.completions.create(model="tiny", messages=CHAT)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_slots(model: Path, stream: bool) -> None:
    async with up(model) as u:
        body = {"model": "tiny", "prompt": "user", "max_tokens": 90, "n": 8, "stream": stream, "ignore_eos": True}
        async with httpx2.AsyncClient() as plain, asyncio.timeout(60):
            call = asyncio.create_task(
                plain.post(f"{u.url}/completions", json=body, headers={"Authorization": f"Bearer {TOKEN}"})
            )
            while not u.engine._scheduler.busy:
                await asyncio.sleep(0)
            call.cancel()
            while u.engine._scheduler.busy or u.server.running:
                await asyncio.sleep(0)
        assert u.engine.gauges()["engine/tokens"].sum == 0, "no answer was finished"
        said = await u.client.completions.create(model="tiny", prompt="user", max_tokens=2)
        assert said.choices[0].finish_reason


async def test_sixty_four_at_once(model: Path) -> None:
    async with up(model) as u:

        async def one(i: int) -> list[int]:
            said = await u.client.completions.create(
                model="tiny", prompt=f"user says {i}", max_tokens=8 + i % 9, seed=i, stream=i % 2 == 0, **FREE
            )
            if i % 2 == 0:
                return [t async for chunk in said for c in chunk.choices for t in c.model_extra["token_ids"]]
            return said.choices[0].model_extra["token_ids"]

        got = await asyncio.gather(*[one(i) for i in range(64)])
        for i, ids in enumerate(got):
            contract = Sampling(max_tokens=8 + i % 9, stop_ids=())
            own = await u.engine.generate(
                u.served.renderer.prompt(f"user says {i}"), contract, seeds.key(i, "serve", 0)
            )
            assert ids == own.ids.tolist()


async def test_an_engine_that_fails_is_a_server_error(model: Path) -> None:
    async with up(model) as u:
        u.engine._module.get_input_embeddings().weight.data.fill_(float("nan"))
        with pytest.raises(openai.InternalServerError, match="logits are not finite"):
            await u.client.completions.create(model="tiny", prompt="x")
        with pytest.raises(openai.APIError, match="logits are not finite"):
            async for _ in await u.client.completions.create(model="tiny", prompt="x", stream=True):
                pass


async def test_leaving_ends_what_is_running(model: Path) -> None:
    """Requests in flight end when the server does; the second signal ends them at once."""
    async with up(model, "model.context=96") as u:
        streams = [
            await u.client.completions.create(model="tiny", prompt="user", max_tokens=90, stream=True, **FREE)
            for _ in range(3)
        ]
        assert len(u.server.running) == 3
        u.server.cut()
        for stream in streams:
            with pytest.raises(openai.APIError, match="the server is stopping"):
                async for _ in stream:
                    pass
        assert not u.engine._scheduler.busy
        whole = asyncio.create_task(u.client.completions.create(model="tiny", prompt="x", max_tokens=90, **FREE))
        while not u.server.running:
            await asyncio.sleep(0.01)
        u.server.cut()
        with pytest.raises(openai.InternalServerError, match="the server is stopping"):
            await whole


def test_a_model_of_the_present_folder_has_its_name(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(model)
    assert make_served(".", "threads=1", token=None)[0].name == model.name


async def test_the_program_on_the_page_runs(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    page = (Path(__file__).parents[2] / "docs/guides/serve.md").read_text()
    program = page.split("```python\n")[1].split("```")[0].replace('"my-model"', '"tiny"')
    async with up(model) as u:
        await asyncio.to_thread(exec, program.replace("http://127.0.0.1:8000", u.url.removesuffix("/v1")), {})
    assert len(capsys.readouterr().out.splitlines()[0]) > 10
