"""Page 22a: the five times of a step, which of them rules it, and what the machine is used for."""

from __future__ import annotations

from dataclasses import replace

from posttrain.lab import lesson as lab
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import machine
from posttrain.plan.models import shape_by_name
from posttrain.plan.throughput import ROLES, Assumed, Throughput, Times, throughput
from posttrain.plan.work import Work
from posttrain.web.picture import Bars, Curve

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B")
WAYS = ("colocated", "disaggregated", "asynchronous")
DEVICES = 8
PROMPTS = 64
COUNTS = [1, 2, 4, 8, 16, 32, 64]


def timed(k: lab.Values, **other: int) -> Throughput:
    """GRPO with a reference on 8 H100, at the knobs `k` with some of them replaced by `other`."""
    at = {**k, **other}
    work = Work(
        shape=shape_by_name(at["model"]),
        lengths=Lengths(prompt=512, mean=int(at["answer"]), most=8 * int(at["answer"]), cv=float(at["spread"])),
        prompts=PROMPTS, siblings=int(at["siblings"]), width=2, accelerator=True, samples_answers=True, reference=True,
        slots=512, vllm=True, engines=0 if at["way"] == "colocated" else DEVICES // 2,
        staleness=int(at["way"] == "asynchronous"),
    )  # fmt: skip
    assumed = Assumed(reward=float(at["reward"]), judges=16, kept=float(at["kept"]))
    return throughput(work, machine(f"{DEVICES}xH100"), assumed)


def compute(k: lab.Values) -> lab.Readout:
    now = timed(k)
    t = now.times
    by_siblings = [timed(k, siblings=n) for n in COUNTS]
    equal_lengths = replace(now.work, lengths=replace(now.work.lengths, cv=0.0))
    decode_if_equal = throughput(equal_lengths, now.machine, now.assumed).decode
    return lab.Readout(
        pictures=(
            Bars("The five times of a step, s", ROLES, {"seconds": [getattr(t, r) for r in ROLES]}, low=0),
            Bars("Sampling, s", ["prompts", "answers, all equal", "answers as they are"],
                 {"seconds": [now.prefill, decode_if_equal, now.decode]}, low=0),
            Curve("Tokens learned from a second", COUNTS, {"tokens": [x.tokens_per_second for x in by_siblings]},
                  x_label="samples of a prompt", low=0, log=True, at=float(k["siblings"])),
        ),
        sentence=f"A step takes **{now.step:.3g} s**; the longest role is **{t.slowest}**. That is "
        f"**{now.tokens_per_second:.0f}** tokens a second, and **{now.utilisation:.1%}** of the arithmetic that the "
        f"machine could do. Of the filter's groups {now.assumed.kept:.0%} are kept; the rest was sampled for nothing.",
        values={"seconds": now.step, "tokens a second": now.tokens_per_second, "used, %": 100 * now.utilisation,
                "idle, %": 100 * now.idle},
    )  # fmt: skip


LESSON = lab.Lesson(
    number="22a", name="throughput", title="Throughput: which term rules a step", part="the engineer", force="cost",
    minutes=7,
    question="How long does a step take, and which of its parts must become shorter first?",
    idea="""
        A step has five times: sampling, judging, the reference, learning, sending weights. In turn they add up; at once
        the longer side counts, and the sending after it.

        Each has its own limit. Learning is *arithmetic*: about six operations a parameter and token. Saying a token is
        *reading*: all weights are read for a few numbers, so many answers must be said at once. At the end of a step a
        few long answers are said alone, and reading the weights serves only them.

        What counts is *useful* tokens a second. A filter that keeps half of the groups doubles the time of sampling. A
        plan gives these times from the device's peaks and the share of them that programs reach; here 40 % of the
        arithmetic and 70 % of the bandwidth are assumed.
    """,
    formula="each time = max( operations / arithmetic, bytes / bandwidth )        useful = tokens learned from / step",
    knobs=(
        lab.Options("model", "model", "Qwen2.5-7B", MODELS),
        lab.Options("way", "placement of 8 H100", "colocated", WAYS),
        lab.Slider("siblings", "samples of a prompt", 8, 1, 64, log=True),
        lab.Slider("answer", "mean tokens of an answer", 1024, 64, 8192, log=True),
        lab.Slider("spread", "standard deviation, in means", 1.0, 0, 2, 0.1),
        lab.Slider("reward", "seconds to judge an answer (16 at once)", 0.1, 0, 5, 0.1),
        lab.Slider("kept", "share of groups that a filter keeps", 0.8, 0.1, 1, 0.05),
    ),
    compute=compute,
    breaks=(
        lab.Break({"reward": 5}, "A slow judge: the accelerators wait for it most of the step.", None, "a slow judge"),
        lab.Break({"siblings": 1, "spread": 2},
                  "Few answers, some of them very long: the weights are read again and again for the last ones.",
                  None, "a long tail alone"),
    ),
    claims=(
        lab.Claim("times 30, 1, 3, 8, 1, asynchronous: seconds", "curriculum 22a", 32,
                  lambda: Times(30, 1, 3, 8, 1).step("asynchronous")),
        lab.Claim("a million tokens in that step: thousand a second", "curriculum 22a", 33,
                  lambda: 512 * 2048 / Times(30, 1, 3, 8, 1).step("asynchronous") / 1e3),
        lab.Claim("7 B in training on one H100: thousand tokens a second", "curriculum 22", 19,
                  lambda: machine("H100").flops / (6 * 7e9) / 1e3,
                  why="19 thousand need 81 % of the peak arithmetic; at 40 % it is half of that."),
    ),
    exercises=(
        lab.AskNumber("Sampling 30 s, judging 1, reference 3, learning 8, sync 1, all in turn: how many seconds?",
                      43, why="They add up."),
        lab.AskKnobs("With the default model and lengths, reach 20,000 tokens a second.", "tokens a second", 20000,
                     None, {"siblings": 64, "kept": 1, "reward": 0}),
        lab.AskChoice("Why does a second of sampling say more tokens with more siblings?",
                      ("The weights are read once for all of them", "Siblings are shorter", "The reward is cheaper"),
                      0, why="Reading is the limit, and each reading serves every sequence."),
    ),
    code=("posttrain.plan.throughput.Throughput", "posttrain.plan.throughput.Times", "posttrain.plan.lengths.Lengths"),
    docs="guides/planning.md", command="posttrain plan grpo model=Qwen2.5-7B machine=8xH100",
    grid=("model", "siblings"),
)  # fmt: skip
