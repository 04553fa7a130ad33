"""Writes a run's weights as a directory that other programs read. Nobody can use it before it is certified.

Everything is written into a hidden folder inside the target, read back, and compared with the run. Only then are the
files moved into the target, the certificate last. Where something differs, only `certificate.failed.json` is left.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from posttrain.build.build_reward_models import with_reward_head
from posttrain.build.open_model import adapter_base, kept_policy
from posttrain.build.weight_lineage import lineage_of, write_exported
from posttrain.config.stages.reward_model_settings import RewardModel, trained_at
from posttrain.engine.adapters.saved_adapter import write_adapter
from posttrain.engine.files.reward_folder import write_reward_model
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.record.certificate import CERTIFICATE, FAILED, ExportCertificate, file_digests
from posttrain.record.checkpoint import Checkpoint, find
from posttrain.record.lineage import LineageLink, check_links
from posttrain.record.run_reader import damage_is_named, run_file
from posttrain.report.export.certify_export import ExportedRun, certify, check_memory
from posttrain.report.export.export_reward import certify_scores, reward_card
from posttrain.report.export.model_card import model_card
from posttrain.role.weights.saved_weights import load_average, load_weights
from posttrain.stages import where
from posttrain.system.errors import ConfigError, InvariantError, RunFolderError
from posttrain.system.files import full, share

UNVERIFIED = ".unverified"
"""The folder inside the target in which files lie until they are certified."""


@dataclass(frozen=True, kw_only=True)
class ExportChoice:
    """The choice of what an export writes of a run."""

    checkpoint: str = "last"
    trust: bool = False
    """Whether what the model of a folder made by somebody else asks for is allowed."""
    adapter: bool = False
    """Whether an adapter is written alone, without the model beneath it."""
    ema: bool = False
    """Whether the moving averages of the weights are written."""


def export_to(source: Path, target: Path, name: str, choice: ExportChoice) -> ExportCertificate:
    """Write an export, certify it, and move it into place.

    Args:
        source: the run folder.
        target: the folder that is written.
        name: of the model, for its card.

    Raises:
        InvariantError: what was written differs from the run; the message names the first difference.
        ConfigError: there is no memory for the comparison.
        RunFolderError: the disk is full, or the record of the run does not fit its files.
    """
    # Verified here: a damaged checkpoint is not exported.
    checkpoint = find(source, choice.checkpoint)
    # The lineage (which model came from which) is checked before anything is written.
    links = lineage_of(source, checkpoint)
    if (stage := trained_at(run_file(source).run.stages, checkpoint.state)) is not None:
        return _reward_model(source, target, name, choice, checkpoint, links, stage)
    base = adapter_base(source) if choice.adapter else ""
    policy = kept_policy(source, allow=choice.trust)
    exported = ExportedRun(
        folder=source,
        identity=str(run_file(source).identity or ""),
        checkpoint=checkpoint,
        made=_made(policy, choice),
        base=base,
        ema=choice.ema,
        history=run_file(source).run.model.history,
    )
    # Before the weights are loaded, which takes time.
    check_memory(policy)
    learner = HFLearner(policy)
    (load_average if choice.ema else load_weights)(checkpoint.folder, learner)

    def write(staged: Path) -> ExportCertificate:
        (write_adapter(policy, staged, base) if choice.adapter else policy.write(staged))
        return certify(learner, exported, staged)

    def card(links: tuple[LineageLink, ...]) -> str:
        return model_card(source, checkpoint, name, ema=choice.ema, links=links)

    return _placed(target, checkpoint, links, write, card)


def _reward_model(
    source: Path,
    target: Path,
    name: str,
    choice: ExportChoice,
    checkpoint: Checkpoint,
    links: tuple[LineageLink, ...],
    stage: RewardModel,
) -> ExportCertificate:
    """Write the reward model of a checkpoint. `stage`: the one that trained it."""
    if choice.adapter:
        raise ConfigError(
            f"{source} holds a reward model, whose head is no part of an adapter: leave --adapter out, and it is merged"
        )
    policy = with_reward_head(run_file(source).run, kept_policy(source, allow=choice.trust))
    check_memory(policy)
    with damage_is_named(f"{checkpoint.folder}/state.json"):
        results = where(run_file(source).run, checkpoint.state).results
    agreement = next((r.agreement for r in reversed(results) if r.name == stage.name), None)
    (load_average if choice.ema else load_weights)(checkpoint.folder, HFLearner(policy))
    # `write` fills it; `card`, which is called after it, reads it.
    forms: list[str] = []

    def write(staged: Path) -> ExportCertificate:
        forms.append(write_reward_model(policy, staged))
        made = "moving average of a reward model" if choice.ema else "reward model"
        return certify_scores(policy, staged, made, str(run_file(source).identity or ""), checkpoint.name)

    def card(links: tuple[LineageLink, ...]) -> str:
        # What was measured of the weights says nothing of their average.
        return reward_card(name, stage.shape, forms[0], None if choice.ema else agreement)

    return _placed(target, checkpoint, links, write, card)


def _placed(
    target: Path,
    checkpoint: Checkpoint,
    links: tuple[LineageLink, ...],
    write: Callable[[Path], ExportCertificate],
    card: Callable[[tuple[LineageLink, ...]], str],
) -> ExportCertificate:
    """Write into a hidden folder, and move the files into the target if the certificate passes.

    Args:
        links: the lineage of the weights, up to the checkpoint.
        write: fills a folder and returns its certificate.
        card: makes the README from the lineage. It is called after `write`.
    """
    target.mkdir(parents=True, exist_ok=True)
    # A refusal of an earlier attempt says nothing about this one.
    _remove(target / FAILED)
    staged = target / UNVERIFIED
    # Another process may be writing there: its files are not touched.
    if staged.exists():
        raise RunFolderError(f"{staged}: another export writes there, or one was cut. Choose another folder")
    try:
        staged.mkdir()
        certificate = write(staged)
        if certificate.passed:
            # The export is a link of its own, and must fit the run it comes from before it is put into place.
            links = (*links, _link(checkpoint, certificate, links[-1]))
            check_links(links, RunFolderError)
            write_exported(staged, links)
            (staged / "README.md").write_text(card(links), encoding="utf-8")
            share(staged)  # libraries write files that only this user may read
            _into_place(staged, target, certificate)
    # Also where the user interrupts it: no half of a model may stay.
    except BaseException as error:
        _remove(staged)
        if (why := full(error)) is None:
            raise
        raise RunFolderError(
            f"{why[0]}: {target} was not written, and what was begun of it is removed. {why[1]} and export again"
        ) from error
    if not certificate.passed:
        _refuse(target, certificate, checkpoint)
    return certificate


def _made(policy: Policy, choice: ExportChoice) -> str:
    """The kind of the export, for the certificate."""
    what = "adapter" if choice.adapter else "weights" if policy.lora is None else "weights with the adapter merged"
    return f"moving average of the {what}" if choice.ema else what


def _link(checkpoint: Checkpoint, certificate: ExportCertificate, run: LineageLink) -> LineageLink:
    """The export as the next link of the lineage. `run`: the link before it."""
    return LineageLink(
        kind="export",
        name=certificate.made,
        weights=certificate.weights,
        tokenizer=certificate.tokenizer,
        template=certificate.template,
        dtype=certificate.dtype,
        began=run.weights,
        about={"checkpoint": checkpoint.name, "posttrain": certificate.versions["posttrain"]},
    )


def _into_place(staged: Path, target: Path, certificate: ExportCertificate) -> None:
    """Move the files; the certificate comes last, so a directory that has one is whole."""
    data = json.dumps(certificate.plain(file_digests(staged)), indent=1)
    # The certificate is written beside the files, with digests of them as they lie in the hidden folder.
    (staged / CERTIFICATE).write_text(f"{data}\n", encoding="utf-8")
    moved: list[Path] = []
    try:
        # `False` sorts first, so the certificate is moved last.
        for path in sorted(staged.iterdir(), key=lambda p: p.name == CERTIFICATE):
            moved.append(path.rename(target / path.name))
    except BaseException:
        # Files that were moved already are removed again. A directory without a certificate would look like a model
        # that somebody wrote by other means.
        for path in moved:
            _remove(path)
        raise
    staged.rmdir()


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _refuse(target: Path, certificate: ExportCertificate, checkpoint: Checkpoint) -> None:
    """Remove the files, keep what was compared, and raise."""
    _remove(target / UNVERIFIED)
    (target / FAILED).write_text(json.dumps(certificate.plain({}), indent=1) + "\n", encoding="utf-8")
    raise InvariantError(
        f"what was read back from the export of {checkpoint.name} is not what the run holds. {certificate.unlike}."
        f" Nothing was kept but {target / FAILED}, which has all that was compared"
    )
