"""Builds the parts of a `Run`: the policy, the roles that need no run folder, and all parts that stages share."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers

from posttrain.build.build_engines import ServedSampler, all_sleep, make_opponent
from posttrain.build.build_environments import distinct
from posttrain.build.build_optimizers import learner_of_one_process, make_optimizer, trained_copy
from posttrain.build.build_reward_models import ModelJudge, RewardModels, with_reward_head
from posttrain.build.distributed_run import lead_learner
from posttrain.build.open_model import open_policy
from posttrain.build.request.branch import begun_with, run_source, same_base
from posttrain.build.request.run_request import check_lengths
from posttrain.build.spawn_engines import PlacedEnvironments, placed_engine, placed_environments
from posttrain.config.run import Run
from posttrain.config.stages.stage import Stage, check_patterns
from posttrain.core import seeds
from posttrain.core.abilities import declared
from posttrain.core.ports import Environment, Reference, Sampler, Tracker
from posttrain.core.redact_secrets import scrubbed_data
from posttrain.engine.head.readout import read_out
from posttrain.engine.learner.frozen_reference import freeze, frozen_module
from posttrain.engine.learner.learner import HEADS, FrozenScorer, HFLearner
from posttrain.engine.learner.learner_routers import refuse_balance, refuse_replay
from posttrain.engine.model.policy_model import Policy, base_digest, load_policy
from posttrain.engine.optimizer import eight_bit
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.record.run_folder import RunFolder
from posttrain.record.run_reader import run_file
from posttrain.role.judges.generative_judge import GenerativeJudge
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.learning.logprob_tolerance import packed_text
from posttrain.role.learning.reference_scores import Opponent
from posttrain.role.memory_peaks import PeakMemory
from posttrain.role.rollout import Rollout
from posttrain.role.sync import Sync
from posttrain.stages.checks_by_kind import observers, of_run
from posttrain.stages.data_fits_model import check_judgements, check_prompts
from posttrain.stages.ranks.rank_lead import RankLead
from posttrain.stages.run_parts import RunParts, StageSetting
from posttrain.system.errors import ConfigError
from posttrain.system.version import VERSION

CANARY = 16
"""Tokens that learner and engine both score after every push of weights."""
WORDS = ("bad_words", "allowed_words")
"""Fields of a sampling contract that the tokenizer turns into ids."""


def facts(policy: Policy, threads: int, sandboxes: Sequence[str] = (), held: int | None = None) -> dict[str, Any]:
    """Returns what `run.json` records beside the run tree: versions, the machine, digests, sandboxes. `held`: resident
    bytes of this process before the model was loaded; the run's memory is counted above them."""
    # On a CPU peaks are of the whole process; an accelerator's allocator counts the run alone (`PeakMemory`).
    resident = {} if held is None or policy.device.type != "cpu" else {"held": held}
    return {
        "versions": {
            "posttrain": VERSION,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
        },
        "machine": {
            "platform": platform.platform(),
            "threads": threads,
            "isa": torch.backends.cpu.get_cpu_capability(),
            "memory": PeakMemory(policy.device.type).what,
            **resident,
        },
        "tokenizer_digest": policy.tokenizer_digest,
        "template_digest": policy.template_digest,
        "stop_ids": list(policy.stop_ids),
        **({} if policy.lora is None else {"base_digest": base_digest(policy)}),
        "sandboxes": list(sandboxes),
        "argv": scrubbed_data(sys.argv),
    }


def check_tokens(run: Run, policy: Policy) -> None:
    """Raises for a sampling contract with tokens that the model lacks, or words that its tokenizer cannot write."""
    tokenizer: Any = policy.tokenizer
    spell = Renderer(tokenizer, policy.stop_ids).spell
    for stage in run.stages:
        if stage.contract is not None:
            stage.contract.resolve(policy.stop_ids, spell).check_vocabulary(read_out(policy.module).weight.shape[0])


def words_in_tokens(run: Run, policy: Policy) -> list[str]:
    """Lines with the words that sampling contracts name and the token ids they became."""
    tokenizer: Any = policy.tokenizer
    spell = Renderer(tokenizer, policy.stop_ids).spell
    named = [
        (s.name, setting, text)
        for s in run.stages
        if s.contract is not None
        for setting in WORDS
        for text in getattr(s.contract, setting)
    ]
    return [
        f"{stage}.sampling.{setting}: {text!r} is {' or '.join(str(list(ids)) for ids in spell(text))}"
        for stage, setting, text in named
    ]


def make_policy(
    run: Run,
    env: Environment,
    others: Mapping[str, Environment] | None = None,
    written: Path | None = None,
    own: Path | None = None,
    blank: Policy | None = None,
) -> Policy:
    """The policy of a run.

    Args:
        env: the environment of all stages but those named in `others` (`own_environments`).
        written: tokenizer files in a run folder. None: a tokenizer that is built has the characters of all
            environments.
        own: the run's folder, where there is one. A branched run has its model there, whose weights are loaded later.
        blank: the policy, if its model shall not be loaded in this process.
    """
    others = others or {}
    alphabets: list[str | None] = [declared(e).alphabet for e in (env, *others.values())]
    alphabet = alphabets[0]
    if others:
        # A built tokenizer must write the tasks of all: by bytes (None), if one does not declare its characters.
        alphabet = None if None in alphabets else "".join(dict.fromkeys("".join(a or "" for a in alphabets)))
    # In this order: the copy in the run's own folder, which is there even if the other run is gone; then the run with
    # which a branch begins; and only then a model that is read or built.
    policy = begun_with(own, run) if own is not None else blank
    if policy is None and run_source(run.model.path) is not None:
        policy = open_policy(run.model, run.seed)
    if policy is None:
        policy = load_policy(run.model, alphabet, run.seed, tokenizer_files=written)
    check_lengths(run, policy.context)
    check_tokens(run, policy)
    for each_env in distinct(env, others):
        its_stages = [s for s in run.stages if others.get(s.name, env) is each_env]
        check_prompts(run, each_env, policy, its_stages)
        check_judgements(run, each_env, policy, its_stages)
    # The digest in the folder is of the model with which the run began, and says nothing with other settings.
    if own is not None and run.model == run_file(own).run.model:
        same_base(own, policy)
    return with_reward_head(run, policy)


def make_teacher(run: Run, path: str, policy: Policy) -> FrozenScorer:
    """A frozen model (teacher or named reference) from a directory or hub id. It must share the policy's tokenizer."""
    # The same dtype and device as the policy, but no adapter, no quantization and no other context.
    other = open_policy(replace(run.model, path=path, context=None, lora=None, quantize=None), run.seed, policy.context)
    if other.tokenizer_digest != policy.tokenizer_digest:
        raise ConfigError(
            f"reference={path}: its tokenizer differs from the policy's, so their tokens cannot be compared. Use a"
            " model with the same tokenizer files, such as one exported from a run that built the same tokenizer"
        )
    if other.context < policy.context:
        raise ConfigError(
            f"reference={path}: its context of {other.context} tokens is shorter than the policy's {policy.context}"
        )
    return FrozenScorer(other)


def opponent_of(
    run: Run, policy: Policy, roles: PolicyRoles, engines: list[ServedSampler], reference: Reference, share: float
) -> Opponent:
    """Returns the opponent of the policy, with this share of the reference. `engines` gets its engine."""
    serving = make_opponent(run, policy, frozen_module(reference), share, roles.renderer.decode)
    engines.append(serving)
    # With share 1 the opponent is the reference alone, to which no weights are pushed.
    if share == 1:
        return Opponent(serving.sampler, None)
    sync = Sync(roles.learner, serving.sampler, probe_ids(policy), run.model.dtype, forget=serving.forget)
    return Opponent(serving.sampler, sync)


@dataclass(frozen=True)
class PolicyRoles:
    """A policy's learner, engine, rollout and weight sync. They need no run folder."""

    learner: HFLearner
    serving: ServedSampler
    renderer: Renderer
    rollout: Rollout
    sync: Sync
    close: Callable[[], None]
    """Ends the engine and frees its threads, processes and memory."""

    @property
    def engine(self) -> Sampler:
        return self.serving.sampler


def make_roles(
    run: Run,
    policy: Policy,
    env: Environment,
    judges: Sequence[ModelJudge] | None = None,
    say: Callable[[str], None] = lambda line: None,
    lead: RankLead | None = None,
) -> PolicyRoles:
    """The learner, the engine (with its own copy of the weights) and the rollout of one policy.

    Args:
        judges: the reward models that judge. None: those of the run's rewards that it did not train itself.
        say: tells the user what happens to engines elsewhere.
        lead: of a run over ranks, whose learner cuts the weights of the policy, or leaves them to the engine.
    """
    refuse_balance(run.stages, policy.module)
    if run.model.router_replay != "none":
        refuse_replay(policy.module)
    renderer = Renderer(cast("Any", policy.tokenizer), policy.stop_ids, policy.context, run.model.history)
    # Over ranks the engine is made first, while the policy's weights are whole: it copies them. The learner then cuts
    # the policy's weights in place.
    serving = placed_engine(run, policy, renderer.decode, say, lead.reads_own_rows) if lead is not None else None
    # The seed is set directly before the learner is made, so that its random numbers do not depend on earlier draws.
    torch.manual_seed(seeds.torch_seed(run.seed, "torch"))
    learner = learner_of_one_process(run, policy) if lead is None else lead_learner(run, policy, lead)
    serving = serving or placed_engine(run, policy, renderer.decode, say)
    engine = serving.sampler
    all_judges = RewardModels(run, policy).judges(run.env) if judges is None else tuple(judges)
    rollout = Rollout(
        engine, env, lambda task: RenderedDialogue(renderer, task), run.seed, renderer, run.env.limits, all_judges
    )
    rollout.right = run.env.named_right(env.abilities.vouched)

    def close() -> None:
        serving.close()
        for judge in all_judges:
            if isinstance(judge, GenerativeJudge | GenerativeStepJudge):
                judge.close()

    # An engine in another process installs weights while this one computes its half of the checks.
    away = serving.idle if serving.here is None else None
    sync = Sync(learner, engine, probe_ids(policy), run.model.dtype, elsewhere=away, forget=serving.forget)
    return PolicyRoles(learner, serving, renderer, rollout, sync, close)


def probe_ids(policy: Policy) -> np.ndarray:
    """int32 [CANARY] ids spread over the vocabulary, the same for every run of a model."""
    rows = read_out(policy.module).weight.shape[0]
    # Multiples of a prime number, modulo the size of the vocabulary: they lie all over it.
    return (np.arange(1, min(CANARY, policy.context) + 1) * 7919 % rows).astype(np.int32)


def _own_rollout(
    run: Run, stage: Stage, models: RewardModels, rollout: Rollout, env: Environment, elsewhere: PlacedEnvironments
) -> Rollout:
    """The rollout of a stage that has an environment of its own (`env`)."""
    settings = run.env_of(stage)
    # Equal rewards share the judges, so that no reward model is in memory twice.
    judges = rollout.judges if settings.rewards == run.env.rewards else models.judges(settings)
    return replace(
        rollout,
        environment=env,
        limits=settings.limits,
        judges=judges,
        plays=elsewhere.player(env),
        right=settings.named_right(env.abilities.vouched),
    )


@dataclass
class TrainedJudges:
    """The reward models of a stage's rewards that the run itself has trained before it."""

    run: Run
    models: RewardModels
    say: Callable[[str], None]
    _said: set[str] = field(default_factory=set[str])

    def __call__(self, stage: Stage) -> tuple[ModelJudge, ...]:
        before = tuple(s.name for s in self.run.stages[: self.run.stages.index(stage)])
        judges = self.models.judges(self.run.env_of(stage), before)
        for line in (j.line for j in judges if j.line not in self._said):
            self._said.add(line)
            self.say(line)
        return judges


def _check_optimizers(run: Run, parameters: list[str]) -> None:
    """ConfigError for a pattern that fits no parameter, or an optimizer whose package is not installed."""
    for stage in run.stages:
        # Without heads that this stage does not train: a pattern that only fits such a head fits nothing.
        read = [n for n in parameters if not n.startswith(HEADS) or n.startswith(stage.heads)]
        check_patterns(stage.optimizer, parameters, f"{stage.name}.optimizer", read)
        if stage.optimizer.kind == "adamw8bit":
            eight_bit.check_installed()


def make_parts(
    run: Run,
    policy: Policy,
    env: Any,
    book: RunFolder,
    trackers: list[Tracker],
    others: Mapping[str, Any] | None = None,
    say: Callable[[str], None] = lambda line: None,
    lead: RankLead | None = None,
) -> RunParts:
    """The parts that all stages of a run share.

    Args:
        others: see `make_policy`.
        say: tells the user of what takes long.
    """
    models, others = RewardModels(run, policy, book.folder), others or {}
    roles = make_roles(run, policy, env, models.judges(run.env), say, lead)
    engines = [roles.serving]
    learner, elsewhere = roles.learner, placed_environments(run, env, others, roles.engine, say, roles.close)
    if run.model.compile:
        say("compiling the learner's layers (model.compile=true) ...")
        say(learner.compile(packed_text(probe_ids(policy))))
    for line in (j.line for j in roles.rollout.judges if isinstance(j, ModelJudge)):
        say(line)

    def close() -> None:
        roles.serving.keep_timeline(book.folder)
        # This ends the engine too (`roles.close`), after the processes that ask it. An opponent's has nothing to end.
        elsewhere.close()
        models.close()

    _check_optimizers(run, list(learner.parameters()))
    return RunParts(
        run=run,
        environment=env,
        renderer=roles.renderer,
        learner=learner,
        sampler=roles.engine,
        rollout=replace(roles.rollout, plays=elsewhere.player(env)),
        sync=roles.sync,
        book=book,
        stop_ids=policy.stop_ids,
        spell=roles.renderer.spell,
        text=lambda ids: str(policy.tokenizer.decode(ids.tolist())),
        freeze=lambda: freeze(learner),
        teacher=lambda path: make_teacher(run, path, policy),
        oppose=lambda reference, share: opponent_of(run, policy, roles, engines, reference, share),
        optimize=partial(make_optimizer, run.model, learner),
        trained_copy=partial(trained_copy, run, learner),
        settings={
            s.name: StageSetting(others[s.name], _own_rollout(run, s, models, roles.rollout, others[s.name], elsewhere))
            for s in run.stages
            if s.name in others
        },
        trained_judges=TrainedJudges(run, models, say),
        observe=observers,
        watch=of_run(),
        trackers=trackers,
        close=close,
        idle=roles.serving.idle,
        sleep=partial(all_sleep, engines),
    )
