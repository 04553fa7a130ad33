"""`posttrain serve`: build an engine from a run folder, a model directory or a hub id, and start the server."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.build.open_model import (
    built_policy,
    check_target,
    model_run,
    open_policy,
    run_and_checkpoint,
    target_run,
)
from posttrain.config import overrides as dotted
from posttrain.config.engines import Embedded
from posttrain.config.run import Run
from posttrain.core import seeds
from posttrain.record.run_reader import is_run, run_file
from posttrain.serve.caller_limits import CallerLimits, check_address
from posttrain.system.errors import ConfigError
from posttrain.system.terminal_output import guard_logs, tell

READ = ("model", "slots", "threads", "deterministic", "seed", "env", "engine")
"""Fields of `Run` that are used to serve its model."""
SHORTEST = 16
"""Fewest characters of a token, so that it cannot be guessed."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Address, token and limits of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    """None: a random one is made and printed."""
    token_env: str | None = None
    """Name of the environment variable that holds it."""
    no_token: bool = False
    limits: CallerLimits = CallerLimits()

    def __post_init__(self) -> None:
        if sum((self.token is not None, self.token_env is not None, self.no_token)) > 1:
            raise ConfigError("--token, --token-env and --no-token are three answers to one question: give one")
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port}: a port lies in 0..65535 (0: any free one)")

    def resolve(self) -> str | None:
        """The token that callers must send; None: no token is needed."""
        if self.no_token:
            return None
        token = self.token
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "").strip()
            if not token:
                raise ConfigError(f"--token-env {self.token_env}: that environment variable is empty")
        if token is None:
            return secrets.token_urlsafe(24)
        # The token is sent in a header, which allows only such characters.
        if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(
                f"the token has {len(token)} characters: use at least {SHORTEST}, printable ASCII without spaces"
            )
        return token


def serve(
    target: str | Path,
    *overrides: str,
    where: ServerAddress | None = None,
    name: str | None = None,
    checkpoint: str = "last",
    trust: bool = False,
    say: Callable[[str], None] = tell,
) -> int:
    """Serve until Ctrl-C or SIGTERM; returns 130 or 143.

    Args:
        target: a run folder, a model directory or a hub id.
        overrides: dotted changes of `model.*`, `engine.*`, `slots`, `threads`, `deterministic`.
        name: the model's name in requests; default the last part of `target`.
        checkpoint: of a run folder: `last`, `best` or a checkpoint's name.
        trust: allow what a run folder made by somebody else asks for.
    """
    guard_logs()
    where = where or ServerAddress()
    token = where.resolve()
    check_address(where.host, token)
    # First the command is checked, which takes milliseconds. Importing torch and loading weights take much longer.
    _stored(*run_and_checkpoint(target, checkpoint), overrides)
    from posttrain.serve.listen import serve as listen
    from posttrain.stages.run_coroutine import wait

    served, facts = make_served(target, *overrides, token=token, name=name, checkpoint=checkpoint, trust=trust)
    return wait(listen(served, where.host, where.port, facts, say, where.limits, where.token_env))


def _stored(target: str | Path, checkpoint: str, overrides: Sequence[str]) -> Run:
    """The run of a target before its overrides; refuses a target that is not there and settings that no server reads,
    before anything heavy is imported."""
    check_target(target, checkpoint)
    stored = run_file(target).run if is_run(target) else model_run(target)
    for text in overrides:
        # `[::2]` leaves out the `=` between key and value; the first word of the path is the field of `Run`.
        head = dotted.address(stored, *(w.strip() for w in text.partition("=")[::2]))[0]
        if head not in READ:
            raise ConfigError(
                f"{text}: nothing of it is read when a model is served; settings begin with one of {', '.join(READ)}"
            )
    return stored


def served_by(run: Run, overrides: Sequence[str]) -> Embedded:
    """Settings of the embedded engine that serves: the run's own, or the defaults if the run used another engine.

    Raises:
        ConfigError: an override names another engine, or a setting that a server does not use.
    """

    def given(name: str) -> bool:
        """True where the user sets this setting, or one below it, for the server."""
        return any(text.strip().startswith(name) for text in overrides)

    if not isinstance(run.engine, Embedded):
        if given("engine"):
            raise ConfigError(
                "posttrain serve answers from the embedded engine (engine=embedded). To serve by vLLM, start"
                " `vllm serve` itself"
            )
        return Embedded()
    # Such settings of the run itself are ignored silently. Those that the user gives here are refused.
    if run.engine.timeline and given("engine.timeline"):
        raise ConfigError("engine.timeline=true writes a file into a run folder, and a server has none. Leave it out")
    if given("engine.update"):
        raise ConfigError(
            "engine.update says what new weights do to sequences, and a server's weights stay. Leave it out"
        )
    from posttrain.build.build_engines import check_engine

    check_engine(run)
    return replace(run.engine, timeline=False)


def make_served(
    target: str | Path,
    *overrides: str,
    token: str | None,
    name: str | None = None,
    checkpoint: str = "last",
    trust: bool = False,
) -> tuple[Any, tuple[str, ...]]:
    """(the `serve.intake.ServedModel`, lines about it for the banner)."""
    target, checkpoint = run_and_checkpoint(target, checkpoint)
    stored = _stored(target, checkpoint, overrides)
    # Applied here only to see which engine is meant. `target_run` applies them to the run that is used.
    engine_settings = served_by(dotted.apply(stored, list(overrides)), overrides)
    parts = ("model", "engine")
    run, weights = target_run(
        target, checkpoint, *overrides, parts=parts, allow=trust, change=lambda r: replace(r, engine=engine_settings)
    )
    import torch

    from posttrain.build.build_engines import embedded_engine
    from posttrain.engine.files.fingerprint import fingerprint
    from posttrain.engine.learner.learner import HFLearner
    from posttrain.engine.learner.torch_settings import use_threads
    from posttrain.engine.model.policy_model import named_tensors
    from posttrain.environment.templates.renderer import Renderer
    from posttrain.role.weights.saved_weights import load_weights
    from posttrain.serve.detokenize import TokenText
    from posttrain.serve.intake import ServedModel

    use_threads(run.threads)
    # With this seed, a model without saved weights gets the same random weights as in its run.
    torch.manual_seed(seeds.torch_seed(run.seed, "torch"))
    policy = built_policy(Path(target), run) if is_run(target) else open_policy(run.model, run.seed)
    if weights is not None:
        load_weights(weights, HFLearner(policy))
    # The digest is of the weights in memory, so that a client can compare them with those of a run.
    digest = fingerprint(named_tensors(policy.module))
    tokenizer: Any = policy.tokenizer
    renderer = Renderer(tokenizer, policy.stop_ids)
    engine = embedded_engine(run, engine_settings, policy, renderer.decode)
    served = ServedModel(
        sampler=engine,
        renderer=renderer,
        words=TokenText(policy.tokenizer),
        vocabulary=int(policy.module.get_input_embeddings().weight.shape[0]),  # type: ignore[union-attr]
        name=name or os.path.basename(os.path.abspath(target)),
        root=str(target),
        fingerprint=digest,
        token=token,
        created=int(time.time()),
    )
    slots = f"{run.slots} slots, context {policy.context:,} tokens"
    return served, (*policy.describe(), f"weights: {digest}", f"{engine.describe()}, {slots}")
