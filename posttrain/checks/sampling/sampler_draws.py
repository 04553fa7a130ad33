"""Checks that the sampler draws from the distribution whose log-probs it reports, and siblings draw independently.

Some engines draw by place: the uniform of a draw is a function of its place (`Sampler.draws_by_place`). Their draws are
repeated. The uniform of the place and the learner's cumulative distribution, by code that shares nothing with the
engine, must give the sampled token. This is not statistical, so one token is enough.

Other engines are tested by betting. A test with a fixed sample size would be wrong: it is read at every step,
log-ratios are heavy-tailed if the policy is nearly certain, and a run has no planned end. A bet is valid at all times.
Its stake is multiplied by a factor whose mean is at most 1 if the engine is correct. So the stake ever exceeds 1 /
alpha with probability at most alpha (Ville's inequality), whatever is tested and whenever the run ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from posttrain.core import seeds
from posttrain.core.batch import Packed
from posttrain.core.exchange.experience import Experience
from posttrain.core.exchange.scores import Odds
from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.types import Episode, Group, Segment, Top, TruncationSets
from posttrain.role.events import Event, Observer, ObserverReport, PlayedEvent, ScoredEvent
from posttrain.role.learning.logprob_tolerance import as_sampled, noise, unmeasured
from posttrain.role.roles import ReinforceRoles
from posttrain.system import dataclass_json
from posttrain.system.errors import InvariantError

TEMPERATURES = (0.5, 0.8, 0.9, 1.1, 1.25, 2.0)
"""Temperatures of the alternatives of the bet: distributions sharper and flatter than the reported one."""
MOST = 10.0
"""Largest factor of one token, before its discount."""
STAKES = (0.02, 0.2, 0.8)
"""Shares of the stake that are bet on two siblings being equal."""
ALPHA = 4e-8
"""Chance of a false alarm in a whole run, for each of the two bets. Both together with
`data_checks.in_order_of_the_file` stay below 1e-7."""
PROBED = 256
"""Spoken tokens that are tested in a step."""
PACKED = 4096
"""Once this many tokens are packed, no further episode is added."""
SURE = 2e-3
"""Nats by which two log-probs of one token may differ in any dtype."""
TINY = 1e-6
"""Probability that float32 loses in the sum over a vocabulary."""
GROUPS = 16
"""Groups of a step whose siblings are compared."""


@dataclass(frozen=True, eq=False)
class CheckedDraws:
    """The beginnings of some episodes, whose draws are tested. Their choice does not depend on the tokens in them."""

    packed: Packed
    episodes: tuple[Episode, ...]
    """The episode of each segment."""
    at_M: np.ndarray
    """int64: the index of each checked token among the spoken tokens of its episode."""
    full: bool
    """Whether the limit was reached, so that further episodes would have added no token."""


def look(episodes: Sequence[Episode], first: int) -> CheckedDraws | None:
    """The first `PROBED` spoken tokens from episode `first` on; None if there are none.

    After the last episode of the list the first one follows.
    """
    chosen: list[tuple[Episode, Segment, int]] = []
    tokens_left, packed_tokens = PROBED, 0
    # Around the end of the list: which episode comes first depends on the step's number alone.
    for e in (*episodes[first:], *episodes[:first]):
        tokens_before = 0
        for s in e.segments:
            if tokens_left < 1 or packed_tokens >= PACKED:
                break
            part = beginning(s, tokens_left)
            if part.spoken and not e.shown:
                chosen.append((e, part, tokens_before))
                tokens_left, packed_tokens = tokens_left - part.spoken, packed_tokens + len(part.ids)
            # Counted for shown and skipped segments too: a place is counted from the start of the episode.
            tokens_before += s.spoken
    if not chosen:
        return None
    at = np.concatenate([np.arange(tokens_before, tokens_before + part.spoken) for _, part, tokens_before in chosen])
    return CheckedDraws(
        Packed.of([part for _, part, _ in chosen]),
        tuple(e for e, _, _ in chosen),
        at,
        tokens_left < 1 or packed_tokens >= PACKED,
    )


def beginning(s: Segment, spoken: int) -> Segment:
    """A segment up to its `spoken`-th spoken token."""
    if s.spoken <= spoken:
        return s
    end = int(np.flatnonzero(s.mask)[spoken - 1]) + 1
    kept = None if s.kept is None else TruncationSets.of(s.kept.sets()[:spoken])
    top = None if s.top is None else Top(s.top.ids[:spoken], s.top.logp[:spoken])
    in_turn = None if s.in_turn is None else s.in_turn[:spoken]
    routed = None if s.routed is None else s.routed[:end]
    return Segment(s.ids[:end], s.mask[:end], s.logp[:end], s.version[:end], s.sampling, kept, top, in_turn, routed)


def uniforms(draws: CheckedDraws, seed: int, stream: str) -> np.ndarray:
    """float64 [M]: the uniform random number of each token's place.

    A place is (seed, stream, task, visit, sibling, turn) and the position in the turn.
    """
    out = np.zeros(len(draws.at_M))
    for segment, e in enumerate(draws.episodes):
        # A turn has random numbers of its own, so a longer turn before it moves nothing.
        keys = [seeds.key(seed, stream, e.task.id, e.visit, e.sibling, turn) for turn in range(len(e.turns))]
        turns = [seeds.uniforms(key, n) for key, n in zip(keys, e.turns, strict=True)]
        of_episode = np.concatenate([np.zeros(0), *turns])
        of_segment = draws.packed.segment_M == segment
        # The beginning of an episode's tokens: places that `beginning` cut off have uniforms that nobody reads.
        out[of_segment] = of_episode[draws.at_M[of_segment]]
    return out


def drawn_again(
    draws: CheckedDraws,
    odds: Odds,
    uniform_M: np.ndarray,
    noise: Callable[[], float],
    text: Callable[[np.ndarray], str],
) -> Gauges:
    """The uniform of a token's place picks that token from the learner's distribution; InvariantError for the first
    that another uniform or distribution must have picked. If log-probs differ by at most d, a cumulative probability F
    lies between F e^-d and F e^d, and 1 - F alike. First d is `SURE`; if that is not enough, `noise` is measured."""
    apart = SURE
    # The cheap bound first: noise is measured in float64, which costs a pass.
    if _picks_another(odds, uniform_M, apart).any():
        apart = max(apart, noise())
    wrong = np.flatnonzero(_picks_another(odds, uniform_M, apart))
    if len(wrong):
        m = int(wrong[0])
        e, token = draws.episodes[int(draws.packed.segment_M[m])], text(draws.packed.target_M[m : m + 1])
        raise InvariantError(
            f"the sampler does not draw from the distribution it reports: token {int(draws.at_M[m])} of task"
            f" {e.task.id!r} (visit {e.visit}, sibling {e.sibling}) is {token!r}, which a uniform in"
            f" [{odds.below_M[m]:.6f}, {odds.upto_M[m]:.6f}) picks, and the uniform of its place is {uniform_M[m]:.6f}"
            f" (noise {apart:.2g} nats); {len(wrong)} of {len(uniform_M)} tokens looked at are like it. Log-probs agree"
            " and draws do not: check temperature, greedy, the kept sets, and that every task, visit, sibling and turn"
            " draws with numbers of its own and of this run's seed"
        )
    return {"canary/drawn_again": Gauge(len(uniform_M), 1)}


def _picks_another(odds: Odds, uniform_M: np.ndarray, apart: float) -> np.ndarray:
    """bool [M]: whether the uniform picks another token even if log-probs differ by up to `apart`.

    Where a bound is NaN it counts as another token.
    """
    # F e^-d <= F' <= F e^d, and the same of 1 - F: near 0 the first is the narrower, near 1 the second.
    least = np.maximum(odds.below_M * math.exp(-apart), 1 - (1 - odds.below_M) * math.exp(apart))
    most = np.minimum(odds.upto_M * math.exp(apart), 1 - (1 - odds.upto_M) * math.exp(-apart))
    return ~((least - TINY <= uniform_M) & (uniform_M <= most + TINY))


@dataclass
class Bet:
    """Stakes that grow only if something is wrong, one for each alternative.

    Before the n-th factor, 1 / (n (n + 1)) is added to each stake, so that a fault that starts late is found too. All
    that is ever added sums to 1. So the mean of the stakes exceeds 1 / alpha with probability at most alpha.
    """

    stakes: tuple[float, ...] = ()
    """Logarithms."""
    rounds: int = 0

    def play(self, log_factors: Sequence[float] | np.ndarray) -> None:
        """Play one round, with the factor of each alternative."""
        n = self.rounds + 1
        # 1 / (n (n + 1)) as a logarithm; the sum over all n is 1.
        added = -math.log(n) - math.log(n + 1)
        before = self.stakes or (-math.inf,) * len(log_factors)
        # What is added takes part in this round's factor already.
        self.stakes = tuple(float(np.logaddexp(s, added)) + float(f) for s, f in zip(before, log_factors, strict=True))
        self.rounds = n

    def lose(self) -> None:
        """Lose all stakes, as by a factor of 0. What later rounds add is a new stake."""
        self.stakes = ()

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean of the stakes. The run stops at -log alpha."""
        # The mean over alternatives, so that their number costs no false alarms.
        return float(np.logaddexp.reduce(self.stakes)) - math.log(len(self.stakes)) if self.stakes else -math.inf


@dataclass
class Bets:
    """The bets of a run, over all its stages. They are part of every checkpoint."""

    draws: Bet = field(default_factory=Bet)
    siblings: Bet = field(default_factory=Bet)

    @staticmethod
    def of(data: Mapping[str, Any] | None) -> Bets:
        """Bets from the data of `plain`; new ones if there are none."""
        return dataclass_json.from_plain(Bets, data) if data else Bets()

    def plain(self) -> dict[str, Any]:
        return dataclass_json.to_plain(self)


def bet_on_draws(bet: Bet, odds: Odds, noise: float) -> Gauges:
    """Play one round for every token. The alternatives are sharper and flatter distributions.

    The factor of an alternative q is min(q / p, MOST), divided by 1 + 2 TV(q, p) (e^noise - 1). The divisor is the
    largest mean the factor can have if the engine's log-probs differ from the learner's by at most `noise`.

    Raises:
        InvariantError: the stake exceeds 1 / `ALPHA`.
    """
    # The cap bounds what one token can prove. The divisor makes up for noise in the engine's log-probs.
    worth_MK = np.minimum(odds.log_ratio_MK, math.log(MOST)) - np.log1p(2 * odds.distance_MK * math.expm1(noise))
    for worth_K in worth_MK:
        bet.play(worth_K)
        # Read after every token: a bet may be ended at any time.
        if bet.log_evidence >= -math.log(ALPHA):
            likely = TEMPERATURES[int(np.argmax(bet.stakes))]
            raise InvariantError(
                f"the sampler does not draw from the distribution it reports: after {bet.rounds} tokens it is"
                f" {math.exp(min(bet.log_evidence, 700)):.2g} times likelier that they come from that distribution at"
                f" {likely:g} times its temperature, which happens by chance once in {1 / ALPHA:.0e} runs. The"
                " log-probs are right and the draws are not: check temperature, greedy and the random numbers of the"
                " draw itself"
            )
    return {"canary/bet_on_draws": Gauge(bet.log_evidence, 1)}


def bet_on_answers(
    bet: Bet, episodes: Sequence[Episode], first: int, odds: Callable[[Packed], Odds], noise: Callable[[Packed], float]
) -> Gauges:
    """`bet_on_draws` on the tokens of `look`, up to the first episode in which a turn was cancelled.

    The tokens of that turn are unknown, and they may be why it was cancelled: the time limit cuts long answers, not
    short ones. Leaving such episodes or steps out would select tokens. So the stake is lost when `look` comes to such a
    turn. No factor is smaller, so the mean stays at most 1 whichever turns are cancelled.
    """
    in_order = (*episodes[first:], *episodes[:first])
    # The tokens of the cut turn are unknown, and with them everything that stands behind them in the order.
    cut = next((i for i, e in enumerate(in_order) if e.cut), None)
    draws = look(in_order[:cut], 0)
    gauges = {} if draws is None else bet_on_draws(bet, odds(draws.packed), noise(draws.packed))
    # It would have been reached: the tokens before it did not fill the test.
    if cut is not None and (draws is None or not draws.full):
        bet.lose()
    return gauges


def bet_on_siblings(bet: Bet, groups: Sequence[Group], noise: float) -> Gauges:
    """Play one round for each pair of neighbouring siblings: a bet that they say the same.

    Let p be the probability of the first answer: the chance that the second one equals it is at most p. Let c be the
    share of the stake that is bet. The factor is 1 + c (1 - p) / p if they are equal, else 1 - c. No bet is made on
    answers with p above a half, nor on empty ones. Of an answer that broke or was cut the known tokens count: an equal
    one has at least these.

    Raises:
        InvariantError: the stake exceeds 1 / `ALPHA`.
    """
    for g in groups[:GROUPS]:
        # Neighbours only: given all answers before it, the next one equals its neighbour with that one's probability.
        # Whether further pairs are equal would follow from these.
        for one, two in pairwise([e for e in g.episodes if not e.shown]):
            # The probability that the engine claims, raised by its noise, so that a bet is never too good.
            log_p = math.fsum(float(s.logp[s.mask].sum(dtype=np.float64)) for s in one.segments) + noise * one.spoken
            # Such an answer repeats by right, and a win would pay next to nothing.
            if log_p > -math.log(2):
                continue
            # Ids with the prompt: siblings of one prompt have it in common.
            same = [s.ids.tobytes() for s in one.segments] == [s.ids.tobytes() for s in two.segments]
            # log(1 - c + c / p): the stake that was kept, and what the bet pays.
            won = [float(np.logaddexp(math.log1p(-c), math.log(c) - log_p)) for c in STAKES]
            bet.play(won if same else [math.log1p(-c) for c in STAKES])
            if bet.log_evidence >= -math.log(ALPHA):
                raise InvariantError(
                    f"siblings repeat each other: sibling {two.sibling} of task {g.task.id!r} says exactly what sibling"
                    f" {one.sibling} said, words of probability {math.exp(log_p):.2g}, and after {bet.rounds}"
                    f" comparisons that happens too often for chance (once in {1 / ALPHA:.0e} runs). A group of copies"
                    " has no spread and teaches nothing: check that every sibling has random numbers of its own"
                )
    return {"canary/bet_on_siblings": Gauge(bet.log_evidence, 1)} if bet.rounds else {}


class DrawsCheck(Observer):
    """Draws are tested in the first 16 steps and in every eighth later one. Siblings are compared in every step.

    Where samples may be older than the learner, draws are tested in the first step alone, and then by `ProbeCheck` and
    `FreshCheck`.
    With oversampling nothing is bet: which answers are kept then depends on their lengths.
    """

    def __init__(self, bets: Bets) -> None:
        self._bets = bets

    def state(self) -> dict[str, Any]:
        return {"bets": self._bets.plain()}

    def on_event(self, roles: ReinforceRoles, event: Event) -> ObserverReport | None:
        match event:
            case PlayedEvent(e) if not roles.stage.oversample:
                # Unmeasured: the bound of the dtype, so that no float64 pass is needed in every step.
                apart = unmeasured(roles.run.model.dtype, roles.sampling.temperature).worst
                return ObserverReport(bet_on_siblings(self._bets.siblings, e.played, apart))
            # Where samples may be older, only the first step learns from what the learner's own weights said.
            case ScoredEvent(e, _) if e.index == 1 or (not roles.stage.most_behind and looked_at(e.index)):
                return ObserverReport(self._test(roles, e))
        return None

    def _test(self, roles: ReinforceRoles, e: Experience) -> Gauges:
        """Test draws of the first groups, whose number is fixed.

        How many further groups are played, and which ones pass the filter, depends on the answers.
        """
        if roles.stage.oversample and not roles.sync.sampler.draws_by_place:
            return {}
        episodes = [x for g in e.played[: roles.stage.prompts] for x in g.episodes]
        # In steps of 7 through the episodes, so that in time others come first.
        return draws_are_true(roles, self._bets, episodes, e.index * 7 % len(episodes), roles.stream)


def looked_at(index: int) -> bool:
    """Returns whether draws of step `index` are tested: in the first 16 steps and in every eighth later one."""
    return index <= 16 or index % 8 == 0


def draws_are_true(roles: ReinforceRoles, bets: Bets, episodes: Sequence[Episode], first: int, stream: str) -> Gauges:
    """Test draws of the learner's own weights, from episode `first` on.

    Draws are repeated, or bet on where the engine does not draw by place. `stream` is that of the episodes' random
    numbers.
    """
    dtype, learner = roles.run.model.dtype, as_sampled(roles.learner)
    if roles.sync.sampler.draws_by_place:
        if (draws := look(episodes, first)) is None:
            return {}
        uniform = uniforms(draws, roles.run.seed, stream)
        apart = lambda: noise(dtype, learner, draws.packed)  # noqa: E731
        return drawn_again(draws, learner.odds(draws.packed), uniform, apart, roles.text)
    odds = lambda packed: learner.odds(packed, TEMPERATURES)  # noqa: E731
    # In float32 the bound of the dtype stands for the noise, without a pass in float64.
    is_float32, assumed = dtype == "float32", unmeasured(dtype, roles.sampling.temperature).worst
    noise_of = lambda packed: assumed if is_float32 else noise(dtype, learner, packed)  # noqa: E731
    return bet_on_answers(bets.draws, episodes, first, odds, noise_of)
