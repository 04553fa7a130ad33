"""Where tasks and rewards come from, as data: of a run, and of a stage that has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from posttrain.core.errors import ConfigError
from posttrain.core.stop import EpisodeLimits

Scalar = str | int | float | bool


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward source: `builtin` names of the environment, or `path.py:function`."""

    function: str
    weight: float = 1.0
    workers: int = 0
    """Processes that run it, killed when it hangs or crashes; for `path.py:function` and `math`. 0: a function runs in
    a thread of the trainer, which nothing can kill; `math` takes two processes."""
    timeout: float | None = None
    """Seconds one call may take: on the clock in a thread, of processor time in a worker. None: 30, and 3 for
    `math`."""
    resolution: float | None = None
    """Relative difference of two of its scores that says nothing: siblings that differ by less are alike. Set it for a
    function that asks a model (1e-3, say: what its scores change by when nothing of meaning does). None: 2^-40, a
    verifier's."""

    def __post_init__(self) -> None:
        if self.workers < 0 or (self.timeout is not None and not self.timeout > 0):
            raise ConfigError(
                f"reward {self.function!r}: workers={self.workers} must be >= 0 and timeout={self.timeout} > 0"
            )
        _check_resolution(f"reward {self.function!r}", self.resolution)


def _check_resolution(what: str, resolution: float | None) -> None:
    if resolution is not None and not 0 <= resolution < 1:
        raise ConfigError(
            f"{what}: resolution={resolution:g} is a relative difference, at least 0 and below 1 (1e-3 for a model,"
            " say)"
        )


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """Where programs run that a model wrote: its answers, where tests judge them, and what it gives a Python tool."""

    name: str = "auto"
    """`auto`: the best of `namespaces` and `landlock` that withstands attacks on this machine. Or one of them; or the
    address of an executor (https://...); or `none`, which contains nothing, is refused for root and needs
    ALLOW_UNSANDBOXED_CODE=1 as well."""
    token: str = "POSTTRAIN_SANDBOX_TOKEN"
    """Environment variable that holds the executor's token."""


@dataclass(frozen=True, kw_only=True)
class Env:
    """Where tasks and rewards come from."""

    name: str = "arithmetic"
    """A gallery environment, `gym:TASK` for reasoning-gym, `verifiers:ID` for PrimeIntellect's verifiers, `prompts` for
    the user's own data, or a class of one's own: `path.py:Class`."""
    args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """The environment's own settings; it names the valid ones."""
    prompts: str | None = None
    """With name=prompts: a JSONL file or a `datasets` dataset (local directory or hub id)."""
    rewards: tuple[Reward, ...] = ()
    """With name=prompts: at least one. Elsewhere they are added to the environment's own."""
    heldout: int = 200
    """Held-out tasks. 0: train without measuring."""
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    resolution: float | None = None
    """As `Reward.resolution`, of the environment's own verdicts, where a model gives them."""

    def __post_init__(self) -> None:
        _check_resolution(f"env {self.name}", self.resolution)
        if self.resolution is not None and self.name == "prompts":
            raise ConfigError("env.resolution: with env.name=prompts its rewards judge; set env.rewards.0.resolution")
        if self.heldout < 0:
            raise ConfigError(f"env.heldout={self.heldout}: must be >= 0 (0 trains without measuring)")
