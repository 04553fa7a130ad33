"""Makes the sampler that `Run.engine` describes, with the function that closes it. No other file makes an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from posttrain.build.open_model import open_policy
from posttrain.build.request.run_request import check_installed
from posttrain.config.engines import GIB, VLLM, Embedded
from posttrain.config.run import Run
from posttrain.config.stages.preference_settings import OnlinePreference
from posttrain.core.ports import Sampler
from posttrain.engine.cpu import compile_native
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.policy_mixture import Mixture
from posttrain.engine.embedded.speculation import Draft, Lookup
from posttrain.engine.layers import compiled_layers
from posttrain.engine.model.architecture_kinds import refuse_vllm
from posttrain.engine.model.policy_model import Policy
from posttrain.engine.vllm.inprocess import VLLMEngine
from posttrain.engine.vllm.sampling_parameters import check
from posttrain.engine.vllm.spawn_server import SpawnedServer
from posttrain.engine.vllm.start_vllm import capabilities_of, folder_for_weights, refuse_few, refuse_split
from posttrain.engine.vllm.vllm_server import ROLE, VLLMServer
from posttrain.stages.run_parts import turns_reach
from posttrain.system import files
from posttrain.system.errors import ConfigError
from posttrain.verifier.http_client import Endpoint, Patience

TIMELINE = "timeline.json"
BEFORE_TRIAL = -2
"""Version of an engine whose adapter has not been tried: the trial is pushed as -1, and the run begins with 0."""


@dataclass(frozen=True)
class ServedSampler:
    """A sampler, and what else a run asks of its engine: to wait, to empty caches, to free memory, to end. An engine in
    another process manages its own memory: the run only waits until its turns have reached it."""

    sampler: Sampler
    close: Callable[[], None]
    """Frees its threads, processes and memory."""
    here: EmbeddedEngine | None = None
    """The engine, where it is in this process."""
    sleeps: bool = False
    """Whether it frees its caches while the learner works."""

    async def idle(self) -> None:
        """Wait until the learner may compute: see `RunParts.idle`."""
        await (turns_reach() if self.here is None else self.here.idle())

    def forget(self) -> None:
        """Empty the prefix cache of an engine in this process."""
        if self.here is not None:
            self.here.forget()

    def sleep(self) -> None:
        """Free the caches of an engine that sleeps."""
        if self.here is not None and self.sleeps:
            self.here.sleep()

    def keep_timeline(self, folder: Path) -> None:
        """Write the engine's timeline into the run folder, if the run asked for one."""
        if self.here is not None and self.here.timeline is not None:
            with files.disk_full_is_reported(folder / TIMELINE, lambda: "The run's record is whole"):
                self.here.timeline.write(folder / TIMELINE)


def all_sleep(engines: Sequence[ServedSampler]) -> None:
    """Free the caches of all engines that sleep while the learner works."""
    for serving in engines:
        serving.sleep()


def served_here(engine: EmbeddedEngine, settings: Embedded) -> ServedSampler:
    """An engine in this process, which ends with it."""
    return ServedSampler(engine, lambda: None, engine, settings.sleep)


def check_engine(run: Run) -> None:
    """ConfigError where the run's engine is not installed, or its compiled kernels cannot be built.

    Called before the run folder is made, so that such a run leaves no folder.
    """
    if not isinstance(run.engine, Embedded):
        for stage in run.stages:
            if isinstance(stage, OnlinePreference) and stage.share is not None:
                raise ConfigError(f"{stage.name}.algorithm={stage.algorithm.name}: {_ONE_MODEL}")
    check_installed(run)
    if not isinstance(run.engine, Embedded):
        refuse_few(run.engine, run.placement)
    if run.model.compile and (why := compiled_layers.missing(run.model.device)):
        raise ConfigError(f"model.compile=true, but torch.compile cannot be used: {why}. Install it, or leave it out")
    if run.model.kernels == "compiled" and (why := compile_native.missing()):
        raise ConfigError(
            f"model.kernels=compiled, but there are no compiled kernels: {why}. Leave it out to compute with torch's"
            " operations"
        )


def make_engine(run: Run, policy: Policy, text: Callable[[np.ndarray], str], keeps: bool = False) -> ServedSampler:
    """The engine of the run: in this process, or a server of vLLM. `placed_engine` also makes engines in processes of
    their own.

    Args:
        text: decodes token ids, special tokens included; stop strings are searched in the result.
        keeps: nobody else uses the policy's weights, so the embedded engine keeps them and takes no copy.

    Raises:
        ConfigError: it cannot keep a stage's sampling contract, or is not installed.
        EngineError: it does not start.
    """
    if isinstance(run.engine, Embedded):
        # A copy: the learner changes the policy's weights in place; the engine has those of the last push.
        served = policy if keeps else policy.twin()
        return keeping_contracts(run, served_here(embedded_engine(run, run.engine, served, text), run.engine))
    return keeping_contracts(run, _vllm(run, run.engine, policy))


def keeping_contracts(run: Run, serving: ServedSampler) -> ServedSampler:
    """Returns the sampler, after checking that it can keep the sampling contract of every stage. Else it is closed.

    Raises:
        ConfigError: it cannot.
    """
    try:
        for stage in run.stages:
            if stage.contract is not None:
                stage.contract.for_training(serving.sampler.keeps_sets)
    except BaseException:
        # After any exception the engine is closed here: it has processes, threads and memory, and nobody else knows it
        # yet.
        serving.close()
        raise
    return serving


def make_opponent(
    run: Run, policy: Policy, reference: PreTrainedModel, share: float, text: Callable[[np.ndarray], str]
) -> ServedSampler:
    """An engine that samples from pi^(1 - share) ref^share. It has its own copy of the policy's weights, which are
    pushed to it like to the first one; with share=1 it holds the reference alone.

    Raises:
        ConfigError: the run's engine is another one, which samples one model only.
    """
    if not isinstance(run.engine, Embedded):
        raise ConfigError(_ONE_MODEL)
    # Drafted tokens are made for the policy's own text, and the timeline is the first engine's.
    settings = replace(run.engine, lookup=0, draft=None, timeline=False)
    if share == 1:
        return served_here(embedded_engine(run, settings, replace(policy, module=reference, lora=None), text), settings)
    mixture = Mixture(reference, share)
    # Below all versions, also without an adapter: so the first push is sent and checked, even that of version 0.
    return served_here(embedded_engine(run, settings, policy.twin(), text, mixture, BEFORE_TRIAL), settings)


_ONE_MODEL = (
    "engine=vllm samples one model, and an opponent of the policy is a mixture of two, token by token: set"
    " engine=embedded, or use an algorithm without an opponent (oaif, iterative_dpo)"
)


def embedded_engine(
    run: Run,
    settings: Embedded,
    policy: Policy,
    text: Callable[[np.ndarray], str],
    mixture: Mixture | None = None,
    version: int | None = None,
) -> EmbeddedEngine:
    """The embedded engine with the run's settings, over the policy's own module.

    Args:
        version: of the weights it begins with; None: 0, or that before the trial of an adapter.
    """
    begun = 0 if policy.lora is None else BEFORE_TRIAL
    return EmbeddedEngine(
        policy.module,
        slots=run.slots,
        context=policy.context,
        deterministic=run.deterministic or run.exact,
        device=run.model.device,
        cache_bytes=int(settings.cache_gib * GIB),
        text=text,
        kernels=policy.kernels,
        update=settings.update,
        budget=settings.budget,
        retain=settings.retain,
        timeline=settings.timeline,
        speculate=_speculation(run, settings, policy),
        mixture=mixture,
        version=begun if version is None else version,
    )


def _speculation(run: Run, settings: Embedded, policy: Policy) -> Lookup | Draft | None:
    """What drafts tokens for the engine: repeated text, a small model with the same tokenizer, or nothing."""
    if settings.lookup:
        return Lookup(settings.lookup)
    if settings.draft is None:
        return None
    small = open_policy(
        replace(run.model, path=settings.draft, context=None, lora=None, quantize=None), run.seed, policy.context
    )
    if small.tokenizer_digest != policy.tokenizer_digest:
        raise ConfigError(
            f"engine.draft={settings.draft}: its tokenizer differs from the policy's, so it drafts other words. Use one"
            " trained with it"
        )
    if small.context < policy.context:
        raise ConfigError(
            f"engine.draft={settings.draft}: its context of {small.context} tokens is shorter than the policy's"
            f" {policy.context}"
        )
    return Draft(small.module, settings.drafts)


def check_vllm(run: Run, settings: VLLM, policy: Policy) -> None:
    """ConfigError where vLLM cannot serve the policy, or cannot keep a stage's sampling contract."""
    config = policy.module.config
    refuse_vllm(config.to_dict())
    refuse_split(settings.workers, config)
    able = replace(capabilities_of(policy), sequences=not settings.apart)
    for stage in run.stages:
        if stage.contract is not None:
            check(stage.contract, able)


def _vllm(run: Run, settings: VLLM, policy: Policy) -> ServedSampler:
    """vLLM in a thread of this process, or a server of it (`settings.apart`)."""
    check_vllm(run, settings, policy)
    if settings.apart:
        return _server(run, settings, policy)
    engine = VLLMEngine(
        policy,
        slots=run.slots,
        cache_bytes=int(settings.cache_gib * GIB),
        eager=settings.eager,
        timeout=settings.timeout,
        inflight=settings.update == "inflight",
        workers=settings.workers,
    )
    return ServedSampler(engine, engine.close)


def _server(run: Run, settings: VLLM, policy: Policy) -> ServedSampler:
    """A vLLM server that runs already, or one that is started here."""
    patience = Patience(answer=settings.timeout)
    inflight = settings.update == "inflight"
    client = partial(VLLMServer, policy, timeout=settings.timeout, inflight=inflight, workers=settings.workers)
    if settings.url is not None:
        share = Path(settings.share) if settings.share is not None else folder_for_weights(policy)
        endpoint = Endpoint(settings.url, ROLE, key_env=settings.key_env, patience=patience)
        return ServedSampler(client(endpoint, share=share), lambda: None)
    spawned = SpawnedServer(
        policy,
        slots=run.slots,
        cache_bytes=int(settings.cache_gib * GIB),
        eager=settings.eager,
        workers=settings.workers,
    )
    share = spawned.folder if settings.share is None else Path(settings.share)
    endpoint = Endpoint(spawned.url, ROLE, patience=patience)
    return ServedSampler(client(endpoint, share=share, ended=spawned.ended), spawned.close)
