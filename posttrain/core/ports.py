"""Where rooms of one floor meet: small protocols, one verb each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posttrain.core.abilities import Abilities
from posttrain.core.batch import Packed
from posttrain.core.errors import InvariantError
from posttrain.core.gauge import Gauges, Step
from posttrain.core.sampling import Sampling
from posttrain.core.scores import Odds, TokenScores
from posttrain.core.shards import Shard
from posttrain.core.types import Episode, Message, Said, Stop, Task, Top
from posttrain.core.verdict import Judged


class Sampler(Protocol):
    """An engine as the rollout sees it. Many `generate` calls run at once; the engine batches whatever is ready."""

    @property
    def version(self) -> int:
        """Version of the weights that would say the next token."""
        ...

    @property
    def keeps_sets(self) -> bool:
        """Whether truncated draws come with their kept token sets."""
        ...

    @property
    def draws_by_place(self) -> bool:
        """Whether the token at position t of a turn is the one that `seeds.uniforms(place, ...)[t]` picks through the
        inverse of the cumulative distribution, ids ascending, so that anyone can draw it again."""
        ...

    @property
    def context(self) -> int:
        """Most tokens a sequence may have, prompt included."""
        ...

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> Said:
        """Continue int32 [T] `ids` by one turn, with random numbers that belong to `place`. Raises DataError for an
        empty or over-long prompt."""
        ...

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probs of ids[1:], each given all before it, at temperature 1 and with nothing cut. It
        shows that the weights being served are the ones that were sent; rollouts never need it."""
        ...

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Take these named weights as `version`; returns the fingerprint of what is now being served."""
        ...

    def gauges(self) -> Gauges:
        """Counters since the last call (tokens, positions computed and needed, occupancy...)."""
        ...

    def clock(self) -> Mapping[str, float]:
        """Seconds since the last call by what they were spent on, such as `engine/step`; apart, because no digest
        covers them."""
        ...


class Scorer(Protocol):
    """A forward-only model: the log-prob of every spoken token."""

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M], under `packed.sampling`."""
        ...

    def fingerprint(self) -> str:
        """Exact digest of the weights that score."""
        ...


class Examiner(Scorer, Protocol):
    """A scorer that also tells of whole next-token distributions."""

    def entropy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: entropy of the distribution each spoken token was drawn from."""
        ...

    def energy(self, packed: Packed) -> np.ndarray:
        """float32 [M]: |d log pi / d logits|^2 of each spoken token, 1 - 2 pi + sum_v pi_v^2, in [0, 2)."""
        ...

    def top(self, packed: Packed, k: int) -> Top:
        """The `k` most probable tokens at each spoken position (0: the whole vocabulary)."""
        ...


class Reference(Examiner, Protocol):
    """A frozen model that the policy is compared with. It may own its weights, or be the policy's own model with its
    adapter switched off."""

    @property
    def digest(self) -> str:
        """The fingerprint it had when it was made. A run compares it with `fingerprint()` as long as the reference is
        used."""
        ...


class Learner(Examiner, Protocol):
    """The model that trains, as the trainer sees it. It owns modules; the trainer owns the optimizer and backward()."""

    def forward(
        self,
        packed: Packed,
        *,
        entropy: bool,
        value: bool,
        candidates_MK: np.ndarray | None = None,
        head_only: bool = False,
    ) -> TokenScores:
        """Differentiable scores of one micro-batch; with `candidates_MK` also the log-probs of those tokens.
        `head_only` lets no gradient of the value reach the policy."""
        ...

    def value(self, packed: Packed) -> np.ndarray:
        """float32 [M]: the value head's estimate before each spoken token, without gradient."""
        ...

    def odds(self, packed: Packed, temperatures: Sequence[float] = ()) -> Odds:
        """Where each spoken token lies in the distribution it was drawn from."""
        ...

    def exact(self, packed: Packed) -> np.ndarray | None:
        """float64 [M]: log-probs by a float64 copy of the weights, made for this call; None where the model is too
        large for one."""
        ...

    def parameters(self) -> Mapping[str, Any]:
        """Trainable parameters by name (value head included, under `value_head.`), in a fixed order."""
        ...

    def shards(self) -> Iterable[Shard]:
        """The policy's weights as they lie here, under the names of the Hugging Face module, ties once.

        A learner in one process has one whole shard a weight. A learner that is one of several has its own parts. Of an
        adapter over weights that never move, the adapter's tensors are all that has to travel. `fingerprint` is that of
        the whole tensors however they are cut.
        """
        ...

    def train_mode(self, on: bool) -> None:
        """Dropout and checkpointing on or off; scoring is always off."""
        ...


class Transport(Protocol):
    """The way of weights from a learner to a sampler: in this process, by shared memory, by a collective, by a file."""

    async def send(self, version: int, shards: Iterable[Shard], sampler: Sampler) -> str:
        """Let the sampler serve these weights as `version`; the fingerprint of what it then serves.

        Raises:
            InvariantError: parts of a weight are missing, came twice, or do not fit together.
        """
        ...


class TaskSource(Protocol):
    """Tasks by index. `count` is None where tasks are generated without end."""

    @property
    def count(self) -> int | None: ...

    def task(self, index: int) -> Task: ...


@dataclass(frozen=True)
class Utterance:
    """One turn of the policy as an environment sees it. `text` is without the stop token; a stop string stays in it."""

    text: str
    stop: Stop
    tokens: int


def _no_tokens(characters: int) -> int:
    raise InvariantError(
        "this attempt was written without tokens, so a verdict about a step has no end in it: give Attempt a"
        " spoken_upto"
    )


@dataclass(frozen=True)
class Attempt:
    """A finished episode as a verifier sees it: all turns of the policy, and the last one as `text`."""

    task: Task
    turns: tuple[str, ...]
    stop: Stop
    spoken_upto: Callable[[int], int] = _no_tokens
    """Spoken tokens up to a character of `text`: the `end` of a verdict about a step."""
    state: Any = None
    """The world as the episode left it (`Talk.leave`): plain data."""

    @property
    def text(self) -> str:
        return self.turns[-1] if self.turns else ""


class Seat(Protocol):
    """One speaker of an episode: an environment's two verbs over that speaker's own view of the conversation."""

    @property
    def format(self) -> str | None:
        """The format in which the speaker's chat template writes tool calls. None where there is no template, or none
        we read."""
        ...

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """The world writes: the prompt first, observations later. Text is encoded once, on its own. `tools` are JSON
        schemas of functions for the chat template, and belong to the prompt."""
        ...

    async def say(self, most: int | None = None) -> Utterance:
        """The speaker takes a turn, of at most `most` tokens where the contract allows more. Where a limit leaves it
        none, nothing is said, and the utterance names the limit as its stop reason. Limits on turns and tokens count
        all seats of the episode."""
        ...


class Talk(Seat, Protocol):
    """The trained seat of an episode: what it says is learned from. The rollout implements it."""

    def seat(self, name: str) -> Seat:
        """Another speaker of this episode, such as a simulated user or an opponent; the same one for the same name.

        It sees only what it is shown, and what it says reaches the policy only where the environment shows it. Nothing
        of it is learned from. The rollout says who plays it (`Rollout.players`): the policy itself where no players are
        given.
        """
        ...

    def pay(self, source: str, score: float) -> None:
        """A reward for the turn just said: a part of the outcome, which credit that knows turns places at that turn."""
        ...

    def leave(self, state: Any) -> None:
        """What the world is like now, as plain data: the last word before the episode ends is what verifiers see
        (`Attempt.state`) and the record keeps."""
        ...


class Dialogue(Protocol):
    """One conversation's encoder: text or messages to the ids to append, once; what was said, as text."""

    @property
    def format(self) -> str | None:
        """See `Talk.format`."""
        ...

    @property
    def restarted(self) -> bool:
        """Whether what `see` returned last begins a new sequence, because the chat template wrote history anew."""
        ...

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 ids of the prompt (first call, special tokens included exactly once) or of an observation."""
        ...

    def text(self, ids: np.ndarray) -> str:
        """What these ids say, without the stop token."""
        ...

    def said(self, ids: np.ndarray) -> str:
        """Take note of the policy's turn; its text, without the stop token."""
        ...


class PairRenderer(Protocol):
    """Demonstrations as tokens."""

    def pair(self, prompt: str | Sequence[Message], completion: str, task: str = "") -> tuple[np.ndarray, np.ndarray]:
        """(prompt ids, completion ids ending in exactly one stop token), int32. The task is named in errors."""
        ...

    def completion_ids(self, text: str, *, chat: bool = False, task: str = "") -> np.ndarray:
        """int32 ids of one demonstrated turn, ending in exactly one stop token: that of a `chat`, or of plain text."""
        ...


class Environment(Protocol):
    """A family of tasks and their judge. A class may derive from it, and then inherits what it cannot do."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> TaskSource: ...

    @property
    def heldout(self) -> Sequence[Task]:
        """Fixed tasks that share no prompt (up to the environment's notion of sameness) with `train`."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What it can do beside playing and judging; whoever needs one of them reads it here. A class that does not
        derive from this one writes `abilities = Abilities()`."""
        return Abilities()

    async def play(self, task: Task, talk: Talk) -> Stop:
        """Run one episode: see, say, see... and return why it ended."""
        ...

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """One entry per source. An outage is `failed`, never a low score."""
        ...

    def gauges(self) -> Gauges:
        """Queue and latency of its verifiers since the last call: facts of the machine, which no digest covers."""
        return {}

    def close(self) -> None:
        """End what the verifiers keep running."""
        return


class EpisodeJudge(Protocol):
    """A judge of finished episodes that reads their tokens, such as a reward model.

    Its verdicts stand beside the environment's. It is given to the rollout (`Rollout.judges`). The episodes of a group
    come in one call, so that a model can score them as one batch. Those that say the same come once and share the
    verdicts. Those that already failed do not come.
    """

    @property
    def name(self) -> str:
        """The source that the record names where the judge itself breaks."""
        ...

    async def judge(self, episodes: Sequence[Episode]) -> Sequence[tuple[Judged, ...]]:
        """The verdicts about each episode, in order, at least one. The tokens are in `Episode.segments`: prompt and
        turns, `mask` True where the policy spoke.

        A verdict without `end` is about the whole episode. One with `end` and `paid` is a reward at that spoken token,
        counted from 1 over all segments. One with `end` alone is an opinion of a step. An outage is `failed` or raises,
        and is asked again. A judge that computes for long does so in a thread, because other episodes run on the same
        loop.
        """
        ...


class Tracker(Protocol):
    """Somewhere else that wants the numbers (TensorBoard, W&B, trackio, the terminal)."""

    def log(self, step: Step) -> None: ...

    def say(self, line: str) -> None:
        """A line for people: what a stage is about to do, what a gauge means."""
        ...

    def close(self, summary: Mapping[str, float]) -> None: ...
