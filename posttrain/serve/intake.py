"""Reads a request: its body, its fields and the ids of its prompts. Each step has a bound.

Bodies are parsed and texts tokenized outside the event loop, in two threads: one for small requests and one for large
ones, so that a small request does not wait for a large one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from aiohttp import web

from posttrain.core.content import shown
from posttrain.core.ports import Sampler
from posttrain.core.types import Message
from posttrain.environment.templates.chat_template import WEATHER
from posttrain.environment.templates.renderer import Renderer
from posttrain.serve.caller_limits import CallerLimits
from posttrain.serve.detokenize import TokenText
from posttrain.serve.protocol import ChatRequest, GenerationRequest, read
from posttrain.serve.refusal import Refusal
from posttrain.system.errors import PosttrainError
from posttrain.verifier.calling import FORMATS


@dataclass(frozen=True)
class ServedModel:
    """A served model with its engine, tokenizer and token."""

    sampler: Sampler
    renderer: Renderer
    words: TokenText
    vocabulary: int
    """Number of ids that the model has embeddings for."""
    name: str
    root: str
    """The target that the model was loaded from."""
    fingerprint: str
    token: str | None
    """The token callers must send; None: every caller on this machine is served."""
    created: int


SMALL = 64 << 10
"""Most bytes of a small request; larger ones are parsed one at a time."""
REST = 3.0
"""After a large request its thread sleeps this many times as long as that took: parsing JSON blocks other threads."""
SHORTEST = 16
"""Assumed number of bytes of the longest token, at least, when a text is refused by its length. A token for unknown
words, which many vocabularies have, may stand for a long word."""
# (the fields of a request, the ids of its prompts)
Understood = tuple[GenerationRequest, list[np.ndarray]]


class Intake:
    """Reads the requests of one server."""

    def __init__(self, served: ServedModel, limits: CallerLimits) -> None:
        self.served, self.limits = served, limits
        self._held = 0
        """Bytes of bodies that are being read or wait to be parsed."""
        # One thread each: parsing holds the interpreter's lock, so more would only leave less for the event loop.
        self._small, self._large = (ThreadPoolExecutor(1, thread_name_prefix="posttrain-serve") for _ in range(2))
        self._rests = 0.0
        """When the thread of large requests may go on, in seconds of `time.monotonic`."""
        # A text of more bytes does not fit into the context, even with the longest tokens.
        self._most = served.sampler.context * max(SHORTEST, served.words.longest)

    def close(self) -> None:
        for lane in (self._small, self._large):
            lane.shutdown(wait=False, cancel_futures=True)

    def check(self, request: web.Request) -> None:
        """Refuse by its headers a body that is not JSON in UTF-8, or is too long (413 or 415). A web page cannot send
        this content type to another site without its permission (CORS)."""
        try:
            # Reading these two parses the header, which may be any text and raise an error.
            kind, charset = request.content_type, (request.charset or "utf-8").lower()
        except ValueError:
            kind, charset = "unreadable", ""
        if kind != "application/json":
            raise Refusal(f"content type {kind!r}: send application/json", status=415)
        if charset not in ("utf-8", "utf8", "us-ascii"):
            raise Refusal(f"charset {charset!r}: send JSON in UTF-8", status=415)
        # A compressed body could be a thousand times as large as what was sent.
        coding = request.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise Refusal(f"content encoding {coding!r}: send the body as it is", status=415)
        # A body that is announced as too long is refused before it is read. `_body` finds a wrong or missing length.
        if (request.content_length or 0) > self.limits.body:
            self._refuse_body()

    async def read(self, request: web.Request, kind: type[GenerationRequest]) -> Understood:
        """The checked fields of a request, and the ids of its prompts."""
        body = await self._body(request)
        lane, work = (self._small, self.parse_request) if len(body) <= SMALL else (self._large, self._parse_large)
        job = asyncio.get_running_loop().run_in_executor(lane, work, body, kind)
        job.add_done_callback(lambda _: self._release(len(body)))
        return await job

    def _parse_large(self, body: bytes, kind: type[GenerationRequest]) -> Understood:
        """`parse_request` for a large request; only called in its thread."""
        time.sleep(max(0.0, self._rests - time.monotonic()))
        start = time.monotonic()
        try:
            return self.parse_request(body, kind)
        finally:
            now = time.monotonic()
            self._rests = now + REST * (now - start)

    def parse_request(self, body: bytes, kind: type[GenerationRequest]) -> Understood:
        """The checked fields and prompt ids of a body; runs in a thread."""
        # Cheap checks come first (fields, the model's name, ids), then templates and tokenizers, which take longer.
        fields: Any = read(kind, parse(body))
        self.known(fields.model)
        self._check_vocabulary(fields)
        if isinstance(fields, ChatRequest):
            return fields, [self._chat(fields)]
        return fields, [self._prompt(p) for p in fields.prompt]

    def known(self, name: str) -> None:
        """Refuse a model that is not served here."""
        if name != self.served.name:
            message = f"there is no model {name!r} here, only {self.served.name!r}"
            raise Refusal(message, status=404, param="model", code="model_not_found")

    async def _body(self, request: web.Request) -> bytes:
        """Read the whole body, within its time limit. Its bytes count as held until `_release`."""
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                async for chunk in request.content.iter_any():
                    body += chunk
                    self._held += len(chunk)
                    if len(body) > self.limits.body:
                        self._refuse_body()
                    # The limit for all callers together counts the bytes that have arrived, because a body may have no
                    # length.
                    if self._held > self.limits.bodies:
                        raise Refusal("too much is being sent at once; try again", status=503)
        except BaseException as error:
            # Every way out except the return releases the bytes, also a cancellation.
            self._release(len(body))
            if isinstance(error, TimeoutError):
                raise Refusal(f"the body was not complete after {self.limits.body_seconds:g} s", status=408) from None
            if isinstance(error, web.RequestPayloadError):
                raise Refusal(f"the body cannot be read ({error})") from None
            raise
        return bytes(body)

    def _release(self, size: int) -> None:
        self._held -= size

    def _refuse_body(self) -> NoReturn:
        """Refuse a body that is too long."""
        raise Refusal(
            f"the body is longer than {self.limits.body_mib:g} MiB, the limit body_mib of this server", status=413
        )

    def _check_vocabulary(self, asked: GenerationRequest) -> None:
        """Refuses ids that are no tokens of the model, and more alternatives than it has tokens."""
        top, most = asked.alternatives or 0, self.served.vocabulary
        if top > most:
            param = "top_logprobs" if isinstance(asked, ChatRequest) else "logprobs"
            raise Refusal(f"{top} alternatives of {most} tokens: ask for fewer", param=param)
        # An id beyond the embedding would raise an index error in the engine, in a batch with other callers.
        for param in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            if unknown := [i for i in getattr(asked, param) or () if not 0 <= i < most]:
                raise Refusal(f"{param}: {unknown[:5]} are no tokens of this model (0..{most - 1})", param=param)

    def _prompt(self, prompt: str | list[int]) -> np.ndarray:
        if isinstance(prompt, str):
            # JSON can hold half a surrogate pair, which has no UTF-8; here only its length counts.
            self._check_size(len(prompt.encode(errors="surrogatepass")), "prompt")
            return self._ids(prompt, "prompt")
        self._check_room(len(prompt), "prompt")
        most = self.served.vocabulary - 1
        if max(prompt) > most:
            raise Refusal(
                f"prompt: token id {max(prompt)}, and the model has 0..{most}: use its own tokenizer", param="prompt"
            )
        return np.array(prompt, np.int32)

    def _chat(self, asked: ChatRequest) -> np.ndarray:
        if not self.served.renderer.tokenizer.chat_template:
            raise Refusal(
                f"{self.served.name} has no chat template, so messages cannot be written for it: use /v1/completions,"
                " or serve a model whose tokenizer has a template",
                param="messages",
                code="no_chat_template",
            )
        # Every message has at least one token, so as many messages as the context has tokens leave no room. Their
        # number and the sizes of the texts are checked before the template runs.
        self._check_room(len(asked.messages), "messages", "messages")
        tools = asked.offered
        self._check_size(
            len(json.dumps(tools, ensure_ascii=False).encode(errors="surrogatepass")) if tools else 0, "tools"
        )
        calls = any(m.tool_calls for m in asked.messages)
        if tools:
            self._check_tools()
        messages = [m.plain(calls and self.served.renderer.template.arguments_as_text) for m in asked.messages]
        self._check_size(sum(_size(m) for m in messages), "messages")
        return self._ids(messages, "messages", tools)

    @cached_property
    def _tools_written(self) -> bool:
        """True where the chat template tells the policy of tools, and writes calls in a known format."""
        template, start = self.served.renderer.template, [Message(role="user", content="hi")]
        if template.format is None:
            return False
        # A template that ignores tools writes the same prompt with and without one.
        return template.render(start, generate=True, tools=[WEATHER]) != template.render(start, generate=True)

    def _check_tools(self) -> None:
        """Refuse tools for a model whose chat template does not write them, or writes calls in an unknown format."""
        if not self._tools_written:
            raise Refusal(
                f"tools: the chat template of {self.served.name} takes no tools, or writes calls in no known format"
                f" ({', '.join(FORMATS)}). Put them into the messages and parse the answer, or serve a model whose"
                " template takes tools",
                param="tools",
                code="no_tools",
            )

    def _ids(self, content: str | Sequence[Message], param: str, tools: Sequence[dict[str, Any]] = ()) -> np.ndarray:
        """The ids of a prompt, as a rollout would give them to the policy."""
        try:
            ids = self.served.renderer.prompt(content, tools=tools)
        except PosttrainError as error:
            raise Refusal(str(error), param=param) from None
        except Exception as error:  # a tokenizer may raise anything, for example at a character it has no token for
            raise Refusal(f"{param}: the tokenizer does not read this text ({error})", param=param) from None
        self._check_room(len(ids), param)
        return ids

    def _check_size(self, size: int, param: str) -> None:
        """Refuse a text that is too long by its bytes, before it is tokenized."""
        if size > self._most:
            self._refuse_full(param, f"{size:,} bytes", f" tokens, which {self._most:,} bytes fill at the least")

    def _check_room(self, length: int, param: str, what: str = "tokens") -> None:
        """Refuses a prompt of `length` tokens or messages that leaves no room to answer."""
        if length >= self.served.sampler.context:
            self._refuse_full(param, f"{length} {what}")

    def _refuse_full(self, param: str, what: str, more: str = "") -> NoReturn:
        """Refuse a prompt that fills the context. `what`: its size in words; `more`: the end of the sentence."""
        message = f"{param}: {what} leave no room to answer in a context of {self.served.sampler.context}{more}"
        raise Refusal(f"{message}; shorten it", param=param, code="context_length_exceeded")


def _size(message: Message) -> int:
    """Bytes of a message's texts, its calls included."""
    calls = json.dumps(message["tool_calls"], ensure_ascii=False) if "tool_calls" in message else ""
    texts = (message["role"], shown(message["content"]), message.get("name", ""), calls)
    return sum(len(x.encode(errors="surrogatepass")) for x in texts)


def parse(body: bytes) -> Any:
    """The JSON of a body. Refuses duplicate names in an object, and NaN and infinities."""
    try:
        return json.loads(body.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Refusal(f"the body is no UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise Refusal("the body is no JSON: it is nested too deeply") from None
    except ValueError as error:
        raise Refusal(f"the body is no JSON: {error}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object from its names and values. Refuses a name that is given twice."""
    # JSON readers differ on which of two equal names counts, so a proxy could check another value than is used here.
    values = dict(pairs)
    if len(values) < len(pairs):
        names: set[str] = set()
        repeated = next(k for k, _ in pairs if k in names or names.add(k))
        raise Refusal(f"{repeated!r} stands twice in one object: send it once", param=repeated)
    return values


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
