"""A run whose learner is several processes (ranks): how many, and what such a run cannot do yet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from threading import TIMEOUT_MAX
from typing import Literal, get_args

from posttrain.config.engines import VLLM
from posttrain.config.placement import Local
from posttrain.config.run import MIXTURES, Run, Supervised
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.reinforce import Reinforce
from posttrain.config.stages.stage import Stage
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.system.errors import ConfigError

SECONDS = 600.0
"""How long a rank waits in an exchange for the others before the run stops."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""The environment variable that torchrun sets in each of its processes."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""The environment variable in which torchrun counts how often it has started them again."""
Parallel = Literal["rows", "tensor", "experts"]
"""How ranks share a model: rows of every weight (`fully_shard`), columns and rows of each layer (tensor parallelism),
or whole experts of a mixture (expert parallelism)."""
STAGES = (Reinforce, Supervised, Preference, OnlinePreference)
"""The kinds of stage that run over ranks."""


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The processes that train one model together: `posttrain run --nproc N`, or torchrun."""

    nproc: int | None = None
    """Processes that this one starts, itself included. None: one process that trains alone; under torchrun those that
    it started."""
    seconds: float = SECONDS
    """How long a rank waits in an exchange for the others before the run stops."""
    replicas: int = 1
    """Copies of the weights (HSDP). Each copy is cut over the same number of ranks."""
    parallel: Parallel = "rows"
    """How the ranks share the model."""

    def __post_init__(self) -> None:
        if self.nproc is not None and self.nproc < 1:
            raise ConfigError(f"--nproc {self.nproc}: must be >= 1")
        # Not inf, of which no `timedelta` can be made.
        if not 0 < self.seconds <= TIMEOUT_MAX:
            raise ConfigError(f"--rank-timeout {self.seconds:g}: must be > 0, and not more than {TIMEOUT_MAX:g}")
        if self.replicas < 1 or (self.world or 1) % self.replicas:
            raise ConfigError(
                f"--replicas {self.replicas}: of {self.world or 1} ranks. Each copy of the weights is cut over the same"
                " number of ranks, so give a divisor of their number"
            )
        if self.parallel not in get_args(Parallel):
            raise ConfigError(f"--parallel {self.parallel}: must be one of {', '.join(get_args(Parallel))}")
        if self.parallel != "rows" and self.replicas > 1:
            raise ConfigError(f"--parallel {self.parallel}: copies of such weights are not built. Leave out --replicas")
        if self.nproc is not None and under_torchrun() and self.nproc != (world := torchrun_world()):
            raise ConfigError(
                f"--nproc {self.nproc}: torchrun has started {world} processes, and each is a rank. Leave --nproc out"
            )

    @property
    def world(self) -> int | None:
        """Number of ranks; None: this process trains alone."""
        return torchrun_world() if under_torchrun() else self.nproc


def under_torchrun() -> bool:
    """Returns whether torchrun has started this process."""
    return TORCHRUN in os.environ


def torchrun_rank() -> int:
    return int(os.environ["RANK"])


def torchrun_world() -> int:
    return int(os.environ["WORLD_SIZE"])


def torchrun_restarts() -> int:
    """Returns the number of times that torchrun has started these processes again after one of them died."""
    return int(os.environ.get(RESTARTS, "0"))


def check_ranks(run: Run, options: RankOptions) -> None:
    """ConfigError for what a run over ranks cannot do yet, with what to change."""
    if options.world is None:
        return
    of_whole_passes = () if options.parallel == "rows" else _pass_refusals(run, options.parallel, options.world)
    for refusal in (*_run_refusals(run), *of_whole_passes):
        raise ConfigError(f"over ranks (--nproc, torchrun): {refusal}")


def _run_refusals(run: Run) -> Iterator[str]:
    """Yields a message about each thing that no run over ranks can do yet."""
    model = run.model
    if model.device != "cpu":
        yield f"model.device={model.device} is not built; ranks compute on CPU (gloo). Set model.device=cpu"
    if model.quantize is not None:
        yield "model.quantize is not built. Leave it out, or train in one process"
    if model.compile or model.warm_up:
        name = "compile" if model.compile else "warm_up"
        yield f"model.{name}=true is not built. Leave it out"
    if isinstance(run.engine, VLLM) and not run.engine.apart and isinstance(run.placement, Local):
        yield (
            "vLLM in this process opens a group of its own in torch.distributed, where the ranks have theirs. Set"
            " engine.server=true or placement=processes"
        )
    if run.exact:
        yield "exact=true computes log-probs with a whole model, which no rank has. Set exact=false"
    for stage in run.stages:
        yield from _stage_refusals(stage)


def _pass_refusals(run: Run, parallel: Parallel, world: int) -> Iterator[str]:
    """Yields a message about each thing that ranks cannot do where each of them computes every token. A model at
    a path is checked when it is loaded."""
    model, option = run.model, f"--parallel {parallel}"
    if model.dtype != "float32":
        yield f"{option} computes in float32 so far. Set model.dtype=float32, or leave it out"
    if model.lora is not None:
        yield f"{option} trains all weights, and model.lora is set. Leave one of them out"
    if model.path is None and parallel == "experts" and model.arch not in MIXTURES:
        yield f"{option} shares whole experts, and model.arch={model.arch} has none. Leave it out"
    # Tensor parallelism cuts a layer between its heads, so each rank needs as many as any other.
    names = ("experts",) if parallel == "experts" else ("heads", "kv_heads")
    for name in names if model.path is None else ():
        if (count := getattr(model, name)) % world:
            yield f"{option}: {world} ranks cannot share model.{name}={count} evenly: give a divisor of it"


def _stage_refusals(stage: Stage) -> Iterator[str]:
    """Yields a message about each thing of one stage that is not built for ranks."""
    if not isinstance(stage, STAGES):
        yield (
            f"stage {stage.name!r} ({type(stage).__name__}) is not built; {', '.join(s.__name__ for s in STAGES)} are."
            " Train it in a run of one process"
        )
    if stage.optimizer.kind not in ("adamw", "sgd"):
        kind = f"{stage.name}.optimizer.kind"
        yield f"{kind}={stage.optimizer.kind} reads more of a weight than one rank has. Set {kind}=adamw or sgd"
    if isinstance(stage, Reinforce) and isinstance(stage.algorithm.baseline, ImplicitOthers):
        yield f"{stage.name}: {stage.algorithm.name} trains a second model, which is not built. Take another algorithm"
    if isinstance(stage, Reinforce) and stage.algorithm.hint is not None and stage.algorithm.hint.weights == "average":
        yield f"{stage.name}: a teacher of averaged weights is not built. Set algorithm.hint.weights=now"
    if isinstance(stage, OnlinePreference) and stage.share is not None:
        yield f"{stage.name}: {stage.algorithm.name} samples from a mixture with the reference, which is not built"
