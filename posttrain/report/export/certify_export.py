"""Checks that the exported model is the trained one: it is read back with plain transformers and compared with the run.

The run's side ("ours") is the policy with the weights of the checkpoint, computed by the learner. The other side
("theirs") is the model that any user gets from the files. All differences are collected; the error names the first.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.core.batch import Packed
from posttrain.core.sampling import Sampling
from posttrain.core.types import Segment
from posttrain.engine.adapters import adapter_modules
from posttrain.engine.adapters.quantise import make_float, quantise, quantised_as
from posttrain.engine.files.fingerprint import fingerprint
from posttrain.engine.files.reload_export import ReloadedModel, reload
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy, named_tensors
from posttrain.environment.templates.renderer import History
from posttrain.record.certificate import ExportCertificate, ExportComparison, first_unlike
from posttrain.record.checkpoint import Checkpoint
from posttrain.record.run_reader import run_file
from posttrain.report.export.export_reward import LIBRARIES
from posttrain.report.export.recorded_prompts import (
    ComparedPrompt,
    generated_prompts,
    recorded_answers,
    recorded_prompts,
    rendered,
)
from posttrain.role.learning.logprob_tolerance import Gap, allowed, as_sampled
from posttrain.role.weights.saved_weights import AVERAGE, OPTIMIZER, WEIGHTS, SavedTensors
from posttrain.system.errors import ConfigError
from posttrain.system.machine import free_memory
from posttrain.system.version import VERSION

ANSWER = 24
"""Most tokens of a greedy answer."""
LONGEST = 256
"""The most tokens of a prompt that are computed. Of a longer prompt they are its last ones."""
GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ExportedRun:
    """The run whose checkpoint was exported."""

    folder: Path
    """The run folder."""
    identity: str
    """The run's identity, as its run.json has it."""
    checkpoint: Checkpoint
    made: str
    """Kind of the export, for the certificate."""
    base: str = ""
    """Base model beneath an adapter that is written alone; '' for any other export."""
    ema: bool = False
    """Whether the moving averages of the weights are exported."""
    history: History = "append"
    """How the run treats a chat template that changes earlier turns (`Model.history`); prompts are rendered so."""


def check_memory(policy: Policy) -> int:
    """Bytes of the second copy of the weights that the comparison needs.

    Raises:
        ConfigError: there is no room for it.
    """
    needed = sum(t.numel() * t.element_size() for _, t in named_tensors(policy.module))
    free = {"main memory": free_memory()}
    if policy.device.type == "cuda":
        free[str(policy.device)] = torch.cuda.mem_get_info(policy.device)[0]
    for where, room in free.items():
        # Both memories: weights pass through the host's on their way to a device.
        if room is not None and room < needed:
            raise ConfigError(
                f"what is exported is read back and compared with the run, for which a second copy of the weights must"
                f" fit: {needed / GIB:.2f} GiB ({needed:,} bytes), and {room / GIB:.2f} GiB of {where} are free. End"
                " other programs, or copy the run folder to a machine with more memory and export there"
            )
    return needed


def certify(learner: HFLearner, exported: ExportedRun, written: Path) -> ExportCertificate:
    """Read a written directory back and compare it with the policy that it was written from.

    Args:
        learner: holds the policy with all weights of the checkpoint, those of a value head too.

    Raises:
        DataError: it cannot be read back at all.
    """
    began, policy = time.perf_counter(), learner.policy
    reread = reload(written, policy, exported.base)
    comparable = _comparable(policy, reread, bool(exported.base))
    rows = policy.module.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    # Prompts of the run's own record come first: they have the words and templates that matter to its user.
    recorded = recorded_prompts(exported.folder, int(rows), policy.context)  # type: ignore[arg-type]
    prompts = recorded or generated_prompts(policy.tokenizer, int(rows), policy.context)  # type: ignore[arg-type]
    dtype = str(policy.dtype).removeprefix("torch.")
    compared = [
        _equal("tokenizer", len(policy.tokenizer), "tokens", policy.tokenizer_digest, reread.tokenizer_digest),
        _equal("chat template", 1, "template", policy.template_digest, reread.template_digest),
        _same_ids(policy, reread, prompts, exported.history, "recorded" if recorded else "generated"),
        _equal("stop tokens", len(policy.stop_ids), "ids", sorted(policy.stop_ids), sorted(reread.stop_ids)),
        _from_checkpoint(learner, exported),
        *_fingerprint(learner, exported),
        _same_record(learner, exported, dtype),
        _same_weights(comparable, reread, bool(exported.base)),
    ]
    # With another vocabulary there are no answers to compare, and the comparison of the weights has told it.
    if rows == reread.inner.get_input_embeddings().weight.shape[0]:  # type: ignore[union-attr,operator]
        compared += _same_words(policy, learner, reread, prompts)
    libraries = (*LIBRARIES, *(("peft",) if exported.base else ()))
    return ExportCertificate(
        made=exported.made,
        run=exported.identity,
        checkpoint=exported.checkpoint.name,
        comparisons=tuple(compared),
        weights=fingerprint(named_tensors(reread.inner)),
        tokenizer=reread.tokenizer_digest,
        template=reread.template_digest,
        dtype=dtype,
        versions={"posttrain": VERSION, **{n: metadata.version(n) for n in libraries}},
        seconds=round(time.perf_counter() - began, 3),
        second_copy=sum(t.numel() * t.element_size() for _, t in named_tensors(reread.inner)),
    )


# --- words ------------------------------------------------------------------------------------------------------------


def _equal(what: str, count: int, unit: str, ours: Any, theirs: Any) -> ExportComparison:
    """A comparison that only equal values pass."""
    return ExportComparison(what, count, unit, "" if ours == theirs else f"{theirs}, and {ours} in the run")


def _same_ids(
    policy: Policy, reread: ReloadedModel, prompts: Sequence[ComparedPrompt], history: History, source: str
) -> ExportComparison:
    """The prompts, rendered with the tokenizer and template that were read back, give the run's ids."""
    compared, as_read, unlike = 0, 0, ""
    for p in prompts:
        ours = rendered(policy.tokenizer, policy.stop_ids, history, p.prompt)
        theirs = rendered(reread.tokenizer, policy.stop_ids, history, p.prompt)
        # The run's own tokenizer cannot render the prompt: the record lacks a part of what it was made from.
        if isinstance(ours, str):
            continue
        compared += 1
        as_read += np.array_equal(ours, p.ids)
        if not unlike and not np.array_equal(ours, theirs):
            unlike = f"prompt {p.name!r} {_first_difference(ours, theirs)}"
    return ExportComparison(
        "ids of prompts", compared, f"{source} prompts", unlike, notes={"as_recorded": int(as_read)}
    )


def _first_difference(ours: np.ndarray, theirs: np.ndarray | str) -> str:
    """Words about the first place at which two sequences of ids differ. `theirs` is a text if nothing was rendered."""
    if isinstance(theirs, str):
        return f"cannot be written ({theirs})"
    n = min(len(ours), len(theirs))
    differ = np.flatnonzero(ours[:n] != theirs[:n])
    at = int(differ[0]) if len(differ) else n
    id_words = [f"id {ids[at]}" if at < len(ids) else "nothing" for ids in (theirs, ours)]
    return f"has {id_words[0]} at position {at}, and {id_words[1]} in the run"


# --- weights ----------------------------------------------------------------------------------------------------------


def _from_checkpoint(learner: HFLearner, exported: ExportedRun) -> ExportComparison:
    """The policy holds the weights (or the averages) of the checkpoint's files, bit for bit."""
    folder, wrong = exported.checkpoint.folder, list[str]()
    # The file of the weights has no averages.
    weights, averages = SavedTensors(folder / WEIGHTS), SavedTensors(folder / (OPTIMIZER if exported.ema else WEIGHTS))
    # With moving averages some tensors have an average; the others are the weights.
    averaged = [n.removeprefix(AVERAGE) for n in averages.shapes if n.startswith(AVERAGE)]
    for name, tensor in learner.parameters().items():
        file, key = (averages, AVERAGE + name) if name in averaged else (weights, name)
        # A tensor that the file lacks was never saved, so nothing says what it should be.
        saved = file.tensor(key).to(tensor.device, tensor.dtype) if name in weights.shapes else None
        if saved is None or not torch.equal(saved, tensor.detach()):
            wrong.append(name)
    which = "moving averages" if exported.ema else "weights"
    unlike = f"{first_unlike(wrong)} are not the {which} of the checkpoint" if wrong else ""
    return ExportComparison(f"{which} of checkpoint {exported.checkpoint.name}", len(weights.shapes), "tensors", unlike)


def _fingerprint(learner: HFLearner, exported: ExportedRun) -> list[ExportComparison]:
    """The weights are those that the trainer saw when it wrote the checkpoint. Averages have no fingerprint there."""
    then = exported.checkpoint.state.get("weights")
    if exported.ema or not then:
        return []
    return [_equal("fingerprint in the checkpoint", 1, "fingerprint", then, learner.fingerprint())]


def _same_record(learner: HFLearner, exported: ExportedRun, dtype: str) -> ExportComparison:
    """The policy gives the recorded answers of these weights the log-probs that the sampler had for them."""
    what, version = "log-probs of the record", exported.checkpoint.state.get("version")
    run = run_file(exported.folder).run
    answers = recorded_answers(exported.folder, version) if isinstance(version, int) else []
    # Each of these is a reason why the comparison would fail although nothing is wrong.
    reasons = {
        "moving averages sampled nothing": exported.ema,
        "the record holds no answers of these weights": not answers,
        "its caches may be of older weights (engine.update=stale)": getattr(run.engine, "update", "") == "stale",
        "it does not hold which experts computed them": learner.routers() is not None
        and any(s.routed is None for s in answers),
    }
    if why := next((reason for reason, holds in reasons.items() if holds), ""):
        return ExportComparison(what, 0, "tokens", notes={"not_compared": why})
    packed = Packed.of(answers)
    # By the same experts as the sampler, where it is a mixture.
    recorded, ours = np.concatenate([s.logp[s.mask] for s in answers]), as_sampled(learner).score(packed)
    gap = Gap.of(recorded, ours)
    bound = allowed(dtype, gap, ours, lambda: learner.exact(packed), packed.sampling.temperature)
    unlike = ""
    if not gap.within(bound):
        unlike = (
            f"answers that these weights sampled have other log-probs now (largest difference {gap.worst:.3g}, bound"
            f" {bound.worst:.2g}; mean {gap.mean:.3g}, bound {bound.mean:.2g}): the model is not the one of the run"
        )
    return ExportComparison(what, len(recorded), "tokens", unlike, gap.worst, bound.worst, {"mean": gap.mean})


def _comparable(policy: Policy, reread: ReloadedModel, alone: bool) -> Policy:
    """The policy with the tensors that were written. Where its base weights are held in few bits (`model.quantize`), a
    merged export holds the float numbers for which these stand. If an adapter was written alone (`alone`), the base
    that is read back is rounded as the run's was, so that only the adapter is compared."""
    kind = quantised_as(policy.module)
    if kind is None:
        return policy
    if alone:
        quantise(reread.inner, kind)  # type: ignore[arg-type]
        return policy
    plain = policy.clone()
    make_float(plain.module, policy.dtype)
    return plain


def _same_weights(policy: Policy, reread: ReloadedModel, alone: bool) -> ExportComparison:
    """The tensors that were read back are those of the policy, bit for bit.

    Where an adapter was merged, the layers with an adapter must compute what they computed unmerged, up to rounding,
    and all other tensors must be equal.

    Args:
        alone: whether an adapter was written alone.
    """
    theirs = dict(named_tensors(reread.inner))
    # Without a merge nothing was computed, so every bit must be the same.
    if policy.lora is None or alone:
        ours = dict(named_tensors(policy.module))
        return _equal_tensors("weights read back", ours, theirs)
    layers = adapter_modules.layers(policy.module)
    merged = {f"{name}.{part}" for name in layers for part in ("weight", "bias")}
    unmerged = {n: t for n, t in adapter_modules.base_tensors(policy.module).items() if n not in merged}
    others = _equal_tensors("weights read back", unmerged, {n: t for n, t in theirs.items() if n not in merged})
    # The error of a merged layer is told as a share of what rounding allows, so 1 is the bound.
    errors = {n: adapter_modules.merge_error(part, reread.inner.get_submodule(n)) for n, part in layers.items()}  # type: ignore[arg-type]
    worst = max(errors, key=errors.__getitem__)
    unlike = others.unlike
    # `not <=` and not `>`, so that NaN is no pass.
    if not unlike and not errors[worst] <= 1:
        unlike = (
            f"{worst} is not the run's layer with its adapter merged once ({errors[worst]:.3g} times what rounding"
            " allows)"
        )
    return ExportComparison(
        "weights read back", len(theirs), "tensors", unlike, errors[worst], 1.0, {"merged": len(layers)}
    )


def _equal_tensors(what: str, ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> ExportComparison:
    """A comparison of named tensors, which must have the same names, types and bits."""
    same = {n for n in ours.keys() & theirs.keys() if ours[n].dtype == theirs[n].dtype}
    wrong = [n for n in sorted({*ours, *theirs}) if n not in same or not torch.equal(ours[n], theirs[n])]
    return ExportComparison(what, len(ours), "tensors", f"{first_unlike(wrong)} differ from the run" if wrong else "")


# --- answers ----------------------------------------------------------------------------------------------------------


def _same_words(
    policy: Policy, learner: HFLearner, reread: ReloadedModel, prompts: Sequence[ComparedPrompt]
) -> list[ExportComparison]:
    """Compares greedy answers and log-probs.

    The answers are those of the model that was read back. The run gives the same answer if, after each beginning of it,
    the run's most probable token is the next token of the answer.
    """
    # An answer has at least one token, and at most half of the context.
    most = max(1, min(ANSWER, policy.context // 2))
    # The last tokens of a long prompt: the answer must fit behind them.
    starts = [p.ids[-min(LONGEST, policy.context - most) :] for p in prompts]
    answers = [reread.answer(ids, most) for ids in starts]
    sequences = [np.concatenate([a, b]).astype(np.int32) for a, b in zip(starts, answers, strict=True)]
    packed = Packed.of([_scored(ids) for ids in sequences])
    theirs = np.concatenate([reread.score(ids) for ids in sequences])
    ours = learner.score(packed)
    dtype, gap = str(policy.dtype).removeprefix("torch."), Gap.of(theirs, ours)
    # At temperature 1, at which both sides score.
    bound = allowed(dtype, gap, ours, lambda: learner.exact(packed), 1.0)
    unlike = ""
    if not gap.within(bound):
        m = int(np.argmax(np.nan_to_num(np.abs(theirs - ours), nan=np.inf)))
        unlike = (
            f"token {int(packed.target_M[m])} of prompt {prompts[int(packed.segment_M[m])].name!r} has"
            f" {theirs[m]:.6f}, and {ours[m]:.6f} in the run (largest difference {gap.worst:.3g}, bound"
            f" {bound.worst:.2g}; mean {gap.mean:.3g}, bound {bound.mean:.2g})"
        )
    notes = {"mean": gap.mean, "mean_bound": bound.mean, "nats": True}
    scores = ExportComparison("log-probs", len(ours), "tokens", unlike, gap.worst, bound.worst, notes)
    # The difference of two log-probs has the error of both.
    return [_same_answers(learner, packed, starts, answers, policy.stop_ids, 2 * bound.worst), scores]


def _scored(ids: np.ndarray) -> Segment:
    """A sequence of which every token but the first is scored."""
    # A segment must have log-probs and versions of its spoken tokens (zeros); a score reads neither.
    mask = np.arange(len(ids)) > 0
    return Segment(
        ids, mask, np.where(mask, 0, np.nan).astype(np.float32), np.where(mask, 0, -1).astype(np.int32), Sampling()
    )


def _same_answers(
    learner: HFLearner,
    packed: Packed,
    starts: Sequence[np.ndarray],
    answers: Sequence[np.ndarray],
    stop_ids: Sequence[int],
    bound: float,
) -> ExportComparison:
    """The greedy answers are the run's, token by token.

    Where two tokens are equally probable up to rounding, either may be said. These are counted as `ties`.

    Args:
        packed: the prompts with their answers.
        bound: nats by which rounding may change the difference of two log-probs.
    """
    # One pass gives the most probable token after every beginning of the answer, so nothing is generated here.
    top, logp = learner.top(packed, 1), learner.score(packed)
    compared, unlike, ties, at = 0, "", 0, 0
    for start, answer in zip(starts, answers, strict=True):
        # Scored tokens are all but the first of each sequence; those of the answer come after the prompt's.
        of_answer = slice(at + len(start) - 1, at + len(start) - 1 + len(answer))
        at += len(start) + len(answer) - 1
        compared += len(answer)
        # Nats by which the answer's token is less probable than the run's most probable one.
        behind = top.logp[of_answer, 0] - logp[of_answer]
        # Another token than the run's most probable one, and less probable by more than rounding explains, or by NaN.
        differs = (top.ids[of_answer, 0] != answer) & ~(np.abs(behind) <= bound)
        ties += int((top.ids[of_answer, 0] != answer).sum() - differs.sum())
        if not unlike and differs.any():
            k = int(np.argmax(differs))
            unlike = (
                f"token {k + 1} of an answer is {int(answer[k])}, and {int(top.ids[of_answer, 0][k])} in the run"
                f" ({float(behind[k]):.3g} nats more probable there)"
            )
        # An answer that was read back must end where the run would end it.
        if not unlike and np.isin(answer[:-1], stop_ids).any():
            unlike = "an answer goes on after a stop token of the run"
    return ExportComparison("greedy answers", compared, "tokens", unlike, notes={"ties": ties, "answers": len(answers)})
