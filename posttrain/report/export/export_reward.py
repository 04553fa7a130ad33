"""Checks that an exported reward model gives the scores of its run, and writes its README.

The model is read back and compared. A last-token head with one output is read by transformers' own sequence
classification, in a batch that is padded on the right and in one that is padded on the left. Other heads are read by
this library, because only it knows their form.
"""

from __future__ import annotations

import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.config.run import Model
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.batch import Packed
from posttrain.core.measure.interval import interval
from posttrain.core.transcript import Transcript
from posttrain.core.types import Segment
from posttrain.engine.files.check_folder import form_of
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.files.reward_folder import read_reward_model
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.engine.model.tiny_models import quiet
from posttrain.record.certificate import ExportCertificate, ExportComparison
from posttrain.role.learning.logprob_tolerance import READ
from posttrain.system.errors import DataError
from posttrain.system.version import VERSION

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors")
"""The libraries that read an export back."""
SEQUENCES = 6
"""Sequences that are scored, of different lengths."""
BOUNDS = {"float32": 1e-5, "float64": 1e-9}
"""Largest difference of a score, relative to the largest score, that counts as rounding. It is 0.05 in narrower types,
because transformers holds the head in them too."""


def certify_scores(policy: Policy, written: Path, made: str, identity: str, checkpoint: str) -> ExportCertificate:
    """Read a written reward model back and compare its scores with those of the policy's own head.

    Args:
        made: what was written, for the certificate.

    Raises:
        DataError: it cannot be read back at all.
    """
    began = time.perf_counter()
    segments = sequences(policy)
    packed = Packed.of(segments)
    ours = HFLearner(policy).rewards(packed).astype(np.float64)
    dtype = str(policy.dtype).removeprefix("torch.")
    # Relative to the largest score, as rounding is. Where all scores are small it is relative to 1.
    bound = BOUNDS.get(dtype, 0.05) * max(1.0, float(np.abs(ours).max()))
    try:
        # The form decides what reads it: transformers knows one form of head, this library all.
        if form_of(written) == "classifier":
            module, scores_by_way = _by_transformers(written, segments, policy)
        else:
            reread = read_reward_model(str(written), Model(device=str(policy.device), dtype=dtype))  # type: ignore[arg-type]
            module, scores_by_way = reread.module, {"": HFLearner(reread).rewards(packed).astype(np.float64)}
    except Exception as error:  # files that cannot be read raise any error of their parser
        first_line = (str(error).strip().splitlines() or ["no reason given"])[0]
        what = f"{type(error).__name__}: {first_line}"
        raise DataError(f"{written}: what was exported cannot be read back ({what})") from error
    compared: list[ExportComparison] = []
    for where, theirs in scores_by_way.items():
        gap = float(np.abs(theirs - ours).max())
        unlike = "" if gap <= bound else f"a score differs by {gap:.3g} (bound {bound:.2g})"
        compared.append(ExportComparison(f"scores{where}", len(packed.ids_N), "tokens", unlike, gap, bound))
    return ExportCertificate(
        made=made,
        run=identity,
        checkpoint=checkpoint,
        comparisons=tuple(compared),
        weights=fingerprint(named_tensors(module)),
        tokenizer=policy.tokenizer_digest,
        template=policy.template_digest,
        dtype=dtype,
        versions={"posttrain": VERSION, **{n: metadata.version(n) for n in LIBRARIES}},
        seconds=round(time.perf_counter() - began, 3),
        second_copy=sum(t.numel() * t.element_size() for _, t in named_tensors(module)),
    )


def sequences(policy: Policy) -> list[Segment]:
    """Made-up sequences of different lengths that end in a stop token. The first half of each counts as the prompt."""
    rows = min(len(policy.tokenizer), int(policy.module.get_input_embeddings().weight.shape[0]))  # type: ignore[union-attr,arg-type]
    out: list[Segment] = []
    for i in range(SEQUENCES):
        length = max(3, min(5 + 7 * i, policy.context))
        # Spread over the vocabulary by the prime 7919, and different in each sequence.
        ids = (np.arange(1 + i, 1 + i + length) * 7919 % rows).astype(np.int32)
        # No stop token inside: the head reads at the one at the end.
        ids[np.isin(ids, policy.stop_ids)] = next(i for i in range(rows) if i not in policy.stop_ids)
        ids[-1] = policy.stop_ids[0]
        transcript = Transcript(READ)
        transcript.see(ids[: length // 2])
        transcript.show(ids[length // 2 :])
        out.append(transcript.segment())
    return out


@torch.no_grad()
def _by_transformers(written: Path, segments: list[Segment], policy: Policy) -> tuple[Any, dict[str, np.ndarray]]:
    """(the model, its scores by the side of the padding).

    Models that take positions get those that the tokens have without padding.
    """
    with quiet():
        module: Any = AutoModelForSequenceClassification.from_pretrained(written, dtype=policy.dtype)
        tokenizer: Any = AutoTokenizer.from_pretrained(written)
    module.to(policy.device).eval()
    scores: dict[str, np.ndarray] = {}
    # Both sides of padding: a head that reads the last place of a padded batch is wrong on one of them.
    for side in ("right", "left"):
        tokenizer.padding_side = side
        batch = tokenizer.pad({"input_ids": [s.ids.tolist() for s in segments]}, return_tensors="pt").to(policy.device)
        mask = batch["attention_mask"]
        inputs = {"input_ids": batch["input_ids"], "attention_mask": mask}
        # Positions count real tokens only, as they would without padding.
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        try:
            logits = module(**inputs, position_ids=positions).logits
        except TypeError:  # an architecture without positions
            logits = module(**inputs).logits
        scores[f" padded on the {side}"] = logits[:, 0].double().cpu().numpy()
    return module, scores


def reward_card(name: str, shape: HeadShape, form: str, agreement: tuple[float, float, float] | None) -> str:
    """The README of an exported reward model."""
    figure = "It was not measured on held-out judgements."
    if agreement is not None:
        figure = f"It orders {interval(*agreement)} of held-out pairs as they were judged (95 % interval)."
    lines = [f"# {name}", "", "A reward model: it scores a prompt with its completion; higher is better.", "", figure]
    lines += ["", f"It is written as {form}."]
    if shape.standard:
        lines += [
            "",
            "```python",
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
            "",
            f'model = AutoModelForSequenceClassification.from_pretrained("{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            "```",
            "",
            "A completion ends in its stop token, at which the score is read.",
        ]
    lines += ["", f"With posttrain: `env.rewards=model:{name}`.", ""]
    return "\n".join(lines)
