"""Faults between the model and the transcript: sampling, recording, and attribution of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from posttrain.core.types import Segment
from posttrain.faults.planting import fault

Real = Callable[..., Any]


@fault(
    "temperature_one_side",
    seam="posttrain.engine.learner.packed_reader:PackedReader.head",
    what="the sampler draws at its temperature, the learner scores at temperature 1",
    harm="every importance ratio is that of another distribution; T=0.6 gave first-token ratios of 2",
    source="pain 2, trl#4159",
    shows=("rl.sampling.temperature=0.7",),
    lesson="sampler and learner score at one temperature, or no ratio is right",
    caught_by="sampler_agrees",
)
def _(real: Real, self: Any, packed: Any, *args: Any, **kwargs: Any) -> Any:
    # The sampler keeps its own contract; only what the learner reads is another one.
    return real(self, replace(packed, sampling=replace(packed.sampling, temperature=1.0)), *args, **kwargs)


@fault(
    "top_p_one_side",
    seam="posttrain.engine.learner.packed_reader:PackedReader.head",
    what="the sampler cuts the distribution at top_p, the learner scores under the whole one",
    harm="ratios sit at the kept mass instead of 1 and gradients shrink by a tenth",
    source="pain 1, trl#6789",
    shows=("rl.sampling.top_p=0.8",),
    lesson="a truncated distribution is renormalised on both sides",
    caught_by="sampler_agrees",
)
def _(real: Real, self: Any, packed: Any, *args: Any, **kwargs: Any) -> Any:
    whole = replace(packed.sampling, top_p=1.0, top_k=0, min_p=0.0)
    # Without kept sets there is nothing to renormalise over.
    return real(self, replace(packed, sampling=whole, kept=None), *args, **kwargs)


@fault(
    "sampler_colder_than_it_says",
    seam="posttrain.engine.embedded.token_sampler:pick",
    what="the engine draws from a sharper distribution than the one whose log-prob it reports",
    harm="exploration is lost while every log-prob agrees, so no comparison of log-probs can see it",
    source="pain 2; NeMo PR#935",
    lesson="log-probs that agree do not show that tokens were drawn from them",
    caught_by="drawn_again",
)
def _(real: Real, logp: Any, *args: Any) -> Any:
    # Twice the log-probs is half the temperature. What is reported stays what was passed in.
    return real((2 * logp).log_softmax(-1), *args)


@fault(
    "siblings_share_seed",
    seam="posttrain.role.rollout:Rollout.episode",
    what="the random numbers of all siblings are those of the first",
    harm="a group is one answer repeated: no spread, no credit, nothing is learned",
    source="pain 25: seeds identical across workers",
    lesson="siblings that are one answer repeated have no spread and no credit",
    caught_by="bet_on_siblings",
)
async def _(real: Real, self: Any, task: Any, visit: int, sibling: int, *args: Any, **kwargs: Any) -> Any:
    # Every sibling is asked as the first one and gets its own number afterwards.
    return replace(await real(self, task, visit, 0, *args, **kwargs), sibling=sibling)


@fault(
    "mask_shifted",
    seam="posttrain.core.transcript:Transcript.segment",
    what="the mask of spoken tokens is one position late",
    harm="the last prompt token is trained on and the stop token is not",
    source="pain 14, verl PR#7322",
    lesson="a loss mask one place late trains on the prompt and forgets the stop",
    caught_by="Segment",
)
def _(real: Real, self: Any) -> Segment:
    s = real(self)
    # Log-probs and versions stay where they are, so `Segment` refuses it.
    return replace(s, mask=np.roll(s.mask, 1))


@fault(
    "logp_shifted",
    seam="posttrain.core.transcript:Transcript.say",
    what="the sampler's log-probs belong to the neighbouring token",
    harm="every ratio divides two unrelated numbers",
    source="pain 3",
    lesson="a log-prob belongs to its own token",
    caught_by="sampler_agrees",
)
def _(real: Real, self: Any, said: Any) -> Any:
    return real(self, replace(said, logp=np.roll(said.logp, 1)))


@fault(
    "observation_unmasked",
    seam="posttrain.core.transcript:Transcript.see",
    what="what a tool showed counts as said by the policy",
    harm="the policy is trained to predict the tool's output",
    source="pain 14, verl#3720",
    needs="tool",
    lesson="what a tool shows is read, and not learned as if it were said",
    caught_by="demonstration_ends_once",
    see=("run calculator sft.steps=20 rl.steps=5 FAULT",),
)
def _(real: Real, self: Any, ids: Any) -> None:
    # The first text is the prompt, which rightly counts as context.
    if not len(self):
        return real(self, ids)
    n = len(ids)
    # As spoken by the weights of the last turn, with a log-prob of 0.
    return self._append(ids, np.ones(n, bool), np.zeros(n, np.float32), np.zeros(n, np.int32) + self._version[-1][-1])


@fault(
    "labels_shifted",
    seam="posttrain.core.batch:Packed.of",
    what="labels are shifted once too often, so every token is predicted from itself",
    harm="log-probs near 0 for everything: loss falls at once and nothing is learned",
    source="trap 13, pain 10",
    lesson="labels are shifted once: twice, each token is predicted from itself",
    caught_by="Packed",
)
def _(real: Real, cls: Any, *args: Any, **kwargs: Any) -> Any:
    packed = real(cls, *args, **kwargs)
    # A source is the position whose hidden state predicts a token; the next one is the token itself. The last position
    # has no token behind it, so it can be no source.
    return replace(packed, source_M=np.minimum(packed.source_M + 1, len(packed.ids_N) - 2))
