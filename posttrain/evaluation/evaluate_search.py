"""`posttrain eval RUN search=...`: how good the answers of searches at inference are, and what they cost. What needs
torch is imported inside the functions, after the request was checked."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain import faults
from posttrain.build.build_environments import make_environment
from posttrain.build.open_model import run_and_checkpoint
from posttrain.build.request.trust_prompt import to_stderr
from posttrain.build.request.user_objects import UserObjects
from posttrain.build.reward_paths import check_judge_path, check_reward_path
from posttrain.config.env import MODEL, STAGE, Reward
from posttrain.config.run import Reinforce, Run
from posttrain.config.stages.reward_model_settings import RewardModel, trained_at
from posttrain.config.stages.step_labels import StepLabeling
from posttrain.core.ports import Environment
from posttrain.engine.model.locate_model import check_source
from posttrain.environment.scripted_policy import attempt
from posttrain.evaluation.evaluate_endpoint import is_url
from posttrain.evaluation.evaluation_target import asked_run, contract_of
from posttrain.evaluation.search_words import SearchRequest, search_request
from posttrain.record.checkpoint import KEPT, find, kept_folder
from posttrain.record.run_reader import is_run, run_file
from posttrain.report.console import Group, PlainConsole, table
from posttrain.report.plots import check_out, search_plot
from posttrain.report.run_summary import short
from posttrain.system.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from posttrain.build.build_run import PolicyRoles
    from posttrain.engine.model.policy_model import Policy
    from posttrain.search.curves import SearchPoint
    from posttrain.search.step_sampling import StepSearch

STAGE_NAME = "search"


@dataclass(frozen=True)
class SearchReport:
    """How good several searches are on the same held-out tasks, and what they cost."""

    name: str
    environment: str
    scored_by: str
    """A line about the scorer, for people; '' where nothing scored."""
    tasks: int
    runs: int
    points: tuple[SearchPoint, ...]
    """The searches, the cheapest first. A single answer is among them."""

    @property
    def title(self) -> str:
        often = f", each searched {self.runs} times" if self.runs > 1 else ""
        return f"{self.name} on {self.tasks} held-out tasks of {self.environment}{often}"

    def table(self) -> Group:
        from posttrain.search.curves import frontier
        from posttrain.search.search_kinds import ONE

        # Gains are over a single answer, which is always among the points.
        single = next(p for p in self.points if p.kind == ONE)
        front = frontier(self.points)
        rows = list[tuple[str, ...]]()
        for p in self.points:
            gain = p.gain(single)
            gain_words = "-" if p is single else short(gain.mean, gain.low, gain.high, "+")
            score = short(p.score.mean, p.score.low, p.score.high)
            rows.append((p.name, score, f"{p.tokens:.1f}", gain_words, "*" if p in front else ""))
        what = "mean reward" if single.grades.graded else "accuracy"
        return table("", ("search", f"{what} [95 %]", "tokens", "gain [95 %]", ""), rows, words=("search",))

    def notes(self) -> list[str]:
        """Lines below the table."""
        lines = [f"scores: {self.scored_by}"] if self.scored_by else []
        lines.append(
            "tokens: said for a task, in the mean; gain: over one answer, task by task; *: nothing above is as good"
        )
        if unjudged := sum(p.unjudged for p in self.points):
            lines.append(f"{unjudged} answers could not be judged, and are left out as no wrong answers")
        return lines


def evaluate_searches(
    target: str | Path,
    *words: str,
    samples: int = 1,
    checkpoint: str = "last",
    max_tokens: int | None = None,
    temperature: float | None = None,
    out: str | Path | None = None,
    quiet: bool = False,
    trust: bool = False,
    allow_fault: bool = False,
) -> SearchReport:
    """Measure several searches and a single answer on held-out tasks: how good the answers are, by tokens spent.

    They are measured by accuracy, or by the mean reward where outcomes are grades.

    Args:
        target: a run folder or one of its checkpoints, or a model, which needs `env=` or `env.prompts=`. If the last
            weights of a run are a reward model's, the searches use the policy before it.
        words: the searches (`search=NAME.SETTING=VALUE,...`), `search.by=`, `search.budget=`, and overrides as in
            `evaluate`.
        samples: searches of a task, with different random numbers.
        out: file of the picture (.svg, .png, .pdf). None: no picture.
        allow_fault: plant the bug that `fault=NAME` names.

    Raises:
        ConfigError: a wrong word, a search without what it needs, or an environment of several turns.
        InvariantError: a search did not do what it says.
    """
    # Wrong words are refused before anything is loaded.
    request, overrides = search_request(words)
    faults.refuse_silent(request.fault, allow_fault)
    if is_url(target):
        raise ConfigError(
            f"search goes on from the middle of answers by their tokens, and {target} is an address: give a run folder"
            " or a model directory"
        )
    if samples < 1:
        raise ConfigError(f"--samples {samples}: searches of a task, at least 1")
    if out is not None:
        check_out(out)
    target, checkpoint = run_and_checkpoint(target, checkpoint)
    run_folder = Path(target) if is_run(target) else None
    say: Callable[[str], None] = (lambda _: None) if quiet else to_stderr
    weights = None if run_folder is None else _weights(run_folder, checkpoint, say)
    if run_folder is None:
        check_source("", str(target))
    run, _, objects = asked_run(target, checkpoint, overrides, UserObjects(), quiet, trust)
    request = _with_scores(request, run, run_folder, target)
    contract = contract_of(run, max_tokens, temperature)
    # A reward model that guides the search as well would judge its own choice.
    env = replace(run.env, rewards=tuple(r for r in run.env.rewards if not r.by_model), measured=False)
    run = replace(run, env=env, stages=(Reinforce(name=STAGE_NAME, sampling=contract),))
    with faults.planted(request.fault), closing(make_environment(run, objects)) as environment:
        _check_single_turn(environment)
        report = _run_searches(request, run, environment, run_folder, weights, samples, trust, str(target))
    console = PlainConsole(soft_wrap=True, quiet=quiet)
    for line in (report.title, report.table(), *report.notes()):
        console.print(line)
    if out is not None:
        search_plot(report.points, report.title, out)
        console.print(f"written: {out}")
    return report


def _run_searches(
    request: SearchRequest,
    run: Run,
    environment: Environment,
    run_folder: Path | None,
    weights: Path | None,
    samples: int,
    trust: bool,
    name: str,
) -> SearchReport:
    """Build the model and run the searches.

    Args:
        run_folder: the run folder of the target; None: the target is a model.
        weights: the folder of the policy's weights; None: those of the model.
        name: of the target, for the report.
    """
    from posttrain.build.build_run import make_policy, make_roles
    from posttrain.build.open_model import kept_policy
    from posttrain.engine.learner.torch_settings import use_threads
    from posttrain.role.weights.saved_weights import load_weights
    from posttrain.stages.run_coroutine import wait

    use_threads(run.threads)
    policy = make_policy(run, environment) if run_folder is None else kept_policy(run_folder, allow=trust)
    with ExitStack() as resources:
        roles = resources.enter_context(closing(make_roles(run, policy, environment, ())))
        if weights is not None:
            load_weights(weights, roles.learner)
        step_search, scorer_line = _step_search(request, run, policy, roles, run_folder, resources)
        points = wait(_points(request, step_search, roles, environment, samples))
    by_cost = tuple(sorted(points, key=lambda p: p.tokens))
    return SearchReport(name, environment.name, scorer_line, len(environment.heldout), samples, by_cost)


async def served(roles: PolicyRoles) -> int:
    """Serve the policy's weights. Returns their version: all tokens of a search are sampled with it."""
    # A first push tries the adapter under the version `+ 1`, so the weights get the one after it.
    await roles.sync.push(roles.engine.version + 2)
    return roles.engine.version


async def _points(
    request: SearchRequest, step_search: StepSearch, roles: PolicyRoles, environment: Environment, samples: int
) -> list[SearchPoint]:
    """Serve the weights and measure each search."""
    from posttrain.search.curves import leading, search_point

    step_search = replace(step_search, version=await served(roles))
    return leading([await search_point(kind, step_search, environment.heldout, samples) for kind in request.kinds])


def _step_search(
    request: SearchRequest, run: Run, policy: Policy, roles: PolicyRoles, run_folder: Path | None, resources: ExitStack
) -> tuple[StepSearch, str]:
    """Returns the parts that every search uses, and the line that names the scorer."""
    from posttrain.search.step_sampling import StepSearch

    dialogue, contract = roles.rollout.dialogue, run.stages[0].contract
    assert contract is not None
    # No scorer of steps, and no separator between them (`""`): a judge may bring both, below.
    without_scores = StepSearch(
        roles.engine,
        None,
        roles.rollout.environment,
        lambda task: dialogue(task.id).see(task.prompt, task.tools),
        dialogue("").text,
        contract.resolve(policy.stop_ids, roles.renderer.spell),
        "",
        seed=run.evaluation.seed,
        verified=request.verified,
        budget=request.budget,
        right_at=roles.rollout.right,
    )
    if request.by is None:
        return without_scores, "the environment's own verdict, which knows the answers" if request.verified else ""
    from posttrain.build.build_reward_models import RewardModels
    from posttrain.role.judges.generative_steps import GenerativeStepJudge
    from posttrain.role.judges.reward_judge import RewardModelJudge
    from posttrain.role.judges.step_judge import StepJudge

    models = RewardModels(run, policy, run_folder)
    # The models are closed after the last search, not at the end of this function.
    resources.callback(models.close)
    (judge,) = models.judges(replace(run.env, rewards=(request.by,)), request.by.stages or None)
    line = judge.line.partition(": each step's score")[0].replace(" (weight 1)", "")
    if isinstance(judge, StepJudge):
        return replace(without_scores, scorer=judge.scorer, separator=judge.separator), line
    if isinstance(judge, GenerativeStepJudge):
        return replace(without_scores, verifier=judge, separator=judge.separator), line
    _refuse_answers(request, request.by.function)
    # A weighted vote adds the scores of equal answers. A sum has a meaning only where scores are probabilities.
    if isinstance(judge, RewardModelJudge) and (kind := _search_with(request, weighted=True)):
        raise ConfigError(
            f"search={kind}: {request.by.function} scores are no chances, and a weighted vote adds them up: weigh by a"
            " process reward model or a judge, or take best_of"
        )
    return replace(without_scores, judge=judge), line


# --- what is asked for ------------------------------------------------------------------------------------------------


def _search_with(request: SearchRequest, **setting: Any) -> str:
    """The name of the first search with this setting (or property); '' where there is none."""
    ((name, value),) = setting.items()
    return next((k.name for k in request.kinds if getattr(k, name, None) == value), "")


def _refuse_answers(request: SearchRequest, by: str) -> None:
    """ConfigError where a search needs scores of steps. It is called where `by` scores whole answers."""
    if kind := _search_with(request, reads="steps"):
        raise ConfigError(
            f"search={kind} goes on from the best steps, and {by} scores whole answers: give a process reward model,"
            " search.by=model:RUN of a run such as posttrain run prm rl=none --out RUN; or take best_of and"
            " vote"
        )


def _with_scores(request: SearchRequest, run: Run, run_folder: Path | None, target: str | Path) -> SearchRequest:
    """The request with its scorer, if a search needs one: the one that was named, or else the run's own.

    Raises:
        ConfigError: there is none, or it cannot score what a search needs.
    """
    needs_scores = _search_with(request, reads="steps") or _search_with(request, reads="answers")
    # The verifier judges whole answers, so it can guide no search over steps.
    if request.verified:
        _refuse_answers(request, "search.by=verifier")
    # No model scores: the verifier does, or no search reads scores. So a model that was named is left out.
    if request.verified or not needs_scores:
        return replace(request, by=None)
    by = request.by or _own_scores(run, run_folder)
    if by is None:
        raise ConfigError(
            f"search={needs_scores} chooses by scores, and {target} has no reward model. Name a process reward model"
            " (search.by=model:RUN; posttrain run prm rl=none --out RUN trains one), a judge (search.by=judge:RUN), or,"
            " for best_of, search.by=verifier: it knows the answers, so it says the most that any scores can reach."
            " vote needs no scores"
        )
    for path in by.models:
        if path.startswith(STAGE):
            if run_folder is None:
                raise ConfigError(f"search.by=model:{path}: {target} is no run, and has no stages: give model:PATH")
            kept_folder(run_folder, path.removeprefix(STAGE))
        else:
            check_reward_path("search.by", path)
    if by.judge_url:
        raise ConfigError(f"search.by={by.function}: a judge at an endpoint pays rewards; a search asks judge:RUN")
    if by.judge_run:
        check_judge_path("search.by", by.judge_run)
    return replace(request, by=by)


def _own_scores(run: Run, run_folder: Path | None) -> Reward | None:
    """The reward model or judge that pays in a run; else the last one that a stage of it trained; else None."""
    if paid := [r for r in run.env.rewards if r.by_model]:
        # Only its score is used: the settings of how it pays a policy have no meaning here.
        return replace(paid[0], weight=1.0, measured=False, steps="score", progress=False)
    if run_folder is None:
        return None
    trained = [s.name for s in run.stages if isinstance(s, RewardModel) and (run_folder / KEPT / s.name).is_dir()]
    return Reward(function=f"{MODEL}{STAGE}{trained[-1]}") if trained else None


def _weights(folder: Path, checkpoint: str, say: Callable[[str], None]) -> Path:
    """The folder of the policy's weights.

    It is that of the checkpoint. Where the checkpoint holds a reward model, it is that of the last stage before that
    model's stage that left a policy.
    """
    chosen, stages = find(folder, checkpoint), run_file(folder).run.stages
    trained = trained_at(stages, chosen.state)
    if trained is None:
        return chosen.folder
    # Only stages whose weights go on to the one that trained the reward model, and that leave a policy.
    before = [s for s in stages[: stages.index(trained)] if s.leaves_policy and s.hands_on]
    trainers = [s.name for s in before if not isinstance(s, StepLabeling)]
    kept = [name for name in trainers if (folder / KEPT / name).is_dir()]
    if not kept:
        raise RunFolderError(
            f"{folder} holds the reward model that {trained.name} trained, and no policy before it. Search with a run"
            f" or a model that samples, and name this one: search.by=model:{folder}"
        )
    say(f"{folder} ends with the reward model of {trained.name}: the policy is that of its stage {kept[-1]}")
    return kept_folder(folder, kept[-1])


def _check_single_turn(environment: Environment) -> None:
    """ConfigError where there is no held-out task, or an episode has more than one turn of the policy."""
    from posttrain.stages.run_coroutine import wait

    if not environment.heldout:
        raise ConfigError("env.heldout=0 leaves no task to search on; say how many, for example env.heldout=100")
    abilities, task = environment.abilities, environment.heldout[0]
    turn_words = "with tools" if (abilities.tools(task) if abilities.tools else task.tools) else ""
    turn_words = turn_words or ("with other seats" if abilities.seats is not None else "")
    # The right answer, where it is known: a wrong one may end the episode early and hide a second turn.
    right_turns = None if abilities.gold is None else abilities.gold.right(task)
    try:
        several = len(wait(attempt(environment, task, right_turns or ("",))).turns) > 1
    except IndexError:  # it asks for another turn than the script has
        several = True
    turn_words = turn_words or ("of several turns" if several else "")
    if turn_words:
        raise ConfigError(
            f"environment {environment.name!r} has episodes {turn_words}, and a search goes on inside one answer: use"
            " an environment of single answers"
        )
