"""Faults outside the policy: verifiers, splits, tokenizers, templates, demonstrations."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from posttrain.core.types import Group
from posttrain.core.verdict import Verdict
from posttrain.faults.judging_faults import DOWN
from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "failed_counts_as_zero",
    seam="posttrain.core.types:outcome",
    what="a verdict that failed on our side enters the baseline and the batch as 0",
    harm="an outage reads as a wrong answer",
    source="pain 16",
    shows=DOWN,
)
def _(real: Real) -> Real:
    def outcome(verdicts: Any) -> float | None:
        found = real(verdicts)
        return 0.0 if found is None else found

    return outcome


@fault(
    "groups_interleaved",
    seam="posttrain.role.rollout:together",
    what="answers are regrouped by the order they came in instead of by prompt",
    harm="a group holds answers to different prompts",
    source="pain 18, AReaL#450",
)
def _(real: Real) -> Real:
    async def together(work: Any) -> Any:
        done = await real(work)
        if len(done) < 2 or not isinstance(done[0], Group) or len({len(g.episodes) for g in done}) > 1:
            return done
        columns = list(zip(*(g.episodes for g in done), strict=True))
        flat = [e for column in columns for e in column]
        n = len(done[0].episodes)
        return [replace(g, episodes=tuple(flat[i * n : (i + 1) * n])) for i, g in enumerate(done)]

    return together


@fault(
    "bos_doubled",
    seam="posttrain.environment.templates.renderer:Renderer.text_ids",
    what="the token that begins a text is put before a text that already has it",
    harm="the policy trains on a beginning it will never be served",
    source="pain 22, axolotl#1616",
    needs="bos",
)
def _(real: Real) -> Real:
    return lambda self, text: np.concatenate([np.array(self.leading, np.int32), real(self, text)])


@fault(
    "template_drift",
    seam="posttrain.environment.templates.renderer:Renderer.conversation",
    what="demonstrations are written without the generation prompt that the rollout begins answers with",
    harm="what was imitated is not what is asked for: the first steps of RL relearn the format",
    source="pain 14; G27",
    needs="chat",
)
def _(real: Real) -> Real:
    def conversation(self: Any, *args: Any) -> Any:
        drifted = copy(self)
        drifted.template = copy(self.template)
        render = self.template.render
        drifted.template.render = lambda messages, *, generate, **more: render(messages, generate=False, **more)
        return real(drifted, *args)

    return conversation


@fault(
    "pad_is_eos",
    seam="posttrain.role.learning.demonstrations:demonstration",
    what="the padding token is the stop token and padding is masked by its value, so the stop is never imitated",
    harm="the policy never learns to stop",
    source="pain 22, trl PR#1591",
    needs="sft",
)
def _(real: Real) -> Real:
    def demonstration(*args: Any, **kwargs: Any) -> Any:
        s = real(*args, **kwargs)
        mask = s.mask & (s.ids != s.ids[-1])
        return replace(
            s,
            mask=mask,
            logp=np.where(mask, s.logp, np.nan).astype(np.float32),
            version=np.where(mask, s.version, -1).astype(np.int32),
        )

    return demonstration


@fault(
    "eos_imitated_twice",
    seam="posttrain.environment.templates.renderer:Renderer.completion_ids",
    what="the template and the collator each add a stop token to a demonstration",
    harm="after its end the policy expects another one",
    source="pain 22, trl#4481",
    needs="sft",
)
def _(real: Real) -> Real:
    def completion_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = real(self, *args, **kwargs)
        return np.append(ids, ids[-1:])

    return completion_ids


@fault(
    "pass_at_k_biased",
    seam="posttrain.role.heldout_evaluation:pass_at_k",
    what="pass@k is 1 - (1 - p)^k of the observed rate",
    harm="pass@k is too low, most of all for k close to the number of samples",
    source="2107.03374: the biased estimate",
)
def _(real: Real) -> Real:
    return lambda n, c, k: 1 - (1 - c / n) ** k


@fault(
    "task_ids_repeat",
    seam="posttrain.environment.gallery.arithmetic:_task",
    what="different tasks share an id",
    harm="their answers are drawn with the same random numbers, and records cannot tell them apart",
    source="pain 18: group ids lost; law 8",
)
def _(real: Real) -> Real:
    return lambda name, *args, **kwargs: real(name if "heldout" in name else "arithmetic", *args, **kwargs)


@fault(
    "reward_weights_ignored",
    seam="posttrain.core.types:outcome",
    what="the outcome adds all reward sources with weight 1",
    harm="a small format bonus outweighs being right",
    source="G9",
    shows=("env.rewards=contains", "env.rewards.0.weight=0.1"),
)
def _(real: Real) -> Real:
    return lambda verdicts: real([replace(j, weight=1.0) for j in verdicts])


@fault(
    "verdicts_race",
    seam="posttrain.environment.gallery.arithmetic:Arithmetic.verify",
    what="once in a while two verdicts are mixed up under load (here: every 41st is the opposite)",
    harm="noise in the reward that no average shows",
    source="pain 16: thread and process pools",
)
def _(real: Real) -> Real:
    calls = count()

    def verify(self: Any, attempt: Any) -> Verdict:
        verdict = real(self, attempt)
        return Verdict.value(1 - (verdict.score or 0.0)) if next(calls) % 41 == 40 else verdict

    return verify


@fault(
    "right_answers_lose_half",
    seam="posttrain.environment.single:SingleTurn.judge",
    what="between the verifier and the record every score is halved",
    harm="the verifier is right in every test, and no answer is ever solved: pass@k and difficulty read 0",
    source="pain 16; gold canaries",
)
def _(real: Real) -> Real:
    async def judge(self: Any, attempt: Any) -> Any:
        return tuple(
            replace(j, verdict=Verdict.value(j.verdict.score / 2)) if j.verdict.score else j
            for j in await real(self, attempt)
        )

    return judge
