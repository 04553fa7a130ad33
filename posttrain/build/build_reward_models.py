"""Reward models: the judges that `env.rewards` names (`model:PATH`, `judge:PATH`), and those that a run trains."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.build.build_judges import by_its_form, generative_judge
from posttrain.build.open_model import kept_policy
from posttrain.build.reward_paths import trained_model
from posttrain.config.env import STAGE, Env, Reward
from posttrain.config.run import Run
from posttrain.config.stages.reward_model_settings import head_of
from posttrain.core.batch import Packed
from posttrain.engine.files.reward_folder import read_reward_model
from posttrain.engine.head.logit_transform import logit_dtype
from posttrain.engine.head.readout import read_out
from posttrain.engine.head.value_heads import REWARD_HEAD, RewardHead
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.record.checkpoint import KEPT, kept_folder
from posttrain.record.run_reader import is_run, run_file
from posttrain.role.judges.generative_judge import GenerativeJudge
from posttrain.role.judges.generative_steps import GenerativeStepJudge
from posttrain.role.judges.reward_judge import JudgeMember, RewardModelJudge
from posttrain.role.judges.step_completion import TokenEnds
from posttrain.role.judges.step_judge import StepJudge, paid_by, step_scores
from posttrain.role.weights.saved_weights import load_average, load_weights
from posttrain.system.errors import ConfigError

ModelJudge = RewardModelJudge | GenerativeJudge | GenerativeStepJudge | StepJudge
"""A judge of finished episodes that `env.rewards` names."""
RESOLUTIONS = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 3e-2}
"""Relative difference up to which two scores count as equal: the rounding of a dtype, summed over a model's layers."""


def with_reward_head(run: Run, policy: Policy) -> Policy:
    """The policy, with a new reward head where a stage of the run trains one."""
    if (shape := head_of(run.stages)) is None:
        return policy
    width = read_out(policy.module).weight.shape[1]
    dtype = logit_dtype(policy.dtype)
    return replace(policy, reward_head=RewardHead(shape, width, dtype=dtype, device=policy.device, seed=run.seed))


def reward_policy(folder: Path, checkpoint: str = "last", trust: bool = False, ema: bool = False) -> Policy:
    """The reward model of a run folder, with the weights of a checkpoint or their moving average (`ema`), as a policy
    with a reward head."""
    _, saved = trained_model(folder, checkpoint)
    policy = with_reward_head(run_file(folder).run, kept_policy(folder, allow=trust))
    (load_average if ema else load_weights)(saved.folder, HFLearner(policy))
    return policy


class RewardModels:
    """The reward models of a run's settings, each loaded once.

    Args:
        folder: the run folder, with the reward models that its own stages trained. None: there is none.
    """

    def __init__(self, run: Run, policy: Policy, folder: Path | None = None) -> None:
        self._run, self._policy, self._folder = run, policy, folder
        self._members: dict[str, JudgeMember] = {}
        self._with_engines: list[GenerativeJudge | GenerativeStepJudge] = []
        """Judges that have an engine of their own, which `close` ends."""

    def judges(self, env: Env, trained: Collection[str] | None = None) -> tuple[ModelJudge, ...]:
        """The judges of an environment's rewards that are models, in order.

        Args:
            trained: None: only judges without a model that a stage of the run trains. Else names of finished stages:
                only judges with such models, if all their stages are among these.

        Raises:
            ConfigError: a path is no reward model, or one whose context is too short.
        """
        # A reward may have several models, and some may be trained by stages. It judges only when all these are done.
        asked = [r for r in env.rewards if r.by_model and bool(r.stages) is (trained is not None)]
        out: list[ModelJudge] = [
            self._generative(r) if r.judge_run else self._judge(r) for r in asked if set(r.stages) <= set(trained or ())
        ]
        names = [j.name for j in out]
        if twice := [n for n in names if names.count(n) > 1]:
            raise ConfigError(
                f"reward model {twice[0]!r} is given twice: give it once, with the weight you want, or rename one of"
                " the directories"
            )
        return tuple(out)

    def close(self) -> None:
        for judge in self._with_engines:
            judge.close()

    def _ends(self) -> TokenEnds:
        """Returns what finds the tokens of the policy at which steps end."""
        tokenizer: Any = self._policy.tokenizer
        renderer = Renderer(tokenizer, self._policy.stop_ids, self._policy.context)
        return TokenEnds(RenderedDialogue(renderer, "").text)

    def _generative(self, reward: Reward) -> GenerativeJudge | GenerativeStepJudge:
        of_answers = generative_judge(self._run, reward, RESOLUTIONS[self._run.model.dtype], reward_member)
        judge = by_its_form(of_answers, reward, self._ends())
        self._with_engines.append(judge)
        return judge

    def _judge(self, reward: Reward) -> RewardModelJudge | StepJudge:
        # Loaded once for all rewards and stages that name it.
        members = tuple(self._member(path) for path in reward.models)
        name = "+".join(m.name for m in members)
        default = RESOLUTIONS[self._run.model.dtype]
        if any(_separator(m) for m in members):
            return self._step_judge(name, reward, members)
        if (reward.steps, reward.progress) != ("score", False):  # the defaults
            raise ConfigError(
                f"reward model {name} scores whole answers, and steps and progress are for one that scores steps"
                " (judgement=steps): leave them out"
            )
        return RewardModelJudge(
            name,
            reward.weight,
            members,
            reward.combine,
            reward.pessimism,
            default if reward.resolution is None else reward.resolution,
            reward.measured,
            _line(name, reward, members),
        )

    def _step_judge(self, name: str, reward: Reward, members: Sequence[JudgeMember]) -> StepJudge:
        """The judge of a process reward model.

        Raises:
            ConfigError: it is one of several, has another tokenizer than the policy, or single steps are measured.
        """
        member = members[0]
        if len(members) > 1:
            raise ConfigError(f"reward model {name}: one of them scores steps, and those are not combined; give one")
        if member.renderer is not None:
            raise ConfigError(
                f"reward model {name} scores steps, and has another tokenizer or chat template than the policy, so its"
                " steps end at other tokens: train one from the policy's own model"
            )
        if reward.measured and reward.steps != "outcome":
            raise ConfigError(
                f"reward model {name}: what is measured is about the whole answer; set env.rewards.N.steps=outcome"
            )
        scorer = member.scorer
        assert isinstance(scorer, FrozenRewards)
        return StepJudge(
            name,
            reward,
            member,
            scorer,
            _separator(member),
            self._ends(),
            RESOLUTIONS[self._run.model.dtype] if reward.resolution is None else reward.resolution,
            f"process reward model {name} (weight {reward.weight:g}) reads the policy's tokens: {paid_by(reward)}",
        )

    def _member(self, path: str) -> JudgeMember:
        if path not in self._members:
            self._members[path] = self._load(path)
        return self._members[path]

    def _load(self, path: str) -> JudgeMember:
        """The reward model that a stage of this run trained (`stage:NAME`), or the one at a path."""
        if path.startswith(STAGE):
            name = path.removeprefix(STAGE)
            assert self._folder is not None
            member = _as_member(name, _frozen(stage_policy(self._folder, name, beside=self._policy)), None)
            return replace(member, stage=name)
        return reward_member(self._run, path, self._policy)


class FrozenRewards:
    """`role.judges.reward_judge.RewardScorer` of a policy with a reward head, which does not train."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self._learner, self._lock = policy, HFLearner(policy), threading.Lock()

    @property
    def separator(self) -> str:
        """The text that ends a step; '' for a model that scores whole answers."""
        return self._policy.reward_head.shape.separator if self._policy.reward_head is not None else ""

    def rewards(self, packed: Packed) -> np.ndarray:
        """float32 [S]: the score of each segment, without gradient. Threads take turns: groups that are asked ahead may
        be judged in one thread while a check reads the same model in another."""
        with self._lock:
            return self._learner.rewards(packed)

    def tokens(self, packed: Packed) -> np.ndarray:
        """float64 [M]: the score at each spoken token, as a probability. For a head that scores steps."""
        with self._lock:
            return step_scores(self._learner, packed)

    def tensors(self) -> Mapping[str, Any]:
        """Its weights by name, the head's included."""
        head = self._policy.reward_head
        assert head is not None
        head_weights = {f"{REWARD_HEAD}.{n}": p for n, p in head.named_parameters()}
        return {**dict(named_tensors(self._policy.module)), **head_weights}


def _separator(member: JudgeMember) -> str:
    return member.scorer.separator if isinstance(member.scorer, FrozenRewards) else ""


def judges_of(run: Run, policy: Policy, folder: Path | None) -> tuple[ModelJudge, ...]:
    """The judges of the run's rewards that are models. `folder`: its run folder, where it has one."""
    # A stage's weights are kept under its name when it ends; a hidden folder is half written.
    finished_stages = () if folder is None else tuple(p.name for p in (folder / KEPT).glob("[!.]*"))
    models = RewardModels(run, policy, folder)
    return (*models.judges(run.env), *models.judges(run.env, finished_stages))


def stage_policy(folder: Path, stage: str, trust: bool = False, beside: Policy | None = None) -> Policy:
    """The reward model that a stage of a run trained, from what the run keeps under its name.

    Args:
        beside: the policy of the same run. If it has an adapter, the reward model is another adapter over the same
            frozen weights, so these are in memory once.
    """
    run = run_file(folder).run
    # The weights beneath the adapter are those of the policy: a second copy of a large model might not fit.
    if beside is not None and beside.lora is not None:
        without_head = beside.beside(beside.lora, run.seed)
    else:
        without_head = kept_policy(folder, allow=trust)
    policy = with_reward_head(run, without_head)
    load_weights(kept_folder(folder, stage), HFLearner(policy))
    return policy


def _frozen(policy: Policy) -> Policy:
    policy.module.requires_grad_(False).eval()
    if policy.reward_head is not None:
        policy.reward_head.requires_grad_(False)
    return policy


def _line(name: str, reward: Reward, members: Sequence[JudgeMember]) -> str:
    """A line for people about a judge: its weight, and whose tokens it reads."""
    combination = "" if len(members) == 1 else f", {_words(reward)}"
    weight = "measured, not paid" if reward.measured else f"weight {reward.weight:g}"
    encoding_anew = [m.name for m in members if m.renderer is not None]
    begins = f"reward model {name} ({weight}{combination})"
    if len(encoding_anew) == len(members):
        return (
            f"{begins} has another tokenizer or chat template than the policy: it reads each conversation anew, in its"
            " own tokens"
        )
    reads = f"; {' and '.join(encoding_anew)} read the conversation anew, in their own tokens" if encoding_anew else ""
    return f"{begins} reads the policy's tokens{reads}"


def _words(reward: Reward) -> str:
    return "the worst of them" if reward.combine == "worst" else f"mean - {reward.pessimism:g} standard deviations"


def reward_member(run: Run, path: str, policy: Policy) -> JudgeMember:
    """The reward model at `path`. It reads the tokens of this policy, or encodes the text again in its own tokens."""
    folder = Path(path).expanduser()
    if is_run(folder):
        model = reward_policy(folder)
    else:
        # It only scores: compiled layers and checkpointing are for the learner of the policy.
        model = read_reward_model(path, replace(run.model, compile=False, gradient_checkpointing="none"))
    _frozen(model)
    name = folder.resolve().name if folder.is_dir() else path
    # With another tokenizer or template the policy's ids mean other text: the conversation is encoded again.
    alike = (model.tokenizer_digest, model.template_digest) == (policy.tokenizer_digest, policy.template_digest)
    if alike and model.context < policy.context:
        raise ConfigError(
            f"model:{path}: its context of {model.context} tokens is shorter than the policy's {policy.context}: lower"
            f" model.context to {model.context}, or use another reward model"
        )
    tokenizer: Any = model.tokenizer
    return _as_member(name, model, None if alike else Renderer(tokenizer, model.stop_ids, model.context))


def _as_member(name: str, policy: Policy, renderer: Renderer | None) -> JudgeMember:
    head = policy.reward_head
    assert head is not None
    # A gate reads the last token of the prompt too.
    reads_last = head.shape.pool == "last" and head.gate is None
    return JudgeMember(name, FrozenRewards(policy), policy.context, renderer, reads_last, head.blank)
