"""Settings for a real model, where the user leaves them open.

A recipe has values for the tiny model that it builds. Where the user gives a model, each setting that the user did not
give is chosen for that model, and printed with the reason. Of the model only config.json and the sizes of its files are
read, of the data only the lengths of its texts (`build.request.input_measures`). The choices become part of the run
tree, so run.json has them. A run that goes on is never changed by them.
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
"""A model with fewer parameters is as small as those that recipes build: it gets the settings of the recipe."""
LARGE = 400_000_000
"""A model with at least so many parameters gets the published learning rates, which are for half a billion and more."""
LR = {Reinforce: 1e-6, Supervised: 1e-5, Preference: 1e-6, RewardModel: 1e-5, Rejection: 1e-5}
"""Learning rates of full weights of a large model: GRPO, DAPO and Dr. GRPO use 1e-6 for RL; 1e-5 is usual for SFT, and
5e-7 to 1e-6 for DPO (2305.18290 and its followers), and 9e-6 for a reward model (2203.02155). Rejection sampling is SFT
on samples."""
SMALL_LR = {Reinforce: 5e-4, Supervised: 2e-3, Preference: 3e-4, RewardModel: 1e-3, Rejection: 1e-3}
"""Learning rates with which the recipes' models of 0.1 million parameters learn (docs/start/recipes.md). Between
`TRAINED` and `LARGE` parameters nothing was measured: there log(rate) is linear in log(parameters)."""
LORA = 10
"""The learning rate of an adapter is that of full weights times this factor. 10 was best over models and tasks in a
study of both (Schulman et al., LoRA without regret, 2025), and 1e-5 is usual for RL with adapters."""
PROMPTS = {True: 128, False: 16}
"""Prompts of a step, with (True) and without an accelerator. 128 prompts with 8 siblings are the 1,024 samples of a
step of GRPO (2402.03300) and Dr. GRPO (2503.20783), for which their learning rate was chosen."""
SIBLINGS = 8
"""Answers to each prompt in a step of reinforcement."""
STEPS = 100
"""Steps of a reinforcement stage."""
PASSES = 2
"""Passes of SFT over its completions."""
ANSWER = 1024
"""Most tokens of an answer where the data does not show how long answers are."""
USUAL = 4096
"""Tokens of a sequence where neither the data nor the user bounds it. Only memory is planned with this number."""
TEMPLATE = 256
"""Room for what a chat template adds to a prompt, in tokens."""
ACTIVATIONS = 0.25
"""Share of the free memory that one forward and backward pass may take."""
SMALLEST_PASS, PASS = 2048, 0.25
"""For a CPU: a pass has at least `SMALLEST_PASS` tokens, and more as long as it takes at most `PASS` GiB. A small model
is slow in small pieces: 4,096 tokens are 6 % faster than 2,048 at 1 M parameters, and 1 to 2 % at 26 M
(docs/guides/planning.md)."""
SLEEPS = 10**7
"""With at least so many parameters, an engine in the learner's process frees its cache while the learner works. Making
the cache anew takes 1 % of a step at 26 M parameters, and 4 % at 1 M."""
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
        where = self.where
        out: dict[str, Choice] = {
            "model.device": (where.device, where.why),
            "model.dtype": (self.dtype, _dtype_reason(where)),
            "threads": (0, f"all {where.cores} cores"),
        }
        for stage in self.run.stages:
            out |= {f"{stage.name}.{name}": choice for name, choice in self._stage(stage)}
        out |= self._memory()
        return {path: choice for path, choice in out.items() if not self._is_given(path)}

    def _is_given(self, path: str) -> bool:
        # A given group, such as an optimizer, gives all settings below it. But `model=PATH` and `env=NAME` only say
        # what is loaded, and leave the other settings of these groups open.
        return any(path == g or path.startswith(f"{g}.") for g in self.given if g not in ("model", "env"))

    def _lr(self, kind: type[Stage]) -> Choice:
        """The learning rate of a stage of this kind, of full weights or of an adapter."""
        rate, why = learning_rate(kind, None if self.size is None else self.size.parameters)
        if self.run.model.lora is None:
            return rate, why
        return float(f"{float(rate) * LORA:.2g}"), f"an adapter: {LORA} times the rate of {why}"

    @property
    def dtype(self) -> str:
        if self._is_given("model.dtype"):
            return self.run.model.dtype
        return "bfloat16" if self.where.device.startswith("cuda") else "float32"

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
        rows, minibatches = self.data.rows if self.data is not None else None, stage.minibatches
        prompts, why = PROMPTS[False], f"this is a CPU; published runs take {PROMPTS[True]} and more, on GPUs"
        if self.where.accelerated:
            prompts, why = PROMPTS[True], f"{PROMPTS[True] * SIBLINGS:,} samples a step, as GRPO and Dr. GRPO"
        if rows is not None and rows < prompts:
            prompts, why = rows, f"the data has {rows:,} rows"
        # Rounded down to a multiple of `minibatches`, since the groups of a step are cut into that many parts.
        yield "prompts", (max(minibatches, prompts // minibatches * minibatches), why)
        yield "siblings", (SIBLINGS, "usual for a prompt; more where few answers are right")
        yield "steps", (STEPS, f"shows whether it learns; --resume RUN {stage.name}.steps=N goes on")
        if stage.eval_every:
            yield "eval_every", (20, f"{STEPS // 20} points of a curve")

    def _answer(self) -> Choice:
        """Most tokens of an answer."""
        context = self.run.model.context or (self.size.positions if self.size is not None else None)
        imitated = any(isinstance(s, Supervised) and s.style == "completion" for s in self.run.stages)
        longest = self.data.longest_completion if self.data is not None and imitated else 0
        most, why = ANSWER, "room to reason; most answers end earlier"
        # A token has about four bytes: half as many tokens as bytes leave room for an answer of twice the length.
        if longest:
            most = max(128, _power(longest // 2))
            why = f"the longest completion has {longest:,} bytes"
        if context is not None and most > context // 2:
            most, why = context // 2, f"half of the model's context of {context:,} tokens"
        return most, why

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

    def _memory(self) -> dict[str, Choice]:
        """The settings that depend on sizes: context, tokens of a pass, checkpointing, the cache, its slots."""
        choices_made: dict[str, Choice] = {}
        longest = self._longest()
        if longest is not None and self.run.model.context is None:
            choices_made["model.context"] = (longest, "the longest prompt of the data with its answer")
        if self.size is None:
            return choices_made
        context = self.run.model.context or longest or min(self.size.positions or USUAL, USUAL)
        free = self.free
        # Rounded down to a power of two, so that a slightly different estimate gives the same number.
        micro = _floor_power(free * ACTIVATIONS * GIB / self._pass_bytes(False))
        # Not even one of the longest sequences fits into a pass.
        if micro < context and self.where.accelerated:
            choices_made["model.gradient_checkpointing"] = ("full", "saves memory: a pass is computed twice")
            micro = _floor_power(free * ACTIVATIONS * GIB / self._pass_bytes(True))
        most = min(16_384, max(SMALLEST_PASS, _floor_power(PASS * GIB / self._pass_bytes(False))))
        micro = min(max(micro, 512), 32_768 if self.where.accelerated else most)
        for stage in self.run.stages:
            choices_made[f"{stage.name}.micro_tokens"] = (micro, "what fits in memory at once; it changes no result")
        if not isinstance(self.run.engine, Embedded) or not any(s.contract is not None for s in self.run.stages):
            return choices_made
        # Each number of the cache has 4 bytes. Slots are counted for sequences of half the context, hence the factor 2.
        bytes_per_token = 4 * self.size.layers * self.size.cache_width
        cache = round(max(0.5, min(free * CACHE, 64.0 if self.where.accelerated else 4.0)), 1)
        choices_made["engine.cache_gib"] = (cache, f"{CACHE:.0%} of the {free:.0f} GiB that the weights leave")
        fitting = _floor_power(2 * cache * GIB / (bytes_per_token * context))
        slots = max(8, min(fitting, 512 if self.where.accelerated else 256))
        choices_made["slots"] = (slots, f"sequences of {context // 2:,} tokens that fit in the cache")
        # The cache may only be freed if no turn is unfinished meanwhile: no groups asked ahead, and no paused turns.
        rl = [s for s in self.run.stages if isinstance(s, Reinforce)]
        nothing_pending = not any(s.staleness or s.unfinished != "go_on" for s in rl)
        worth_it = self.size.parameters >= SLEEPS and not self.where.accelerated
        if nothing_pending and worth_it and isinstance(self.run.placement, Local):
            choices_made["engine.sleep"] = (True, "the cache is freed while the learner works")
        return choices_made

    def _longest(self) -> int | None:
        """A bound for the tokens of a sequence, since a token has at least one byte. None: not known, or not below the
        model's positions."""
        # With tools a sequence also has their results, whose lengths the data does not show.
        if self.data is None or self.run.env.args.get("tools"):
            return None
        answers = [self._tokens_of(s) for s in self.run.stages if isinstance(s, Reinforce | Rejection | StepLabeling)]
        need = max([self.data.longest_prompt + max(answers, default=0), self.data.longest])
        # Rounded up to 256, with room for the template.
        need = -(-(need + TEMPLATE) // 256) * 256
        bound = self.size.positions if self.size is not None else None
        return need if bound is not None and need < bound else None

    def _tokens_of(self, stage: Reinforce | Rejection | StepLabeling) -> int:
        """Most tokens of an answer of a stage, given or chosen."""
        is_given = self._is_given(f"{stage.name}.sampling.max_tokens")
        return stage.sampling.max_tokens if is_given else int(self._answer()[0])

    @cached_property
    def needed(self) -> float:
        """GiB of the weights, of their copies, and of the optimizer's moments."""
        assert self.size is not None
        bytes_each = 4 if self.dtype == "float32" else 2
        reference = any(isinstance(s, Reinforce) and s.algorithm.reads & {"reference"} for s in self.run.stages)
        sampler = any(s.contract is not None for s in self.run.stages)
        # `bytes_each` for the weight, its gradient, the sampler's copy and the reference's copy. 8: the two moments in
        # float32. 8 more below float32: a float32 master copy with its gradient.
        bytes_per_parameter = bytes_each * (2 + sampler + reference) + 8 + (8 if bytes_each < 4 else 0)
        # Beneath an adapter learner and reference share one copy, and the sampler too, except in float32 without
        # quantization. The adapter's own numbers are not counted.
        if self.run.model.lora is not None:
            quantized_bytes = {"int8": 1.2, "nf4": 0.7}.get(self.run.model.quantize or "")
            bytes_per_parameter = quantized_bytes or bytes_each * (1 + (sampler and bytes_each == 4))
        return bytes_per_parameter * self.size.parameters / GIB

    @property
    def free(self) -> float:
        """GiB that the weights and the optimizer leave, of 90 % of the memory; at least 1."""
        return max(1.0, 0.9 * self.where.memory - self.needed)

    def _pass_bytes(self, again: bool) -> float:
        """Bytes that a token takes in a forward and backward pass, about.

        A layer keeps about 16 hidden states and 4 inner ones of the feed-forward part. With gradient checkpointing
        (`again`) only one layer keeps them at a time, and each layer keeps one hidden state.
        """
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
    # Between the two sizes log(rate) is linear in log(parameters). It is rounded to one digit: more is not known.
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
    return frozenset(".".join(dotted.address(run, key.strip(), value.strip())) for key, value in given)


def for_model(
    run: Run,
    given: frozenset[str],
    *,
    trained: bool = True,
    only: Collection[str] = (),
    objects: RuntimeObjects = RuntimeObjects(),
    planned: tuple[ModelSize, Machine] | None = None,
) -> ModelDefaults:
    """The run with a choice for every setting that was not given, and the lines to print. Without `model.path` only
    stages for which the data has nothing are left out. A model as small as a recipe's own, or one that a run built,
    keeps the settings of the recipe.

    Args:
        given: full paths of the user's settings (`given_paths`).
        trained: False where the weights are of a model that a run built.
        only: words of the paths to choose: the first word, or the second, as in `rl.sampling.max_tokens`. Empty: all.
        objects: what a Python program handed to the run.
        planned: the sizes of the model, and the machine, of a plan; None: those of `model.path` and of this machine.
    """
    # Rows are read only where the user gave data or a model: for a recipe as it is shipped nothing depends on them.
    data = data_size(run.env, objects) if {"env.prompts", "model", "model.path"} & given else None
    run, lines = without_completions(run, given, data)
    chosen = {"stages": "; ".join(lines)} if lines else {}
    if run.model.path is None:
        return ModelDefaults(run, tuple(lines), chosen)
    if planned is not None:
        size = planned[0]
    else:
        source = run_source(run.model.path)
        size = model_size(run.model.path if source is None else str(source[0] / MODEL))
    if not trained or (size is not None and size.parameters < TRAINED):
        return ModelDefaults(run) if only else _as_the_recipe(run, given, size, trained, lines, chosen)
    # A device that the user named decides the choices, also where the machine has a better one.
    device = run.model.device if "model.device" in given else None
    choices = Choices(run, given, data, size, machine(device) if planned is None else planned[1])
    asked = {path: c for path, c in choices.made().items() if not only or {*path.split(".")[:2]} & {*only}}
    lines += [f"settings chosen for {run.model.path} (give any of them yourself):"]
    return _with_choices(run, asked, lines, [w for w in (choices.warning(),) if w], chosen)


def _with_choices(
    run: Run, choices: Mapping[str, Choice], lines: list[str], more: list[str], chosen: dict[str, str]
) -> ModelDefaults:
    """The run with these choices, and its lines: `lines`, one for each choice, and `more`."""
    words = [f"{path}={str(x).lower() if isinstance(x, bool) else x}" for path, (x, _) in choices.items()]
    choice_lines = [f"  {path} = {word(value)}: {why}" for path, (value, why) in choices.items()]
    reasons = chosen | {path: why for path, (_, why) in choices.items()}
    return ModelDefaults(dotted.apply(run, words), (*lines, *choice_lines, *more), reasons)


def _as_the_recipe(
    run: Run, given: frozenset[str], size: ModelSize | None, trained: bool, lines: list[str], chosen: dict[str, str]
) -> ModelDefaults:
    """The run with the settings of the recipe. A larger model that a run built gets the learning rates of its size."""
    about = "" if size is None else f"about {float(f'{size.parameters:.2g}'):,.0f} parameters"
    if size is not None and size.parameters >= TRAINED:
        stages = [s for s in run.stages if type(s) in LR]
        rates = {f"{s.name}.optimizer.lr": learning_rate(type(s), size.parameters) for s in stages}
        free = {path: c for path, c in rates.items() if path not in given}
        lines += [f"settings: those of the recipe, because a run built the model; by its {about}:"]
        return _with_choices(run, free, lines, [], chosen)
    why = f"it has {about}" if trained or about else "a run built it"
    lines.append(f"settings: those of the recipe, because the model is as small as its own ({why})")
    return ModelDefaults(run, tuple(lines), chosen)


def room_for_minibatches(run: Run, overrides: Sequence[str]) -> list[str]:
    """Overrides that raise the recipe's `prompts` to a multiple of the `minibatches` that the user gives beside a
    model, where `prompts` is open. It is chosen for the model later; until then the recipe's number must be valid."""
    words = [text.partition("=") for text in overrides if "=" in text]
    if not {"model", "model.path"} & {key.strip() for key, _, _ in words}:
        return []
    given = given_paths(run, overrides)
    by_path = {".".join(dotted.address(run, k.strip(), w.strip())): w.strip() for k, _, w in words}
    out: list[str] = []
    for s in run.stages:
        # A word that is no number above 0 is refused where all overrides are applied.
        parts = by_path.get(f"{s.name}.minibatches", "")
        if isinstance(s, Reinforce) and f"{s.name}.prompts" not in given and parts.isdecimal() and int(parts):
            out.append(f"{s.name}.prompts={-(-s.prompts // int(parts)) * int(parts)}")
    return out


def word(value: Value) -> str:
    """A value as people write it in an override: true, 1e-06, bfloat16."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
