"""The public surface as data, and how it is written down: one line for each name, field and method, with its
signature.

Everything is read from the source and nothing is imported, so the lines are the same for every Python version.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent

PUBLIC = {
    # what a program calls
    "posttrain.api.main": "run evaluate export",
    "posttrain.build.request.user_objects": "prompts PromptData",
    "posttrain.report.run_result": "load Result RolloutView",
    "posttrain.evaluation.check_environment": "check",
    "posttrain.evaluation.ablation.ablation": "ablate Ablation AblationRow",
    "posttrain.report.run_summary": "summarize",
    "posttrain.report.compare_runs": "compare",
    "posttrain.report.plots": "plot",
    # a run as data
    "posttrain.config.run": "Run Model Supervised Evaluation",
    "posttrain.config.stages.reinforce": "Reinforce",
    "posttrain.config.stages.rejection": "Rejection RejectionMethod Regenerate",
    "posttrain.config.stages.reward_model_settings": "RewardModel",
    "posttrain.config.stages.step_labels": "StepLabeling",
    "posttrain.config.stages.stage": "Stage Optimizer",
    "posttrain.config.env": "Env JudgeEndpoint Reward SandboxSettings",
    "posttrain.config.engines": "Embedded VLLM",
    "posttrain.config.placement": "Local Processes Ray",
    "posttrain.core.sampling": "Sampling",
    "posttrain.core.stop": "Stop EpisodeLimits StepNumber",
    "posttrain.ladder.algorithm": "Algorithm patch",
    "posttrain.ladder.preference_algorithm": "PreferenceAlgorithm",
    "posttrain.ladder.pieces.piece": "Piece",
    "posttrain.ladder.pieces.baseline": "Baseline Zero ToGo Ema GroupMean Others LengthMean EnergyMean OffPolicyMean"
    " SoftMean SecondBest Greedy StepMean TurnMean AnchorMean Value",
    "posttrain.ladder.pieces.implicit": "ImplicitOthers",
    "posttrain.ladder.pieces.trust_region": "TrustRegion Clip Cap Taper Soft Geometric Divergence FutureKL Hump",
    "posttrain.ladder.pieces.pull": "Pull KL SequenceL2 TokenL2",
    "posttrain.ladder.pieces.step_size": "StepScale EffectiveSize",
    "posttrain.ladder.pieces.hint": "Hint",
    "posttrain.ladder.pieces.source_ema": "SourceEma",
    "posttrain.ladder.pieces.correction": "Correction Truncate Mask BinaryKL Reject Veto NegativeMask",
    "posttrain.ladder.pieces.shape": "Shaping Signed Overlong DropTruncated BestOf RankLength TargetLength RateLength"
    " Cosine Repetition Gate RelativeLength",
    "posttrain.ladder.pieces.link": "Link",
    "posttrain.ladder.pieces.preference_pieces": "Statistic FDivergence LabelNoise MarginTerm Added",
    "posttrain.ladder.pieces.token_choice": "Tokens ClipCov KlCov TopEntropy SecondMoment EntropyBonus Imitate Shown"
    " Distill Curriculum NoEasy Priority",
    "posttrain.config.stages.keep_rule": "Keep Passing Rising Best TopShare",
    # what an environment or a reward meets
    "posttrain.core.types": "Task Message TruncationSets Top SampledTurn Segment Episode Group",
    "posttrain.core.content": "ContentPart",
    "posttrain.core.exchange.other_seats": "SeatTurn",
    "posttrain.core.verdict": "State Verdict Judged outcome",
    "posttrain.core.abilities": "Abilities GoldAnswers Demonstrations DataRow Judgements Judging Measures Together"
    " Verify Write",
    "posttrain.environment.make": "environment",
    "posttrain.environment.single": "SingleTurn Generated Listed require",
    "posttrain.environment.generated": "GeneratedTasks",
    "posttrain.environment.rows.own_prompts": "PromptsEnv",
    "posttrain.environment.judged.synthetic_preferences": "Taste",
    "posttrain.environment.conformance": "prove Check",
    "posttrain.environment.scripted_policy": "attempt judged ScriptedPolicy",
    "posttrain.environment.check.probe": "Mark Probe ProbeResult",
    "posttrain.environment.check.report": "CheckReport",
    "posttrain.environment.tools.tool": "tool Toolbox ToolError Observation",
    "posttrain.environment.tools.tool_world": "ToolWorld",
    "posttrain.environment.gallery.shop": "Shop",
    "posttrain.verifier.reward_source": "Source graded",
    "posttrain.verifier.user_functions": "source",
    "posttrain.verifier.math.grade": "Gold Grade gold_of grade",
    "posttrain.verifier.code.code_reward": "Code",
    "posttrain.sandbox.choose_backend": "open_sandbox",
    "posttrain.sandbox.sandbox_pool": "Sandbox",
    "posttrain.sandbox.sandbox_types": "Call ProgramLimits Ran SandboxBroken SandboxUnavailableError",
    # where parts meet
    "posttrain.core.ports": "Sampler Scorer Examiner Reference Learner Transport TaskSource Utterance Attempt Seat Talk"
    " Dialogue Environment EpisodeJudge Tracker",
    "posttrain.core.conversation": "PairRenderer LearnedConversation",
    "posttrain.role.judging": "ComparingJudge MeasuredJudge",
    "posttrain.core.exchange.shards": "Shard",
    "posttrain.core.exchange.ranks": "Ranks",
    "posttrain.core.exchange.scores": "Reads TokenScores",
    "posttrain.core.batch": "Packed Batch",
    "posttrain.core.streams": "Stream",
    "posttrain.core.transcript": "Transcript",
    "posttrain.core.exchange.experience": "Experience",
    "posttrain.ladder.rollout_request": "RolloutRequest",
    "posttrain.core.scored": "Scored ScoredGroup EpisodeCredit GroupCredit Credit",
    "posttrain.core.gauge": "Gauge Step",
    "posttrain.system.errors": "PosttrainError ConfigError InvariantError DataError LimitError RunFolderError"
    " UntrustedError EngineError EndpointError RewardError",
    "posttrain.engine.head.kernel_table": "Kernel",
    "posttrain.algorithm.loss.losses": "Loss PolicyLoss Likelihood",
    "posttrain.algorithm.loss.policy_loss": "Terms",
    # where the mathematics of an own piece is registered
    "posttrain.algorithm.credit.baseline_values": "centred",
    "posttrain.algorithm.loss.token_selection": "choose",
    "posttrain.algorithm.loss.mismatch_correction": "factor",
    "posttrain.algorithm.loss.reference_penalty": "pull_term",
    "posttrain.algorithm.credit.reward_shaping": "shape",
    "posttrain.algorithm.loss.step_scale": "step_share",
    "posttrain.algorithm.loss.push_factor": "pushed Push TrustInputs",
    "posttrain.algorithm.preference.preference_link": "link statistic divergence noisy owed Margins Completions",
    "posttrain.algorithm.preference.preference_loss": "added",
    "posttrain.stages.loop": "Driver",
    "posttrain.stages.progress": "StageState StageResult",
    "posttrain.role.rollout": "Rollout",
    "posttrain.role.episode_conversation": "Player",
    "posttrain.role.trainer": "Trainer WeightOptimizer",
    "posttrain.role.sync": "Sync",
    "posttrain.role.heldout_evaluation": "EvaluationReport",
    "posttrain.role.events": "PlayedEvent ScoredEvent PackedEvent DifferentiatedEvent LearnedEvent PushedEvent"
    " EvaluatedEvent RestoredEvent Observer ObserverReport",
    "posttrain.role.learner_passes": "Needs Passes",
    # what reads a run folder
    "posttrain.record.run_reader": "RunFile EpisodeFile is_run run_file steps episode_files episodes",
    "posttrain.record.step_format": "Recorded",
    "posttrain.core.measure.interval": "Score Gain",
    "posttrain.diagnose.reward_quality": "calibration debias",
    "posttrain.diagnose.run_outcome": "RunOutcome read_outcome",
    "posttrain.diagnose.run_comparison": "RunComparison",
    "posttrain.diagnose.gauges.gauge_definition": "Definition",
    "posttrain.diagnose.rules.rule": "Finding",
    "posttrain.diagnose.rules.notes_once": "RepeatedNote findings_of",
    "posttrain.faults.planting": "Fault",
}
"""Module -> the names that users depend on. The algorithms of `posttrain.ladder.policy_rows` are public too."""

LADDER = "posttrain.ladder.policy_rows"
CONSTANTS = ("posttrain.ladder.preference_rows", "posttrain.core.streams")
"""Modules whose constants are public: the algorithms of the second ladder, and the streams that a loss reads."""


class SurfaceError(Exception):
    """A name of the table that the package does not have."""


def names() -> list[tuple[str, str]]:
    """(module, name), in the order of the table."""
    return [(module, name) for module, text in PUBLIC.items() for name in text.split()]


@cache
def tree(module: str) -> ast.Module | None:
    """The source of a module or package; None where there is none."""
    path = ROOT.joinpath(*module.split("."))
    for found in (path.with_suffix(".py"), path / "__init__.py"):
        if found.exists():
            return ast.parse(found.read_text())
    return None


def defined(module: str) -> dict[str, list[ast.stmt]]:
    """Classes and functions of a module by name; several where a function is overloaded."""
    out = dict[str, list[ast.stmt]]()
    for node in body(module):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            out.setdefault(node.name, []).append(node)
    return out


def body(module: str) -> list[ast.stmt]:
    found = tree(module)
    if found is None:
        raise SurfaceError(f"module {module} is gone: say in tests/public.py where its names are now")
    return found.body


def home(module: str, name: str) -> tuple[str, str]:
    """Where a name is defined that a module imports from another one."""
    if (found := tree(module)) is None or name in defined(module):
        return module, name
    for node in ast.walk(found):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name and node.module.startswith("posttrain"):
                    return home(node.module, alias.name)
    return module, name


def algorithms() -> dict[str, tuple[str, str]]:
    """Algorithms of the ladder: the name in Python -> (the name in `algorithm=NAME`, paper)."""
    out = dict[str, tuple[str, str]]()
    for node in body(LADDER):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            target, call = node.targets[0], node.value
            words = [ast.literal_eval(a) for a in call.args[1:3]] + [
                ast.literal_eval(k.value) for k in call.keywords if k.arg in ("name", "paper")
            ]
            if isinstance(target, ast.Name) and target.id.isupper() and len(words) == 2:
                out[target.id] = (words[0], words[1])
    return out


def lines() -> Iterator[str]:
    """The whole surface, module by module in alphabetical order."""
    gone = list[str]()
    for module in sorted(PUBLIC):
        for name in sorted(PUBLIC[module].split()):
            found = defined(module).get(name, [])
            if not found:
                near = [m for m, n in names_of_package() if n == name]
                where = f"; {near[0]} has one" if near else ""
                gone.append(f"{module}.{name} is gone{where}")
            for node in found:
                yield from described(node, f"{module}.{name}", of=frozenset(defined(module)))
    for name, (word, paper) in sorted(algorithms().items()):
        yield f"{LADDER}.{name}: algorithm={word} ({paper})"
    if gone:
        raise SurfaceError("\n".join([*gone, "say in tests/public.py what it is called now, or that it is not public"]))


@cache
def names_of_package() -> tuple[tuple[str, str], ...]:
    """(module, name) of every class and function at the top of a module."""
    files = sorted((ROOT / "posttrain").rglob("*.py"))
    modules = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in files]
    return tuple((m, n) for m in modules for n in defined(m))


def described(node: ast.stmt, path: str, of: frozenset[str]) -> Iterator[str]:
    """The line of a class or function, and those of a class's fields and methods.

    A class that derives from another one of its module (`of`) does what that one promises, so its methods are left out;
    those of a protocol add to what it promises.
    """
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield signature(node, path)
    elif isinstance(node, ast.ClassDef):
        bases = [ast.unparse(b) for b in node.bases]
        yield f"class {path}({', '.join(bases)})"
        plain, own = bool({"StrEnum", "Enum"} & {*bases}), "Protocol" in bases or not of & {*bases}
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and shown(part.target.id):
                default = f" = {ast.unparse(part.value)}" if part.value is not None else ""
                yield f"{path}.{part.target.id}: {ast.unparse(part.annotation)}{default}"
            elif isinstance(part, ast.Assign) and plain:
                yield f"{path}.{ast.unparse(part.targets[0])} = {ast.unparse(part.value)}"
            elif (
                isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)
                and own
                and (shown(part.name) or part.name in ("__init__", "__call__"))
            ):
                yield signature(part, f"{path}.{part.name}")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> str:
    marks = {ast.unparse(d) for d in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if marks & {"property", "cached_property"}:
        return f"{path}{returns} (property)"
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{word} {path}({ast.unparse(node.args)}){returns}"


def shown(name: str) -> bool:
    return not name.startswith("_")
