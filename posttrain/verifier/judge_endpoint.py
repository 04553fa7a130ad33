"""A judge at an OpenAI-compatible endpoint as a reward source: one answer at a time, by a rubric.

Equal questions are asked once. The verdict is `failed`, never a low score, where the endpoint is down, the answer has
another form, or the run has used up its calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.config.env import JudgeEndpoint, Reward
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.measure.equal_numbers import RESOLUTION
from posttrain.core.ports import Attempt
from posttrain.core.redact_secrets import redacted
from posttrain.core.types import Task
from posttrain.core.verdict import Judged, State, Verdict
from posttrain.system.concurrency import LoopThread
from posttrain.system.errors import ConfigError, EndpointError
from posttrain.verifier.discover import RemoteModel, discover
from posttrain.verifier.http_client import Endpoint, Patience
from posttrain.verifier.reward_source import CALLS
from posttrain.verifier.rubric import Rubric

TIMEOUT = 60.0
"""Default for the seconds that one try of a request may take."""
DRAWS = 3
"""How often a judgement is drawn until it has the form that was asked for."""
KEPT = 1 << 16
"""Most verdicts that are kept."""
SILENT = 30.0
"""Seconds without an answer after which a judge that has answered before counts as down."""
NO_CHAT = ". A model without a chat template is asked with judge.api=completions"
QUOTED = 200
"""Most characters of a reason, or of an answer without the right form, in a verdict."""


@dataclass(eq=False)
class RubricJudge:
    """A reward source that asks a judge at an endpoint, many questions at once, in a thread of its own. Its score is in
    [0, 1]."""

    name: str
    weight: float
    rubric: Rubric
    endpoint: Endpoint
    resolution: float = RESOLUTION
    calls: int = 0
    """Requests of the run so far. One that is resumed goes on from its record (`restore_call_counts`)."""
    _model: RemoteModel | None = None
    _kept: dict[bytes, asyncio.Task[Verdict]] = field(default_factory=dict[bytes, "asyncio.Task[Verdict]"])
    _counts: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    _retried: int = 0
    """Repeated tries of the endpoint that are in the gauge already."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: LoopThread = field(default_factory=lambda: LoopThread("posttrain-judge-endpoint"))

    @property
    def settings(self) -> JudgeEndpoint:
        return self.rubric.settings

    @staticmethod
    def of(reward: Reward) -> RubricJudge:
        """The judge of a reward. ConfigError: it has no rubric, or its key is absent or would go over plain http."""
        settings = reward.judge
        name = settings.name or ("heldout_judge" if reward.measured else "judge")
        patience = Patience(answer=reward.timeout or TIMEOUT, tries=4, longest=10.0)
        endpoint = Endpoint(
            reward.judge_url,
            name,
            key_env=settings.key_env,
            patience=patience,
            connections=settings.parallel,
            silent=SILENT,
        )
        resolution = RESOLUTION if reward.resolution is None else reward.resolution
        return RubricJudge(name, reward.weight, Rubric.of(settings), endpoint, resolution)

    def check(self, tasks: Sequence[Task]) -> None:
        """DataError where a task lacks a column that the rubric names."""
        self.rubric.check(tasks)

    async def __call__(self, attempt: Attempt) -> Judged:
        verdict = await self._thread.run(self._verdict(self.rubric.prompt(attempt)))
        return Judged(self.name, self.weight, redacted(verdict), resolution=self.resolution, by_model=True)

    def gauges(self) -> Gauges:
        """The number of all requests of the run. Since the last call: seconds of a judgement, repeated tries, and two
        shares of the verdicts: those that were known from before (`cached`), and those that failed."""
        # Requests run in a thread of their own, and gauges are read in the run's.
        with self._lock:
            taken, self._counts = self._counts, {}
        return {f"verifier/{self.name}/{n}": Gauge(*x) for n, x in {**taken, CALLS: (self.calls, 1)}.items()}

    def close(self) -> None:
        """Close the connections and stop the thread."""
        self._thread.close(self.endpoint.close)
        self._kept.clear()

    async def _verdict(self, prompt: str) -> Verdict:
        """The verdict about a question. If an equal question was judged, or is being judged, it has the same
        verdict."""
        # `_kept` holds asyncio tasks and not verdicts, so that equal questions that are asked at the same time wait for
        # one request. Its keys are hashes, because a prompt may be long.
        key = hashlib.blake2b(prompt.encode(errors="surrogatepass"), digest_size=16).digest()
        judging = self._kept.get(key)
        # A failure is not kept: the endpoint may be up again.
        if judging is not None and judging.done():
            lost = judging.cancelled() or judging.exception() or judging.result().state is State.FAILED
            if lost:
                judging = None
        self._count("cached", float(judging is not None))
        if judging is None:
            judging = self._kept[key] = asyncio.create_task(self._ask(prompt))
            while len(self._kept) > KEPT:
                # The oldest one is removed. A caller that waits for it still has its task.
                self._kept.pop(next(iter(self._kept)))
        # `shield`: an episode that is cancelled must not cancel the request that its siblings wait for.
        verdict = await asyncio.shield(judging)
        self._count("failed", float(verdict.state is State.FAILED))
        return verdict

    async def _ask(self, prompt: str) -> Verdict:
        """Asks the judge until its answer has the form that was asked for, at most `DRAWS` times."""
        begun, text = time.monotonic(), ""
        try:
            model = self._model = self._model or await self._look_up()
            for draw in range(DRAWS):
                # Checked for each draw, because each is a request that costs.
                if self.calls >= self.settings.calls:
                    return Verdict.failed(
                        "calls",
                        f"{self.name} was asked {self.calls:,} times, the most that judge.calls allows; raise it",
                    )
                self.calls += 1
                text = _text_of(await self.endpoint.post(*self._request(model, prompt, draw)))
                if (read := self.rubric.read(text)) is not None:
                    return Verdict.value(read[0], why=read[1][:QUOTED])
        except EndpointError as error:
            chat_refused = self.settings.api == "chat" and error.status in (400, 404)
            return Verdict.failed("outage", f"{error}{NO_CHAT if chat_refused else ''}")
        finally:
            self._count("seconds", time.monotonic() - begun)
            # The endpoint counts for all judgements that run at once. Whichever ends first adds what is new.
            retried, self._retried = self.endpoint.retried - self._retried, self.endpoint.retried
            self._count("retried", float(retried))
        wanted = f"{self.settings.answer} from {self.settings.low:g} to {self.settings.high:g}"
        return Verdict.failed("unreadable", f"{self.name} was asked for {wanted} and said {text[:QUOTED]!r}")

    async def _look_up(self) -> RemoteModel:
        """The model that the endpoint serves. ConfigError if it has to be named."""
        try:
            return await discover(self.endpoint, self.settings.model)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: set judge.model. {error}") from error

    def _request(self, remote: RemoteModel, prompt: str, draw: int) -> tuple[str, dict[str, Any]]:
        """(path, body). The first draw is the most probable answer; the later ones are drawn."""
        settings, chat = self.settings, self.settings.api == "chat"
        body: dict[str, Any] = {"model": remote.model, "temperature": min(draw, 1), "seed": draw}
        # OpenAI's newer models refuse `max_tokens` in chat, and compatible servers may not know the other name.
        body["max_completion_tokens" if chat and remote.dialect == "openai" else "max_tokens"] = settings.max_tokens
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        if settings.answer == "json":
            schema = {"name": "verdict", "strict": True, "schema": self.rubric.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ("/chat/completions" if chat else "/completions"), body

    def _count(self, name: str, value: float) -> None:
        """Adds a value to the sum of a gauge, and 1 to its count."""
        with self._lock:
            total, count = self._counts.get(name, (0.0, 0))
            self._counts[name] = (total + value, count + 1)


def _text_of(answer: Any) -> str:
    """The text of an answer's first choice; EndpointError where there is none."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
    except (KeyError, IndexError, TypeError):
        text = None
    if not isinstance(text, str):
        raise EndpointError("the judge's answer has no choice with a text", "judge")
    return text
