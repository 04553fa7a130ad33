"""Settings of environments and rewards, of a run and of a stage that has its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from posttrain.core.measure.answer_steps import Aggregate
from posttrain.core.stop import EpisodeLimits
from posttrain.system.errors import ConfigError

Scalar = str | int | float | bool

MODEL = "model:"
"""Begins a reward that is a reward model."""
JUDGE = "judge:"
"""Begins a reward that is a judge: a policy which learned to judge, or an endpoint."""
STAGE = "stage:"
"""Begins the name of a stage of the same run that trains one."""


@dataclass(frozen=True, kw_only=True)
class JudgeEndpoint:
    """The settings by which a model at an endpoint judges (`judge:https://HOST/v1`). It reads one answer at a time."""

    rubric: str = ""
    """A text file (.md or .txt) that says what is worth how much. It is required. A column of the data stands in it by
    its name, as {level}. The task and the answer are written below it; with {response} in it, it is the whole prompt,
    in which {prompt} stands for the task."""
    name: str = ""
    """Its name in the record. Empty: `judge`, or `heldout_judge` where it is measured and not paid."""
    model: str | None = None
    """Name of the model; none: the only one that the endpoint serves."""
    key_env: str | None = None
    """Environment variable that holds the endpoint's key. A key goes to another machine over https only."""
    api: Literal["chat", "completions"] = "chat"
    """Whether the prompt is sent as a user's message, or as plain text to continue."""
    answer: Literal["json", "number"] = "json"
    """The form of the judge's answer: JSON with `score` (the request has its schema as `response_format`), or a number
    alone. An answer that is neither is asked for again, and is no verdict at last."""
    low: float = 0.0
    """The lowest score of the rubric. It is paid 0."""
    high: float = 10.0
    """The highest score of the rubric. It is paid 1, and what lies between in proportion."""
    max_tokens: int = 512
    """Most tokens of a judgement, its reasons included."""
    parallel: int = 16
    """Most requests at once."""
    calls: int = 100_000
    """Most requests of a run; one that is resumed counts on. What is asked later is no verdict, and the run stops."""

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(f"judge: low={self.low:g} must be below high={self.high:g}, and both finite")
        if min(self.max_tokens, self.parallel, self.calls) < 1:
            raise ConfigError(
                f"judge: max_tokens={self.max_tokens}, parallel={self.parallel} and calls={self.calls} must be at"
                " least 1"
            )


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A reward source: a builtin name of the environment, `path.py:function`, or a reward model."""

    function: str
    """A verifier of posttrain (exact, last_integer, contains, math, code), or `path.py:function`. `model:PATH`: a
    reward model, in a directory, a run folder or on the hub; `model:stage:NAME`: the one that stage NAME of this run
    trained; `model:A+B` combines several into one reward. `judge:PATH`: a policy that learned to judge, in the folder
    of its run; it writes its reasons and votes. `judge:https://HOST/v1`: a model at an OpenAI-compatible endpoint,
    which judges by a rubric."""
    weight: float = 1.0
    """Factor of its score in the sum of all rewards."""
    workers: int = 0
    """Processes that run it, for `path.py:function` and `math`. One that hangs is killed. 0: a function runs in a
    thread of the trainer, which cannot be killed; `math` uses two processes."""
    timeout: float | None = None
    """Most seconds of one call: wall time in a thread or at an endpoint, processor time in a worker, which the kernel
    counts in whole seconds, so that a call may take one more. None: 30; 2 for `math`, so at most 3; 60 for `code` and
    for an endpoint."""
    resolution: float | None = None
    """Relative difference up to which two of its scores count as equal. Set it for a function that asks a model, to the
    noise of that model's scores (for example 1e-3). None: 2^-40, right for a verifier, and the rounding of
    `model.dtype` for a reward model."""
    combine: Literal["mean", "worst"] = "mean"
    """The score of several reward models: their mean less `pessimism` standard deviations, or the worst."""
    pessimism: float = 0.0
    """How many standard deviations of several reward models are subtracted from their mean (2310.02743)."""
    votes: int = 1
    """Number of a judge's judgements of each comparison, in each order of the two sides."""
    rivals: int = 0
    """Number of rivals, for a judge of pairs: each answer is compared with the next so many of its group, and so with
    twice as many. 0: with all."""
    meta: str | None = None
    """A reward model of judgements (a directory, a run folder or a hub id) for a judge, with the judge's tokenizer. The
    half of the votes about a comparison that it scores highest counts (2504.02495)."""
    steps: Literal["score", "pay", "outcome"] = "score"
    """The use of a process reward model's scores of steps. score: each step has its score, which an algorithm reads
    that compares steps (grpo_process). pay: each score is paid at the end of its step, for credit with values (ppo).
    outcome: the scores as one number are the answer's reward."""
    aggregate: Aggregate = "min"
    """How the scores of steps become one number."""
    progress: bool = False
    """Score each step, by a process reward model, as the amount by which the step raised the chance of a right answer
    (2410.08146)."""
    measured: bool = False
    """Nothing is learned from it. Held-out accuracy and mean reward are those of what is measured, beside what is
    paid, so that over-optimisation of a reward shows."""
    judge: JudgeEndpoint = JudgeEndpoint()

    @property
    def stages(self) -> tuple[str, ...]:
        """The stages of the same run whose reward models it is."""
        return tuple(m.removeprefix(STAGE) for m in self.models if m.startswith(STAGE))

    @property
    def models(self) -> tuple[str, ...]:
        """The paths of its reward models; none where it is something else."""
        if not self.function.startswith(MODEL):
            return ()
        return tuple(path.strip() for path in self.function.removeprefix(MODEL).split("+"))

    @property
    def judge_url(self) -> str:
        """The address of a judge at an endpoint; '' where it is something else."""
        address = self.function.removeprefix(JUDGE).strip() if self.function.startswith(JUDGE) else ""
        return address if "://" in address else ""

    @property
    def judge_run(self) -> str:
        """The run folder of a policy that learned to judge; '' where it is something else."""
        folder = self.function.removeprefix(JUDGE).strip() if self.function.startswith(JUDGE) else ""
        return "" if self.judge_url else folder

    @property
    def by_model(self) -> bool:
        """True where the reward is a reward model or a policy that judges, which read the answers of a whole group."""
        return bool(self.models) or (self.function.startswith(JUDGE) and not self.judge_url)

    @property
    def graded(self) -> bool:
        """True where a model gives the score (`Judged.by_model`)."""
        return self.by_model or bool(self.judge_url)

    def __post_init__(self) -> None:
        for why in self._refusals():
            raise ConfigError(f"reward {self.function!r}{why}")
        _check_resolution(f"reward {self.function!r}", self.resolution)

    def _refusals(self) -> Iterator[str]:
        """Yields what means nothing in these settings. Each text goes on after the reward's name in the message."""
        is_policy = self.function.startswith(JUDGE) and not self.judge_url
        if is_policy and not self.judge_run:
            yield ": name the run folder of a judge: judge:PATH"
        if self.judge != JudgeEndpoint() and not self.judge_url:
            yield ": its settings judge are for a judge at an endpoint (judge:https://HOST/v1); leave them out"
        if self.judge_url and self.workers:
            yield ": set judge.parallel for requests at once, and leave workers out"
        if not is_policy and (self.votes, self.rivals, self.meta) != (1, 0, None):
            yield ": votes, rivals and meta are for judge:PATH; leave them out"
        if self.votes < 1 or self.rivals < 0:
            yield f": votes={self.votes} must be at least 1 and rivals={self.rivals} at least 0"
        if is_policy and (self.workers or self.timeout is not None):
            yield " has an engine of its own: leave workers and timeout out"
        if self.models:
            yield from self._refusals_of_models()
        elif (self.steps, self.aggregate, self.progress) != ("score", "min", False) and not self.judge_run:
            yield (
                ": steps, aggregate and progress are for a process reward model (model:PATH, or judge:PATH of a"
                " verifier); leave them out"
            )
        elif self.combine != "mean" or self.pessimism:
            yield ": combine and pessimism are for several reward models (model:A+B); leave them out"
        if self.progress and self.steps == "outcome":
            yield ": progress is of single steps, and steps=outcome pays one number; set steps=score or steps=pay"
        if self.workers < 0 or (self.timeout is not None and not self.timeout > 0):
            yield f": workers={self.workers} must be >= 0 and timeout={self.timeout} > 0"

    def _refusals_of_models(self) -> Iterator[str]:
        if not all(self.models) or not all(self.stages):
            yield ": name a directory, a run folder or a hub id, or a stage of this run: model:PATH, model:stage:NAME"
        if self.workers or self.timeout is not None:
            yield " is computed by the learner's own forward pass: leave workers and timeout out"
        if len(self.models) == 1 and (self.combine != "mean" or self.pessimism):
            yield " is one model, and combine and pessimism are for several: model:A+B"
        if self.pessimism < 0 or (self.pessimism and self.combine == "worst"):
            yield f": pessimism={self.pessimism:g} must be >= 0, and 0 with combine=worst"


def _check_resolution(owner: str, resolution: float | None) -> None:
    if resolution is not None and not 0 <= resolution < 1:
        raise ConfigError(
            f"{owner}: resolution={resolution:g} is a relative difference, at least 0 and below 1 (1e-3 for a model,"
            " say)"
        )


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """The place where programs run that a model wrote: answers that are tested, and calls of a Python tool."""

    name: str = "auto"
    """`auto`: the best of `namespaces` and `landlock` that passes the tests with attacks on this machine. Or one of
    them, or the address of an executor (https://...). Or `none`: no sandbox; it is refused for root and also needs
    ALLOW_UNSANDBOXED_CODE=1."""
    token: str = "POSTTRAIN_SANDBOX_TOKEN"
    """Environment variable that holds the executor's token."""


@dataclass(frozen=True, kw_only=True)
class Env:
    """The environment, with its tasks and rewards."""

    name: str = "arithmetic"
    """`prompts` for your own data, a gallery environment, `gym:TASK` of reasoning-gym, `verifiers:ID` of
    PrimeIntellect's verifiers, or a class of your own: `path.py:Class`."""
    args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    """The environment's own settings. An unknown one is an error that names the valid ones."""
    prompts: str | None = None
    """With env=prompts: a JSONL file or a `datasets` dataset (local directory or hub id)."""
    mix: tuple[tuple[str, float], ...] = ()
    """Further data sets, mixed with `prompts` by weight: `env.mix=code.jsonl:0.5,chat.jsonl:2`. `prompts` has weight 1,
    and each has its share of the rows that are learned, however many it has. Each holds rows out by its share too."""
    rewards: tuple[Reward, ...] = ()
    """The rewards that judge an answer: verifiers by their names, or `path.py:function`; several with commas. With
    env=prompts at least one. For other environments they are added to the environment's own."""
    heldout: int = 200
    """Held-out tasks. 0: train without measuring."""
    limits: EpisodeLimits = EpisodeLimits()
    sandbox: SandboxSettings = SandboxSettings()
    resolution: float | None = None
    """Like `Reward.resolution`, for the environment's own verdicts where a model gives them."""
    right: float | None = None
    """The smallest reward of a right answer. Accuracy, pass@k and what reads solved answers go by it. None: 1; and no
    answer is right where a reward model or a judge is paid, since its score is a grade."""
    measured: bool = False
    """The environment's own verdict is measured and not paid (`Reward.measured`): `rewards` alone pay."""

    @property
    def data(self) -> tuple[tuple[str, float], ...]:
        """The data sets, each with its weight."""
        return () if self.prompts is None else ((self.prompts, 1.0), *self.mix)

    @property
    def judges(self) -> bool:
        """True where something judges answers. Data that was judged beforehand may come without rewards."""
        return self.name != "prompts" or bool(self.rewards)

    @property
    def paid_weights(self) -> tuple[float, ...]:
        """The weights of what is paid: the environment's own verdict where it has one, and rewards."""
        own = (1.0,) if self.name != "prompts" and not self.measured else ()
        return (*own, *(r.weight for r in self.rewards if r.weight and not r.measured))

    def named_right(self, vouched: bool) -> float | None:
        """The smallest outcome of a right answer, where it is named: by `right`; or as 1 where the outcome is the
        environment's own verdict alone, and it is `vouched`: the environment promises that right answers score 1."""
        # The outcome is what is measured, where anything is, and else what is paid. It is the environment's own verdict
        # alone where no other source counts for it.
        measured = self.measured or any(r.measured for r in self.rewards)
        alone = not any(r.measured == measured and (r.weight or measured) for r in self.rewards)
        promised = vouched and alone and measured == self.measured
        return 1.0 if self.right is None and promised else self.right

    @property
    def has_reward_models(self) -> bool:
        """True where reward models or generative judges judge the answers, alone or beside others."""
        return any(r.by_model for r in self.rewards)

    def __post_init__(self) -> None:
        _check_resolution(f"env {self.name}", self.resolution)
        if self.resolution is not None and self.name == "prompts":
            raise ConfigError("env.resolution: with env.name=prompts its rewards judge; set env.rewards.0.resolution")
        if self.measured and self.name == "prompts":
            raise ConfigError("env.measured: with env.name=prompts its rewards judge; set env.rewards.0.measured=true")
        if self.mix and self.prompts is None:
            raise ConfigError(
                f"env.mix={self.mix[0][0]}: is mixed with the data of env.prompts, and there is none: give env.prompts"
            )
        if bad := [f"{path}:{w:g}" for path, w in self.mix if not path or not 0 < w < math.inf]:
            raise ConfigError(f"env.mix={bad[0]}: write PATH:WEIGHT, weight > 0")
        if self.measured and not any(not r.measured for r in self.rewards):
            raise ConfigError(
                "env.measured=true: the environment's own verdict is not paid, and nothing else is: give env.rewards,"
                " such as model:PATH"
            )
        if self.right is not None and not math.isfinite(self.right):
            raise ConfigError(f"env.right={self.right}: must be a number, or none")
        if self.heldout < 0:
            raise ConfigError(f"env.heldout={self.heldout}: must be >= 0 (0 trains without measuring)")
