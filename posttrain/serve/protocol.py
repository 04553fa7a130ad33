"""Requests of OpenAI's API, and the sampling contract of each. Unknown fields are refused by name.

Extensions have vLLM's names: `top_k`, `min_p`, `repetition_penalty`, `min_tokens`, `allowed_token_ids`,
`stop_token_ids`, `ignore_eos`, `return_token_ids`, `return_tokens_as_token_ids`, `prompt_logprobs`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, model_validator

from posttrain.core.content import Content, content_of, unread
from posttrain.core.sampling import LARGEST, Sampling
from posttrain.core.types import Message
from posttrain.serve.refusal import Refusal
from posttrain.serve.response_format import RequestPart, ResponseFormat
from posttrain.serve.served_tools import MOST_TOOLS, PastCall, ToolRequest
from posttrain.system.errors import DataError, nearest

MOST_CHOICES = 1024
"""Most answers to one request, over all its prompts."""
MOST_STOPS = 16
"""Most stop strings of a request."""
MOST_TOP = 20
"""Most alternatives shown beside a token."""
COLDEST, HOTTEST = 0.01, 100.0
"""Temperatures served beside 0; colder ones overflow the logits in float32."""
WEAKEST = 0.01
"""Smallest repetition penalty served; the largest is its inverse."""

Tokens = list[int]


class StreamOptions(RequestPart):
    """Options of a stream. `include_usage`: send a last chunk with the token counts."""

    include_usage: bool = False


def _one_or_many(stop: Any) -> Any:
    """Stop strings as a list: one string, a list of them, or null."""
    if isinstance(stop, list) and len(stop) > MOST_STOPS:
        raise ValueError(f"{len(stop)} stop strings, and at most {MOST_STOPS} are looked for")
    return [stop] if isinstance(stop, str) else [] if stop is None else stop


DECIMAL = re.compile(r"0|[1-9][0-9]{0,17}")
"""A token id as a key of JSON, with one spelling for each number: `17`, and not `017`."""


def _by_id(bias: Any) -> Any:
    """Convert the keys to token ids; in JSON they are text: `{"17": -2}`."""
    if not isinstance(bias, dict) or not all(isinstance(k, str) and DECIMAL.fullmatch(k) for k in bias):
        raise ValueError('logit_bias is an object from token ids to numbers, such as {"17": -2.5}')
    # Two keys cannot become one id: DECIMAL allows one spelling of each number.
    by_id = {int(k): x for k, x in bias.items()}
    out_of_range = next((k for k, x in by_id.items() if type(x) not in (int, float) or not -100 <= x <= 100), None)
    # A wrong entry goes on alone, so that pydantic gives one error for it, however many are wrong.
    return by_id if out_of_range is None else {out_of_range: by_id[out_of_range]}


# With `fail_fast` a list of a million wrong entries gives one error and not a million.
Ids = Annotated[list[int], Field(fail_fast=True)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopTexts = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], BeforeValidator(_one_or_many)]


class GenerationRequest(RequestPart):
    """Fields of both kinds of request."""

    model: str
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float = Field(1.0, ge=0, le=HOTTEST, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=LARGEST)
    min_p: float = Field(0.0, ge=0, lt=1)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_by_id)] = Field({})
    allowed_token_ids: Ids | None = None
    min_tokens: int = Field(0, ge=0, le=LARGEST)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopTexts = Field([])
    stop_token_ids: Ids = Field([])
    ignore_eos: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat = ResponseFormat(type="text")
    user: str | None = None
    """The caller's name for its user; it has no effect."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # Rules that need more than one field, or a range with a gap, cannot be written at the field.
        if 0 < self.temperature < COLDEST:
            raise ValueError(f"temperature must be 0 (the most probable token) or lie in [{COLDEST}, {HOTTEST:g}]")
        if self.repetition_penalty < WEAKEST:
            raise ValueError(f"repetition_penalty must lie in [{WEAKEST}, 100]")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only read with stream=true")
        if self.stream and self.response_format.type != "text":
            raise ValueError("an answer of a response_format is known when it is whole: leave stream out")
        return self

    @property
    def alternatives(self) -> int | None:
        """Number of alternatives to return per token; None: no log-probs at all."""
        raise NotImplementedError

    def limit(self, room: int) -> int:
        """Most tokens of an answer, where the context leaves `room`."""
        raise NotImplementedError

    def sampling(self, stops: Sequence[int], room: int) -> Sampling:
        """The contract of one answer. `stops` are the model's own stop ids."""
        # Temperature 0 means the most probable token. The logits are not divided by it, and truncation does not change
        # the result.
        greedy = self.temperature == 0
        alternatives = self.alternatives
        return Sampling(
            temperature=1.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            top_k=0 if greedy else max(self.top_k, 0),  # -1 and 0 both mean: all tokens
            min_p=0.0 if greedy else self.min_p,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            allowed_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            stop=tuple(self.stop),
            greedy=greedy,
            # A greedy token has log-prob 0 under the distribution it was taken from. The model's own is that of the
            # most probable alternative (`Choice._take`), so one is asked for.
            top=0 if alternatives is None else max(alternatives, int(greedy)),
            max_tokens=self.limit(room),
            # Each id once, the model's own first.
            stop_ids=tuple(dict.fromkeys((*(() if self.ignore_eos else stops), *self.stop_token_ids))),
        )


def _prompt(prompt: Any) -> Any:
    """A string, token ids, or a list of either, as a list of prompts."""
    if isinstance(prompt, str) or _ids(prompt):
        return [prompt]
    if isinstance(prompt, list) and prompt and (all(isinstance(p, str) for p in prompt) or all(map(_ids, prompt))):
        return prompt
    raise ValueError(
        "prompt must be a string, a list of token ids, or a non-empty list of strings or of lists of token ids"
    )


def _ids(x: Any) -> bool:
    """Returns whether a value is a non-empty list of token ids."""
    # The exact type is compared, because True would be the token 1.
    return isinstance(x, list) and len(x) > 0 and all(type(i) is int and 0 <= i < 2**31 for i in x)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[list[str | Tokens], BeforeValidator(_prompt)]
    max_tokens: int = Field(16, ge=1, le=LARGEST)
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    prompt_logprobs: int | None = Field(None, ge=0, le=0)
    """0: the log-probs of the prompt's own tokens, at temperature 1."""

    @model_validator(mode="after")
    def _few(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs come with a whole answer only: leave stream out")
        # `n` has a bound of its own, but every prompt has `n` answers, so the product is bounded too.
        if self.n * len(self.prompt) > MOST_CHOICES:
            raise ValueError(
                f"n={self.n} answers to {len(self.prompt)} prompts are more than {MOST_CHOICES}; send several requests"
            )
        return self

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    def limit(self, room: int) -> int:
        return self.max_tokens


def _content(given: Any) -> Content:
    """The content of a message; ValueError if it is neither text nor parts of text."""
    try:
        content = content_of(given)
    except DataError as error:
        raise ValueError(str(error)) from None
    if why := unread(content):
        raise ValueError(why)
    return content


class ChatMessage(RequestPart):
    """One message. The model's chat template decides which roles are valid."""

    role: str
    content: Annotated[Any, BeforeValidator(_content)]
    """Text, or parts of text, as the model's chat template reads them (`core.content`)."""
    name: str | None = Field(None, max_length=256)
    tool_calls: list[PastCall] = Field(default=[], max_length=MOST_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, message: Any) -> Any:
        # Clients send back what they received, such as `refusal: null`: null is the same as a field that is not there.
        # A message with calls may have no content.
        if not isinstance(message, Mapping):
            return message
        fields = {k: v for k, v in message.items() if v is not None}
        if fields.get("role") == "assistant" and fields.get("tool_calls"):
            fields.setdefault("content", "")
        return fields

    def plain(self, arguments_as_text: bool = False) -> Message:
        message = Message(role=self.role, content=self.content)
        if self.name is not None:
            message["name"] = self.name
        if self.tool_calls:
            message["tool_calls"] = [c.plain(arguments_as_text) for c in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


class ChatRequest(GenerationRequest, ToolRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=LARGEST)
    max_completion_tokens: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)

    @model_validator(mode="after")
    def _read(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is only read with logprobs=true")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens and max_completion_tokens are two names of one number; send one")
        return self

    @property
    def alternatives(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self, room: int) -> int:
        # OpenAI's API has no default limit on a chat answer. Here it is the rest of the context. A prompt that leaves
        # no rest is refused when it is read (`Intake`).
        return self.max_completion_tokens or self.max_tokens or max(room, 1)


UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "presence_penalty": ((0,), "the log-prob contract has none"),
    "frequency_penalty": ((0,), "the log-prob contract has none"),
    "best_of": ((1,), "ask for n answers and choose among them"),
    "echo": ((False,), "completions ask for the prompt's log-probs with prompt_logprobs=0"),
    "bad_words": (([],), "a word has many spellings in tokens. Ban tokens with logit_bias={id: -100}"),
    "suffix": (("",), "text is only written at the end"),
    "tools": (([],), "tools belong to /v1/chat/completions"),
    "tool_choice": (("none",), "tools belong to /v1/chat/completions"),
    "functions": (([],), "name them in tools, which replaced it"),
    "function_call": (("none",), "send tool_choice, which replaced it"),
    "modalities": ((["text"],), "this server writes text"),
    "store": ((False,), "nothing is stored"),
}
"""Parameters of OpenAI's API that are not served: (the values without effect, which are accepted; why others are
refused)."""


def read(kind: type[Any], body: Any) -> Any:
    """A request from JSON. `Refusal` names the wrong field. null means the default, as in OpenAI's API."""
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    # Clients send parameters with values that have no effect, and these are accepted. Other values are refused.
    fields = {k: v for k, v in body.items() if v is not None}
    for name in [k for k in fields if k in UNSUPPORTED and k not in kind.model_fields]:
        neutral, why = UNSUPPORTED[name]
        # With best_of equal to n there is no choice among more answers, so it is accepted too.
        if fields[name] not in neutral and not (name == "best_of" and fields[name] == fields.get("n", 1)):
            raise Refusal(f"{name} is not supported: {why}. Leave it out", param=name, code="unsupported_parameter")
        del fields[name]
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[BaseModel], error: ValidationError) -> Refusal:
    """The first error of pydantic, as a sentence."""
    # All errors could be longer than the request, so the first is shown. The names of our validators are left out.
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    if first["type"] == "extra_forbidden":
        at_top = len(first["loc"]) == 1
        hint = nearest(place, sorted(kind.model_fields)) if at_top else "it is not read there"
        return Refusal(f"unknown parameter {place}: {hint}", param=place, code="unknown_parameter")
    if first["type"] == "missing":
        return Refusal(f"{place} is missing", param=place, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    return Refusal(f"{place}: {message}" if place else message, param=place or None, code="invalid_value")
