"""A run as one frozen tree. Everything derived is a property; nothing is filled in later.

`posttrain.core.tree` turns it into plain data and back; dotted overrides address its fields by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.core.algorithm import Algorithm
from posttrain.core.engines import Embedded, Engine
from posttrain.core.errors import ConfigError
from posttrain.core.ladder import GRPO
from posttrain.core.pieces.shape import BestOf
from posttrain.core.sampling import Sampling
from posttrain.core.stop import Limits

Scalar = str | int | float | bool
NAME = re.compile(r"\w[\w-]{0,63}")
"""Of a stage."""


BUILT_CONTEXT = 512
"""Positions of a built model, where nothing else is said."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The policy: any Hugging Face causal LM by `path`, or, without one, a small config built on the spot."""

    path: str | None = None
    """Local directory or hub id. None: build `arch` at the sizes below, with random weights and a tokenizer of the environment's alphabet."""
    trust_remote_code: bool = False
    arch: Literal["qwen3", "llama", "gpt2", "gemma"] = "qwen3"
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 384
    context: int | None = None
    """Most tokens of a sequence, prompt included. None: all positions of the model at `path`, 512 where one is built or names no bound.
    A rope whose frequencies change with the length (dynamic, longrope) is served up to the length at which they begin to."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the weights and activations; the head, its softmax and every loss are float32 regardless."""
    gradient_checkpointing: bool = False
    history: Literal["append", "rewrite"] = "append"
    """Conversations of several turns whose earlier ones the chat template writes anew (drops their reasoning, say): refused, or each
    turn becomes a sequence of its own behind the conversation as it was then written."""


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward source: `builtin` names of the environment, or `path.py:function`."""

    function: str
    weight: float = 1.0
    workers: int = 0
    """Processes that run it, killed when it hangs or crashes; for `path.py:function` and `math`. 0: a function runs in a thread of
    the trainer, which nothing can kill; `math` takes two processes."""
    timeout: float | None = None
    """Seconds one call may take: on the clock in a thread, of processor time in a worker. None: 30, and 3 for `math`."""
    resolution: float | None = None
    """Relative difference of two of its scores that says nothing: siblings that differ by less are alike. Set it for a function that asks
    a model (1e-3, say: what its scores change by when nothing of meaning does). None: 2^-40, a verifier's."""

    def __post_init__(self) -> None:
        if self.workers < 0 or (self.timeout is not None and not self.timeout > 0):
            raise ConfigError(f"reward {self.function!r}: workers={self.workers} must be >= 0 and timeout={self.timeout} > 0")
        _check_resolution(f"reward {self.function!r}", self.resolution)


def _check_resolution(what: str, resolution: float | None) -> None:
    if resolution is not None and not 0 <= resolution < 1:
        raise ConfigError(f"{what}: resolution={resolution:g} is a relative difference, at least 0 and below 1 (1e-3 for a model, say)")


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where programs run that a model wrote: its answers, where tests judge them, and what it gives a Python tool."""

    name: str = "auto"
    """`auto`: the best of `namespaces` and `landlock` that withstands attacks on this machine. Or one of them; or the address of an
    executor (https://...); or `none`, which contains nothing, is refused for root and needs ALLOW_UNSANDBOXED_CODE=1 as well."""
    token: str = "POSTTRAIN_SANDBOX_TOKEN"
    """Environment variable that holds the executor's token."""


@dataclass(frozen=True, kw_only=True)
class Env:
    """Where tasks and rewards come from."""

    name: str = "arithmetic"
    """A gallery environment, `gym:TASK` for reasoning-gym, `verifiers:ID` for PrimeIntellect's verifiers, `prompts` for the user's own data, or a class of one's own: `path.py:Class`."""
    args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """The environment's own settings; it names the valid ones."""
    prompts: str | None = None
    """With name=prompts: a JSONL file or a `datasets` dataset (local directory or hub id)."""
    rewards: tuple[Reward, ...] = ()
    """With name=prompts: at least one. Elsewhere they are added to the environment's own."""
    heldout: int = 200
    """Held-out tasks. 0: train without measuring."""
    limits: Limits = Limits()
    sandbox: Where = Where()
    resolution: float | None = None
    """As `Reward.resolution`, of the environment's own verdicts, where a model gives them."""

    def __post_init__(self) -> None:
        _check_resolution(f"env {self.name}", self.resolution)
        if self.resolution is not None and self.name == "prompts":
            raise ConfigError("env.resolution: with env.name=prompts its rewards judge; set env.rewards.0.resolution")
        if self.heldout < 0:
            raise ConfigError(f"env.heldout={self.heldout}: must be >= 0 (0 trains without measuring)")


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW with global gradient clip and linear warm-up, then constant."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 1.0
    """Global gradient norm is scaled down to this. inf: never."""
    warmup: int = 10
    """Optimizer steps over which lr rises linearly from 0."""

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.clip > 0 or self.warmup < 0:
            raise ConfigError(f"optimizer: lr={self.lr} and clip={self.clip} must be > 0, warmup={self.warmup} >= 0")


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A stage that imitates texts: pretraining on documents, SFT on demonstrations (prompt masked)."""

    name: str
    style: str
    """What to imitate: a style the environment can write (document, answer, cot), or `completion` from the user's data."""
    wrong: float = 0.0
    """Share of demonstrations that are plausible and false."""
    steps: int = 100
    batch: int = 64
    """Sequences per optimizer step."""
    micro_tokens: int = 4096
    optimizer: Optimizer = Optimizer()
    beside: str | None = None
    """Name of a later-compared stage: start from the weights that stage started from, run for the wall time it took,
    report beside it, and hand nothing on. `steps` is then an upper bound."""
    eval: bool = True
    """Evaluate held-out accuracy at the end of the stage."""
    checkpoint_every: int = 100
    """Steps between checkpoints (0: only at the end of the stage)."""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "micro_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}.{name}={getattr(self, name)}: must be >= 1")
        if not 0 <= self.wrong <= 1:
            raise ConfigError(f"{self.name}.wrong={self.wrong}: a share in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """A stage that learns from reward. Four primitive numbers make the batch algebra; the rest is derived."""

    name: str
    algorithm: Algorithm = GRPO
    sampling: Sampling = Sampling()
    optimizer: Optimizer = Optimizer(lr=3e-4)
    prompts: int = 32
    """Groups per step."""
    siblings: int = 8
    """Samples per prompt."""
    oversample: int = 0
    """Start this many more samples per prompt and abort the rest once `siblings` have ended. It cuts the long tail off and
    prefers short answers: see docs/engine.md for how much."""
    minibatches: int = 1
    """Optimizer steps one pass over the step's groups is cut into (whole groups)."""
    epochs: int = 1
    """Passes over the step's groups."""
    steps: int = 100
    wall_time: float | None = None
    """Stop after this many seconds (checked between steps)."""
    target: float | None = None
    """Stop once the mean held-out reward reaches this: accuracy, where outcomes are 0 or 1."""
    eval_every: int = 20
    """Held-out evaluation every n steps (0: only before and after)."""
    checkpoint_every: int = 20
    """Steps between checkpoints (0: only at the end of the stage)."""
    refill: int = 8
    """With a filter: ask for at most this many times `prompts` groups a step, then go on with what was kept."""
    micro_tokens: int = 4096
    """Packed tokens per forward/backward; splits only, never changes the gradient."""
    reference: str | None = None
    """Weights the algorithm's KL or distillation compares with: a model directory with the policy's tokenizer. None: the policy
    as the stage began."""
    max_failed: float = 0.5
    """Stop the run when more than this share of a step's samples could not be judged."""

    def __post_init__(self) -> None:
        for name in ("prompts", "siblings", "minibatches", "epochs", "steps", "refill", "micro_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}.{name}={getattr(self, name)}: must be >= 1")
        if self.prompts % self.minibatches:
            raise ConfigError(
                f"{self.name}: prompts={self.prompts} cannot be cut into minibatches={self.minibatches} of whole groups; use a divisor of {self.prompts}"
            )
        if self.algorithm.group_relative and self.siblings < 2:
            raise ConfigError(f"{self.name}.siblings={self.siblings}: {self.algorithm.name} compares siblings, so at least 2 are needed")
        if self.oversample < 0:
            raise ConfigError(f"{self.name}.oversample={self.oversample}: must be >= 0 (0 aborts nothing)")
        if self.target is not None and self.eval_every == 0:
            raise ConfigError(f"{self.name}.target={self.target} is never checked with eval_every=0; set eval_every")
        self._check_pieces()
        self.sampling.for_training()

    def _check_pieces(self) -> None:
        """What the algorithm needs of the stage."""
        a = self.algorithm
        if a.shown is not None and a.shown.siblings >= self.siblings:
            raise ConfigError(
                f"{self.name}: shown.siblings={a.shown.siblings} of siblings={self.siblings} leaves nothing for the policy to say; raise siblings"
            )
        if a.shown is not None and self.sampling.truncated:
            raise ConfigError(
                f"{self.name}: {a.name} learns from demonstrations, which no truncated sampler drew. Set top_p=1 top_k=0 min_p=0"
            )
        if a.shown is not None and self.sampling.bans:
            raise ConfigError(
                f"{self.name}: {a.name} learns from demonstrations, and this sampling may ban what they say. Set allowed_ids=none "
                "allowed_words=none bad_ids=none bad_words=none min_tokens=0"
            )
        if (best := next((s for s in a.shape if isinstance(s, BestOf)), None)) and best.k >= self.siblings:
            raise ConfigError(
                f"{self.name}: the best of k={best.k} is the same for all siblings={self.siblings}, so nothing is learned. Lower shape.bestof.k, or raise siblings"
            )
        if self.reference is not None and not a.reads & {"reference", "teacher"}:
            raise ConfigError(
                f"{self.name}.reference={self.reference}: {a.name} reads no reference. Set reference=none, or pull or distill"
            )
        if a.rewards == "none" and self.reference is None:
            raise ConfigError(f"{self.name}: {a.name} learns from a teacher alone. Name its model directory: {self.name}.reference=PATH")
        if self.sampling.top not in (0, a.stores_top):
            raise ConfigError(
                f"{self.name}.sampling.top={self.sampling.top}: the algorithm decides it ({a.name}: {a.stores_top}). Leave it out"
            )

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps per controller step."""
        return self.minibatches * self.epochs


Stage = Supervised | Reinforce


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out accuracy is measured: fixed tasks, fixed seeds."""

    samples: int = 8
    """Samples a prompt at temperature 1 (or the stage's sampling)."""
    seed: int = 1234
    greedy: bool = True
    """Also score one greedy answer a prompt."""

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ConfigError(f"evaluation.samples={self.samples}: must be >= 1")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides what happens, except the machine."""

    recipe: str
    seed: int = 0
    model: Model = Model()
    env: Env = Env()
    stages: tuple[Stage, ...]
    evaluation: Evaluation = Evaluation()
    engine: Engine = Embedded()
    """What samples: `embedded`, or `vllm`."""
    slots: int = 256
    """Sequences the engine decodes at once."""
    deterministic: bool = False
    """Fixed matmul shapes in the embedded engine, so that tokens are bit-equal whatever runs beside them; slower."""
    threads: int = 0
    """CPU threads for torch. 0: all cores of the machine (recorded in run.json)."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    keep_checkpoints: int = 2
    """Newest checkpoints kept, beside the best one."""
    record_episodes: bool = True
    fault: str | None = None
    """A bug to plant on purpose, by its name in `posttrain faults`, to see it caught. The run's numbers are then worthless, so it
    only starts with --allow-fault. None: nothing is planted."""

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("threads", 0), ("keep_checkpoints", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: must be >= {least}")
        if self.deterministic and not isinstance(self.engine, Embedded):
            raise ConfigError(
                "deterministic=true is what the embedded engine can do; vLLM's tokens depend in their last bits on what runs beside them. Set engine=embedded, or deterministic=false"
            )
        if self.deterministic and isinstance(self.engine, Embedded) and (self.engine.lookup or self.engine.draft):
            raise ConfigError(
                "deterministic=true computes fixed shapes, and drafts differ in number: set engine.lookup=0 engine.draft=none"
            )
        names = [s.name for s in self.stages]
        if not names:
            raise ConfigError("a run needs at least one stage")
        if strange := [n for n in names if not NAME.fullmatch(n)]:
            raise ConfigError(f"stage name {strange[0]!r}: use at most 64 letters, digits, - and _, since files of the run are named by it")
        if len(set(names)) != len(names):
            raise ConfigError(f"stage names must differ: {names}")
        if not self.env.heldout and (blind := [s.name for s in self.stages if isinstance(s, Reinforce) and s.target is not None]):
            raise ConfigError(f"{blind[0]}.target is never measured with env.heldout=0: set env.heldout, or target=none")
        for i, s in enumerate(self.stages):
            if isinstance(s, Supervised) and s.beside is not None and s.beside not in names[:i]:
                raise ConfigError(f"stage {s.name!r}: beside={s.beside!r} must name an earlier stage of {names[:i]}")

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)
