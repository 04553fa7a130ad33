"""Faults between judged completions and their loss: sides, tokens, micro-batches, and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.batch import Batch
from posttrain.core.streams import WEIGHT
from posttrain.core.types import Segment
from posttrain.faults.planting import fault

Real = Callable[..., Any]
FAST = ("dpo.optimizer.lr=0.01",)
"""Overrides with which the policy leaves its reference at once."""


def _with_ids(segment: Segment, ids: np.ndarray, prompt: int) -> Segment:
    """The segment with other tokens, of which the first `prompt` do not count."""
    mask = np.arange(len(ids)) >= prompt
    logp = np.where(mask, 0.0, np.nan).astype(np.float32)
    version = np.where(mask, segment.version[segment.mask][0], -1).astype(np.int32)
    return replace(segment, ids=ids.astype(np.int32), mask=mask, logp=logp, version=version)


def _cut(segment: Segment) -> int:
    """Tokens of the prompt."""
    return int(np.argmax(segment.mask))


def _rejected(real: Real, change: Callable[[Segment], Segment]) -> Real:
    """`demonstration` in which every second completion, the rejected one of a pair, is changed."""
    calls = [0]

    def demonstration(*args: Any, **kwargs: Any) -> Segment:
        calls[0] += 1
        segment = real(*args, **kwargs)
        return segment if calls[0] % 2 else change(segment)

    return demonstration


# --- what was judged, and its tokens ---------------------------------------------------------------------------------


@fault(
    "sides_swapped",
    seam="posttrain.stages.preference.judged_batches:completions",
    what="the rejected completion is read as the chosen one",
    harm="the policy learns what people did not want, and its accuracy on its own data looks perfect",
    source="pain 22: the columns of a data set swapped by a formatting function",
    needs="preference",
)
def _(real: Real) -> Real:
    def completions(judgement: Any) -> Any:
        found = real(judgement)
        sides = [side for _, side in found]
        return tuple((text, side) for (text, _), side in zip(reversed(found), sides, strict=True))

    return completions


@fault(
    "judged_prompt_in_loss",
    seam="posttrain.stages.preference.judged_batches:demonstration",
    what="the last token of the prompt counts as part of every completion",
    harm="the log-probs of a pair share a term, and averages are of other tokens",
    source="trap of B06: TRL's ORPO counts the prompt",
    needs="preference",
)
def _(real: Real) -> Real:
    def demonstration(*args: Any, **kwargs: Any) -> Segment:
        segment = real(*args, **kwargs)
        return _with_ids(segment, segment.ids, max(1, _cut(segment) - 1))

    return demonstration


@fault(
    "one_side_cut",
    seam="posttrain.stages.preference.judged_batches:demonstration",
    what="the rejected completion's text is cut at its beginning, so that it fits",
    harm="the two sides answer different prompts, and length decides what is learned",
    source="pain 22: max_length cuts one side",
    needs="preference",
)
def _(real: Real) -> Real:
    return _rejected(real, lambda s: _with_ids(s, s.ids[1:], _cut(s) - 1))


@fault(
    "double_bos_on_one_side",
    seam="posttrain.stages.preference.judged_batches:demonstration",
    what="the prompt of the rejected completion begins with a token too many",
    harm="the two sides are compared under different prompts",
    source="pain 22: a template and a tokenizer both begin the text",
    needs="preference",
)
def _(real: Real) -> Real:
    return _rejected(real, lambda s: _with_ids(s, np.append(s.ids[:1], s.ids), _cut(s) + 1))


@fault(
    "stop_missing_on_one_side",
    seam="posttrain.stages.preference.judged_batches:demonstration",
    what="the rejected completion has no stop token",
    harm="to stop is learned as part of what is wanted, and answers become shorter or longer for no reason",
    source="pain 22: no stop token on the rejected side",
    needs="preference",
)
def _(real: Real) -> Real:
    return _rejected(real, lambda s: _with_ids(s, s.ids[:-1], _cut(s)) if s.spoken > 1 else s)


@fault(
    "padding_counts",
    seam="posttrain.stages.preference.judged_batches:demonstration",
    what="the rejected completion is padded with stop tokens, and the padding counts",
    harm="completions get log-probs of tokens that nobody said, and averages are too small",
    source="trap of B02: padding in the mean",
    needs="preference",
)
def _(real: Real) -> Real:
    return _rejected(real, lambda s: _with_ids(s, np.append(s.ids, np.repeat(s.ids[-1], 2)), _cut(s)))


@fault(
    "pair_torn",
    seam="posttrain.core.batch:Packed.bins",
    what="the two completions of a pair may lie in different micro-batches",
    harm="margins are those of completions that belong to different pairs",
    source="design of a unit: what a loss reads together",
    shows=("dpo.micro_tokens=32",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda self, *args, **kwargs: real(replace(self, unit_E=None), *args, **kwargs)


@fault(
    "weights_per_micro_batch",
    seam="posttrain.core.batch:Packed.cut",
    what="the weights of pairs are normalised in each micro-batch",
    harm="the learning rate rises with the number of micro-batches",
    source="pain 10",
    shows=("dpo.micro_tokens=32",),
    needs="preference",
)
def _(real: Real) -> Real:
    def cut(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = real(self, *args, **kwargs)
        if len(parts) == 1 or not isinstance(self, Batch):
            return parts
        return [p.having({WEIGHT: p[WEIGHT] * self.units / p.units}) for p in parts]

    return cut


# --- the reference ---------------------------------------------------------------------------------------------------


@fault(
    "reference_is_policy_of_now",
    seam="posttrain.stages.preference.preference_stage:PreferenceDriver._reference_logp",
    what="the policy is compared with itself as it is now",
    harm="every margin is 0 at every step, so the loss never falls and nothing holds the policy back",
    source="trap of B02: the reference shares its weights with the policy",
    shows=FAST,
    needs="preference",
)
def _(real: Real) -> Real:
    from posttrain.core.batch import Packed

    return lambda self, of: self.roles.learner.score(Packed.of(of))


@fault(
    "reference_trained_along",
    seam="posttrain.stages.preference.preference_stage:PreferenceDriver.remember",
    what="the reference follows the policy after every step",
    harm="the KL is to the step before, and the policy drifts without end",
    source="trap of B02: reference updated",
    shows=("dpo.ahead=false", *FAST),
    needs="preference",
)
def _(real: Real) -> Real:
    def remember(self: Any, asked: Any, step: Any) -> Any:
        held = self.roles.reference
        if held is not None:
            self.roles.reference = type(held)(self.parts.learner.policy)
            vars(self.roles.reference)["digest"] = held.digest
        return real(self, asked, step)

    return remember


@fault(
    "reference_scores_rounded",
    seam="posttrain.role.learning.reference_scores:ReferenceScores.add",
    what="the reference's log-probs are computed by a model of another precision",
    harm="every log-ratio begins with noise that is then learned",
    source="trap of B02: the reference in another dtype",
    shows=("dpo.ahead=true",),
    needs="preference",
)
def _(real: Real) -> Real:
    class Coarse:
        def __init__(self, scorer: Any) -> None:
            self._scorer = scorer

        def score(self, packed: Any) -> np.ndarray:
            return np.round(self._scorer.score(packed) * 16) / np.float32(16)

    return lambda self, scorer, segments: real(self, Coarse(scorer), segments)


@fault(
    "reference_of_other_tokens",
    seam="posttrain.role.learning.reference_scores:ReferenceScores.add",
    what="the reference reads the texts with another tokenizer, whose ids differ by one",
    harm="the log-ratio compares different texts",
    source="pain 22: a reference of another tokenizer",
    shows=("dpo.ahead=true",),
    needs="preference",
)
def _(real: Real) -> Real:
    class Shifted:
        def __init__(self, scorer: Any) -> None:
            self._scorer = scorer

        def score(self, packed: Any) -> np.ndarray:
            ids = np.where(packed.ids_N > 1, packed.ids_N - 1, packed.ids_N)
            return self._scorer.score(replace(packed, ids_N=ids, target_M=ids[packed.source_M + 1]))

    return lambda self, scorer, segments: real(self, Shifted(scorer), segments)


@fault(
    "reference_scores_shifted",
    seam="posttrain.role.learning.reference_scores:ReferenceScores.of",
    what="the reference's log-probs are one token late",
    harm="the log-ratio compares different tokens",
    source="pain 11",
    shows=("dpo.ahead=true",),
    needs="preference",
)
def _(real: Real) -> Real:
    return lambda self, segments: np.roll(real(self, segments), 1)


@fault(
    "reference_kept_from_other_sampling",
    seam="posttrain.role.learning.reference_scores:ReferenceScores.add",
    what="the reference's log-probs are those of a sampler at temperature 2",
    harm="the reference is flatter than it is, so likely tokens look learned already",
    source="pain 3: log-probs under another sampling contract",
    shows=("dpo.ahead=true",),
    needs="preference",
)
def _(real: Real) -> Real:
    class Warm:
        def __init__(self, scorer: Any) -> None:
            self._scorer = scorer

        def score(self, packed: Any) -> np.ndarray:
            return self._scorer.score(replace(packed, sampling=replace(packed.sampling, temperature=2.0)))

    return lambda self, scorer, segments: real(self, Warm(scorer), segments)
