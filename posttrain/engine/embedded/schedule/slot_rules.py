"""Steps 1 to 3 of the log-prob contract (`core.sampling`) while tokens are drawn, for all slots at once.

`engine.head.logit_rules` computes the same for tokens that were said. Here every option is a column or a table with one
row per slot, so that a step runs no Python code per slot. A table is made when some slot first needs it. A slot's state
follows from its prompt and the tokens it said, so it can be made again after a preemption.

Axis letters: s a slot, B rows of a draw (each a slot, or a slot some tokens ahead), V vocabulary, K ids of the longest
list, W sequences, L tokens of the longest sequence without its last, D tokens ahead.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from posttrain.core.sampling import Sampling
from posttrain.engine.head.logit_rules import banned_always
from posttrain.system.errors import EngineError

INF = float("-inf")
NO_ID, ANY = -1, -2
"""Fillings of tables. NO_ID equals no token. ANY, in the table of bad sequences, fits every token."""
MASKS_KEPT = 16
"""Contracts whose masks over the vocabulary are cached. Where another one comes, all of them are dropped."""


class NoDraw(EngineError):
    """Nothing can be drawn in some rows of a draw. The other rows are not affected."""

    def __init__(self, rows: np.ndarray, message: str) -> None:
        super().__init__(message)
        self.rows = rows


class NothingLeft(NoDraw):
    """The contract bans every token in some rows of a draw."""


class NotADistribution(NoDraw):
    """Some rows of a draw have probabilities that are not finite."""


class SlotRules:
    """The rules of `count` slots, and the past tokens that they need."""

    def __init__(self, count: int) -> None:
        self.active = np.zeros(count, bool)
        """Slots whose contract has rules."""
        self.penalty = np.ones(count, np.float32)
        self.min_tokens = np.zeros(count, np.int64)
        self.said = np.zeros(count, np.int64)
        """Tokens said in the turn."""
        self.bias_ids, self.bias = np.full((count, 0), NO_ID, np.int64), np.zeros((count, 0), np.float32)
        self.stops = np.full((count, 0), NO_ID, np.int64)
        self.first = np.full((count, 0, 0), ANY, np.int64)
        """[s, W, L]: bad sequences without their last token, filled up with ANY on the left."""
        self.last = np.full((count, 0), NO_ID, np.int64)
        """[s, W]: the token that each of them bans."""
        self.tail = np.full((count, 0), NO_ID, np.int64)
        """[s, L]: the tokens said last in the turn."""
        self.static = np.zeros(count, bool)
        """Slots with tokens that are banned at every position."""
        self._samplings: list[Sampling | None] = [None] * count
        self._fresh: dict[int, np.ndarray] = {}
        """Slots whose rows of the two tables below are not written yet, with the tokens of their sequences."""
        self._seen: Tensor | None = None
        """bool [s, V]: tokens in the sequence."""
        self._never: Tensor | None = None
        """bool [s, V]: tokens banned at every position."""
        self._known: dict[int, tuple[Sampling, np.ndarray | None]] = {}
        """Contracts with their masks, bool [V], by the contract's `id`."""

    def put(self, s: int, sampling: Sampling, prompt: np.ndarray, said: np.ndarray) -> None:
        """Slot `s` follows `sampling` from now on, after a prompt and the tokens its turn has already said."""
        self.clear(s)
        if not sampling.rules:
            return
        self.active[s], self._samplings[s] = True, sampling
        self.penalty[s], self.min_tokens[s], self.said[s] = sampling.repetition_penalty, sampling.min_tokens, len(said)
        self.bias_ids = _row(self.bias_ids, s, np.array([i for i, _ in sampling.logit_bias], np.int64), NO_ID)
        self.bias = _row(self.bias, s, np.array([x for _, x in sampling.logit_bias], np.float32), 0)
        self.stops = _row(self.stops, s, np.array(sampling.stop_ids or (), np.int64), NO_ID)
        # A bad sequence of one token is banned everywhere; longer ones need the tokens before.
        self.static[s] = sampling.allowed_ids is not None or any(len(b) == 1 for b in sampling.bad_ids)
        self._put_sequences(s, [b for b in sampling.bad_ids if len(b) > 1])
        # Right-aligned. Before the turn's first token stands NO_ID: a bad sequence never reaches back into the prompt.
        depth = self.tail.shape[1]
        self.tail[s, depth - min(depth, len(said)) :] = said[len(said) - min(depth, len(said)) :]
        # The two tables [s, V] are written at the first draw: the logits show the vocabulary (`_write`).
        if self.penalty[s] != 1 or self.static[s]:
            self._fresh[s] = np.concatenate([prompt, said])

    def clear(self, s: int) -> None:
        """Slot `s` has no rules."""
        if self.active[s]:
            self.active[s], self._samplings[s], self.static[s] = False, None, False
            self.penalty[s], self.min_tokens[s], self.said[s] = 1, 0, 0
            self.bias_ids[s], self.stops[s], self.last[s], self.first[s], self.tail[s] = NO_ID, NO_ID, NO_ID, ANY, NO_ID
            self._fresh.pop(s, None)

    def record(self, at: np.ndarray, ids: np.ndarray) -> None:
        """Record one token `ids[i]` that slot `at[i]` has said."""
        ruled = self.active[at]
        if not ruled.any():
            return
        at, ids = at[ruled], ids[ruled]
        self.said[at] += 1
        if self.tail.shape[1]:
            self.tail[at] = np.concatenate([self.tail[at, 1:], ids[:, None]], 1)
        if self._seen is not None:
            self._seen[placed(at, self._seen), placed(ids, self._seen)] = True
        # Of a slot whose row is not written yet the token has to be kept with the others.
        for s in [s for s in self._fresh if s in at]:
            self._fresh[s] = np.append(self._fresh[s], ids[at == s])

    def adjust(self, logits: Tensor, rows: np.ndarray, ahead: np.ndarray | None = None) -> np.ndarray:
        """Apply steps 1 to 3, in place, to the logits [B, V] of slots `rows` [B].

        Args:
            ahead: int64 [B, D], filled up with -1: drafted tokens that row b treats as said after those of its slot.

        Returns the rows with drafted tokens after which every token is banned. Their logits are set to
        0 and have no meaning.

        Raises:
            NothingLeft: in some rows without drafted tokens every token is banned.
        """
        self._write(logits)
        # Place b * V + id of the flat logits. The steps come in the order of the contract: bias, penalty, bans. So a
        # penalty looks at the sign of the biased logit, and nothing is computed with -inf.
        flat, width = logits.view(-1), logits.shape[1]
        drafted = None if ahead is None else (ahead != NO_ID).sum(1)
        # (row, column) pairs of the entries that are no filling.
        b, k = np.nonzero(self.bias_ids[rows] != NO_ID)
        if len(b):
            flat.index_add_(
                0,
                placed(b * width + self.bias_ids[rows[b], k], logits),
                placed(self.bias[rows[b], k], logits).to(logits.dtype),
            )
        self._penalise(logits, rows, ahead)
        banned = [np.zeros(0, np.int64)]
        # Rows ahead have said the drafted tokens as well.
        tokens_said = self.said[rows] if drafted is None else self.said[rows] + drafted
        b, k = np.nonzero((tokens_said < self.min_tokens[rows])[:, None] & (self.stops[rows] != NO_ID))
        banned.append(b * width + self.stops[rows[b], k])
        b, k = np.nonzero(self._completed(rows, ahead))
        banned.append(b * width + self.last[rows[b], k])
        where = np.concatenate(banned)
        flat.index_fill_(0, placed(where, logits), INF)
        static = np.flatnonzero(self.static[rows])
        if len(static) and self._never is not None:
            at = placed(static, logits)
            never = self._never.index_select(0, placed(rows[static], logits))
            logits.index_copy_(0, at, logits.index_select(0, at).masked_fill_(never, INF))
        # A row without any ban cannot have lost all its tokens, so only rows with bans are searched.
        return self._dead_ends(logits, rows, np.union1d(static, where // width), drafted)

    def _penalise(self, logits: Tensor, rows: np.ndarray, ahead: np.ndarray | None) -> None:
        """Apply the repetition penalty, in place: logits of tokens in the sequence are divided by it where they are
        above 0, and multiplied by it below."""
        penalised = np.flatnonzero(self.penalty[rows] != 1)
        if not len(penalised) or self._seen is None:
            return
        at = placed(penalised, logits)
        # A copy: drafts count as said in this draw, and may be rejected after it.
        in_sequence = self._seen.index_select(0, placed(rows[penalised], logits))
        if ahead is not None:
            b, k = np.nonzero(ahead[penalised] != NO_ID)
            in_sequence[placed(b, logits), placed(ahead[penalised[b], k], logits)] = True
        z, p = logits.index_select(0, at), placed(self.penalty[rows[penalised]], logits)[:, None].to(logits.dtype)
        logits.index_copy_(0, at, torch.where(in_sequence, torch.where(z < 0, z * p, z / p), z))

    def _completed(self, rows: np.ndarray, ahead: np.ndarray | None) -> np.ndarray:
        """bool [B, W]: bad sequences that are complete but for their last token."""
        tail = self.tail[rows]
        if ahead is not None:
            # The last L of what was said and drafted: the window moves to the right by the number of drafts.
            depth, drafted = tail.shape[1], (ahead != NO_ID).sum(1)
            tail = np.take_along_axis(np.concatenate([tail, ahead], 1), drafted[:, None] + np.arange(depth), 1)
        first = self.first[rows]
        # [B, W, L]: every place fits. Rows of `last` that are filling ban nothing.
        return ((first == ANY) | (first == tail[:, None])).all(-1) & (self.last[rows] != NO_ID)

    def _put_sequences(self, s: int, sequences: list[tuple[int, ...]]) -> None:
        """Store the bad sequences of a slot that have more than one token."""
        # Tables grow on the left: both are right-aligned, so what they hold stays at its distance from the end.
        deepest = max((len(b) - 1 for b in sequences), default=0)
        if grow := max(0, deepest - self.tail.shape[1]):
            self.tail = np.pad(self.tail, ((0, 0), (grow, 0)), constant_values=NO_ID)
            self.first = np.pad(self.first, ((0, 0), (0, 0), (grow, 0)), constant_values=ANY)
        if grow := max(0, len(sequences) - self.last.shape[1]):
            self.first = np.pad(self.first, ((0, 0), (0, grow), (0, 0)), constant_values=ANY)
        self.last = _row(self.last, s, np.array([b[-1] for b in sequences], np.int64), NO_ID)
        for w, b in enumerate(sequences):
            self.first[s, w, self.first.shape[2] - len(b) + 1 :] = b[:-1]

    def _write(self, logits: Tensor) -> None:
        """Write the rows of the two tables for new slots."""
        shape = (len(self.active), logits.shape[1])
        for s, ids in self._fresh.items():
            sampling = self._samplings[s]
            assert sampling is not None
            if self.penalty[s] != 1:
                if self._seen is None:
                    self._seen = _table(shape, logits)
                self._seen[s] = False
                self._seen[s, placed(ids.astype(np.int64), logits)] = True
            if self.static[s]:
                if self._never is None:
                    self._never = _table(shape, logits)
                never_V = self._mask(sampling, shape[1])
                assert never_V is not None
                self._never[s] = placed(never_V, logits)
        self._fresh.clear()

    def _mask(self, sampling: Sampling, vocabulary: int) -> np.ndarray | None:
        """`banned_always`, cached by the identity of the contract, which all requests of a stage share."""
        contract, never_V = self._known.get(id(sampling), (None, None))
        # An `id` is used again once its object is gone, so the object is kept and compared.
        if contract is not sampling:
            if len(self._known) >= MASKS_KEPT:
                self._known.clear()
            never_V = banned_always(sampling, vocabulary)
            self._known[id(sampling)] = sampling, never_V
        return never_V

    def _dead_ends(
        self, logits: Tensor, rows: np.ndarray, touched: np.ndarray, drafted: np.ndarray | None
    ) -> np.ndarray:
        """The rows among `touched` in which every token is banned. Their logits become 0.

        `drafted` is the number of drafted tokens of each row; None: no row has any. NothingLeft where a row without
        drafted tokens is dead.
        """
        dead = touched
        if len(touched):
            dead = touched[(logits.index_select(0, placed(touched, logits)).amax(1) == INF).cpu().numpy()]
        if not len(dead):
            return dead
        # After a draft a dead row is no error yet: the draft may be rejected, and then the row is not used.
        without_drafts = dead if drafted is None else dead[drafted[dead] == 0]
        if len(without_drafts):
            s = int(rows[without_drafts[0]])
            raise NothingLeft(
                without_drafts,
                f"after {self.said[s]} tokens of a turn the contract bans every token of the vocabulary, so nothing can"
                f" be sampled: allow more in allowed_ids, or ban less in bad_ids or min_tokens ({self._samplings[s]})",
            )
        # A row of -inf alone would make nan, and a draw over all rows would fail for it.
        logits.index_fill_(0, placed(dead, logits), 0)
        return dead


def _row(table: np.ndarray, s: int, values: np.ndarray, fill: int) -> np.ndarray:
    """The table [s, K] with these values in row `s`. It gets more columns if needed."""
    if len(values) > table.shape[1]:
        table = np.pad(table, ((0, 0), (0, len(values) - table.shape[1])), constant_values=fill)
    table[s] = fill
    table[s, : len(values)] = values
    return table


def _table(shape: tuple[int, int], like: Tensor) -> Tensor:
    """bool, all False, writable inside and outside of inference mode."""
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=torch.bool, device=like.device)


def placed(x: np.ndarray, like: Tensor) -> Tensor:
    """The array on the device of `like`."""
    return torch.from_numpy(x).to(like.device)
