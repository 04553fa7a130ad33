"""`posttrain plan`: from the words of a command to the sizes of a stage, and a machine. Neither model nor torch is
loaded."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from posttrain.build.request.branch import was_built
from posttrain.build.request.defaults import for_model, given_paths, room_for_minibatches
from posttrain.build.request.input_measures import GIB, Machine, ModelSize, memory_here
from posttrain.build.request.run_file import is_recipe, run_of
from posttrain.config import overrides as dotted
from posttrain.config.engines import VLLM, Embedded
from posttrain.config.rank_limits import Parallel
from posttrain.config.run import BUILT_CONTEXT, Model, Reinforce, Run
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.stage import Stage
from posttrain.ladder.algorithm_cost import cost
from posttrain.plan.lengths import Lengths
from posttrain.plan.machines import Device, Hardware, machine
from posttrain.plan.models import shape_by_name
from posttrain.plan.shapes import ModelShape, read_shape, shape_of
from posttrain.plan.throughput import Assumed, Throughput, throughput
from posttrain.plan.work import Work, work_of
from posttrain.system.errors import ConfigError, nearest
from posttrain.system.machine import cores

HERE = "here"
PROBED = "machine.json"
"""Name of the file in the cache folder with the figures of `posttrain plan --probe`."""
REACHED = 0.9
"""Share of the probed arithmetic that a step of a learner reaches on a processor. Measured
(docs/research/plans-measured.md)."""
ALPHABET = 100
"""Tokens of a built model's tokenizer, which has the characters of its environment. Assumed."""
PROMPT, ANSWER, SPREAD = 256, 512, 0.5
"""Tokens of a prompt and of a demonstration, and the spread of sampled answers. Assumed."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of a plan that are no settings of a run."""

    stage: str | None = None
    prompt: int | None = None
    answer: int | None = None
    """Tokens of an answer: of a sampled one in the mean."""
    spread: float | None = None
    """Standard deviation of sampled answers, as a share of their mean."""
    nproc: int | None = None
    replicas: int = 1
    parallel: Parallel = "rows"
    assumed: Assumed = Assumed()


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A stage of a run on a machine."""

    run: Run
    stage: Stage
    work: Work
    machine: Hardware
    notes: tuple[str, ...]
    """Notes on what was assumed or chosen."""
    timed: Throughput | None
    """None where nothing is known of the machine's speed."""

    @property
    def memory(self) -> float:
        """Bytes of each device."""
        return self.machine.device.memory


def planned(recipe: str, words: Sequence[str], options: PlanOptions) -> Planned:
    """The stage that these words describe. ConfigError where a word, a model or a number means nothing."""
    asked, overrides = machine_word(words)
    where, timed = here() if asked == HERE else (machine(asked), True)
    base = run_of(recipe)
    room = room_for_minibatches(base, overrides) if is_recipe(recipe) else []
    run = dotted.apply(base, [*room, *overrides])
    shape, positions = model_shape(run.model)
    # Prompts of a given length need no context that the data would bound.
    given = given_paths(base, overrides) | ({"model.context"} if options.prompt is not None else frozenset())
    run, notes = _chosen(run, given, shape, positions, where, is_recipe(recipe))
    stage = stage_of(run, options.stage)
    lengths, length_notes = lengths_of(stage, run.model.context or positions, options)
    work = replace(
        work_of(run, stage, shape, lengths),
        ranks=_ranks(options, where, run),
        replicas=options.replicas,
        parallel=options.parallel,
    )
    assumed = replace(assumed_of(run, stage, work, options), drafts=_drafts(run, options))
    timed_stage = throughput_of(run, work, where, assumed) if timed else None
    return Planned(run=run, stage=stage, work=work, machine=where, notes=(*notes, *length_notes), timed=timed_stage)


def _drafts(run: Run, options: PlanOptions) -> int:
    """Tokens that the engine drafts for each pass."""
    e = run.engine
    drafts = (e.lookup or e.drafts * (e.draft is not None)) if isinstance(e, Embedded) else 0
    if options.assumed.accepted and not drafts:
        raise ConfigError(
            f"--accepted {options.assumed.accepted:g} is about drafted tokens, and this engine drafts none. Set"
            " engine.lookup=4, or leave --accepted out"
        )
    return drafts


def throughput_of(run: Run, work: Work, where: Hardware, assumed: Assumed) -> Throughput:
    """The times of a stage of a run on a machine."""
    workers = run.engine.workers if isinstance(run.engine, VLLM) else 1
    # None: those of the engines that `work` names. Where it names none, the run's one engine has its workers' devices.
    sampling_devices = None if work.engines else min(workers, where.count)
    return throughput(work, where, assumed, sampling_devices, workers)


def assumed_of(run: Run, stage: Stage, work: Work, options: PlanOptions) -> Assumed:
    """What is assumed of a stage, with the passes without gradient that its algorithm asks for."""
    if isinstance(stage, Reinforce):
        costs = cost(stage.algorithm)
        # `late` passes are needed only if a step has several updates.
        passes = costs.forwards + (costs.late if stage.optimizer_steps > 1 else 0)
    elif isinstance(stage, Preference | OnlinePreference) and run.model.lora is not None:
        # Beneath an adapter the policy itself is the reference: it takes no memory, and a pass in each step.
        ahead = isinstance(stage, Preference) and bool(stage.ahead)
        passes = int(stage.algorithm.reads_reference and not ahead)
    else:
        return options.assumed
    # The pass of a second model in memory is counted by the plan itself.
    watched = isinstance(stage, Reinforce)
    return replace(options.assumed, forwards=max(0, passes - work.reference), watched=watched)


def machine_word(words: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `machine=`, and the other words."""
    asked = [w.partition("=")[2] for w in words if w.startswith("machine=")]
    return asked[-1] if asked else HERE, [w for w in words if not w.startswith("machine=")]


def stage_of(run: Run, name: str | None) -> Stage:
    """The stage that is planned: the named one; without a name the last that learns from reward, or else the last."""
    names = [s.name for s in run.stages]
    if name is not None and name not in names:
        raise ConfigError(f"--stage {name}: {run.recipe} has no such stage; {nearest(name, names)}")
    rewarded = [s for s in run.stages if isinstance(s, Reinforce)]
    return run.stage(name) if name is not None else (rewarded or list(run.stages))[-1]


def _ranks(options: PlanOptions, where: Hardware, run: Run) -> int:
    """The ranks of the learner: those of --nproc, or one on each device that the engines leave."""
    if options.nproc is not None and options.nproc < 1:
        raise ConfigError(f"--nproc {options.nproc}: must be >= 1")
    engine_devices = getattr(run.placement, "engines", 0) * (run.engine.workers if isinstance(run.engine, VLLM) else 1)
    if options.nproc is None:
        return max(1, where.count - engine_devices)
    if where.device.accelerator and options.nproc + engine_devices > where.count:
        raise ConfigError(
            f"--nproc {options.nproc} and {engine_devices} devices of engines are more than the {where.count} of"
            f" machine={where.name}: lower one of them"
        )
    return options.nproc


def model_shape(model: Model) -> tuple[ModelShape, int]:
    """The shape of a run's model, and its positions; 0: not said.

    Raises:
        ConfigError: no folder and no known model has this name, or it is no decoder that is known.
    """
    if model.path is None:
        config = {
            "model_type": "gemma2" if model.arch == "gemma" else model.arch,
            "hidden_size": model.hidden,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.hidden // model.heads,
            "intermediate_size": model.ffn,
            # Another architecture's name for `intermediate_size`. A name that an architecture does not read does no
            # harm.
            "n_inner": model.ffn,
            "vocab_size": ALPHABET,
            "num_local_experts": model.experts,
            "num_experts_per_tok": model.experts_per_token,
            "tie_word_embeddings": model.arch not in ("llama", "mixtral"),  # as `tiny_models.OWN_HEAD` says
        }
        return shape_of(config), model.context or BUILT_CONTEXT
    folder = Path(model.path).expanduser()
    if folder.is_dir():
        # The shape comes first: it refuses a file that is missing or broken.
        shape, config_file = read_shape(folder), json.loads((folder / "config.json").read_text())
        positions = [config_file.get(k) for k in ("max_position_embeddings", "n_positions")]
        return shape, next((n for n in positions if isinstance(n, int)), 0)
    return shape_by_name(model.path), 0


def _chosen(
    run: Run, given: frozenset[str], shape: ModelShape, positions: int, where: Hardware, recipe: bool
) -> tuple[Run, tuple[str, ...]]:
    """The run with the settings that `posttrain run` would choose for this model on this machine, and notes.

    Of a run that is no recipe it chooses none. Here only the device is taken from the machine that is planned.
    """
    device = "cuda" if where.device.accelerator else "cpu"
    if not recipe:
        kept = run.model.path is None or "model.device" in given
        return run if kept else dotted.apply(run, [f"model.device={device}"]), ()
    size = ModelSize(
        parameters=shape.parameters,
        positions=positions or None,
        hidden=shape.hidden,
        layers=shape.layers,
        ffn=shape.feed,
        cache_width=shape.cache_bytes(1) // shape.layers,  # at one byte each, bytes are numbers
    )
    place = Machine(device=device, why=where.name, memory=where.device.memory / GIB, cores=cores())
    ready = for_model(run, given, trained=not was_built(run.model.path), planned=(size, place))
    left_out = [text for path, text in ready.chosen.items() if path == "stages"]
    count = len(ready.chosen) - len(left_out)
    note = f"settings left open are those that a run chooses for this model and machine ({count})"
    return ready.run, (*left_out, note) if count else ready.lines


def lengths_of(stage: Stage, context: int, options: PlanOptions) -> tuple[Lengths, tuple[str, ...]]:
    """Lengths of a stage, and which of them are assumed."""
    sampling = stage.contract
    most = sampling.max_tokens if sampling is not None else options.answer or min(ANSWER, context or ANSWER)
    prompt = PROMPT if options.prompt is None else options.prompt
    # Assumed lengths are shortened for a short context. Lengths that the user gives raise below if they do not fit.
    # Sampled answers keep their limit, which is a setting, so the prompt alone gives way. With demonstrations both do.
    if options.prompt is None and context:
        prompt = max(1, min(PROMPT, context - most)) if sampling is not None else max(1, min(PROMPT, context // 4))
        most = most if sampling is not None else max(1, min(most, context - prompt))
    # Sampled answers end before the limit: the mean is assumed to be half of it. Demonstrations have the given length.
    mean = options.answer if options.answer is not None else most / 2 if sampling is not None else most
    spread = options.spread if options.spread is not None else SPREAD if sampling is not None else 0.0
    lengths = Lengths(prompt=prompt, mean=mean, most=max(most, 1), cv=spread)
    if context and prompt + most > context:
        raise ConfigError(
            f"a prompt of {prompt} tokens and an answer of {most} are longer than model.context={context}: lower one"
        )
    assumed = [n for n in ("prompt", "answer", "spread") if getattr(options, n) is None]
    note = f"prompts of {prompt:,} tokens, answers of {lengths.answer:,.0f} in the mean and at most {most:,}"
    return lengths, (note + (f"; assumed: --{', --'.join(assumed)}" if assumed else ""),)


def cache_file() -> Path:
    """Returns the path of the file that keeps the figures of this machine."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    return base / "posttrain" / PROBED


def here() -> tuple[Hardware, bool]:
    """(this machine, whether its speed is known: only after it was probed)."""
    try:
        probed = json.loads(cache_file().read_text())
        figures = {k: float(probed[k]) for k in ("memory", "flops", "bandwidth", "latency")}
        if not all(0 < v < math.inf for v in figures.values()):
            raise ValueError("a figure is not above 0")
        accelerator, source = bool(probed["accelerator"]), f"probed on {probed['date']}, {probed['versions']}"
    except (OSError, ValueError, KeyError, TypeError):
        # Not probed. Memory is known and can be planned. The speeds given here are never read.
        return Hardware(HERE, Device(float(memory_here()), 1e11, 1e10, "this machine", accelerator=False)), False
    latency = figures.pop("latency")
    device = Device(**figures, source=source, link=figures["bandwidth"], accelerator=accelerator)
    # A step of the learner reaches only a part of the arithmetic that one large product reaches.
    share = 1.0 if accelerator else REACHED
    return Hardware(HERE, device, compute=share, reading=1.0, latency=latency, why=source), True
