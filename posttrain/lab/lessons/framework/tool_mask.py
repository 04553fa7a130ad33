"""Page 08: what a tool wrote is read by the policy, and must not be learned by it."""

from __future__ import annotations

import numpy as np
import torch

from posttrain.algorithm.loss.policy_loss import objective
from posttrain.algorithm.loss.token_weights import weigh
from posttrain.algorithm.loss.torch_streams import streams
from posttrain.checks.sampling.sampler_checks import masks_cover_what_was_said
from posttrain.core.batch import Batch
from posttrain.core.exchange.scores import TokenScores
from posttrain.core.sampling import Sampling
from posttrain.core.streams import ADVANTAGE, MU, WEIGHT
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Segment, Stop, Task
from posttrain.core.verdict import Judged, Verdict
from posttrain.lab import lesson as lab
from posttrain.ladder.policy_rows import REINFORCE
from posttrain.web.picture import Curve, TextTile, Tiles

LETTERS = "0123456789+=c()#<>"
SAMPLING = Sampling(max_tokens=40, stop_ids=())
STEPS, EPISODES = 30, 8


def ids(words: str) -> np.ndarray:
    """int32: the place of each character in LETTERS; a token is a character."""
    return np.array([LETTERS.index(c) for c in words], np.int32)


def say(t: Transcript, words: str, logp: float = -1.0) -> None:
    """The policy says these words. The log-prob is made up: REINFORCE has no ratio, so it is not read."""
    n = len(words)
    t.say(SampledTurn(ids(words), np.full(n, logp, np.float32), np.zeros(n, np.int32), Stop.SAID))


def segment(a: int, b: int, c: int, *, masked: bool) -> Segment:
    """One episode with a calculator: the question, the call, what the tool wrote, the answer. Without the mask the
    tool's text enters as if the policy had said it."""
    t = Transcript(SAMPLING)
    t.see(ids(f"<{a}+{b}+{c}>"))
    say(t, f"c({a}+{b}+{c})")
    written = f"={a + b + c}"
    if masked:
        t.see(ids(written))
    else:
        say(t, written)
    say(t, f"{a + b + c}#")
    return t.segment()


def drawn(seed: int, masked: bool) -> list[Segment]:
    """Eight episodes with random numbers of three digits; the same ones with and without the mask."""
    rng = np.random.default_rng(seed)
    return [segment(*(int(x) for x in rng.integers(100, 900, 3)), masked=masked) for _ in range(EPISODES)]


def group(segments: list[Segment]) -> Group:
    """These episodes as a group, all right."""
    task = Task("sum", "?")
    verdict = (Judged("toy", 1.0, Verdict.value(1.0)),)
    return Group(task, 0, tuple(Episode(task, 0, i, (s,), Stop.SAID, verdict) for i, s in enumerate(segments)))


def learn(masked: bool, seed: int) -> tuple[list[float], list[float]]:
    """Mean log-prob of the tool's tokens, and of the policy's own, before each of 30 steps on right answers. The
    policy is a table of logits [40, V]: it reads nothing but the position of a token."""
    segments, truly_masked = drawn(seed, masked), drawn(seed, True)
    spoken = [int(s.mask.sum()) for s in segments]
    weights = np.repeat(weigh(REINFORCE.aggregate, spoken, [0] * EPISODES, 40), spoken)
    by_stream = {WEIGHT: weights, ADVANTAGE: np.ones(sum(spoken)), MU: np.full(sum(spoken), -1.0)}
    batch = Batch.of(segments, unit_E=np.arange(EPISODES, dtype=np.int32), streams=by_stream)
    tensors = streams(batch, dtype=torch.float64)
    table = torch.zeros(40, len(LETTERS), dtype=torch.float64, requires_grad=True)
    position = torch.as_tensor(batch.positions_N[batch.source_M + 1], dtype=torch.int64)
    target = torch.as_tensor(batch.target_M, dtype=torch.int64)
    tool_logp, policy_logp = list[float](), list[float]()
    for _ in range(STEPS):
        logp = torch.log_softmax(table, -1)
        rows = [logp.detach()[np.arange(len(s.ids)), s.ids].numpy() for s in truly_masked]
        tool_logp.append(float(np.mean(np.concatenate([r[_tool(s)] for r, s in zip(rows, truly_masked, strict=True)]))))
        policy_logp.append(float(np.mean(np.concatenate([r[s.mask] for r, s in zip(rows, truly_masked, strict=True)]))))
        loss = objective(REINFORCE, tensors, TokenScores(logp[position, target], None, None)).loss
        with torch.no_grad():
            table -= 4.0 * torch.autograd.grad(loss, table)[0]
    return tool_logp, policy_logp


def _tool(s: Segment) -> np.ndarray:
    """bool [T]: the tokens that the tool wrote, those between the policy's two turns."""
    first = int(np.argmax(s.mask))
    return ~s.mask & (np.arange(len(s.mask)) > first)


def compute(k: lab.Values) -> lab.Readout:
    masked, seed = bool(k["mask"]), int(k["seed"])
    episode, truth = segment(123, 456, 789, masked=masked), segment(123, 456, 789, masked=True)
    by_tool = _tool(truth)
    tiles = [
        TextTile(LETTERS[i], "bad" if (m and w) else "good" if m else "mute", note="learned" if m else "only read")
        for i, m, w in zip(episode.ids.tolist(), episode.mask.tolist(), by_tool.tolist(), strict=True)
    ]
    tool_logp, policy_logp = learn(masked, seed)
    played, engine_said = group(drawn(seed, masked)), int(sum(x.mask.sum() for x in drawn(seed, True)))
    return lab.Readout(
        pictures=(
            Tiles("One episode: question, call, tool, answer", {"": tiles},
                  {"good": "said by the policy, learned", "mute": "only read", "bad": "the tool's, and learned"}),
            Curve("Mean log-prob while it learns from right answers", list(range(STEPS)),
                  {"the tool's tokens": tool_logp, "the policy's own": policy_logp}, y_label="nats"),
        ),
        sentence=f"**{int(episode.mask.sum())}** of {len(episode.ids)} tokens are learned. The tool's tokens went from "
        f"**{tool_logp[0]:.2f}** to **{tool_logp[-1]:.2f}** nats"
        + (": it learns to write the tool's answer itself." if not masked else ": they gave no gradient."),
        values={"learned tokens": float(episode.mask.sum()), "tool's log-prob": tool_logp[-1]},
        says=lab.refusal(lambda: masks_cover_what_was_said([played], engine_said), "masks_cover_what_was_said"),
    )  # fmt: skip


LESSON = lab.Lesson(
    number="08", name="tools", title="Tools: read it, do not learn it", part="the framework", force="signal", minutes=6,
    question="A calculator wrote 1368 into the answer: should the policy learn those digits?",
    idea="""
        An agent says a call, a tool writes its result, and the agent goes on. All of it is one sequence, but only a
        part was said by the policy. Tokens that the tool wrote were not drawn from the policy, so they belong in no
        loss: they are masked from the moment they enter. Without the mask the policy is rewarded for the tool's digits,
        and learns to invent results in place of asking for them.

        Two verbs keep this right: the world is *seen*, the policy *says*. There is no third way in.
    """,
    formula="loss = sum over SAID tokens only:  w_t * ( -A * log pi_t )",
    knobs=(
        lab.Toggle("mask", "mask what the tool wrote", True),
        lab.Slider("seed", "seed", 0, 0, 20),
    ),
    compute=compute, pace="release",
    breaks=(
        lab.Break({"mask": False}, "The tool's digits become likelier: the policy learns to write them itself.",
                  "masks_cover_what_was_said"),
    ),
    claims=(
        lab.Claim("c(123+456+789) is right with", "curriculum 08", 1368, lambda: 123 + 456 + 789, within=0),
    ),
    exercises=(
        lab.AskNumber("How many tokens of <1+2+3>c(1+2+3)=66# does the policy say, if the tool writes =6?", 10,
                      why="c(1+2+3) has 8, 6# has 2."),
        lab.AskKnobs("Teach the policy the tool's digits.", "tool's log-prob", -2.0, None, {"mask": False}),
        lab.AskChoice("Why not give the tool's tokens credit 0 instead of a mask?",
                      ("A KL or entropy term would still read them", "It is slower", "It is the same"), 0,
                      why="Terms live where credit is 0, and denominators would count them."),
    ),
    code=("posttrain.core.transcript.Transcript.see", "posttrain.core.transcript.Transcript.say"),
    docs="guides/tools.md", command="posttrain run calculator", grid=("mask", "seed"),
)  # fmt: skip
