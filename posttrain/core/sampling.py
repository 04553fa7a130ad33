"""The log-prob contract: every number that decides which distribution a token was drawn from.

The sampler draws under it, the segment carries it, the learner evaluates pi under the same transform.
Order of the transform: logits / temperature, then top-k, then top-p, then min-p, each on the distribution the
previous one left; the kept tokens are renormalised. A stored log-prob is that of this final distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from posttrain.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a turn is sampled. All fields are explicit; `stop_ids` is None until resolved, once, at load."""

    temperature: float = 1.0
    """Divides the logits. Must be > 0; use greedy=true for the argmax."""
    top_p: float = 1.0
    """Smallest set of most probable tokens whose mass reaches this. 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens. 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens with probability >= min_p * largest. 0 keeps all."""
    top: int = 0
    """Also store the log-probs of this many most probable tokens with every token said. An algorithm that reads them asks for them."""
    greedy: bool = False
    """Take the most probable token. For evaluation only: it has no log-prob to learn from."""
    max_tokens: int = 64
    """Most tokens said in one turn; reaching it is stop reason `length`."""
    stop_ids: tuple[int, ...] | None = None
    """Token ids that end a turn (they are said, and count). None: not resolved yet. (): never stop early."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ConfigError(f"sampling.temperature={self.temperature}: must be > 0 (for the argmax set greedy=true)")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"sampling.top_p={self.top_p}: must lie in (0, 1]")
        if self.top_k < 0:
            raise ConfigError(f"sampling.top_k={self.top_k}: must be >= 0 (0 keeps all tokens)")
        if not 0 <= self.min_p < 1:
            raise ConfigError(f"sampling.min_p={self.min_p}: must lie in [0, 1)")
        if self.top < 0:
            raise ConfigError(f"sampling.top={self.top}: must be >= 0 (0 stores the said token alone)")
        if self.max_tokens < 1:
            raise ConfigError(f"sampling.max_tokens={self.max_tokens}: must be >= 1")

    @property
    def truncated(self) -> bool:
        """Whether some tokens may get probability zero, so that the kept sets must be stored."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    def resolve(self, stop_ids: tuple[int, ...]) -> Sampling:
        """The same contract with its stop ids filled in; a contract is resolved at most once."""
        return self if self.stop_ids is not None else replace(self, stop_ids=tuple(stop_ids))

    def for_training(self, keeps_sets: bool = True) -> Sampling:
        """This contract, or ConfigError where pi could not be evaluated under it.

        Args:
            keeps_sets: whether the engine stores the kept token set of each truncated draw.
        """
        if self.greedy:
            raise ConfigError("sampling.greedy=true cannot be trained on: an argmax has no log-prob. Set greedy=false")
        if self.truncated and not keeps_sets:
            raise ConfigError(
                "sampling truncates the support (top_p/top_k/min_p) but this engine does not store the kept sets, "
                "so pi cannot be evaluated on the distribution really sampled. Set top_p=1 top_k=0 min_p=0"
            )
        return self
