"""A kind of stage lives in one file: this one adds a kind from outside, and runs, cuts, resumes and evaluates it.

And what every kind can say of itself: where it starts, on what it plays, how long, and whether the run goes on with its
weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import posttrain
from posttrain.build.build_environments import distinct, make_environment, own_environments
from posttrain.config.env import Env, Reward
from posttrain.config.overrides import apply, surface
from posttrain.config.run import Reinforce, Run, Supervised
from posttrain.config.stages.stage import Stage, come_to, starts
from posttrain.core.gauge import Gauge, Step
from posttrain.record import run_reader
from posttrain.record.checkpoint import find, scan
from posttrain.record.external_access import Kind, asks, decided
from posttrain.role.weights.saved_weights import WEIGHTS
from posttrain.stages import Progress, Stages, where
from posttrain.stages.checks_by_kind import OF
from posttrain.stages.interrupt import Interrupted, Stopper
from posttrain.stages.loop import DRIVERS, Driver
from posttrain.stages.progress import StageState
from posttrain.stages.reinforce.reinforce_stage import ReinforceDriver
from posttrain.system import files
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError, RewardError, RunFolderError
from posttrain.system.subclass_registry import alternatives
from tests.tiny import only_rl, tiny_parts, tiny_run


@dataclass(frozen=True, kw_only=True)
class Average(Stage):
    """Pull the weights toward those of an earlier stage, a share of the way a step (2203.05482: what lies between two
    fine-tuned models)."""

    harmless = ("toward",)

    toward: str
    """The earlier stage."""
    share: float = 0.25


@dataclass
class AverageState(StageState):
    way: float = 0.0
    """How much of the way is behind it: the sum of the largest moves."""


class AverageDriver(Driver[Average, AverageState, torch.Tensor], stage=Average, state=AverageState):
    """The share falls with the way that is behind it, which a checkpoint must bring back."""

    die_at: ClassVar[int] = 0

    async def open(self, checkpoint: Path | None) -> Any:
        self.other = load_file(self.parts.book.kept(self.stage.toward) / WEIGHTS)
        self.parts.say(f"{self.stage.name}: pulled toward {self.stage.toward}")
        return self._ask, self._learn

    async def _ask(self, index: int) -> torch.Tensor:
        return torch.tensor(self.stage.share / (1 + self.state.way))

    async def _learn(self, asked: torch.Tensor) -> Step:
        index = self.state.step + 1
        if index == self.die_at:
            raise RuntimeError("killed")
        moved = 0.0
        with torch.no_grad():
            for name, tensor in self.parts.learner.parameters().items():
                by = asked * (self.other[name] - tensor)
                tensor += by
                moved = max(moved, float(by.abs().max()))
        self.trainer.version += 1
        self.state.way += moved
        return Step(self.stage.name, index, self.trainer.version, {"average/moved": Gauge(moved, 1)}, self.clock.take())


@pytest.fixture(autouse=True, scope="module")
def registries() -> Iterator[None]:
    """As they were, once these tests are over."""
    yield
    Average.withdraw()
    AverageState.withdraw()
    del DRIVERS[Average]
    assert set(alternatives(Stage)) == set(DRIVERS) == set(run_reader.STAGES) == set(OF)


def with_average() -> Run:
    """SFT, RL, then the weights of the SFT come back a part of the way."""
    run = tiny_run(steps=2)
    mean = Average(name="mean", toward="sft", steps=4, checkpoint_every=1, eval_every=2)
    return replace(run, stages=(*run.stages, mean))


def weights(folder: Path, name: str = "") -> dict[str, torch.Tensor]:
    return load_file((folder / "kept" / name if name else find(folder).folder) / WEIGHTS)


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def plain_state(folder: Path) -> Any:
    """The last checkpoint's state without its clock."""
    return without_clock(dict(find(folder).state))


def without_clock(data: Any) -> Any:
    """Plain data without what says how long something took, at any depth."""
    if isinstance(data, dict):
        return {k: without_clock(v) for k, v in data.items() if k not in ("seconds", "roles", "peaks")}
    return [without_clock(x) for x in data] if isinstance(data, list) else data


# --- a kind from outside ----------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_it_runs_is_measured_and_is_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = posttrain.run(with_average(), out=tmp_path / "run")
    assert [(r.name, r.kind, r.steps, r.start) for r in done.stages][-1] == ("mean", "average", 4, "rl")
    assert done.stages[-1].accuracy is not None and done.accuracy == done.stages[-1].accuracy[0]
    assert done.stages[-1].before == (done.stages[-2].accuracy or (None,))[0] is not None
    steps = [s for s in run_reader.steps(tmp_path / "run") if s.stage == "mean"]
    assert [s.index for s in steps] == [1, 2, 3, 4] and ["eval/accuracy" in s.gauges for s in steps] == [
        False,
        True,
        False,
        False,
    ]
    assert not equal(weights(tmp_path / "run"), weights(tmp_path / "run", "rl"))
    assert equal(weights(tmp_path / "run"), weights(tmp_path / "run", "mean"))
    assert "mean: pulled toward sft" in capsys.readouterr().out
    report = posttrain.evaluate(tmp_path / "run", samples=2, quiet=True)
    assert report.accuracy.known == done.stages[-1].accuracy


@pytest.mark.prove
@pytest.mark.parametrize("step", [1, 2, 4])
def test_killed_and_resumed_is_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    posttrain.run(with_average(), out=tmp_path / "whole", quiet=True)
    monkeypatch.setattr(AverageDriver, "die_at", step)
    with pytest.raises(RuntimeError, match="killed"):
        posttrain.run(with_average(), out=tmp_path / "cut", quiet=True)
    monkeypatch.setattr(AverageDriver, "die_at", 0)
    running = find(tmp_path / "cut").state["running"]
    assert running is None if step == 1 else (running["type"], running["step"]) == ("AverageState", step - 1)
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    assert equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert plain_state(tmp_path / "cut") == plain_state(tmp_path / "whole")


def test_its_settings_are_settings_like_others() -> None:
    run = with_average()
    assert from_plain(Run, to_plain(run)) == run and to_plain(run)["stages"][-1]["type"] == "Average"
    assert apply(run, ["share=0.5", "mean.steps=9"]).stages[-1] == replace(run.stages[-1], share=0.5, steps=9)
    assert ("mean.toward", "text") in surface(run)
    assert not asks(run) and decided(Average, "toward") is not None


def test_what_a_kind_does_not_decide_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Average, "harmless", ())
    assert [(a.path, a.kind) for a in asks(with_average())] == [("mean.toward", Kind.CODE)]
    monkeypatch.setattr(Average, "models", ("toward",))
    assert [(a.path, a.kind) for a in asks(with_average())] == [("mean.toward", Kind.OUTSIDE)]


def test_names_are_given_once() -> None:
    with pytest.raises(ConfigError, match="Give the class another name"):
        type("Average", (Stage,), {"__module__": "elsewhere"})
    with pytest.raises(ConfigError, match="has a driver already"):
        type("Other", (Driver,), {}, stage=Average, state=AverageState)


def test_a_kind_without_a_driver_never_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DRIVERS, Average)
    with pytest.raises(ConfigError, match="nothing takes the steps of a Average; import the file of its driver"):
        posttrain.run(with_average(), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.prove
def test_the_state_of_another_kind_is_damage(tmp_path: Path) -> None:
    """A state that does not fit its stage is named, whatever is wrong with it."""
    posttrain.run(with_average(), out=tmp_path / "run", quiet=True)
    checkpoint = next(c for c in scan(tmp_path / "run") if c.state["running"])
    state = dict(checkpoint.state)
    assert where(with_average(), state).running is not None
    for harm, why in (
        ({"stage": 0}, "sft' remembers a SupervisedState"),
        ({"stage": 7}, "7 of 3 stages"),
        ({"cursor": 1}, "no such field"),
        ({"running": {**state["running"], "type": "Nothing"}}, "type=Nothing"),
        ({"running": {**state["running"], "way": "far"}}, "running.way"),
    ):
        with (
            pytest.raises(RunFolderError, match=f"state.json is damaged: .*{why}"),
            run_reader.damage_is_named("state.json"),
        ):
            where(with_average(), {**state, **harm})


async def interrupted(folder: Path, run: Run) -> str:
    """What a run says that is asked to end before its first step has ended."""
    parts = tiny_parts(folder, run)
    try:
        with pytest.raises(Interrupted) as said:
            for stage in Stages(parts, Progress(), Stopper(2)).left():
                await stage.run()
        return str(said.value)
    finally:
        parts.book.close()
        parts.close()


@pytest.mark.prove
async def test_a_stage_cut_behind_its_last_evaluation_is_gone_on_with(tmp_path: Path) -> None:
    """The evaluation that met the target is in the record, and is not written twice."""
    run = only_rl(tiny_run(steps=3, eval_every=1, target=0.0))
    assert "the last checkpoint is complete" in await interrupted(tmp_path / "cut", run)
    done = posttrain.run(resume=tmp_path / "cut", quiet=True)
    whole = posttrain.run(run, out=tmp_path / "whole", quiet=True)
    assert [(r.why, r.accuracy, r.pass_at) for r in done.stages] == [
        (r.why, r.accuracy, r.pass_at) for r in whole.stages
    ]
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")
    assert equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


@pytest.mark.prove
@pytest.mark.parametrize("own", [False, True])
def test_a_stage_cut_before_its_first_checkpoint_has_the_record_of_one_that_was_not(
    own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights were evaluated at the end of the stage before, or are evaluated before its first step where it starts
    from others."""
    run = tiny_run(steps=2, checkpoint_every=0, start="start" if own else None)
    run = replace(run, stages=(replace(run.stages[0], eval=True, steps=4), run.stages[1]))
    remember = ReinforceDriver.remember

    def killed(self: ReinforceDriver, asked: Any, step: Step) -> Step:
        if not list(tmp_path.glob("killed")):
            (tmp_path / "killed").touch()
            raise KeyboardInterrupt
        return remember(self, asked, step)

    monkeypatch.setattr(ReinforceDriver, "remember", killed)
    with pytest.raises(KeyboardInterrupt):
        posttrain.run(run, out=tmp_path / "cut", quiet=True)
    posttrain.run(resume=tmp_path / "cut", quiet=True)
    posttrain.run(run, out=tmp_path / "whole", quiet=True)
    files_of = [
        [(row.stage, row.index, row.kind) for row in run_reader.episode_files(tmp_path / n)] for n in ("cut", "whole")
    ]
    assert files_of[0] == files_of[1] and (("rl", 0, "eval") in files_of[1]) is own
    assert run_reader.record_digest(tmp_path / "cut") == run_reader.record_digest(tmp_path / "whole")


@pytest.mark.prove
async def test_a_stage_that_is_not_checkpointed_says_so(tmp_path: Path) -> None:
    sft, rl = tiny_run(steps=1).stages
    run = replace(tiny_run(), stages=(replace(sft, hands_on=False, eval=True), rl))
    assert "it hands nothing on, so it is not checkpointed and begins anew" in await interrupted(tmp_path / "run", run)
    assert not scan(tmp_path / "run")


@pytest.mark.prove
def test_what_cannot_be_resumed_is_left_closed(tmp_path: Path) -> None:
    """In one process the same sentence is said twice, and the folder is free for others."""
    posttrain.run(with_average(), out=tmp_path / "run", quiet=True)
    last = find(tmp_path / "run")
    (last.folder / "state.json").write_text(
        json.dumps({**json.loads((last.folder / "state.json").read_text()), "state": {"stage": 7}})
    )
    digests = json.loads((last.folder / "digests.json").read_text())
    digests["state.json"] = files.digest(last.folder / "state.json")
    (last.folder / "digests.json").write_text(json.dumps(digests))
    for _ in range(2):
        with pytest.raises(RunFolderError, match="7 of 3 stages"):
            posttrain.run(resume=tmp_path / "run", quiet=True)


# --- what every kind can say ------------------------------------------------------------------------------------------


@pytest.mark.prove
def test_weights_that_are_handed_to_nobody(tmp_path: Path) -> None:
    """They are kept under their own name and compared; the run ends with those from before, and a later stage may start
    from them."""
    sft, rl = tiny_run(steps=2, checkpoint_every=0).stages
    other = replace(sft, name="other", start="sft", time_of="rl", hands_on=False, steps=2, eval=True)
    more = replace(sft, name="more", start="other", steps=1, hands_on=False, eval=True)
    run = replace(tiny_run(), stages=(sft, rl, other, more))
    assert [starts(run.stages, s) for s in run.stages] == ["start", "sft", "sft", "other"]
    assert [come_to(run.stages, s) for s in run.stages] == ["start", "sft", "rl", "rl"]
    done = posttrain.run(run, out=tmp_path / "run", quiet=True)
    folder = tmp_path / "run"
    assert equal(weights(folder), weights(folder, "rl")) and not equal(weights(folder, "other"), weights(folder, "rl"))
    assert not equal(weights(folder, "other"), weights(folder, "more"))
    rl_result, compared, last = done.stages[1:]
    assert rl_result.accuracy is not None and done.accuracy == rl_result.accuracy[0]
    assert compared.before == rl_result.before and last.before == (compared.accuracy and compared.accuracy[0])
    assert not [c.name for c in scan(folder) if c.state["running"]], "its middle is not checkpointed"
    again = posttrain.run(resume=folder, quiet=True)
    assert again.stages == done.stages


@pytest.mark.prove
def test_an_environment_of_its_own(tmp_path: Path) -> None:
    """It is played, demonstrated, evaluated and limited there; what is measured there is no measure of the run."""
    run = tiny_run(steps=1)
    sft, rl = run.stages
    own = Env(name="countdown", heldout=5)
    elsewhere = replace(rl, name="elsewhere", env=own)
    run = replace(run, model=replace(run.model, context=128), stages=(sft, rl, elsewhere, replace(rl, name="again")))
    done = posttrain.run(run, out=tmp_path / "run", quiet=True)
    env = make_environment(run)
    for name, source in (
        ("rl", env.train),
        ("elsewhere", own_environments(run, env)["elsewhere"].train),
        ("again", env.train),
    ):
        asked = {str(e.episode.task.prompt) for e in run_reader.episodes(tmp_path / "run", name, 1)}
        assert asked <= {str(source.task(i).prompt) for i in range(8)}, name
    held = {s: len(run_reader.episodes(tmp_path / "run", s, 0, "eval")) for s in ("rl", "elsewhere")}
    assert held == {"rl": 6 * 2, "elsewhere": 5 * 2}
    assert done.accuracy == (done.stages[3].accuracy or (None,))[0]
    assert posttrain.evaluate(tmp_path / "run", samples=1, quiet=True).accuracy.prompts == 6, "the run's own tasks"


@pytest.mark.prove
def test_what_was_not_measured_is_not_known(tmp_path: Path) -> None:
    """A stage on tasks of its own, or without evaluation, moves the weights: what was measured before is no measure of
    them."""
    run = tiny_run()
    sft = replace(run.stages[0], eval=True, steps=2)
    for folder, aside in (
        ("own", replace(sft, name="aside", env=Env(name="countdown", heldout=4))),
        ("blind", replace(sft, name="aside", eval=False)),
    ):
        two = replace(run, model=replace(run.model, context=128), stages=(sft, aside))
        ended = posttrain.run(two, out=tmp_path / folder, quiet=True)
        assert ended.stages[0].accuracy is not None and ended.accuracy is None and ended.reward is None
        assert find(tmp_path / folder).metric is None and find(tmp_path / folder, "best").state["stage"] == 1
        three = replace(two, stages=(*two.stages, replace(sft, name="last", env=run.env)))
        done = posttrain.run(three, out=tmp_path / f"{folder}-three", quiet=True)
        assert done.stages[2].before is None and done.accuracy == (done.stages[2].accuracy or (None,))[0] is not None


@pytest.mark.prove
def test_a_stage_that_names_another_is_evaluated_alone(tmp_path: Path) -> None:
    """`posttrain eval` asks under the stage's contract, whatever it started from, and whether or not the run went on
    with it."""
    sft, rl = tiny_run(steps=1, checkpoint_every=0).stages
    run = replace(tiny_run(), stages=(sft, replace(rl, start="sft", time_of="sft", hands_on=False)))
    posttrain.run(run, out=tmp_path / "run", quiet=True)
    assert posttrain.evaluate(tmp_path / "run", samples=1, quiet=True).accuracy.prompts == 6


def test_a_wrong_environment_of_a_stage_is_named_with_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rl.env \\(called env here\\): env.name='nope' is no environment"):
        posttrain.run(tiny_run(), "rl.env=nope", out=tmp_path / "run", quiet=True)


@pytest.mark.prove
def test_who_has_to_be_mended_is_the_stages_own(tmp_path: Path) -> None:
    """Too many unjudged samples: the message names the reward of the environment that the stage plays on."""
    broken = tmp_path / "broken.py"
    broken.write_text("def broken(task, text):\n    raise RuntimeError('down')\n")
    run = only_rl(tiny_run(eval=False))
    own = replace(run.env, rewards=(Reward(function=f"{broken}:broken"),))
    with pytest.raises(RewardError, match=f"Mend {broken}:broken, then resume: .* --accept-changed"):
        posttrain.run(replace(run, stages=(replace(run.stages[0], env=own),)), out=tmp_path / "run", quiet=True)


def test_equal_environments_are_built_once() -> None:
    run = tiny_run()
    sft, rl = run.stages
    own = Env(name="arithmetic", args={"max_terms": 3}, heldout=4)
    run = replace(
        run,
        stages=(
            sft,
            replace(rl, name="a", env=own),
            replace(rl, name="b", env=replace(own)),
            replace(rl, name="c", env=run.env),
        ),
    )
    env = make_environment(run)
    others = own_environments(run, env)
    assert others["a"] is others["b"] and others["c"] is env and len(distinct(env, others)) == 2
    with pytest.raises(ConfigError, match="sft.style='answer': environment"):
        own_environments(replace(run, stages=(replace(sft, env=Env(name="gym:chain_sum")),)), env)


SFT, RL = Supervised(name="sft", style="answer"), Reinforce(name="rl")


@pytest.mark.parametrize(
    ("stages", "why"),
    [
        ((replace(SFT, start="rl"), RL), "start='rl' must name an earlier stage, one of \\['start'\\]; set sft.start"),
        ((replace(SFT, start="sft"),), "must name an earlier stage"),
        ((SFT, replace(RL, time_of="rl")), "time_of='rl' must name an earlier stage"),
        ((SFT, replace(RL, time_of="start")), "time_of='start' must name an earlier stage"),
        ((replace(SFT, name="start"),), "cannot be called 'start'"),
        (
            (SFT, replace(SFT, name="x", eval=False, hands_on=False)),
            "nothing is measured of it and no later stage starts from it",
        ),
        ((replace(SFT, hands_on=False),), "no stage hands its weights on"),
        ((replace(SFT, time_of="rl"), RL), "must name an earlier stage, and there is none; set sft.time_of=none"),
        (
            (SFT, replace(RL, target=0.5, env=Env(heldout=0))),
            "rl.target is never measured with rl.env.heldout=0: set rl.env.heldout",
        ),
    ],
)
def test_what_means_nothing_is_refused(stages: tuple[Stage, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Run(recipe="test", stages=stages)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"wall_time": 3.0, "time_of": "x"}, "two times to stop after; keep one"),
        ({"wall_time": 0.0}, "must be > 0 seconds"),
        ({"eval": False, "eval_every": 5}, "eval=false measures nothing"),
        ({"eval_every": -1}, "eval_every=-1: must be >= 0"),
        ({"steps": 0}, "steps=0: must be >= 1"),
        ({"max_failed": -1.0}, r"max_failed=-1: a share in \[0, 1\]"),
    ],
)
def test_settings_of_one_stage_that_mean_nothing(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replace(RL if "max_failed" in changes else SFT, **changes)


def test_a_stage_may_be_given_an_environment_by_one_word() -> None:
    run = Run(recipe="test", stages=(SFT, RL))
    given = apply(run, ["rl.env=countdown", "rl.env.heldout=7"])
    assert given.stages[1].env == Env(name="countdown", heldout=7) and given.env == run.env
    assert apply(given, ["rl.env=none"]).stages[1].env is None
    with pytest.raises(ConfigError, match="name its own first: rl.env=NAME"):
        apply(run, ["rl.env.heldout=7"])
