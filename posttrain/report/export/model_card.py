"""The model card of an exported model: where its weights come from, what was measured of them, and how to repeat it.

Everything in it is read from the run folder. Names and settings of a folder may be a stranger's. So they are written as
code spans, JSON and code blocks, and nothing in them is read as Markdown, HTML or YAML.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.build.weight_lineage import local_names, stage_of, stages_to
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.preference_settings import OnlinePreference, Preference
from posttrain.config.stages.stage import Stage, starts
from posttrain.core.gauge import Step
from posttrain.diagnose.measurement import Measurement
from posttrain.diagnose.run_outcome import measurement
from posttrain.record.certificate import CERTIFICATE, LINEAGE
from posttrain.record.checkpoint import Checkpoint
from posttrain.record.lineage import LineageLink
from posttrain.record.run_reader import episode_files, read_episodes, run_file, steps
from posttrain.stages.checks_by_kind import observers
from posttrain.system.dataclass_json import to_plain
from posttrain.system.terminal_output import visible

# "org/model"
HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")
MOST_NOTES = 12
"""The most kinds of notes that a card lists."""
PREFERENCES = (Preference, OnlinePreference)
"""The kinds of stage that learn from preferences."""


@dataclass(frozen=True)
class HeldOutResult:
    """The held-out result of the exported weights, or of the last evaluated ones before them."""

    stage: str
    step: int
    of: Measurement
    samples: int
    behind: int
    """Updates between the measured weights and the exported ones."""


FEW_BITS = (
    "The adapter was trained over linear layers in few bits (`model.quantize`). Merged weights are the float numbers"
    " that those stand for, with the adapter added; they are not the rounded ones of the base model. An adapter alone"
    " computes over the unrounded base slightly otherwise than in training."
)


def model_card(
    folder: Path, checkpoint: Checkpoint, name: str, *, ema: bool = False, links: Sequence[LineageLink] = ()
) -> str:
    """The README.md of the model that a checkpoint of a run folder holds.

    Args:
        ema: whether the model has the moving averages of the weights. Then measurements of the weights are left out.
        links: those of the lineage record beside the card.
    """
    file = run_file(folder)
    run = file.run
    stage, step = stage_of(run, checkpoint)
    used = stages_to(run, stage)
    # Later steps of the run say nothing of these weights.
    record = [s for s in steps(folder) if s.stage != stage.name or step is None or s.index <= step]
    # What was measured of the weights says nothing of their average.
    result = None if ema else _held_out(folder, run, record, stage)
    parts = (
        _front(run, used, result),
        _head(run, name, stage, step, ema),
        [*_stages(run, used, record), *_links(links)],
        *(_algorithm(s, file.lineages) for s in used if s.algorithm_name),
        _data(run, used),
        _measured(result),
        _settings(run),
        _versions(file.facts),
        _checks(used, record),
        _again(file.facts, run),
    )
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


# --- foreign text -----------------------------------------------------------------------------------------------------


def code(text: object) -> str:
    """Text as a code span, for a table or a line: nothing in it is markup.

    >>> code("a|b`<script>")
    "`a\\\\|b'<script>`"
    """
    # A backtick would end the span, and it cannot be escaped inside one.
    shown = visible(local_names(str(text))).replace("`", "'").strip()
    # After an even number of backslashes a | ends the cell of a table. So all before it are doubled, and one is added:
    # `a|b` becomes `a\|b`.
    shown = re.sub(r"(\\*)\|", r"\1\1\\|", shown)
    return f"`{shown}`" if shown else "-"


def quoted(text: object) -> str:
    """Text as a value of YAML (a JSON string is one)."""
    return json.dumps(visible(str(text)), ensure_ascii=True)


def block(text: str, language: str) -> list[str]:
    """A block of code that its text cannot end."""
    # Three backticks would end the block.
    lines = (visible(line).replace("```", "'''") for line in text.split("\n"))
    return [f"```{language}", *lines, "```"]


# --- which weights ----------------------------------------------------------------------------------------------------


def _held_out(folder: Path, run: Run, record: Sequence[Step], stage: Stage) -> HeldOutResult | None:
    """The last held-out evaluation of these weights or of earlier ones of their line. `record` ends with their step."""
    names = [s.name for s in stages_to(run, stage)]
    # Of this stage the evaluations up to the exported step count, of the stages before it all.
    last = max((s.index for s in record if s.stage == stage.name), default=0)
    evaluations = [f for f in episode_files(folder) if f.kind == "eval" and f.stage in names and f.path.is_file()]
    evaluations = [f for f in evaluations if f.stage != stage.name or f.index <= last]
    if not evaluations:
        return None
    file = max(evaluations, key=lambda f: (names.index(f.stage), f.index))
    version = {(s.stage, s.index): s.version for s in record}
    # An evaluation before the first step has no line in the record. It measured the weights that the stage began with:
    # those of the last step of the stage before it, or version 0 where the run began.
    measured = version.get((file.stage, file.index), version.get(_end_before(run, record, file.stage), 0))
    exported = version.get((stage.name, last), version.get(_end_before(run, record, stage.name), 0))
    figures, episodes = measurement(file), Counter(r.episode.task.id for r in read_episodes(file.path))
    samples = max(episodes.values(), default=0)
    return HeldOutResult(file.stage, file.index, figures, samples, max(0, exported - measured))


def _end_before(run: Run, record: Sequence[Step], name: str) -> tuple[str, int]:
    """The last step of the stage that a stage starts from."""
    before = starts(run.stages, run.stage(name))
    return before, max((s.index for s in record if s.stage == before), default=0)


# --- the parts --------------------------------------------------------------------------------------------------------


def _base(run: Run) -> str:
    """The weights that the run began with."""
    return run.model.path or "weights drawn at random for this run"


def _front(run: Run, used: Sequence[Stage], result: HeldOutResult | None) -> list[str]:
    """YAML front matter, as the hub reads it."""
    path = run.model.path or ""
    # A folder of this machine with a slash in its name is no id of the hub.
    on_hub = HUB_ID.fullmatch(path) and not Path(path).exists()
    kinds = {"reinforcement-learning": Reinforce, "preference-optimization": PREFERENCES}
    tags = ["posttrain", *(tag for tag, kind in kinds.items() if any(isinstance(s, kind) for s in used))]
    tags += [s.algorithm_name for s in used if s.algorithm_name]
    return [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        *([f"base_model: {quoted(path)}"] if on_hub else []),
        "tags:",
        *(f"- {quoted(t)}" for t in dict.fromkeys(tags)),
        "---",
    ]


def _head(run: Run, name: str, stage: Stage, step: int | None, ema: bool) -> list[str]:
    """The title, and which weights these are."""
    at = f"after step {step}" if step else "at its beginning" if step == 0 else "at its end"
    return [
        f"# {code(name)}",
        "",
        f"{f'Moving average (decay {stage.optimizer.ema:g}) of the weights' if ema else 'Weights'} of stage"
        f" {code(stage.name)} {at}, from a run of recipe {code(run.recipe)} with"
        " posttrain. This card was written from the record of the run.",
        *([] if run.model.quantize is None else ["", FEW_BITS]),
    ]


def _stages(run: Run, used: Sequence[Stage], record: Sequence[Step]) -> list[str]:
    """The table of the stages that led to these weights."""
    rows = ["## Lineage", "", "| | from | steps | |", "|---|---|---:|---|", f"| base | {code(_base(run))} | | |"]
    for s in used:
        taken = max((x.index for x in record if x.stage == s.name), default=0)
        rows.append(f"| {code(s.name)} | {code(starts(run.stages, s))} | {taken} | {_kind(s)} |")
    return rows


def _kind(stage: Stage) -> str:
    """Returns the kind of data that a stage learns from, with its algorithm."""
    if not stage.algorithm_name:
        return "imitates"
    return f"learns from {'preferences' if isinstance(stage, PREFERENCES) else 'reward'}, {code(stage.algorithm_name)}"


def _links(links: Sequence[LineageLink]) -> list[str]:
    """The lineage record as a table: each model in the line with its digests."""
    if not links:
        return []
    rows = ["", "| record | steps | weights | tokenizer | template |", "|---|---:|---|---|---|"]
    for link in links:
        # The record may be a stranger's: what is no list of objects is left out.
        stages: Any = link.about.get("stages")
        taken = (
            " + ".join(str(s.get("steps")) for s in stages if isinstance(s, dict)) if isinstance(stages, list) else ""
        )
        rows.append(
            f"| {link.kind} {code(link.name)} | {code(taken) if taken else ''} |"
            f" {' | '.join(code(x or '-') for x in (link.weights, link.tokenizer, link.template))} |"
        )
    return [*rows, "", f"`{LINEAGE}` beside the weights has all of it, `{CERTIFICATE}` what was compared."]


def _algorithm(stage: Stage, lineages: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """The patches that make the algorithm, from the root of its ladder on."""
    lines = [
        f"## Algorithm of {code(stage.name)}: {code(stage.algorithm_name)}",
        "",
        "Each line is a patch of the one above:",
        "",
    ]
    for patch in lineages.get(stage.name, []):
        changes: Mapping[str, Any] = patch.get("changes") or {}
        changed = ", ".join(f"{k}={_short(v)}" for k, v in changes.items())
        lines.append(
            f"- {code(patch.get('name', ''))} ({code(patch.get('paper', ''))})"
            + (f": {code(changed)}" if changed else "")
        )
    return lines


def _short(value: Any) -> str:
    """A value of a setting as text: a piece of an algorithm as `Type(setting=value)`."""
    if isinstance(value, dict) and "type" in value:
        settings = ", ".join(f"{k}={v}" for k, v in value.items() if k != "type")
        return f"{value['type']}({settings})"
    return str(value)


def _data(run: Run, used: Sequence[Stage]) -> list[str]:
    out = [
        "## Data and environment",
        "",
        "| stage | environment | prompts | rewards | held out |",
        "|---|---|---|---|---:|",
    ]
    for s in used:
        env = run.env_of(s)
        rewards = ", ".join(f"{r.function} (weight {r.weight:g})" for r in env.rewards)
        out.append(
            f"| {code(s.name)} | {code(env.name)} | {code(env.prompts or '')} | {code(rewards)} | {env.heldout} |"
        )
    return out


def _measured(result: HeldOutResult | None) -> list[str]:
    out = ["## Held-out result", ""]
    if result is None:
        return [*out, "None: the run recorded no held-out evaluation of these weights."]
    where = f"stage {code(result.stage)}, step {result.step}"
    out += ["| measure | value [95 % interval] | prompts |", "|---|---|---:|"]
    accuracy, reward = result.of.accuracy, result.of.reward
    if result.of.graded:
        out += [f"| mean reward | {reward} | {reward.prompts} |"]
    if accuracy.prompts:
        out += [f"| accuracy | {accuracy} | {accuracy.prompts} |"]
    which = (
        "on the weights of this model"
        if not result.behind
        else f"{result.behind} updates before the weights of this model, which were not measured themselves"
    )
    return [
        *out,
        "",
        f"Measured at {where}, {which}, with {result.samples} samples of a prompt. The interval is over prompts.",
    ]


def _settings(run: Run) -> list[str]:
    tree = block(local_names(json.dumps(to_plain(run), indent=1, ensure_ascii=True)), "json")
    return ["## Settings", "", "<details><summary>the whole run</summary>", "", *tree, "", "</details>"]


def _versions(facts: Mapping[str, Any]) -> list[str]:
    versions: Any = facts.get("versions")
    rows = versions.items() if isinstance(versions, dict) else ()
    return ["## Versions", "", ", ".join(f"{code(k)} {code(v)}" for k, v in rows) or "not recorded"]


def _checks(used: Sequence[Stage], record: Sequence[Step]) -> list[str]:
    """The checks of these stages, and the notes that were given."""
    out = ["## Checks that ran", ""]
    for s in used:
        taken = sum(x.stage == s.name for x in record)
        names = ", ".join(map(code, observers(s, (), {}).names))
        out.append(
            f"- {code(s.name)}: {names or 'none'}, over {taken} steps" if taken else f"- {code(s.name)}: no step"
        )
    stages = {s.name for s in used}
    # In the order in which they were first given.
    notes = Counter(note for step in record if step.stage in stages for note in step.notes)
    out += ["", f"A failed check stops a run, so none failed. Notes said meanwhile: {len(notes) or 'none'}."]
    out += [f"- {count} x {code(text)}" for text, count in [*notes.items()][:MOST_NOTES]]
    return out


def _again(facts: Mapping[str, Any], run: Run) -> list[str]:
    """The command that started the run, if it was one."""
    argv: Any = facts.get("argv")
    words = [str(w) for w in argv] if isinstance(argv, list) else []
    at = words.index("run") if "run" in words else -1
    # The command of a resumed run is not the one that began it.
    if at < 0 or "--resume" in words:
        return [
            "## Reproduce",
            "",
            f"Started from Python, recipe {code(run.recipe)}; the settings above are the whole run.",
        ]
    command = local_names(shlex.join(["posttrain", *words[at:]]))
    return ["## Reproduce", "", *block(command, "sh")]
