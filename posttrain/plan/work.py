"""The sizes of a stage of a run: its model, its batch, its lengths, and where it works."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from posttrain.config.engines import GIB, Embedded
from posttrain.config.model_settings import ALL_LINEAR, Lora
from posttrain.config.placement import Local, Processes
from posttrain.config.rank_limits import Parallel
from posttrain.config.run import Checkpointing, Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.plan.lengths import Lengths
from posttrain.plan.shapes import ModelShape
from posttrain.system.errors import ConfigError

FUSED = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers run as few operations on a processor (`engine.layers.fused_layers`,
`engine.embedded.cache.fused_decoder`)."""
# nf4 has 4 bits, and .127 bits of scales, which are quantised themselves (2305.14314): 4.127 / 8.
QUANTISED = {"int8": 1.0, "nf4": 0.516}
"""Bytes of one number of a quantised weight. For nf4 its scales are included, for int8 those of rows are not."""

COMPLETIONS = {"pair": 2, "ranking": 3, "label": 1, "rating": 1, "steps": 1}
"""Completions of a judgement, by its kind. Of a ranking 3 are assumed: it may have any number."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stage as sizes. `posttrain.config.run` says what each setting means."""

    shape: ModelShape
    lengths: Lengths
    prompts: int
    """Groups of a step. In a stage that samples nothing: its sequences or pairs."""
    siblings: int = 1
    """Completions of a prompt."""
    micro_tokens: int = 4096
    minibatches: int = 1
    epochs: int = 1
    width: int = 4
    """Bytes of a weight and of an activation."""
    accelerator: bool = False
    head: bool = True
    """Whether log-probs are learned from. A reward model has none."""
    lora: Lora | None = None
    quantize: str | None = None
    optimizer: str = "adamw"
    ema: bool = False
    checkpointing: Checkpointing = "none"
    offload_activations: bool = False
    offload_optimizer: bool = False
    share: bool = True
    """`model.share_prefixes`"""
    samples_answers: bool = False
    """Whether it samples from the policy."""
    reference: bool = False
    """Whether a second model scores."""
    values: bool = False
    judging: int = 0
    """Models that judge; each is taken to be as large as the policy."""
    vllm: bool = False
    slots: int = 256
    cache: float = 4.0 * GIB
    """Most bytes of the cache of keys and values."""
    budget: int = 2048
    sleep: bool = False
    engines: int = 0
    """Engines in processes of their own; 0: there is one in the learner's process."""
    delta: bool = False
    staleness: int = 0
    learned: float = 1.0
    """Share of the tokens that the learner computes: groups without spread may be left out."""
    ranks: int = 1
    replicas: int = 1
    parallel: Parallel = "rows"

    def __post_init__(self) -> None:
        for name in ("prompts", "siblings", "micro_tokens", "minibatches", "epochs", "slots", "ranks", "replicas"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be >= 1")
        if self.ranks % self.replicas:
            raise ConfigError(f"replicas={self.replicas}: must be a divisor of the {self.ranks} ranks")

    # --- sequences ---------------------------------------------------------------------------------------------------

    @property
    def sequences(self) -> int:
        """Number of sequences of a step."""
        return self.prompts * self.siblings

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is planned for."""
        return self.lengths.prompt + math.ceil(self.lengths.longest(self.sequences))

    @property
    def together(self) -> int:
        """Sequences that an engine decodes at once."""
        return min(self.slots, math.ceil(self.sequences / max(1, self.engines)))

    @property
    def fused(self) -> bool:
        """True where the layers of the learner are the compiled ones, which keep less."""
        plain = self.shape.experts is None and self.shape.family in FUSED
        return plain and not self.accelerator and self.width == 4 and self.checkpointing == "none"

    @property
    def group_tokens(self) -> float:
        """Tokens computed for one group of siblings: a shared prompt once, the last token of an answer never."""
        prompts = 1 if self.share else self.siblings
        return self.lengths.prompt * prompts + (self.lengths.answer - 1) * self.siblings

    @property
    def minibatch_tokens(self) -> float:
        """Tokens computed for one optimizer step, on one rank."""
        # With rows of the weights each rank computes other tokens; else every rank computes all of them.
        divided = self.ranks if self.parallel == "rows" else 1
        return self.prompts * self.group_tokens * self.learned / self.minibatches / divided

    @property
    def pass_tokens(self) -> float:
        """Tokens computed in the largest forward and backward pass."""
        # The minibatch is one pass if it fits. Else passes are filled with whole sequences of the mean length, and a
        # sequence that is longer than a pass gets one of its own.
        if self.minibatch_tokens <= self.micro_tokens:
            return self.minibatch_tokens
        sequence = self.group_tokens / self.siblings
        return max(self.longest - 1.0, sequence * (self.micro_tokens // sequence))

    @property
    def passes(self) -> int:
        """Forward and backward passes of an optimizer step."""
        # Without the small number a whole quotient with a rounding error would count one pass more.
        return math.ceil(self.minibatch_tokens / self.pass_tokens - 1e-9)

    @property
    def spoken_tokens(self) -> float:
        """Tokens of a pass whose log-probs are learned: those of answers, as prompts are only read."""
        return self.pass_tokens * self.lengths.answer * self.siblings / self.group_tokens

    @property
    def copy_ranks(self) -> int:
        """Ranks over which one copy of the weights is cut."""
        return self.ranks // self.replicas

    @property
    def cut_in_rows(self) -> bool:
        """Whether ranks hold rows of every weight, and bring a layer together to compute with it."""
        return self.parallel == "rows" and self.copy_ranks > 1

    # --- parameters --------------------------------------------------------------------------------------------------

    @property
    def linear(self) -> dict[str, tuple[int, int, int]]:
        """(inputs, outputs, how many) of the linear layers of the decoder."""
        s, x = self.shape, self.shape.experts
        layers = {name: (i, o, s.layers) for name, (i, o) in s.projections.items()}
        dense = min(s.layers, x.dense if x else s.layers)
        parts = [("", s.feed, dense)]
        if x and x.shared:  # the experts themselves are no linear layers
            name = "shared_expert" if x.shared_gate else "shared_experts"
            parts.append((f"{name}.", x.shared, s.layers - dense))
            layers |= {f"{name}_gate": (s.hidden, 1, s.layers - dense)} if x.shared_gate else {}
        for part, width, count in (p for p in parts if p[2]):
            layers |= {f"{part}gate_proj": (s.hidden, width, count)} if s.form.gated else {}
            layers |= {f"{part}up_proj": (s.hidden, width, count), f"{part}down_proj": (width, s.hidden, count)}
        joined = {name: [layers[n] for n in names.split()] for name, names in s.form.linear}
        return {name: (x[0][0], sum(o for _, o, _ in x), x[0][2]) for name, x in joined.items()} or layers

    @property
    def in_linear(self) -> int:
        """Parameters of the layers in `linear`."""
        return sum(i * o * n for i, o, n in self.linear.values())

    @property
    def adapter_parameters(self) -> int:
        """Parameters of the adapter; 0: all weights train."""
        if self.lora is None:
            return 0
        # As PEFT does it: the end of a layer's name says that it is meant, and what no layer is called is passed over.
        ends = tuple("" if t == ALL_LINEAR else f".{t}" for t in self.lora.targets)
        chosen = [x for n, x in self.linear.items() if f".{n}".endswith(ends) or any(e.endswith(f".{n}") for e in ends)]
        if not chosen:
            names = ", ".join((ALL_LINEAR, *self.linear))
            raise ConfigError(f"model.lora.targets={','.join(self.lora.targets)}: a plan counts {names}")
        # A is rank x inputs and B is outputs x rank.
        return sum(self.lora.rank * (i + o) * n for i, o, n in chosen)

    @property
    def trained_parameters(self) -> int:
        """Parameters that train."""
        # A value head is one row and a bias.
        return self.adapter_parameters or self.shape.parameters + self.values * (self.shape.hidden + 1)


def work_of(run: Run, stage: Stage, shape: ModelShape, lengths: Lengths) -> Work:
    """The sizes of a stage of a run over one process."""
    model, engine = run.model, run.engine
    common = Work(
        shape=shape,
        lengths=lengths,
        prompts=1,
        micro_tokens=stage.micro_tokens,
        width=4 if model.dtype == "float32" else 2,
        accelerator=model.device != "cpu",
        lora=model.lora,
        quantize=model.quantize,
        optimizer=stage.optimizer.kind,
        ema=stage.optimizer.ema is not None,
        checkpointing=model.checkpointing,
        offload_activations=model.offload_activations,
        offload_optimizer=model.offload_optimizer,
        share=model.share_prefixes,
        vllm=not isinstance(engine, Embedded),
        slots=run.slots,
        cache=engine.cache_gib * GIB,
        budget=engine.budget if isinstance(engine, Embedded) else 2048,
        sleep=isinstance(engine, Embedded) and engine.sleep,
        engines=0 if isinstance(run.placement, Local) else run.placement.engines,
        delta=isinstance(run.placement, Processes) and run.placement.delta,
        samples_answers=isinstance(stage, Reinforce | OnlinePreference | Rejection),
        judging=len({m for r in run.env_of(stage).rewards for m in (*r.models, r.judge_run, r.meta) if m}),
    )
    # What is compared with is a second model, but for an adapter that is switched off, which is its own reference.
    second_model = model.lora is None or getattr(stage, "reference", None) is not None
    if isinstance(stage, Reinforce):
        a = stage.algorithm
        # A teacher with the policy's weights is the policy.
        compares = bool(a.reads & {"reference", "teacher"}) and not a.own_teacher
        return replace(common, prompts=stage.prompts, siblings=stage.siblings, minibatches=stage.minibatches,
                       epochs=stage.epochs, staleness=stage.staleness, reference=compares and second_model,
                       values="values" in a.reads)  # fmt: skip
    if isinstance(stage, Preference):
        # As the stage decides it (`PreferenceDriver._ahead`): where log-probs are computed before the first step, no
        # second model is in memory later. Worlds of the library, which have no colon, and mixed data are endless; of an
        # environment of the user's own it is not known, and it is taken to be finite.
        env = run.env_of(stage)
        endless = bool(env.mix) or (env.name != "prompts" and ":" not in env.name)
        ahead = not endless and model.lora is None if stage.ahead is None else stage.ahead
        held = stage.algorithm.reads_reference and not ahead and second_model
        return replace(common, prompts=stage.batch, siblings=COMPLETIONS[stage.algorithm.kind], reference=held)
    if isinstance(stage, RewardModel):
        return replace(common, prompts=stage.batch, siblings=COMPLETIONS[stage.judgement], head=False)
    if isinstance(stage, OnlinePreference):
        held = stage.algorithm.reads_reference and second_model
        learned = 2 * stage.pairs / (stage.prompts * stage.samples)
        return replace(common, prompts=stage.prompts, siblings=stage.samples, learned=learned, reference=held)
    if isinstance(stage, Rejection):
        return replace(common, prompts=stage.prompts, siblings=stage.siblings)
    if isinstance(stage, Supervised):
        return replace(common, prompts=stage.batch)
    raise ConfigError(f"{stage.name}: a stage of kind {type(stage).__name__} is not planned; name another with --stage")
