"""A run as one frozen tree of dataclasses. Everything derived is a property; nothing is filled in later.

`posttrain.system.dataclass_json` turns it into plain data and back. Dotted overrides address its fields by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from posttrain.config.engines import Embedded, Engine, KernelChoice, engine_refusals, pause_refusals
from posttrain.config.env import Env
from posttrain.config.model_settings import Lora, RouterReplay, check_device, check_frozen, router_refusals
from posttrain.config.placement import Local, Placement, placement_refusals
from posttrain.config.stages.reinforce import Reinforce as Reinforce
from posttrain.config.stages.stage import LearnsRows, Stage, offered, refusals
from posttrain.config.stages.stage import Optimizer as Optimizer
from posttrain.core.conversation import Turns
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.system.errors import ConfigError, at_least

NAME = re.compile(r"\w[\w-]{0,63}")
"""Pattern of a stage's name."""

Checkpointing = Literal["none", "selective", "full"]
"""Which activations are computed again in the backward pass: see `Model.gradient_checkpointing`."""

MIXTURES = ("qwen3_moe", "mixtral")
"""Architectures that are mixtures of experts."""

BUILT_CONTEXT = 512
"""Positions of a built model, where `Model.context` is not set."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The policy: any Hugging Face causal LM by `path`, or, without one, a small config built on the spot."""

    path: str | None = None
    """The model to train: a local directory or hub id. None: build `arch` at the sizes below, with random weights and a
    tokenizer of the environment's alphabet."""
    trust_remote_code: bool = False
    """Run the Python code that comes with the model at `path`."""
    arch: Literal["qwen3", "llama", "gpt2", "gemma", "qwen3_moe", "mixtral"] = "qwen3"
    """Architecture of a model that is built. qwen3_moe and mixtral are mixtures of experts."""
    hidden: int = 128
    """Width of a built model."""
    layers: int = 4
    """Layers of a built model."""
    heads: int = 4
    """Attention heads of a built model."""
    kv_heads: int = 4
    """Key-value heads of a built model; fewer than `heads` share them."""
    ffn: int = 384
    """Width of the feed-forward layers of a built model; of each expert in a mixture."""
    experts: int = 4
    """Experts in each layer of a built mixture (qwen3_moe, mixtral)."""
    experts_per_token: int = 2
    """Experts that the router of a built mixture chooses for each token."""
    context: int | None = None
    """Most tokens of a sequence, prompt included. None: all positions of the model at `path`, and 512 where the model
    is built or gives no limit. With a RoPE whose frequencies change with the length (dynamic, longrope), the limit is
    the length at which they begin to change."""
    device: str = "cpu"
    """Where it computes: cpu, cuda, cuda:1, xpu. Not mps, because torch has no float64 there, by which tokens are drawn
    and weights are checked."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and activations. The head, its softmax, every loss and the weights that the optimizer updates are
    always float32. Sampler and learner differ by about 1/8 as much in float16 as in bfloat16; it needs the loss to be
    scaled, which is done by itself."""
    kernels: KernelChoice = "auto"
    """Which code learner, optimizer, reference and embedded engine use. auto: the fastest that works on this machine.
    compiled: the same, but do not start where the embedded engine has no kernels built by this machine's C compiler
    (float32 on a CPU). torch: nothing that is compiled on this machine. reference: every operation by its plain
    definition; slow, for finding out whether a faster form is wrong."""
    lora: Lora | None = None
    """Train adapters of low rank beside frozen weights (`model.lora.rank=16`). None: train all weights."""
    quantize: Literal["int8", "nf4"] | None = None
    """Hold the frozen linear layers beneath an adapter in few bits, in learner, reference and engine. int8: each row as
    whole numbers of 8 bits times one scale. nf4: 4 bits, by torchao (2305.14314). Takes less memory, and computes
    slower on a CPU. None: as they were loaded."""
    share_prefixes: bool = True
    """Compute what several sequences begin with once in the learner: the prompt of siblings, earlier turns. It changes
    results by rounding only, which its first use in a run proves."""
    compile: bool = False
    """Compile the learner's layers with torch.compile before the first step, which takes a minute or more. It pays off
    on GPUs and in long runs. The sampler and references are not compiled."""
    warm_up: bool | None = None
    """Compute the largest pass that the settings allow once before the first step of a stage, so that memory that does
    not suffice shows at once. Nothing is learned from it. None: on every device but the CPU."""
    router_replay: RouterReplay = "none"
    """The choice of experts that the learner follows, in a mixture of experts. sampler: for each token the experts that
    its sampler chose, as the engine recorded them; their weights are computed anew, so that the router learns (R3,
    2510.11370). start: those of the learner at the beginning of the step (R2), which holds them fixed over several
    optimizer steps. none: every pass chooses anew. It matters where sampler and learner differ: narrow types,
    staleness, several optimizer steps."""
    gradient_checkpointing: Checkpointing | bool = "none"
    """The results that the backward pass computes again instead of keeping them in memory. selective: all but matrix
    products and torch's attention, which costs little. full: whole layers. true and false stand for full and none."""
    offload_activations: bool = False
    """Keep activations in the memory of the CPU until the backward pass. Only for accelerators."""
    offload_optimizer: bool = False
    """Keep the optimizer's moments, and averages of the weights, in the memory of the CPU between steps. Each step
    copies them to the device and back, some parameters at a time, and computes the same. Only for accelerators."""
    history: Literal["append", "rewrite"] = "append"
    """The treatment of a chat template that changes earlier turns of a conversation, for example drops their
    reasoning. append: refuse it. rewrite: each turn becomes a sequence of its own, after the conversation as it was
    then written."""

    def __post_init__(self) -> None:
        check_device(self.device, self.offload_activations, self.offload_optimizer)
        if self.quantize is not None and self.lora is not None and self.lora.dora:
            raise ConfigError(
                f"model.quantize={self.quantize} with model.lora.dora=true: PEFT computes DoRA's norms from float"
                " weights. Set one of them off"
            )
        # Both spellings become the word, so that equal runs are equal. The class is frozen, hence the detour.
        if isinstance(self.gradient_checkpointing, bool):
            object.__setattr__(self, "gradient_checkpointing", "full" if self.gradient_checkpointing else "none")
        if self.compile and (self.gradient_checkpointing != "none" or self.offload_activations):
            raise ConfigError(
                "model.compile=true keeps what its graphs decide to keep: set model.gradient_checkpointing=none"
                " model.offload_activations=false, or leave it out"
            )
        if self.compile and self.router_replay != "none":
            raise ConfigError(
                "model.compile=true writes the routers' choice into its graphs, so none can be given to them: set"
                " model.router_replay=none, or leave model.compile out"
            )
        if self.path is None:
            self._check_sizes()

    @property
    def checkpointing(self) -> Checkpointing:
        """`gradient_checkpointing` as a word."""
        setting = self.gradient_checkpointing
        return ("full" if setting else "none") if isinstance(setting, bool) else setting

    def _check_sizes(self) -> None:
        """ConfigError where no model of `arch` can be built at these sizes."""
        if self.router_replay != "none" and self.arch not in MIXTURES:
            raise ConfigError(
                f"model.router_replay={self.router_replay}, and {self.arch} has no router: set model.arch to"
                f" {' or '.join(MIXTURES)}, or model.router_replay=none"
            )
        sizes = ("hidden", "layers", "heads", "kv_heads", "ffn", "experts", "experts_per_token", "context")
        at_least(self, "model.", **dict.fromkeys(sizes, 1))
        if self.hidden % self.heads:
            raise ConfigError(
                f"model.hidden={self.hidden} cannot be split over model.heads={self.heads}: use a multiple of"
                f" {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} cannot share model.kv_heads={self.kv_heads}: use a divisor of {self.heads}"
            )
        if self.experts_per_token > self.experts:
            raise ConfigError(
                f"model.experts_per_token={self.experts_per_token} of model.experts={self.experts}: a router chooses"
                " among the experts of its layer, so use at most as many"
            )
        if self.arch == "gpt2" and self.kv_heads != self.heads:
            raise ConfigError(
                f"gpt2 has no shared key-value heads: set model.kv_heads={self.heads}, or model.arch=llama"
            )
        if self.arch != "gpt2" and (self.hidden // self.heads) % 2:
            raise ConfigError(f"{self.arch} rotates pairs: hidden / heads = {self.hidden // self.heads} must be even")


@dataclass(frozen=True, kw_only=True)
class Supervised(LearnsRows):
    """A stage that learns from texts: pretraining on documents, or SFT on demonstrations (prompt masked)."""

    harmless = ("style", "turns", "tool_arguments")

    style: str
    """The demonstrations to imitate: a style the environment can write (document, answer, cot), or `completion` from
    the user's data."""
    wrong: float = 0.0
    """Share of demonstrations that are plausible but false."""
    turns: Turns = "all"
    """Which of the assistant's messages of a row are learned. all: each, by its `weight` (1 where the row gives none, 0
    masks it), as the chat template writes it. last: the completion alone, as it is given."""
    tool_arguments: bool = True
    """Whether the arguments of tool calls are learned. false: a call is, and what it is called with is masked."""
    batch: int = 64
    """Sequences per optimizer step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.wrong <= 1:
            raise ConfigError(f"{self.name}.wrong={self.wrong}: a share in [0, 1]")

    @property
    def demonstrated(self) -> bool:
        return True

    def refuses(self, env: str, styles: tuple[str, ...]) -> str:
        if self.style in styles:
            return ""
        advice = "Give rows with messages, a text or a completion" if env == "prompts" else "Give another env"
        advice = f"Set {self.name}.style={styles[0]}" if styles else advice
        return (
            f"{self.name}.style={self.style!r}: environment {env!r} writes {offered(styles)}. {advice}, or leave the"
            f" stage out with {self.name}=none"
        )


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The settings by which held-out accuracy is measured. Tasks and seeds are fixed."""

    samples: int = 8
    """Samples per prompt, at temperature 1 (or the stage's sampling)."""
    seed: int = 1234
    """Seed of the sampling of held-out answers."""
    greedy: bool = True
    """Also score one greedy answer per prompt."""

    def __post_init__(self) -> None:
        at_least(self, "evaluation.", samples=1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """All settings of a run. Only facts of the machine are not in it."""

    recipe: str
    """The recipe it began from; it decides the stages."""
    seed: int = 0
    """Seed of everything random: the built weights, the order of the tasks, what is sampled."""
    model: Model = Model()
    env: Env = Env()
    stages: tuple[Stage, ...]
    """The stages of the run, one after another."""
    evaluation: Evaluation = Evaluation()
    engine: Engine = Embedded()
    """The engine that samples: `embedded` or `vllm`."""
    placement: Placement = Local()
    """Where the engine works: `local`, in the learner's process; `processes`, one or several in processes of their own;
    or `ray`."""
    slots: int = 256
    """Sequences the engine decodes at once."""
    deterministic: bool = False
    """Fixed matmul shapes in the embedded engine, so that tokens are bit-equal whatever else is in the batch, and
    torch's deterministic algorithms everywhere: an operation that has none stops the run. Slower."""
    exact: bool = False
    """The learner's log-probs equal the sampler's bit for bit: the learner computes them a second time, as the embedded
    engine does, with its own weights. The ratio is then exactly 1 on policy. It includes what deterministic does to the
    engine, and costs one more pass over each batch, whose price the first step tells."""
    threads: int = 0
    """CPU threads for torch. 0: all cores of the machine (recorded in run.json)."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where its numbers are also shown, beside its own folder."""
    log_completions: int = 0
    """Completions of each RL step that trackers get too, with prompt and reward, as a table. 0: text stays here."""
    keep_checkpoints: int = 2
    """How many of the newest checkpoints are kept, beside the best one."""
    record_episodes: bool = True
    """Write every sampled episode into the run folder, which `posttrain show` reads."""
    fault: str | None = None
    """A bug to plant on purpose, by its name in `posttrain faults`, to see it caught. The run's numbers are then
    worthless, so it only starts with --allow-fault. None: no bug."""

    def __post_init__(self) -> None:
        at_least(self, "", slots=1, threads=0, keep_checkpoints=1, log_completions=0)
        if self.log_completions and not (self.record_episodes and self.trackers):
            raise ConfigError(
                f"log_completions={self.log_completions}: they are read from the run's record and go to trackers; set"
                " trackers=wandb (or another one), and leave record_episodes as it is"
            )
        for why in self._refusals():
            raise ConfigError(why)
        # A model that is loaded may come with an adapter, which only its folder tells; it is checked where it is read.
        if self.model.path is None:
            check_frozen(self.model.lora, self.model.quantize)
        names = [s.name for s in self.stages]
        if not names:
            raise ConfigError("a run needs at least one stage")
        if strange := [n for n in names if not NAME.fullmatch(n)]:
            raise ConfigError(
                f"stage name {strange[0]!r}: use at most 64 letters, digits, - and _, since files of the run are named"
                " by it"
            )
        if len(set(names)) != len(names):
            raise ConfigError(f"stage names must differ: {names}")
        for s in self.stages:
            if isinstance(s, Reinforce) and s.target is not None and not self.env_of(s).heldout:
                env = "env" if s.env is None else f"{s.name}.env"
                raise ConfigError(
                    f"{s.name}.target is never measured with {env}.heldout=0: set {env}.heldout, or"
                    f" {s.name}.target=none"
                )
        for why in refusals(self.stages):
            raise ConfigError(why)

    def _refusals(self) -> Iterator[str]:
        """Yields a message about each thing that engine, placement and stages cannot do together."""
        model, engine = self.model, self.engine
        rl = [s for s in self.stages if isinstance(s, Reinforce)]
        ahead = next((s.name for s in rl if s.staleness), "")
        lora = model.lora is not None
        yield from engine_refusals(engine, model.kernels, lora, self.deterministic, self.exact, ahead)
        if why := placement_refusals(self.placement, engine):
            yield why
        for stage in [s.name for s in rl if s.unfinished == "pause"]:
            yield from pause_refusals(stage, engine, isinstance(self.placement, Local), self.deterministic)
        for stage in (s for s in rl if isinstance(s.algorithm.baseline, ImplicitOthers)):
            path, env = "env" if stage.env is None else f"{stage.name}.env", self.env_of(stage)
            learns = f"{stage.name}: {stage.algorithm.name} learns the chance that an answer is right"
            weights = env.paid_weights
            # Where each source pays 0 to 1, as verifiers and judges do. Of a user's function it is assumed.
            if sum(weights) > 1 + 1e-9 or min(weights, default=0.0) < 0:
                yield (
                    f"{learns}, so answers are paid 0 to 1, and the weights of what pays are"
                    f" {', '.join(f'{w:g}' for w in weights)}. Set {path}.rewards.N.weight, or"
                    f" {path}.rewards.N.measured=true, so that none is below 0 and their sum is at most 1, or take"
                    " another algorithm"
                )
            # Steps that are paid as one outcome are chances; every other score of a reward model is any number.
            for n, reward in enumerate(env.rewards):
                if reward.models and reward.steps != "outcome" and reward.weight and not reward.measured:
                    yield (
                        f"{learns}, and the score of reward model {reward.function} is no number of 0 to 1. Set"
                        f" {path}.rewards.{n}.measured=true, or take another algorithm"
                    )
        balanced = next((s.name for s in rl if s.router_aux_loss_coef), "")
        embedded = isinstance(engine, Embedded)
        yield from router_refusals(model.router_replay, balanced, embedded)
        if not embedded and model.lora is not None and model.lora.dora:
            yield (
                "model.lora.dora=true with engine=vllm: vLLM serves no DoRA adapters. Set engine=embedded, or"
                " model.lora.dora=false"
            )
        if not embedded and model.quantize is not None:
            yield (
                f"model.quantize={model.quantize} with engine=vllm: vLLM would answer from other weights than the"
                " learner's. Set engine=embedded, or leave it out"
            )

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    def env_of(self, stage: Stage) -> Env:
        """The environment of a stage: its own, or the run's."""
        return stage.env or self.env
