"""The sampling contract: every number that decides which distribution a token was drawn from.

The sampler draws under it, the segment stores it, and the learner evaluates pi under the same transform. The model's
logits z (with the model's own scale and soft-cap) are changed in this order:

    1. z_i += logit_bias_i
    2. repetition penalty p (CTRL, arXiv 1909.05858, section 4.1), for every token i that stands before this one in the
       sequence, prompt and earlier turns included: z_i * p where z_i < 0, else z_i / p
    3. bans, z_i = -inf: what is not in allowed_ids; the last token of a bad sequence whose earlier tokens have just
       been sampled; stop ids at the first min_tokens positions of the turn
    4. z / temperature
    5. top-k, then top-p, then min-p, each on the distribution the previous one left
    6. what is left is renormalised

A stored log-prob is that of this final distribution. transformers and vLLM have steps 1-4 in the same order (bans
commute with the rest). greedy takes the argmax after step 3.

Steps 1-3 depend only on the contract and on token ids, so the learner computes them again. The sets that step 5 keeps
depend on comparisons of floats, so the sampler stores them (`truncated`). What ends a turn (stop strings, max_tokens)
changes no probability.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from posttrain.system.errors import ConfigError

LEAST, MOST = 1e-6, 1e6
"""Smallest and largest temperature and repetition penalty. MOST is also the largest bias. Within these limits all
results are finite in float32."""
LARGEST = 2**31 - 1
"""Largest token id, token count and other count of a contract, because engines store these in 32 bits."""
Spell = Callable[[str], Sequence[Sequence[int]]]
"""Maps a word to the token sequences in which a tokenizer writes it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings by which a turn is sampled. All fields are explicit. Those that depend on the tokenizer are resolved
    once, when the model is loaded (`resolve`)."""

    temperature: float = 1.0
    """Divides the logits. From 1e-6 to 1e6; use greedy=true for the argmax."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose total probability reaches this. 1 keeps all."""
    top_k: int = 0
    """Keep this many most probable tokens. 0 keeps all."""
    min_p: float = 0.0
    """Keep tokens with probability >= min_p * largest. 0 keeps all."""
    repetition_penalty: float = 1.0
    """Makes tokens that are already in the sequence less probable (> 1) or more (< 1). From 1e-6 to 1e6; 1: off."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token id and a number that is added to its logit (at most 1e6 up or down), each id once. On the
    command line `17:-2.5,3:1`."""
    allowed_ids: tuple[int, ...] | None = None
    """Only these token ids can be sampled. None: all. Without a stop id among them a turn ends by length alone."""
    allowed_words: tuple[str, ...] = ()
    """Only the tokens of these words, and the stop ids, can be sampled. Added to allowed_ids at load."""
    bad_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that a turn cannot contain. A sequence counts only within one turn: it cannot begin in the
    prompt. On the command line `[[5], [7, 8]]`; `5,6` are two sequences of one token."""
    bad_words: tuple[str, ...] = ()
    """Words that a turn cannot contain, as the tokenizer writes them alone and after a space. Added to bad_ids at load.
    The same letters in other tokens are not caught."""
    top: int = 0
    """Also store the log-probs of this many most probable tokens with every sampled token. The algorithm sets it where
    it reads them."""
    greedy: bool = False
    """Take the most probable token. For evaluation only: it has no log-prob to learn from."""
    max_tokens: int = 64
    """Most tokens sampled in one turn; reaching it is stop reason `length`."""
    min_tokens: int = 0
    """Least tokens of a turn before the token that ends it. Stop ids cannot be sampled earlier, and stop strings do not
    end the turn earlier."""
    stop_ids: tuple[int, ...] | None = None
    """Token ids that end a turn (they are part of the turn, and count).
    None: not resolved yet. (): never stop early."""
    stop: tuple[str, ...] = ()
    """Texts that end a turn, with stop reason `string`. The token that completes one is part of the turn, and counts.
    On the command line `stop=;` or, with spaces, commas or escapes, `stop=["\\n\\n"]`."""

    def __post_init__(self) -> None:
        span = f"[{LEAST:g}, {MOST:g}]"
        for name, good, says in (
            ("temperature", LEAST <= self.temperature <= MOST, f"{span} (for the argmax set greedy=true)"),
            ("top_p", 0 < self.top_p <= 1, "(0, 1]"),
            ("min_p", 0 <= self.min_p < 1, "[0, 1)"),
            ("repetition_penalty", LEAST <= self.repetition_penalty <= MOST, f"{span} (1: off)"),
        ):
            if not good:
                raise ConfigError(f"sampling.{name}={getattr(self, name)}: must lie in {says}")
        for name, least, what in (
            ("top_k", 0, "0 keeps all tokens"),
            ("top", 0, "0 stores the said token alone"),
            ("max_tokens", 1, "a turn says something"),
            ("min_tokens", 0, "0: a turn may end at once"),
        ):
            if not least <= getattr(self, name) <= LARGEST:
                raise ConfigError(
                    f"sampling.{name}={getattr(self, name)}: must be >= {least} and at most {LARGEST} ({what})"
                )
        if self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"sampling.min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}: lower it, or raise"
                " that"
            )
        self._check_ids()
        for name in ("stop", "bad_words", "allowed_words"):
            if not all(getattr(self, name)):
                raise ConfigError(f"sampling.{name}: an empty text is in every text; leave it out")
        # A turn is decoded token by token, and half a character decodes to U+FFFD, which would end the turn.
        if any("\ufffd" in text for text in self.stop):
            raise ConfigError("sampling.stop: U+FFFD stands for bytes that are no character yet: leave it out")
        self._check_support()

    def _named_ids(self) -> dict[str, list[int]]:
        """The token ids that each setting names."""
        return {
            "stop_ids": [*(self.stop_ids or ())],
            "logit_bias": [i for i, _ in self.logit_bias],
            "allowed_ids": [*(self.allowed_ids or ())],
            "bad_ids": [i for sequence in self.bad_ids for i in sequence],
        }

    def _check_ids(self) -> None:
        """ConfigError where a token id, a bad sequence or a bias cannot be used."""
        biased = [i for i, _ in self.logit_bias]
        for name, ids in self._named_ids().items():
            if wrong := [i for i in ids if not 0 <= i <= LARGEST]:
                raise ConfigError(f"sampling.{name}: {wrong[0]} is no token id; ids are >= 0 and at most {LARGEST}")
        if not all(self.bad_ids):
            raise ConfigError("sampling.bad_ids: a sequence has no tokens; leave it out")
        if len(set(biased)) != len(biased):
            twice = next(i for i in biased if biased.count(i) > 1)
            raise ConfigError(f"sampling.logit_bias: token {twice} is listed twice; add the numbers up")
        if far := [(i, x) for i, x in self.logit_bias if not -MOST <= x <= MOST]:
            raise ConfigError(
                f"sampling.logit_bias: {far[0][1]} for token {far[0][0]} must be finite, at most {MOST:g} up or down;"
                " to ban a token put it into bad_ids"
            )

    def _check_support(self) -> None:
        """Checks that single bad tokens and early stop ids leave a token at every position. Where longer bad sequences
        leave none, which depends on what was said, the sampler refuses the request when it gets there."""
        if self.allowed_ids is None:
            return
        if not self.allowed_ids:
            raise ConfigError("sampling.allowed_ids is empty, so nothing could be said: list some ids, or none for all")
        # Only bans of one token hold at every position; a longer sequence bans its last token only sometimes.
        sayable = set(self.allowed_ids) - {s[0] for s in self.bad_ids if len(s) == 1}
        if not sayable:
            raise ConfigError(
                f"sampling: bad_ids ban all {len(set(self.allowed_ids))} of allowed_ids, so nothing could be said"
            )
        if self.min_tokens and not sayable - set(self.stop_ids or ()):
            raise ConfigError(
                f"sampling: only stop ids are allowed, and min_tokens={self.min_tokens} bans them at the start of a"
                " turn"
            )

    def __str__(self) -> str:
        """The fields that differ from the defaults, for messages; long lists are cut."""
        texts = [(f.name, repr(getattr(self, f.name))) for f in fields(self) if getattr(self, f.name) != f.default]
        short = [f"{name}={text if len(text) < 60 else text[:57] + '...'}" for name, text in texts]
        return f"Sampling({', '.join(short)})"

    @property
    def truncated(self) -> bool:
        """True where top-k, top-p or min-p cut the support, so that the kept sets must be stored."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def bans(self) -> bool:
        """True where a rule gives some tokens probability zero."""
        return self.allowed_ids is not None or bool(
            self.allowed_words or self.bad_ids or self.bad_words or self.min_tokens
        )

    @property
    def rules(self) -> bool:
        """True where any of steps 1 to 3, before the temperature, changes the logits."""
        return self.repetition_penalty != 1 or bool(self.logit_bias) or self.bans

    @property
    def in_turn(self) -> bool:
        """True where the distribution depends on a token's position in its turn, so that the position must be
        stored."""
        # A bad sequence of one token is banned everywhere. A longer one may
        # not begin before the turn, so it matters how far the turn has come.
        return self.min_tokens > 0 or bool(self.bad_words) or any(len(s) > 1 for s in self.bad_ids)

    @property
    def resolved(self) -> bool:
        """True where everything that depends on the tokenizer is filled in."""
        return self.stop_ids is not None and not self.bad_words and not self.allowed_words

    def resolve(self, stop_ids: tuple[int, ...], spell: Spell | None = None) -> Sampling:
        """The same contract with its stop ids filled in and its words as ids. A contract is resolved at most once.

        Args:
            spell: how the tokenizer writes a word; needed where the contract has words.
        """
        # A resolved contract stays as it is: resolving it again with other stop ids
        # would change a contract under which tokens were drawn already.
        if self.resolved:
            return self
        stops = tuple(stop_ids) if self.stop_ids is None else self.stop_ids
        if not self.bad_words and not self.allowed_words:
            return replace(self, stop_ids=stops)
        if spell is None:
            raise ConfigError(
                "sampling.bad_words and allowed_words need a tokenizer, and there is none here: give bad_ids and"
                " allowed_ids"
            )
        bad = _minimal([*self.bad_ids, *(tuple(ids) for word in self.bad_words for ids in spell(word))])
        allowed = self.allowed_ids
        if self.allowed_words:
            # Stop ids are allowed too: else a turn could end only by its length.
            word_ids = {i for word in self.allowed_words for ids in spell(word) for i in ids}
            allowed = tuple(sorted(word_ids | set(allowed or ()) | set(stops)))
        return replace(self, stop_ids=stops, bad_ids=bad, bad_words=(), allowed_ids=allowed, allowed_words=())

    def check_vocabulary(self, size: int) -> None:
        """Raises ConfigError where a token id lies outside a vocabulary of `size` tokens."""
        # -1 where no id is named: then every vocabulary is large enough.
        most = max([i for ids in self._named_ids().values() for i in ids], default=-1)
        if most >= size:
            raise ConfigError(
                f"sampling names token id {most}, and the model has 0..{size - 1}: correct stop_ids, allowed_ids,"
                " logit_bias or bad_ids"
            )

    def for_training(self, keeps_sets: bool = True) -> Sampling:
        """This contract; raises ConfigError where pi could not be evaluated under it.

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


def _minimal(sequences: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Each sequence once, without sequences that end in another one: what they ban is banned already."""
    # Where (7,) is banned, (5, 7) is banned already: its last token is never sampled.
    distinct = dict.fromkeys(sequences)
    return tuple(s for s in distinct if not any(s[-n:] in distinct for n in range(1, len(s))))
