"""Setups that others published, beside a plan of them.

    python -m benchmarks.speed.plan_published

Nothing is measured here: the reported figures are those of the sources, and what a source does not say is assumed as a
plan assumes it. `tests/plan/test_plan_against.py` holds the ratios, docs/research/plans-measured.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from posttrain.config.model_settings import Lora
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import machine
from posttrain.plan.memory import places
from posttrain.plan.models import shape_by_name
from posttrain.plan.shapes import shape_of
from posttrain.plan.throughput import Assumed, Throughput, Topology
from posttrain.plan.work import Work

NEMO = "NeMo RL 0.4, its performance summary"
TUNE = "torchtune 0.4, README"
PROMPT = 150
"""Tokens of a prompt of OpenMathInstruct-2. Assumed."""
SIBLINGS = 32
"""Samples of a prompt in those recipes."""


@dataclass(frozen=True)
class Published:
    """A figure of somebody else's, and the plan's."""

    what: str
    source: str
    unit: str
    reported: float
    planned: float

    @property
    def ratio(self) -> float:
        """Planned / reported."""
        return self.planned / self.reported


@dataclass(frozen=True)
class RLStep:
    """A row of NeMo RL's table: H100, GRPO."""

    model: str
    ahead: bool
    longest: int
    mean: int
    devices: int
    samples: int
    workers: int
    seconds: float
    """Reported, of a step. Training batches have 512 samples."""


STEPS = (
    RLStep("Llama-3.1-8B", False, 4096, 1060, 16, 2048, 1, 97.7),
    RLStep("Llama-3.1-8B", True, 4096, 1129, 16, 2048, 1, 74.6),
    RLStep("Qwen3-32B", False, 4096, 3206, 32, 2048, 4, 393),
    RLStep("Qwen3-32B", True, 4096, 3207, 64, 2048, 4, 215),
    RLStep("Qwen3-30B-A3B", False, 4096, 3154, 32, 2048, 4, 225),
    RLStep("Qwen3-30B-A3B", True, 4096, 3158, 32, 2048, 2, 244),
    RLStep("Qwen3-235B-A22B", False, 8192, 5671, 128, 512, 16, 506),
    RLStep("Qwen3-235B-A22B", True, 8192, 5691, 256, 512, 8, 241),
    RLStep("DeepSeek-V3", False, 1536, 745, 256, 512, 32, 154),
    RLStep("DeepSeek-V3", True, 1536, 744, 512, 512, 32, 77.9),
)


def rl_step(row: RLStep) -> Throughput:
    """The plan of a row: a reference, log-probs at the start of the step, and where samples are a step old half of the
    devices for engines."""
    engines = row.devices // 2 if row.ahead else row.devices
    work = Work(
        shape=shape_by_name(row.model),
        lengths=Lengths(prompt=PROMPT, mean=row.mean - PROMPT, most=row.longest - PROMPT, cv=0.5),
        prompts=row.samples // SIBLINGS, siblings=SIBLINGS, minibatches=row.samples // 512, width=2, share=False,
        accelerator=True, samples_answers=True, reference=True, vllm=True, engines=engines // row.workers,
        staleness=int(row.ahead),
    )  # fmt: skip
    learners = row.devices - engines if row.ahead else row.devices
    way: Topology = "asynchronous" if row.ahead else "colocated"
    return Throughput(work, machine(f"{row.devices}xH100"), way, engines, learners, Assumed(forwards=1))


def training_memory(model: str, ranks: int = 1, quantize: str | None = None) -> float:
    """GiB of LoRA training without an engine: two packed sequences of 2,048 tokens, layers computed again."""
    targets = ("q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    work = Work(
        shape=shape_by_name(model), lengths=Lengths(prompt=1, mean=2047, most=2047), prompts=2 * ranks, width=2,
        accelerator=True, lora=Lora(rank=16, targets=targets), quantize=quantize, checkpointing="full", ranks=ranks,
    )  # fmt: skip
    place = places(work)[0]
    own = replace(place, terms=tuple(t for t in place.terms if not t.name.startswith("engine")))
    return max(sum(t.bytes for t in own.held(i)) for i in ("forward", "backward", "gradients", "update")) / 2**30


OPT_13B = shape_of(
    {"model_type": "gpt2", "n_embd": 5120, "n_layer": 40, "n_head": 40, "vocab_size": 50272, "n_positions": 2048}
)


def rows() -> Iterator[Published]:
    """Every figure."""
    yield Published(
        "OPT-13B: cache of a token", "PagedAttention (SOSP 2023), section 3", "kB", 819.2, OPT_13B.cache_bytes() / 1e3
    )
    kept = shape_by_name("Llama-3.1-8B").cache_bytes() * 20 * 1024 / 2**30
    yield Published("Llama-3.1-8B: cache of 20 k tokens", "Unsloth, blog/grpo", "GiB", 2.5, kept)
    yield Published("Llama-3.1-70B, LoRA, 8 A100: peak of each", TUNE, "GiB", 27.6, training_memory("Llama-3.1-70B", 8))
    yield Published("Llama-3.1-8B, LoRA, RTX 4090: peak", TUNE, "GiB", 16.2, training_memory("Llama-3.1-8B"))
    quantised = training_memory("Llama-3.1-8B", quantize="nf4")
    yield Published("Llama-3.1-8B, QLoRA, RTX 4090: peak", TUNE, "GiB", 7.4, quantised)
    for row in STEPS:
        way = "a step ahead" if row.ahead else "in turn"
        what = f"{row.model}, GRPO, {row.devices} H100, {way}: step"
        yield Published(what, NEMO, "s", row.seconds, rl_step(row).step)


if __name__ == "__main__":
    for x in rows():
        print(f"| {x.what} | {x.source} | {x.reported:g} {x.unit} | {x.planned:.3g} | {x.ratio:.2f} |")
