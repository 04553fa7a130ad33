"""A sampling contract of every kind of rule, from the command line through rollout, record and learner, in real tiny
runs."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posttrain.build.build_environments import make_environment
from posttrain.build.build_run import check_tokens, make_policy
from posttrain.checks.sampling.sampler_checks import stops_are_true
from posttrain.cli import main
from posttrain.config.overrides import apply, surface
from posttrain.config.run import Env, Reinforce, Run
from posttrain.core.ports import Utterance
from posttrain.core.sampling import Sampling
from posttrain.core.transcript import Transcript
from posttrain.core.types import Episode, Group, SampledTurn, Stop, Task
from posttrain.environment.make import environment
from posttrain.environment.templates.renderer import Renderer
from posttrain.ladder.policy_rows import LUFFY
from posttrain.record import run_reader
from posttrain.system.errors import ConfigError, InvariantError
from tests.tiny import only_rl, play, tiny_parts, tiny_run

WORDS = (
    "rl.sampling.stop=7,=2",
    "rl.sampling.bad_words=11,3",
    "rl.sampling.repetition_penalty=1.3",
    "rl.sampling.logit_bias=2:0.5",
)


def overridden(*words: str) -> Sampling:
    stage = apply(Run(recipe="r", stages=(Reinforce(name="rl"),)), [f"sampling.{w}" for w in words]).stage("rl")
    assert isinstance(stage, Reinforce)
    return stage.sampling


def test_lists_pairs_and_texts_on_the_command_line() -> None:
    s = overridden(
        "stop=;,end",
        "bad_ids=5,6",
        "logit_bias=17:-2.5, 3:1",
        "allowed_ids=1,2,17",
        "min_tokens=2",
        "repetition_penalty=1.2",
    )
    assert s.stop == (";", "end") and s.bad_ids == ((5,), (6,)) and s.logit_bias == ((17, -2.5), (3, 1.0))
    assert s.allowed_ids == (1, 2, 17) and s.min_tokens == 2 and s.repetition_penalty == 1.2
    s = overridden(
        'stop=["\\n\\n", "a, b", " "]', "bad_ids=[[5], [7, 8]]", "logit_bias=[[1, 2]]", "allowed_words=yes,no"
    )
    assert s.stop == ("\n\n", "a, b", " ") and s.bad_ids == ((5,), (7, 8)) and s.logit_bias == ((1, 2.0),)
    assert s.allowed_words == ("yes", "no") and overridden("stop=none", "allowed_ids=none").stop == ()
    assert hash(s) == hash(
        overridden('stop=["\\n\\n", "a, b", " "]', "bad_ids=[[5],[7,8]]", "logit_bias=1:2", "allowed_words=yes,no")
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("stop=[open", "is read as JSON"),
        ("logit_bias=5", "expected a whole number:a number"),
        ("logit_bias=5:x", "expected a number"),
        ("bad_ids=[[5],[x]]", "is read as JSON"),
        ('bad_ids=[["x"]]', r"bad_ids.0.0: 'x' is not valid here; expected a whole number"),
        ("logit_bias=[[1,2,3]]", "is not valid here"),
        ("allowed_ids=", "allowed_ids is empty"),
    ],
)
def test_words_that_are_no_value(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        overridden(word)


def test_every_field_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    paths = {path for path, _ in surface(Run(recipe="r", stages=(Reinforce(name="rl"),)))}
    assert {f"rl.sampling.{f.name}" for f in fields(Sampling)} <= paths
    assert main(["run", "arithmetic", "--help=sampling", "rl.sampling.stop=;"]) == 0
    shown = capsys.readouterr().out
    assert (
        "rl.sampling.logit_bias = none" in shown
        and "rl.sampling.bad_words = none" in shown
        and "rl.sampling.stop = ;" in shown
    )


def test_a_run_learns_under_all_of_it(tmp_path: Path) -> None:
    """The start-up proofs and canaries of the run compare sampler and learner token by token; the record holds the
    contract."""
    run = apply(only_rl(tiny_run(eval_every=1)), [*WORDS, "rl.sampling.min_tokens=1", "rl.sampling.max_tokens=10"])
    asyncio.run(play(tiny_parts(tmp_path / "r", run)))
    assert run_reader.run_file(tmp_path / "r").run.stage("rl").sampling.bad_words == ("11", "3")  # type: ignore[union-attr]
    steps = [s for s in run_reader.steps(tmp_path / "r") if s.stage == "rl"]
    assert max(s.gauges["canary/logp_gap_worst"].mean for s in steps) < 1e-4
    reasons: set[Stop] = set()
    count = 0
    for step in range(1, 4):
        for r in run_reader.episodes(tmp_path / "r", "rl", step):
            e = r.episode
            (segment,) = e.segments
            s = segment.sampling
            assert s.resolved and s.bad_ids == ((1, 1), (3,)) and s.stop == ("7", "=2") and s.logit_bias == ((2, 0.5),)
            assert segment.in_turn is not None and segment.in_turn.tolist() == list(range(segment.spoken))
            assert "3" not in e.text and "11" not in e.text and segment.spoken > 1
            completed = any(e.text.find(x, max(0, 2 - len(x))) >= 0 for x in s.stop)
            assert (e.stop is Stop.STRING) == completed, "ends the turn, unless it is complete with the first token"
            assert not completed or e.text.endswith(s.stop)
            reasons.add(e.stop)
            count += 1
    assert count == 48 and {Stop.STRING, Stop.LENGTH} <= reasons


@pytest.mark.prove
def test_show_names_the_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = apply(only_rl(tiny_run(steps=1)), ["rl.sampling.stop=0,1,2,3,4,5,6,7,8,9"])
    asyncio.run(play(tiny_parts(tmp_path / "r", run)))
    capsys.readouterr()
    assert main(["show", str(tmp_path / "r")]) == 0
    assert " string\n" in capsys.readouterr().out


def test_words_and_ids_a_model_does_not_have_never_start() -> None:
    run = only_rl(tiny_run())
    policy = make_policy(run, make_environment(run))
    for word, said in (
        ("bad_words=ß", "cannot write 'ß'"),
        ("allowed_words=é", "cannot write 'é'"),
        ("bad_ids=999", "token id 999, and the model has"),
        ("logit_bias=999:1", "token id 999"),
    ):
        with pytest.raises(ConfigError, match=said):
            check_tokens(apply(run, [f"rl.sampling.{word}"]), policy)
    check_tokens(apply(run, ["rl.sampling.allowed_words=12", "rl.sampling.bad_words=1"]), policy)
    with pytest.raises(ConfigError, match="bad_ids ban all|nothing could be said"):
        check_tokens(apply(run, ["rl.sampling.allowed_ids=1", "rl.sampling.bad_words=1"]), policy)


def test_demonstrations_and_bans_do_not_mix() -> None:
    Reinforce(name="rl", algorithm=LUFFY, sampling=Sampling(repetition_penalty=1.1))
    for banned in ({"min_tokens": 1}, {"bad_words": ("x",)}, {"allowed_ids": (1,)}, {"bad_ids": ((1, 2),)}):
        with pytest.raises(ConfigError, match="may ban what they say"):
            Reinforce(name="rl", algorithm=LUFFY, sampling=Sampling(**banned))  # type: ignore[arg-type]


def _ended(stop: Stop, *ids: int) -> list[Group]:
    t = Transcript(Sampling(stop_ids=(9,), stop=("x",)))
    t.see([1])
    n = len(ids)
    t.say(SampledTurn(np.array(ids, np.int32), np.full(n, -1, np.float32), np.zeros(n, np.int32), stop))
    task = Task("t", "p")
    return [Group(task, 0, (Episode(task, 0, 0, (t.segment(),), stop, ()),))]


def test_a_stop_string_is_no_stop_token() -> None:
    stops_are_true(_ended(Stop.STRING, 3, 4), (9,), 8)
    with pytest.raises(InvariantError, match="reason 'string', but its last token is a stop token"):
        stops_are_true(_ended(Stop.STRING, 3, 9), (9,), 8)


async def test_a_tool_call_may_end_with_a_stop_string() -> None:
    """The calculator answers a turn that ended itself, by a token or by a string, and none that was cut off."""
    env: Any = environment(Env(name="calculator"), 0)

    async def turns(stop: Stop) -> int:
        seen: list[Any] = []

        class Talk:
            def see(self, content: Any) -> None:
                seen.append(content)

            async def say(self) -> Any:
                return Utterance("calc:2*3", stop, 8)

        await env.play(env.train.task(0), Talk())
        return len(seen)

    assert await turns(Stop.SAID) == await turns(Stop.STRING) == 2
    assert await turns(Stop.LENGTH) == 1


def test_a_turn_keeps_its_stop_string(tmp_path: Path) -> None:
    """What the environment reads is all that was said; the string is not cut off."""
    parts = tiny_parts(tmp_path / "r", only_rl(tiny_run()))
    renderer = parts.renderer
    assert isinstance(renderer, Renderer)
    assert renderer.text(renderer.encode("12;")) == "12;"
    parts.book.close()
