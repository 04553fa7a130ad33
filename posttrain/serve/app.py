"""The routes: health, models, completions, chat completions. Every answer and every refusal is in OpenAI's shape.

A handler consumes one request, waits for the engine, and is unblocked by it token by token; a client that goes away
cancels its handler, which cancels the engine's work and frees its slots.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

from posttrain.core import seeds
from posttrain.core.errors import PosttrainError
from posttrain.core.ports import Sampler
from posttrain.core.sampling import Sampling
from posttrain.environment.render import Renderer
from posttrain.serve.choice import Choice, Piece
from posttrain.serve.protocol import Asked, ChatRequest, CompletionRequest, read
from posttrain.serve.refusal import Refusal, refusal_of
from posttrain.serve.shape import Shape
from posttrain.serve.words import Words

log = logging.getLogger(__name__)
LARGEST = 32 << 20
"""Most bytes of a request."""
Told = tuple[Choice, Piece | None]
"""What a choice said; None: it has ended."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Served:
    """What is served, and to whom."""

    sampler: Sampler
    renderer: Renderer
    words: Words
    vocabulary: int
    """Ids the model has embeddings for."""
    name: str
    root: str
    """Where the model came from."""
    fingerprint: str
    token: str | None
    """What callers must bring; None: anybody on this machine is served."""
    created: int


@dataclass
class Server:
    """The web application over one engine."""

    served: Served
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])
    """Requests being answered."""

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_spoken, self._allowed], client_max_size=LARGEST)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    def cut(self) -> None:
        """End everything that is being answered, now."""
        for task in self.running:
            task.cancel()

    @web.middleware
    async def _allowed(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Refuse callers without the token; without one, web pages that reach this machine under another name."""
        if request.path == "/health":
            return await handler(request)
        token = self.served.token
        if token is None:
            if not _local(request.host):
                raise Refusal(f"no token is asked for here, so only this machine is served, not {request.host!r}", status=403)
            return await handler(request)
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
            said = "no" if not given else "a wrong"
            raise Refusal(f"{said} token: send the header 'Authorization: Bearer TOKEN' (api_key=TOKEN in OpenAI's clients)", status=401)
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._known(request.match_info["name"])
        return web.json_response(self._card())

    def _card(self) -> dict[str, Any]:
        s = self.served
        own = {"id": s.name, "object": "model", "created": s.created, "owned_by": "posttrain"}
        return own | {"root": s.root, "max_model_len": s.sampler.context}

    def _known(self, name: str) -> None:
        if name != self.served.name:
            raise Refusal(f"there is no model {name!r} here, only {self.served.name!r}", status=404, param="model", code="model_not_found")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        asked: CompletionRequest = await self._read(request, CompletionRequest)
        return await self._answer(request, asked, [self._prompt(p) for p in asked.prompt], "cmpl")

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked: ChatRequest = await self._read(request, ChatRequest)
        if not self.served.renderer.tokenizer.chat_template:
            raise Refusal(
                f"{self.served.name} has no chat template, so messages cannot be written for it: use /v1/completions, or serve a model whose "
                "tokenizer has a template",
                param="messages",
                code="no_chat_template",
            )
        return await self._answer(request, asked, [self._ids([m.plain() for m in asked.messages], "messages")], "chatcmpl")

    async def _read(self, request: web.Request, kind: type[Any]) -> Any:
        """The request, checked; a page in a browser cannot send this content type without being allowed to."""
        if request.content_type != "application/json":
            raise Refusal(f"content type {request.content_type!r}: send application/json", status=415)
        try:
            body = json.loads(await request.text())
        except (ValueError, RecursionError) as error:
            raise Refusal(f"the body is no JSON: {error}") from None
        asked = read(kind, body)
        self._known(asked.model)
        top = asked.alternatives or 0
        if top > self.served.vocabulary:
            raise Refusal(
                f"{top} alternatives of {self.served.vocabulary} tokens: ask for fewer",
                param="top_logprobs" if kind is ChatRequest else "logprobs",
            )
        for param in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if unknown := [i for i in getattr(asked, param) or () if not 0 <= i < self.served.vocabulary]:
                raise Refusal(f"{param}: {unknown[:5]} are no tokens of this model (0..{self.served.vocabulary - 1})", param=param)
        return asked

    def _prompt(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            return self._ids(prompt, "prompt")
        most = self.served.vocabulary - 1
        if max(prompt) > most:
            raise Refusal(f"prompt: token id {max(prompt)}, and the model has 0..{most}: use its own tokenizer", param="prompt")
        return self._fits(np.array(prompt, np.int32), "prompt")

    def _ids(self, content: Any, param: str) -> np.ndarray:
        """A prompt as a rollout would show it to the policy."""
        try:
            ids = self.served.renderer.prompt(content)
        except PosttrainError as error:
            raise Refusal(str(error), param=param) from None
        except Exception as error:  # a tokenizer raises what it likes, such as at a character it has no token for
            raise Refusal(f"{param}: the tokenizer does not read this text ({error})", param=param) from None
        return self._fits(ids, param)

    def _fits(self, ids: np.ndarray, param: str) -> np.ndarray:
        context = self.served.sampler.context
        if len(ids) >= context:
            raise Refusal(
                f"{param}: {len(ids)} tokens leave no room to answer in a context of {context}; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        return ids

    def _contract(self, asked: Asked, length: int) -> Sampling:
        """The contract of one answer to a prompt of `length` tokens."""
        try:
            return asked.sampling(self.served.renderer.stop_ids, self.served.sampler.context - length)
        except PosttrainError as error:
            raise refusal_of(error) from None

    async def _answer(self, request: web.Request, asked: Asked, prompts: Sequence[np.ndarray], kind: str) -> web.StreamResponse:
        s = self.served
        queue: asyncio.Queue[Told | None] = asyncio.Queue()
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        choices: list[Choice] = []
        for ids in prompts:
            sampling = self._contract(asked, len(ids))
            for i in range(asked.n):
                choice = Choice(len(choices), ids, sampling, seeds.key(seed, "serve", i), s.words)
                if asked.stream:
                    choice.told = lambda piece, c=choice: queue.put_nowait((c, piece))
                choices.append(choice)
        shape = Shape(asked, s.words, f"{kind}-{secrets.token_hex(12)}", s.name, s.fingerprint)
        work = asyncio.create_task(self._say(choices, queue))
        self.running.add(work)
        try:
            if asked.stream:
                return await self._stream(request, shape, choices, queue, work)
            await work
            scores = None
            if isinstance(asked, CompletionRequest) and asked.prompt_logprobs is not None:
                scores = {id(ids): await s.sampler.score(ids) for ids in prompts}
            return web.json_response(shape.whole(choices, scores))
        finally:
            work.cancel()
            self.running.discard(work)

    async def _say(self, choices: Sequence[Choice], queue: asyncio.Queue[Told | None]) -> None:
        """All choices at once; the first failure ends the others and is raised as itself."""

        async def one(choice: Choice) -> None:
            await choice.run(self.served.sampler.generate)
            queue.put_nowait((choice, None))

        try:
            async with asyncio.TaskGroup() as group:
                for choice in choices:
                    group.create_task(one(choice))
        except* PosttrainError as many:
            raise refusal_of(_first(many)) from None

    async def _stream(
        self,
        request: web.Request,
        shape: Shape,
        choices: Sequence[Choice],
        queue: asyncio.Queue[Told | None],
        work: asyncio.Task[None],
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"})
        await response.prepare(request)

        async def send(event: str) -> None:
            await response.write(f"data: {event}\n\n".encode())

        for choice in choices:
            await send(json.dumps(shape.first(choice)))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        while (told := await queue.get()) is not None:
            choice, piece = told
            await send(json.dumps(shape.next(choice, piece or Piece(), choice.finish if piece is None else None)))
        try:
            await work
        except Refusal as refusal:
            await send(json.dumps(refusal.body()))
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            await send(json.dumps(Refusal("the server is stopping", status=503).body()))
        else:
            if (options := shape.request.stream_options) and options.include_usage:
                await send(json.dumps(shape.last(choices)))
            await send("[DONE]")
        await response.write_eof()
        return response


@web.middleware
async def _spoken(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every refusal as JSON, aiohttp's own included."""
    try:
        return await handler(request)
    except Refusal as refusal:
        headers = {"WWW-Authenticate": "Bearer"} if refusal.status == 401 else None
        return web.json_response(refusal.body(), status=refusal.status, headers=headers)
    except web.HTTPException as error:
        text = f"{request.method} {request.path}: {error.reason}"
        if error.status == 404:
            text += "; served are GET /health, /v1/models, POST /v1/completions, /v1/chat/completions"
        kept = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
        return web.json_response(Refusal(text, status=error.status).body(), status=error.status, headers=kept)
    except Exception:
        log.exception("%s %s", request.method, request.path)
        text = "a bug in the server, whose log has the traceback"
        return web.json_response(Refusal(text, status=500).body(), status=500)


def _first(many: BaseExceptionGroup[Any]) -> Any:
    cause: Any = many
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    return cause


def _local(host: str) -> bool:
    """Whether a Host header names this machine, so that a page whose name was made to point here is not served."""
    name = host.rpartition(":")[0] if host.count(":") == 1 or host.rpartition(":")[0].endswith("]") else host
    name = name.strip("[]").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"
