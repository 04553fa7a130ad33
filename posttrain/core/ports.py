"""The protocols through which rooms of one floor use each other. Each one is small."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from posttrain.core.abilities import Abilities
from posttrain.core.batch import Packed
from posttrain.core.conversation import PairRenderer as PairRenderer
from posttrain.core.exchange.expert_choices import Routers
from posttrain.core.exchange.scores import AdapterTrial, Odds, Reads, TokenScores
from posttrain.core.exchange.shards import Shard
from posttrain.core.gauge import Gauges, Step
from posttrain.core.sampling import Sampling
from posttrain.core.types import Episode, Message, SampledTurn, Stop, Task, Top
from posttrain.core.verdict import Judged
from posttrain.system.errors import InvariantError


class Sampler(Protocol):
    """An engine as the rollout uses it. Many `generate` calls run at once, and the engine batches what is ready."""

    @property
    def version(self) -> int:
        """Version of the weights that would sample the next token."""
        ...

    @property
    def keeps_sets(self) -> bool:
        """True where truncated draws are returned with their kept token sets."""
        ...

    @property
    def draws_by_place(self) -> bool:
        """True where the draw at position t of a turn can be repeated: inverse-CDF sampling, ids ascending, with the
        uniform number `seeds.uniforms(place, ...)[t]`."""
        ...

    @property
    def context(self) -> int:
        """Most tokens a sequence may have, prompt included."""
        ...

    async def generate(self, ids: np.ndarray, sampling: Sampling, place: int) -> SampledTurn:
        """Sample one turn after `ids` (int32 [T]), with the random numbers of `place`.

        Raises:
            DataError: the prompt is empty or too long.
        """
        ...

    async def score(self, ids: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probs of ids[1:], each given all tokens before it, at temperature 1 without truncation.
        It checks that the served weights are the ones that were sent."""
        ...

    async def load(self, version: int, tensors: Iterable[tuple[str, Any]]) -> str:
        """Load these named weights as `version`; returns the fingerprint of what is now served."""
        ...

    def gauges(self) -> Gauges:
        """Counters since the last call (tokens, positions computed and needed, occupancy...)."""
        ...

    def clock(self) -> Mapping[str, float]:
        """Seconds since the last call, by what they were spent on, such as `engine/step`. No digest covers them."""
        ...


class Scorer(Protocol):
    """A model that computes the log-prob of every spoken token, without gradient."""

    def score(self, packed: Packed) -> np.ndarray:
        """float32 [M], under `packed.sampling`."""
        ...

    def fingerprint(self) -> str:
        """Exact digest of its weights."""
        ...


class Examiner(Scorer, Protocol):
    """A scorer that also computes properties of the whole next-token distribution."""

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
    """A frozen model that the policy is compared with: a copy of the weights, or the policy without its adapter."""

    @property
    def digest(self) -> str:
        """The fingerprint it had when it was made. A run compares it with `fingerprint()` as long as it uses it."""
        ...


class Learner(Examiner, Protocol):
    """The model that is trained. It owns the modules; the trainer owns the optimizer and calls backward()."""

    @property
    def computes_once(self) -> bool:
        """True where the learner computes a beginning once that several segments of a pass share."""
        ...

    def forward(self, packed: Packed, reads: Reads = Reads()) -> TokenScores:
        """Differentiable scores of one micro-batch: what `reads` asks for."""
        ...

    def rewards(self, packed: Packed) -> np.ndarray:
        """float32 [S]: the reward head's score of each segment, without gradient."""
        ...

    def examine(self, packed: Packed, names: Collection[str]) -> Mapping[str, np.ndarray]:
        """Returns the results of the learner's methods of these `names` (score, value, entropy, energy), from one pass
        of the layers."""
        ...

    def value(self, packed: Packed) -> np.ndarray:
        """float32 [M]: the value head's estimate before each spoken token, without gradient."""
        ...

    def collision(self, packed: Packed) -> np.ndarray:
        """float32 [M]: the probability that two draws at each spoken position are the same token, without gradient."""
        ...

    def odds(self, packed: Packed, temperatures: Sequence[float] = ()) -> Odds:
        """Returns how probable each spoken token is in the distribution it was drawn from."""
        ...

    def exact(self, packed: Packed) -> np.ndarray | None:
        """float64 [M]: log-probs from a float64 copy of the weights, made for this call; None where it is too large."""
        ...

    def parameters(self) -> Mapping[str, Any]:
        """Trainable parameters by name (value head included, under `value_head.`), in a fixed order."""
        ...

    def shards(self) -> Iterable[Shard]:
        """The policy's weights in this process, under the names of the Hugging Face module. Tied weights come once.

        A learner on several ranks gives only this rank's parts, any other learner one whole shard per weight. With an
        adapter, the adapter's tensors are enough. `fingerprint` is that of the whole tensors, however they are cut.
        """
        ...

    def adapter(self) -> AdapterTrial | None:
        """Returns the trial of the adapter; None where all weights train."""
        ...

    def routers(self) -> Routers | None:
        """The routers of a mixture of experts; None for another model, or where they are not understood."""
        ...

    def packed_score(self, packed: Packed) -> np.ndarray:
        """float32 [M]: as `score`, but always by the learner's own forward pass."""
        ...

    def price(self, packed: Packed) -> float | None:
        """Seconds of `score` divided by those of `packed_score`, with `exact=true`, where `score` is the
        sampler's pass. None without it."""
        ...

    def train_mode(self, on: bool) -> None:
        """Turn dropout and gradient checkpointing on or off. Scoring always runs with both off."""
        ...


class Transport(Protocol):
    """Sends weights from a learner to a sampler: in this process, by shared memory, by a collective, or by a file."""

    async def send(self, version: int, shards: Iterable[Shard], sampler: Sampler) -> str:
        """Make the sampler serve these weights as `version`; returns the fingerprint of what it then serves.

        Raises:
            InvariantError: parts of a weight are missing, came twice, or do not fit together.
        """
        ...


class TaskSource(Protocol):
    """Tasks by index. `count` is None where tasks are generated without limit."""

    @property
    def count(self) -> int | None: ...

    def task(self, index: int) -> Task: ...


@dataclass(frozen=True)
class Utterance:
    """One turn of the policy, as an environment gets it. `text` has no stop token; a stop string stays in it."""

    text: str
    stop: Stop
    tokens: int
    opened: str = ""
    """The tag of a thought with which the prompt ends: the policy's text goes on after it."""


def _no_tokens(characters: int) -> int:
    """The `spoken_upto` of an attempt without tokens: it always raises."""
    raise InvariantError("an attempt written without tokens: no step of it has an end. Give Attempt a spoken_upto")


@dataclass(frozen=True)
class Attempt:
    """A finished episode, as a verifier gets it: all turns of the policy, the last of them also as `text`."""

    task: Task
    turns: tuple[str, ...]
    stop: Stop
    spoken_upto: Callable[[int], int] = _no_tokens
    """Number of spoken tokens up to a character of `text`. It gives the `end` of a verdict about a step."""
    state: Any = None
    """The environment's state at the end of the episode (`Talk.leave`), as plain data."""
    ids: tuple[int, ...] = ()
    """Ids of the tokens that the policy said, of all turns. Empty where an answer was written without tokens."""
    batched: bool = False
    """Whether the whole group is judged later by some sources (`Abilities.together`). Then `judge` leaves these out."""

    @property
    def text(self) -> str:
        return self.turns[-1] if self.turns else ""


class Seat(Protocol):
    """One speaker of an episode. The environment calls `see` and `say` on its own view of the conversation."""

    @property
    def format(self) -> str | None:
        """The format in which the speaker's chat template writes tool calls. None where posttrain reads none of it."""
        ...

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> None:
        """The environment writes: the prompt first, observations later. Text is encoded once, on its own. `tools` are
        JSON schemas of functions for the chat template; they belong to the prompt."""
        ...

    async def say(self, most: int | None = None) -> Utterance:
        """The speaker takes a turn, of at most `most` tokens where `Sampling` allows more. Limits on turns and tokens
        count all seats; where one leaves no tokens, the turn is empty and its stop reason names it."""
        ...


class Talk(Seat, Protocol):
    """The trained seat of an episode: the policy learns from its turns. The rollout implements it."""

    def seat(self, name: str) -> Seat:
        """Another speaker of this episode, such as a simulated user or an opponent. The same name gives the same one.

        It sees only what the environment passes to its `see`. The policy sees its turns only where the environment
        passes them on. Its turns are never learned from. `Rollout.players` sets who plays it; without players it is the
        policy itself.
        """
        ...

    def pay(self, source: str, score: float) -> None:
        """A reward for the last turn. It is a part of the outcome; turn-level credit places it at that turn."""
        ...

    def leave(self, state: Any) -> None:
        """Set the environment's state, plain data. Verifiers see the last one (`Attempt.state`); a record keeps it."""
        ...


class Dialogue(Protocol):
    """The encoder of one conversation: text or messages to ids to append, each once, and turns back to text."""

    @property
    def format(self) -> str | None:
        """See `Seat.format`."""
        ...

    @property
    def restarted(self) -> bool:
        """True where the last result of `see` begins a new sequence, because the chat template rewrote history."""
        ...

    def see(self, content: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> np.ndarray:
        """int32 ids of the prompt (first call, with special tokens exactly once) or of an observation."""
        ...

    def text(self, ids: np.ndarray) -> str:
        """The text of these ids, without the stop token."""
        ...

    def said(self, ids: np.ndarray) -> str:
        """Add the policy's turn to the conversation; returns its text, without the stop token."""
        ...


class Environment(Protocol):
    """A family of tasks and their judge. A class that derives from it inherits defaults for the optional methods."""

    @property
    def name(self) -> str: ...

    @property
    def train(self) -> TaskSource: ...

    @property
    def heldout(self) -> Sequence[Task]:
        """Fixed tasks, none of which is also in `train` (`Abilities.key` decides which tasks are the same)."""
        ...

    @property
    def abilities(self) -> Abilities:
        """What it can do beside playing and judging. A class that does not derive from this one writes `abilities =
        Abilities()`."""
        return Abilities()

    async def play(self, task: Task, talk: Talk) -> Stop:
        """Play one episode (see, say, see...) and return why it ended."""
        ...

    async def judge(self, attempt: Attempt) -> tuple[Judged, ...]:
        """One verdict per source. An outage is `failed`, never a low score."""
        ...

    def gauges(self) -> Gauges:
        """Queue and latency of its verifiers since the last call. No digest covers them: they depend on the machine."""
        return {}

    def close(self) -> None:
        """Stop the processes and connections of its verifiers."""
        return


class EpisodeJudge(Protocol):
    """A judge of finished episodes that reads their tokens, such as a reward model (`Rollout.judges`).

    Its verdicts are added to the environment's. A group comes in one call, so that a model can score it as one batch.
    Equal episodes are judged once and share the verdicts. Episodes that already failed are left out.
    """

    @property
    def name(self) -> str:
        """The source that the record names when the judge itself fails."""
        ...

    async def judge(self, episodes: Sequence[Episode]) -> Sequence[tuple[Judged, ...]]:
        """The verdicts about each episode, in order, at least one per episode. The tokens are in `Episode.segments`:
        prompt and turns, with `mask` True at spoken tokens.

        A verdict without `end` is about the whole episode. One with `end` and `paid` is a reward at that spoken token,
        counted from 1 over all segments. One with `end` alone scores a step. An outage is `failed` or an exception, and
        is tried again. A judge that computes for long uses a thread, because other episodes run on the same loop.
        """
        ...


class Tracker(Protocol):
    """Receives the numbers of a run (TensorBoard, W&B, trackio, the terminal)."""

    def log(self, step: Step) -> None: ...

    def say(self, line: str) -> None:
        """Show a line to people, such as what a stage is about to do or what a gauge means."""
        ...

    def close(self, summary: Mapping[str, float]) -> None: ...
