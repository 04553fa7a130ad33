"""A run whose learner is several processes (ranks): how the ranks start, get the model, and become parts of the run.
Each rank reads its own rows of the model (`engine.parallel.sharded_load`) where that is possible, else rank 0 sends the
whole model."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from posttrain import faults
from posttrain.build.request.branch import run_source
from posttrain.checks.learning.expert_checks import ExpertsCheck
from posttrain.checks.learning.gradient_and_update_checks import FrozenCheck, UpdateCheck
from posttrain.checks.learning.precision_checks import ScaleCheck
from posttrain.config.engines import VLLM
from posttrain.config.placement import Local, Ray
from posttrain.config.rank_limits import (
    Parallel,
    RankOptions,
    torchrun_rank,
    torchrun_restarts,
    torchrun_world,
    under_torchrun,
)
from posttrain.config.run import Model, Run
from posttrain.core import seeds
from posttrain.engine.adapters.saved_adapter import saved_adapter
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.layers import attention
from posttrain.engine.learner.torch_settings import use_deterministic, use_threads
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.parallel.expert_parallel import ExpertLearner, whole_experts
from posttrain.engine.parallel.ranks.rank_orders import END, HERE, LONG, Store, met
from posttrain.engine.parallel.ranks.rank_processes import RankProcesses
from posttrain.engine.parallel.ranks.signed_messages import users_key
from posttrain.engine.parallel.sharded_learner import ShardedLearner, refuse_ranks
from posttrain.engine.parallel.sharded_load import BlankPolicy, blank_policy, read_rows
from posttrain.engine.parallel.sharded_reference import EmptyModule
from posttrain.engine.parallel.tensor_parallel import TensorLearner, columns_and_rows
from posttrain.stages.checks_by_kind import checks_of
from posttrain.stages.ranks import rank_state as together
from posttrain.stages.ranks.lead_learner import LeadExpertLearner, LeadLearner, LeadTensorLearner, OrderedLearner
from posttrain.stages.ranks.rank_checks import rank_observers
from posttrain.stages.ranks.rank_lead import LeadReference, RankLead, lead_optimizer, lead_trainer
from posttrain.stages.ranks.rank_state import RankLearner, RankState
from posttrain.stages.ranks.rank_worker import work
from posttrain.stages.run_parts import RunParts
from posttrain.system.child_lifetime import ending_with_parent
from posttrain.system.errors import ConfigError, DataError, EngineError
from posttrain.system.machine import cores

# Parts of the lines that are printed.
OWN_ENGINE = "the engine in this process"
SENT = "rank 0 reads the whole model, and every rank gets all of it before it keeps its rows"


def with_absolute_path(model: Model) -> Model:
    """The model, with the absolute path of its directory."""
    return replace(model, path=str(Path(model.path or "").expanduser().resolve()))


def choose_reading(run: Run, lead: RankLead) -> tuple[BlankPolicy | None, tuple[str, ...]]:
    """Chooses how ranks get the model; sets `lead.reads_own_rows`. Returns (policy, lines for people). The policy has
    no weights in memory, if ranks read rows and no engine here needs a whole copy. None: it is loaded as always."""
    if run.model.path is None:
        return None, ()
    # The checks go from cheap to expensive: settings, config and tokenizer, names in the files, what other ranks see.
    # If one fails, rank 0 reads the whole model, which always works.
    if why := _why_whole(run, lead.parallel):
        return None, (f"note: {SENT}: {why}",)
    try:
        blank = blank_policy(run.model, run.seed)
    except (ConfigError, DataError) as error:
        return None, (f"note: {SENT}: {error}",)
    if strange := blank.files.strange(blank.module):
        why = f"{', '.join(strange[:3])} is in its files under another name, or not at all"
        return None, (f"note: {SENT}: {why}",)
    # Ranks may be on several machines, where folders of the same name may have different files.
    seen = lead.all(together.see_files, str(blank.files.folder.resolve()))
    if others := [rank for rank, digest in enumerate(seen) if digest != seen[0]]:
        why = f"rank {others[0]} does not see the same files in {blank.files.folder}"
        return None, (f"note: {SENT}: {why}",)
    lead.reads_own_rows = True
    whole = _who_is_whole(run)
    # An engine in this process needs a whole copy anyway, so the policy is loaded as always.
    return None if whole == OWN_ENGINE else blank, (
        f"each rank reads its rows of {run.model.path}; whole copies: {whole}",
    )


def _who_is_whole(run: Run) -> str:
    """Returns the name of the process that has a whole copy of the model."""
    if isinstance(run.engine, VLLM):
        return "the vLLM server"
    return OWN_ENGINE if isinstance(run.placement, Local) else "the engines in processes of their own"


def _why_whole(run: Run, parallel: Parallel) -> str:
    """Returns the reason why rows cannot be read, as far as the settings tell; '' where they can."""
    path = run.model.path or ""
    if not Path(path).expanduser().is_dir():
        return f"model={path} is no directory here"
    if run_source(path) is not None:
        return f"model={path} is the folder of a run"
    if saved_adapter(path) is not None:
        return f"model={path} is an adapter"
    if parallel != "rows":
        return f"--parallel {parallel} cuts whole layers, of which no rank reads rows"
    if run.model.trust_remote_code:
        return "model.trust_remote_code=true, and code of the model's own may build it as it likes"
    if isinstance(run.engine, VLLM) and run.model.lora is not None:
        return "vLLM gets the weights beneath an adapter from rank 0 (engine=embedded reads them by itself)"
    if isinstance(run.engine, VLLM) and not isinstance(run.placement, Local):
        return "engines of vLLM in processes of their own get the model from rank 0 (a server of vLLM does not)"
    if isinstance(run.placement, Ray):
        return "engines on a cluster get the model from rank 0 (placement=processes reads it by itself)"
    return ""


L = TypeVar("L", bound=RankLearner)

WORKER = "posttrain.stages.ranks.rank_worker"
LAUNCHER = "the process of torchrun"
LEARNERS: dict[Parallel, tuple[Any, Any]] = {
    "rows": (LeadLearner, ShardedLearner),
    "tensor": (LeadTensorLearner, TensorLearner),
    "experts": (LeadExpertLearner, ExpertLearner),
}
"""By the way in which ranks share a model: (the learner of rank 0, the learner of another rank)."""
ROW_CHECKS = (UpdateCheck, FrozenCheck)
"""The checks that every rank makes of its own rows."""
PLANTED = ExitStack()
"""Holds the fault that a run plants, in the process of a rank, for as long as that lives."""


@dataclass(frozen=True, eq=False)
class RankStart:
    """Makes the learner of another rank than 0. It is pickled and sent, with the policy in it, or with the settings of
    the model whose rows each rank reads."""

    policy: Policy | Model
    seed: int
    threads: int
    deterministic: bool
    fault: faults.Fault | None
    digest: str
    """Digest of the weights, if each rank reads its rows; else ''."""
    parallel: Parallel
    learner_settings: Mapping[str, Any]
    """Further arguments of the learner."""

    def __call__(self, state: RankState) -> None:
        use_threads(self.threads)
        use_deterministic(self.deterministic)
        PLANTED.enter_context(faults.planted(self.fault))
        # As on rank 0 (`make_roles`), so that all ranks draw the same numbers.
        torch.manual_seed(seeds.torch_seed(self.seed, "torch"))
        policy = self.policy if isinstance(self.policy, Policy) else blank_policy(self.policy, self.seed)
        built_learner(state, policy, self.digest, LEARNERS[self.parallel][1], state.ranks, **self.learner_settings)


def built_learner(
    state: RankState, policy: Policy, digest: str, make: Callable[..., L], *given: Any, **settings: Any
) -> L:
    """The learner of a rank, as `make` makes it, in its state."""
    # References are later filled into this empty copy. The learner that is made next cuts the weights.
    state.mould = EmptyModule(policy)
    if isinstance(policy, BlankPolicy):
        learner = read_rows(policy, state.ranks, make, *given, digest=digest, **settings)
    else:
        learner = make(policy, *given, **settings)
    state.own = learner
    return learner


def begin_rank(state: RankState, start: bytes) -> None:
    """Does the first work of a rank other than rank 0."""
    attention.register()  # before the model is read
    pickle.loads(start)(state)


@contextmanager
def leading(run: Run, options: RankOptions) -> Iterator[RankLead | None]:
    """Rank 0 among ranks that wait for its orders and end with the block; None where the run trains in one process."""
    if options.world is None:
        yield None
        return
    # Closed in reverse order: the orders, so that waiting ranks leave, then the group, then processes that still live.
    with ExitStack() as closing:
        if under_torchrun():
            closing.enter_context(ending_with_parent(LAUNCHER))
            # torchrun has started all ranks already, so this process cannot hand them a key. Each reads the user's key.
            world, processes, key, store = torchrun_world(), None, users_key(), torchrun_store(options)
            # The other ranks wait for this entry while rank 0 checks the run (`follow`). Then all meet.
            store.set(HERE.format(0), "1")
        else:
            world = options.world
            options_of_ranks = {"replicas": options.replicas}
            processes = RankProcesses(world, WORKER, rank_threads(run, options), options.seconds, options_of_ranks)
            # Before the meeting, which may fail with processes that wait for it.
            closing.callback(processes.close, kill=True)
            store, key = processes.store, processes.key
        # `str` returns '': whether a rank of torchrun lives is torchrun's to say.
        local, gone = processes is not None, str if processes is None else processes.gone
        ranks = closing.enter_context(
            met(store, 0, world, options.seconds, options.replicas, key=key, local=local, gone=gone)
        )
        lead = RankLead(ranks, store, processes, options.parallel)
        closing.callback(lead.close)
        yield lead


def follow(options: RankOptions) -> int:
    """A process of torchrun that is not rank 0: do what rank 0 orders; returns the exit code."""
    with ending_with_parent(LAUNCHER):
        store = torchrun_store(options)
        # A long wait, without the time-out of exchanges: rank 0 first checks the run and makes its environments.
        store.wait([HERE.format(0)], LONG)
        if store.get(HERE.format(0)).decode() == END:
            return 0
        return work(store, torchrun_rank(), torchrun_world(), options.seconds, options.replicas, key=users_key())


def dismiss(options: RankOptions) -> None:
    """Rank 0 of torchrun ends with an error: let go of ranks that still wait for it to begin."""
    # Whatever the store says, the error with which rank 0 ends is the one to show.
    with suppress(Exception):
        torchrun_store(options).set(HERE.format(0), END)


def torchrun_store(options: RankOptions) -> Store:
    """Returns the store of the processes of torchrun. Keys of an earlier attempt, whose ranks died, are not visible."""
    store = next(iter(rendezvous("env://", timeout=timedelta(seconds=options.seconds))))[0]
    return PrefixStore(f"posttrain-{torchrun_restarts()}", store)


def rank_threads(run: Run, options: RankOptions) -> int:
    """Threads of each rank: those of the run, or an equal share of this machine's cores."""
    # Under torchrun only the ranks on this machine share its cores.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if under_torchrun() else options.world or 1
    return run.threads or max(1, cores() // ranks_here)


def refuse_policy(policy: Policy, lead: RankLead, blank: bool) -> None:
    """ConfigError for a model that ranks cannot share as they are asked to."""
    match lead.parallel:
        case "tensor":
            columns_and_rows(policy, lead.ranks.world)
        case "experts":
            whole_experts(policy, lead.ranks.world)
        case "rows":
            refuse_ranks(policy, blank)


def lead_learner(run: Run, policy: Policy, lead: RankLead) -> OrderedLearner:
    """A learner on every rank. It cuts the weights of the policy in place, or each rank reads its rows of them.

    Raises:
        EngineError: the model cannot be sent to another process.
        InvariantError: the rows that ranks have read are not those of the policy.
    """
    learner_settings: dict[str, Any] = {"gradient_checkpointing": run.model.checkpointing}
    if run.model.router_replay != "none":
        learner_settings["replays"] = True
    sent_policy = with_absolute_path(run.model) if lead.reads_own_rows else policy
    # By it the rows that all ranks have read are compared with this policy.
    digest = fingerprint(policy.numbers(named_tensors(policy.module))) if lead.reads_own_rows else ""
    # In the order of the fields of `RankStart`, after the policy.
    start_settings = (
        run.seed,
        torch.get_num_threads(),
        run.deterministic,
        faults.named(run.fault),
        digest,
        lead.parallel,
        learner_settings,
    )
    start = RankStart(sent_policy, *start_settings)
    try:
        sent = pickle.dumps(start, pickle.HIGHEST_PROTOCOL) if lead.ranks.world > 1 else b""
    except Exception as error:  # pickling runs code of the model's classes
        raise EngineError(
            f"the model cannot be sent to another process ({type(error).__name__}: {error}): leave out --nproc"
        ) from error
    # Inside the order, since building a learner over ranks exchanges: all must do it at once.
    with lead.ordered("build the learner", (begin_rank, (sent,))):
        own_policy = blank_policy(run.model, run.seed) if lead.reads_own_rows else policy
        return built_learner(lead.state, own_policy, digest, LEARNERS[lead.parallel][0], lead, **learner_settings)


def over_ranks(parts: RunParts, run: Run, lead: RankLead) -> RunParts:
    """The parts of a run over ranks: references, optimizers, trainers and checks are those that work on all ranks."""
    scaled = run.model.dtype == "float16"
    checks_of_rows = (
        *ROW_CHECKS,
        *([ScaleCheck] if scaled else []),
        *([ExpertsCheck] if lead.parallel == "experts" else []),
    )
    # None: the optimizer's state lies where the parameters do.
    optimizer_arguments: tuple[Any, ...] = (run.model.kernels, scaled, None)
    return replace(
        parts,
        freeze=lambda: LeadReference(lead),
        optimize=lambda config: lead_optimizer(lead, config, optimizer_arguments),
        make_trainer=lambda learner, optimizer, micro_tokens, version: lead_trainer(
            lead, optimizer, micro_tokens, version
        ),
        observe=rank_observers(lead, checks_of, checks_of_rows),
    )
