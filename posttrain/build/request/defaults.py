"""Settings for a real model. A recipe holds values for the tiny model that it builds; where the user gives a model,
every setting that the user leaves open is chosen for that one, and each choice is printed with its reason.

    Choices(run, given).made()     path -> (value, reason)
    for_model(run, given)          the run with them, and the lines to print

The model is known by config.json and the sizes of its files, the data by the lengths of its texts
(`build.request.input_measures`). What is chosen is part of the run tree, so run.json holds what ran. A run that was
written down is never changed by it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from posttrain.build.request.branch import MODEL, run_source
from posttrain.build.request.input_measures import GIB, DataSize, Machine, ModelSize, data_size, machine, model_size
from posttrain.build.request.settings_from_rows import without_completions
from posttrain.config import overrides as dotted
from posttrain.config.engines import Embedded
from posttrain.config.placement import Local
from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.config.stages.preference_settings import Preference
from posttrain.config.stages.rejection import Rejection
from posttrain.config.stages.reward_model_settings import RewardModel
from posttrain.config.stages.stage import Stage
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.record.runtime_objects import RuntimeObjects

TRAINED = 1_000_000
"""A model with fewer parameters is as small as those that recipes build, and the recipe's settings are for it."""
LARGE = 400_000_000
"""Parameters from which on the published learning rates are used: they are for half a billion and more."""
LR = {Reinforce: 1e-6, Supervised: 1e-5, Preference: 1e-6, RewardModel: 1e-5, Rejection: 1e-5}
"""Learning rates of full weights of a large model: GRPO, DAPO and Dr. GRPO use 1e-6 for RL; 1e-5 is usual for SFT, and
5e-7 to 1e-6 for DPO (2305.18290 and its followers), and 9e-6 for a reward model (2203.02155). Rejection sampling is SFT
on samples."""
SMALL_LR = {Reinforce: 5e-4, Supervised: 2e-3, Preference: 3e-4, RewardModel: 1e-3, Rejection: 1e-3}
"""Learning rates with which the recipes' models of .1 million parameters learn (docs/start/recipes.md). Between
`TRAINED` and `LARGE` nothing was measured: there the rate lies on the line between the two, both axes logarithmic."""
LORA = 10
"""Learning rate of an adapter, in those of full weights: 10 was best over models and tasks in a study of both
(Schulman et al., LoRA without regret, 2025), and 1e-5 is usual for RL with adapters."""
PROMPTS = {True: 128, False: 16}
"""Prompts of a step, by whether there is an accelerator. With 8 siblings 128 are the 1,024 samples a step of GRPO
(2402.03300) and Dr. GRPO (2503.20783), for which their learning rate was chosen."""
SIBLINGS = 8
STEPS = 100
PASSES = 2
"""Passes of SFT over its completions."""
ANSWER = 1024
"""Most tokens of an answer where the data does not show how long answers are."""
USUAL = 4096
"""Tokens of a sequence where neither the data nor the user bounds it; only memory is planned by it."""
TEMPLATE = 256
"""Room for what a chat template adds to a prompt, in tokens."""
ACTIVATIONS = 0.25
"""Share of the free memory that one forward and backward pass may take."""
SMALLEST_PASS, PASS = 2048, 0.25
"""Tokens of a pass on a processor, at least; more while it takes at most so many GiB, since a small model is slow in
small pieces: 4,096 tokens are 6 % faster than 2,048 at 1 M parameters, and 1 to 2 % at 26 M
(docs/guides/planning.md)."""
SLEEPS = 10**7
"""Parameters from which on an engine in the learner's process frees its cache while the learner works. To make it anew
takes 1 % of a step at 26 M parameters, and 4 % at 1 M."""
CACHE = 0.3
"""Share of the free memory that the key-value cache may take."""

Value = str | int | float | bool
Choice = tuple[Value, str]


@dataclass(frozen=True)
class Choices:
    """The choices for one run. `given`: full paths of the settings that the user gave; these are left alone."""

    run: Run
    given: frozenset[str]
    data: DataSize | None = None
    size: ModelSize | None = None
    where: Machine = field(default_factory=machine)

    def made(self) -> dict[str, Choice]:
        """Every choice by its path, in the order in which they are printed."""
        out: dict[str, Choice] = dict(self._machine())
        for stage in self.run.stages:
            out |= {f"{stage.name}.{name}": choice for name, choice in self._stage(stage)}
        out |= self._memory()
        return {path: choice for path, choice in out.items() if not self._is_given(path)}

    def _is_given(self, path: str) -> bool:
        # A given group, such as an optimizer, gives all settings below it. `model` and `env` are names of what is
        # loaded, and leave their further settings open.
        return any(path == g or path.startswith(f"{g}.") for g in self.given if g not in ("model", "env"))

    def _lr(self, kind: type[Stage]) -> Choice:
        rate, why = learning_rate(kind, None if self.size is None else self.size.parameters)
        return (
            (rate, why)
            if self.run.model.lora is None
            else (float(f"{float(rate) * LORA:.2g}"), f"an adapter: {LORA} times the rate of {why}")
        )

    # --- the machine -------------------------------------------------------------------------------------------------

    def _machine(self) -> Iterator[tuple[str, Choice]]:
        where = self.where
        yield "model.device", (where.device, where.why)
        yield "model.dtype", (self.dtype, _dtype_reason(where))
        yield "threads", (0, f"all {where.cores} cores")

    @property
    def dtype(self) -> str:
        if self._is_given("model.dtype"):
            return self.run.model.dtype
        return "bfloat16" if self.where.device.startswith("cuda") else "float32"

    # --- stages ------------------------------------------------------------------------------------------------------

    def _stage(self, stage: Stage) -> Iterator[tuple[str, Choice]]:
        if isinstance(stage, Reinforce):
            yield from self._reinforce(stage)
        elif isinstance(stage, Supervised):
            yield from self._supervised(stage)
        elif isinstance(stage, Rejection):
            yield "optimizer.lr", self._lr(Rejection)
            yield "sampling.max_tokens", self._answer()
        elif isinstance(stage, StepLabeling):
            yield "sampling.max_tokens", self._answer()
        elif isinstance(stage, Preference | RewardModel):
            yield from self._judged(stage)

    def _reinforce(self, stage: Reinforce) -> Iterator[tuple[str, Choice]]:
        yield "optimizer.lr", self._lr(Reinforce)
        yield "sampling.max_tokens", self._answer()
        rows, cut = self.data.rows if self.data is not None else None, stage.minibatches
        wanted = PROMPTS[self.where.accelerated]
        why = (
            f"{PROMPTS[True] * SIBLINGS:,} samples a step, as GRPO and Dr. GRPO"
            if self.where.accelerated
            else f"this is a CPU; published runs take {PROMPTS[True]} and more, on GPUs"
        )
        if rows is not None and rows < wanted:
            wanted, why = rows, f"the data has {rows:,} rows"
        # A multiple of `minibatches`, into which the groups of a step are cut.
        yield "prompts", (max(cut, wanted // cut * cut), why)
        yield "siblings", (SIBLINGS, "usual for a prompt; more where few answers are right")
        yield "steps", (STEPS, f"shows whether it learns; --resume RUN {stage.name}.steps=N goes on")
        if stage.eval_every:
            yield "eval_every", (20, f"{STEPS // 20} points of a curve")

    def _answer(self) -> Choice:
        """Most tokens of an answer."""
        room = self._positions
        imitated = any(isinstance(s, Supervised) and s.style == "completion" for s in self.run.stages)
        longest = self.data.longest_completion if self.data is not None and imitated else 0
        most, why = ANSWER, "room to reason; most answers end earlier"
        # A token has about four characters in English: half of the characters leaves room for twice the longest
        # completion.
        if longest:
            most = max(128, _power(longest // 2))
            why = f"the longest completion has {longest:,} characters"
        if room is not None and most > room // 2:
            most, why = room // 2, f"half of the model's context of {room:,} tokens"
        return most, why

    @property
    def _positions(self) -> int | None:
        return self.run.model.context or (self.size.positions if self.size is not None else None)

    def _supervised(self, stage: Supervised) -> Iterator[tuple[str, Choice]]:
        yield "optimizer.lr", self._lr(Supervised)
        count = 0 if self.data is None else self.data.judged if stage.style == "chosen" else self.data.completions
        passes = PASSES if stage.epochs is None else stage.epochs
        steps = max(1, round(passes * count / stage.batch))
        if count and stage.epochs is None:
            yield "steps", (steps, f"{PASSES} passes over {count:,} completions, {stage.batch} a step")
        if count and stage.eval and not stage.eval_every and not self.run.env.rewards:
            taken = stage.steps if self._is_given(f"{stage.name}.steps") else steps
            yield "eval_every", (max(1, taken // 5), "5 points of a curve of held-out loss")

    def _judged(self, stage: Preference | RewardModel) -> Iterator[tuple[str, Choice]]:
        yield "optimizer.lr", self._lr(type(stage))
        if self.data is not None and self.data.rows and stage.epochs is None:
            steps = max(1, self.data.rows // stage.batch)
            yield "steps", (steps, f"1 pass over {self.data.rows:,} rows, {stage.batch} a step; more passes overfit")

    # --- memory ------------------------------------------------------------------------------------------------------

    def _memory(self) -> dict[str, Choice]:
        """Returns the settings that depend on the sizes: the context, the tokens of a pass, the cache and its slots."""
        out: dict[str, Choice] = {}
        longest = self._longest()
        if longest is not None and self.run.model.context is None:
            out["model.context"] = (longest, "the longest prompt of the data with its answer")
        if self.size is None:
            return out
        context = self.run.model.context or longest or min(self.size.positions or USUAL, USUAL)
        free = self.free
        # Powers of two, so that small changes of the estimate choose the same number.
        micro = _floor_power(free * ACTIVATIONS * GIB / self._pass_bytes(False))
        # Not even one of the longest sequences fits into a pass.
        if micro < context and self.where.accelerated:
            out["model.gradient_checkpointing"] = ("full", "saves memory: a pass is computed twice")
            micro = _floor_power(free * ACTIVATIONS * GIB / self._pass_bytes(True))
        most = min(16_384, max(SMALLEST_PASS, _floor_power(PASS * GIB / self._pass_bytes(False))))
        micro = min(max(micro, 512), 32_768 if self.where.accelerated else most)
        for stage in self.run.stages:
            out[f"{stage.name}.micro_tokens"] = (micro, "what fits in memory at once; it changes no result")
        if not isinstance(self.run.engine, Embedded) or not any(s.contract is not None for s in self.run.stages):
            return out
        # Bytes of a token in the cache, 4 for each number. Slots are counted for sequences of half the context, hence
        # the 2 below.
        row = 4 * self.size.layers * self.size.cache_width
        cache = round(max(0.5, min(free * CACHE, 64.0 if self.where.accelerated else 4.0)), 1)
        out["engine.cache_gib"] = (cache, f"{CACHE:.0%} of the {free:.0f} GiB that the weights leave")
        slots = max(8, min(_floor_power(2 * cache * GIB / (row * context)), 512 if self.where.accelerated else 256))
        out["slots"] = (slots, f"sequences of {context // 2:,} tokens that fit in the cache")
        # A cache that is freed in between must hold nothing that goes on: no groups asked ahead, no paused turns.
        waits = not any(isinstance(s, Reinforce) and (s.staleness or s.unfinished != "go_on") for s in self.run.stages)
        large = self.size.parameters >= SLEEPS and not self.where.accelerated
        if waits and large and isinstance(self.run.placement, Local):
            out["engine.sleep"] = (True, "the cache is freed while the learner works")
        return out

    def _longest(self) -> int | None:
        """Most tokens of a sequence: a token has at least one byte. None: not known, so all positions are used."""
        if self.data is None or self.run.env.args.get("tools"):
            return None
        made = [self._tokens_of(s) for s in self.run.stages if isinstance(s, Reinforce | Rejection | StepLabeling)]
        need = max([self.data.longest_prompt + max(made, default=0), self.data.longest])
        # Rounded up to 256, with room for the template.
        need = -(-(need + TEMPLATE) // 256) * 256
        bound = self.size.positions if self.size is not None else None
        return need if bound is not None and need < bound else None

    def _tokens_of(self, stage: Reinforce | Rejection | StepLabeling) -> int:
        given = self._is_given(f"{stage.name}.sampling.max_tokens")
        return stage.sampling.max_tokens if given else int(self._answer()[0])

    @cached_property
    def needed(self) -> float:
        """GiB of the weights, of their copies, and of the optimizer's moments."""
        assert self.size is not None
        each = 4 if self.dtype == "float32" else 2
        reads = any(isinstance(s, Reinforce) and s.algorithm.reads & {"reference"} for s in self.run.stages)
        sampler = any(s.contract is not None for s in self.run.stages)
        # weights, gradients, two moments; a float32 master with its gradient below float32; sampler; reference
        per = each * (2 + sampler + reads) + 8 + (8 if each < 4 else 0)
        if self.run.model.lora is not None:  # one copy for all three; an adapter's own numbers are few
            held = {"int8": 1.2, "nf4": 0.7}.get(self.run.model.quantize or "")  # learner and sampler share them
            per = held or each * (1 + (sampler and each == 4))
        return per * self.size.parameters / GIB

    @property
    def free(self) -> float:
        return max(1.0, 0.9 * self.where.memory - self.needed)

    def _pass_bytes(self, again: bool) -> float:
        """Bytes that a token takes in a forward and backward pass: about 16 hidden states and 4 inner ones a layer, or
        with gradient checkpointing one hidden state a layer beside one whole layer."""
        assert self.size is not None
        layer = 16 * self.size.hidden + 4 * self.size.ffn
        kept = layer * self.size.layers if not again else layer + self.size.hidden * self.size.layers
        return kept * (4 if self.dtype == "float32" else 2)

    def warning(self) -> str:
        """A line where the model does not seem to fit; '' where it does."""
        if self.size is None or self.needed < 0.9 * self.where.memory:
            return ""
        return (
            f"note: training {self.size.parameters / 1e9:.2g} billion parameters takes about {self.needed:.0f} GiB for"
            f" weights and optimizer alone, and {self.where.device} has {self.where.memory:.0f} GiB: use a smaller"
            " model or a larger machine"
        )


def learning_rate(kind: type[Stage], parameters: int | None) -> Choice:
    """The rate for full weights of a model of this size, with the reason; None: its size is not known.

    >>> learning_rate(Reinforce, 100_000)[0], learning_rate(Reinforce, 30_000_000)[0], learning_rate(Reinforce, None)[0]
    (0.0005, 1e-05, 1e-06)
    """
    large, small = LR[kind], SMALL_LR[kind]
    if parameters is None or parameters >= LARGE:
        return large, "full weights, as published for half a billion parameters and more"
    if parameters <= TRAINED:
        return small, "as the recipes' own models, which are as small"
    # log lr is linear in log parameters between the two sizes; one digit of it is all that is known.
    share = math.log(parameters / TRAINED) / math.log(LARGE / TRAINED)
    between = float(f"{small ** (1 - share) * large**share:.0e}")
    return between, f"by size, between {small:g} at 1 million parameters and {large:g} at half a billion"


def _dtype_reason(where: Machine) -> str:
    if where.device.startswith("cuda"):
        return "optimizer, head and losses stay float32"
    if where.device == "cpu":
        return "the compiled kernels for CPUs are float32; bfloat16 is slower"
    return "bfloat16 was not measured on this device"


def _power(number: float) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << max(0, int(number) - 1).bit_length()


def _floor_power(number: float) -> int:
    """The largest power of two that is not larger, at least 1."""
    return 1 << max(0, int(number).bit_length() - 1)


@dataclass(frozen=True)
class ModelDefaults:
    """A run with its choices. `chosen`: the reason of each, by path, for run.json."""

    run: Run
    lines: tuple[str, ...] = ()
    chosen: Mapping[str, str] = field(default_factory=dict[str, str])


def given_paths(run: Run, overrides: Iterable[str]) -> frozenset[str]:
    """Full paths of the settings that these overrides give."""
    given = (text.partition("=")[::2] for text in overrides if "=" in text)
    return frozenset(".".join(dotted.address(run, key.strip(), word.strip())) for key, word in given)


def for_model(
    run: Run,
    given: frozenset[str],
    *,
    trained: bool = True,
    only: Collection[str] = (),
    objects: RuntimeObjects = RuntimeObjects(),
) -> ModelDefaults:
    """The run with everything chosen that was not given. Without `model.path`, and for a model as small as a recipe's
    own (`trained`), only the stages are looked at.

    Args:
        given: full paths of the user's settings (`given_paths`).
        trained: False where the weights are of a run that built its model.
        only: first words of the paths to choose (of a stage's, the word after its name); empty: all.
        objects: what a Python program handed to the run.
    """
    # Rows are read only where the user gave data or a model: for a recipe as it is shipped nothing depends on them.
    data = data_size(run.env, objects) if {"env.prompts", "model", "model.path"} & given else None
    run, lines = without_completions(run, given, data)
    chosen = {"stages": "; ".join(lines)} if lines else {}
    if run.model.path is None:
        return ModelDefaults(run, tuple(lines), chosen)
    source = run_source(run.model.path)
    size = model_size(run.model.path if source is None else str(source[0] / MODEL))
    if not trained or (size is not None and size.parameters < TRAINED):
        return ModelDefaults(run) if only else _as_the_recipe(run, given, size, trained, lines, chosen)
    # A device that the user named decides the choices, also where the machine has a better one.
    asked = run.model.device if "model.device" in given else None
    choices = Choices(run, given, data, size, machine(asked))
    made = {path: c for path, c in choices.made().items() if not only or {*path.split(".")[:2]} & {*only}}
    words = [f"{path}={str(value).lower() if isinstance(value, bool) else value}" for path, (value, _) in made.items()]
    lines += [f"settings chosen for {run.model.path} (give any of them yourself):"]
    lines += [f"  {path} = {word(value)}: {why}" for path, (value, why) in made.items()]
    lines += [w for w in (choices.warning(),) if w]
    return ModelDefaults(
        dotted.apply(run, words), tuple(lines), chosen | {path: why for path, (_, why) in made.items()}
    )


def _as_the_recipe(
    run: Run, given: frozenset[str], size: ModelSize | None, trained: bool, lines: list[str], chosen: dict[str, str]
) -> ModelDefaults:
    """The run with the settings of the recipe, which are for a model as small as its own. One that a run built larger
    gets the learning rates of its size."""
    about = "" if size is None else f"about {float(f'{size.parameters:.2g}'):,.0f} parameters"
    if size is not None and size.parameters >= TRAINED:
        asked = [s for s in run.stages if type(s) in LR]
        rates = {f"{s.name}.optimizer.lr": learning_rate(type(s), size.parameters) for s in asked}
        made = {path: c for path, c in rates.items() if path not in given}
        lines += [f"settings: those of the recipe, because a run built the model; by its {about}:"]
        lines += [f"  {path} = {word(value)}: {why}" for path, (value, why) in made.items()]
        words = [f"{path}={value}" for path, (value, _) in made.items()]
        return ModelDefaults(dotted.apply(run, words), tuple(lines), chosen | {p: why for p, (_, why) in made.items()})
    why = f"it has {about}" if trained or about else "a run built it"
    lines.append(f"settings: those of the recipe, because the model is as small as its own ({why})")
    return ModelDefaults(run, tuple(lines), chosen)


def room_for_minibatches(run: Run, overrides: Sequence[str]) -> list[str]:
    """Overrides that raise `prompts` of the recipe to a multiple of the `minibatches` that the user gives with a model,
    where `prompts` is left open: it is chosen for the model, and the recipe's own number must not refuse them."""
    words = [text.partition("=") for text in overrides if "=" in text]
    if not {"model", "model.path"} & {key.strip() for key, _, _ in words}:
        return []
    given = given_paths(run, overrides)
    asked = {".".join(dotted.address(run, k.strip(), w.strip())): w.strip() for k, _, w in words}
    out: list[str] = []
    for s in run.stages:
        cut = asked.get(f"{s.name}.minibatches", "")
        if isinstance(s, Reinforce) and f"{s.name}.prompts" not in given and cut.isdecimal() and int(cut):
            out.append(f"{s.name}.prompts={-(-s.prompts // int(cut)) * int(cut)}")
    return out


def word(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
