"""core.tree: whatever a Run can hold goes to JSON and comes back equal; what it cannot hold is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.build.request.extend import changes, check_changes
from posttrain.config.engines import VLLM
from posttrain.config.env import Reward
from posttrain.config.run import Env, Evaluation, Model, Optimizer, Reinforce, Run, Supervised
from posttrain.core.sampling import Sampling
from posttrain.diagnose.run_comparison import settings_of
from posttrain.ladder import algorithm as A
from posttrain.ladder.algorithm import patch
from posttrain.ladder.pieces.baseline import Others, SecondBest, StepMean
from posttrain.ladder.pieces.implicit import ImplicitOthers
from posttrain.ladder.pieces.pull import SequenceL2
from posttrain.ladder.pieces.shape import DropTruncated, Overlong, Signed
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import DAPO, GRPO, LADDER
from posttrain.recipe.recipes import recipe
from posttrain.record.external_access import values
from posttrain.system.dataclass_json import from_plain, to_plain
from posttrain.system.errors import ConfigError

text = st.text(max_size=12)


@pytest.mark.parametrize(
    ("one", "other", "differ"),
    [
        (
            patch(GRPO, "x", "me", baseline=SecondBest()),
            patch(GRPO, "x", "me", baseline=Others()),
            "rl.algorithm.baseline",
        ),
        (replace(GRPO, shape=(Signed(),)), replace(GRPO, shape=(DropTruncated(),)), "rl.algorithm.shape.0"),
    ],
)
def test_pieces_without_numbers_are_told_apart(one: A.Algorithm, other: A.Algorithm, differ: str) -> None:
    """By what compares runs, and by what refuses another algorithm in a run that goes on."""
    base = recipe("grpo")
    a, b = (replace(base, stages=(replace(base.stages[0], algorithm=x),)) for x in (one, other))
    assert differ in {c.path for c in changes(a, b)} and changes(a, a) == ()
    assert settings_of(a)[differ] != settings_of(b)[differ]
    with pytest.raises(ConfigError, match="cannot change in a run that goes on"):
        check_changes(Path("runs/x"), a, b)
    assert values(replace(base, engine=VLLM()))["engine"][1] == "VLLM"


positive = st.floats(1e-6, 1e6)


@st.composite
def algorithms(draw: st.DrawFn) -> A.Algorithm:
    """A ladder entry, sometimes with a user's patch on top that is legal for every one of them."""
    base = draw(
        st.sampled_from(
            [
                a
                for a in LADDER.values()
                if a.rewards == "sum" and a.shown is None and not a.shape and not isinstance(a.baseline, StepMean)
            ]
        )
    )
    changes = {
        "entropy": EntropyBonus(coef=draw(positive)),
        "shape": draw(
            st.lists(st.sampled_from([Signed(), Overlong(cache=0.5), DropTruncated()]), min_size=1).map(tuple)
        ),
        "pull": SequenceL2(coef=draw(positive)),
    }
    keep = {k: v for k, v in changes.items() if draw(st.booleans()) and getattr(base, k) != v}
    return patch(base, f"{base.name}+user", "your patch", note=draw(text), **keep) if keep else base


samplings = st.builds(
    Sampling,
    temperature=positive,
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 50),
    max_tokens=st.integers(1, 4096),
    stop_ids=st.none() | st.lists(st.integers(0, 10)).map(tuple),
    stop=st.lists(st.text(st.characters(exclude_characters="\ufffd"), min_size=1, max_size=4), max_size=2).map(tuple),
    repetition_penalty=positive,
    logit_bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100), max_size=3).map(lambda d: tuple(d.items())),
    allowed_ids=st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple),
    bad_ids=st.lists(st.lists(st.integers(100, 200), min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    bad_words=st.lists(st.text(min_size=1, max_size=4), max_size=2).map(tuple),
)
optimizers = st.builds(Optimizer, lr=positive, clip=positive | st.just(math.inf), warmup=st.integers(0, 100))
scalars = text | st.integers() | st.floats(allow_nan=False) | st.booleans()
envs = st.builds(
    Env,
    name=text,
    args=st.dictionaries(text, scalars, max_size=4),
    prompts=st.none() | text,
    rewards=st.lists(st.builds(Reward, function=text, weight=st.floats(allow_nan=False)), max_size=3).map(tuple),
)
supervised = st.builds(Supervised, name=st.just("sft"), style=text, optimizer=optimizers, eval=st.booleans())
reinforce = st.builds(
    Reinforce,
    name=st.just("rl"),
    algorithm=algorithms(),
    sampling=samplings,
    optimizer=optimizers,
    wall_time=st.none() | positive,
).map(  # what PRIME is paid lies in 0..1
    lambda stage: replace(stage, env=Env()) if isinstance(stage.algorithm.baseline, ImplicitOthers) else stage
)
runs = st.builds(
    Run,
    recipe=text,
    seed=st.integers(),
    model=st.builds(Model, path=st.none() | text, arch=st.sampled_from(["qwen3", "llama"])),
    env=envs,
    stages=st.tuples(supervised, reinforce) | st.tuples(reinforce),
    evaluation=st.builds(Evaluation, greedy=st.booleans()),
    trackers=st.lists(st.sampled_from(["tensorboard", "wandb", "trackio"])).map(tuple),
)


@settings(max_examples=100)
@given(runs)
def test_round_trip_through_strict_json(run: Run) -> None:
    data = json.loads(json.dumps(to_plain(run), allow_nan=False))
    again = from_plain(Run, data)
    assert again == run
    assert to_plain(again) == data
    for scalar, other in zip(run.env.args.values(), again.env.args.values(), strict=True):
        assert type(scalar) is type(other)


def test_the_lineage_survives() -> None:
    mine = patch(DAPO, "dapo+user", "your patch", clip=Clip(low=0.1, high=0.4))
    again = from_plain(A.Algorithm, json.loads(json.dumps(to_plain(mine))))
    assert [a.name for a in again.lineage()] == ["reinforce", "ppo", "grpo", "dapo", "dapo+user"]
    assert again.lineage() == mine.lineage()


def test_union_members_are_tagged_even_beside_none() -> None:
    assert to_plain(GRPO)["clip"] == {"type": "Clip", "low": 0.2, "high": 0.2, "cap": None}
    assert to_plain(DAPO)["shape"][0] == {"type": "Signed"}
    assert "type" not in to_plain(Optimizer())


RUN = Run(recipe="r", stages=(Supervised(name="sft", style="answer"), Reinforce(name="rl")))


def broken(path: str, value: object) -> dict[str, object]:
    """RUN as plain data with one place overwritten."""
    data = to_plain(RUN)
    *walk, last = path.split(".")
    node = data
    for part in walk:
        node = node[int(part)] if isinstance(node, list) else node[part]
    node[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "stages.1.algorithm.clip.hihg",
            0.3,
            r"Run\.stages\.1\.algorithm\.clip\.hihg: Clip has no such field; did you mean 'high'",
        ),
        ("stages.1.prompts", "many", r"Run\.stages\.1\.prompts: 'many' is not valid here; expected a whole number"),
        ("stages.1.prompts", True, "expected a whole number"),
        ("stages.1.prompts", 3.0, "expected a whole number"),
        ("stages.1.algorithm.ratio", "tokn", r"ratio=tokn: did you mean 'token'"),
        ("stages.1.algorithm.clip", {"low": 0.2}, "needs a 'type' key"),
        ("stages.1.algorithm.clip", {"type": "Clop"}, "did you mean 'Clip'"),
        ("stages.1.type", "Reinforced", "did you mean 'Reinforce'"),
        ("model.arch", None, "expected one of qwen3"),
        ("seeed", 3, "did you mean 'seed'"),
        ("env.args", [1], "expected an object of named values"),
        ("stages", 3, "expected a list of"),
        ("stages.1.optimizer.lr", {"float": "abc"}, r"optimizer\.lr: \{.float.: .abc.\} is not valid here"),
        pytest.param("stages.1.optimizer.lr", 10**400, r"lr: 10+\.\.\. is not valid here; expected a", id="too large"),
        ("stages.1.algorithm.clip", {"type": ["Clip"]}, r"clip\.type=\[.Clip.\]: "),
    ],
)
def test_refusals_name_path_value_and_what_is_valid(path: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_plain(Run, broken(path, value))


def test_a_missing_field_is_named_and_defaults_fill_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"Run\.stages is missing"):
        from_plain(Run, {"recipe": "r"})
    sparse = from_plain(Run, {"recipe": "r", "stages": [{"type": "Reinforce", "name": "rl"}]})
    assert sparse == Run(recipe="r", stages=(Reinforce(name="rl"),))


def test_whole_numbers_become_floats_where_floats_are_declared() -> None:
    lr = from_plain(Optimizer, {"lr": 1}).lr
    assert lr == 1.0 and type(lr) is float


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Painted:
    colour: Colour
    anything: Any = None


@dataclass(frozen=True)
class Bad:
    type: str | Painted = "x"


def test_enums_and_values_that_cannot_be_stored() -> None:
    assert from_plain(Painted, to_plain(Painted(Colour.RED))).colour is Colour.RED
    for anything in ({"float": 0.5}, {"float": "word"}, [{"float": "1"}], math.inf):
        assert from_plain(Painted, to_plain(Painted(Colour.RED, anything))).anything == anything
    with pytest.raises(ConfigError, match="called 'type'"):
        to_plain(Bad())
    with pytest.raises(ConfigError, match="cannot be written"):
        to_plain(replace(Painted(Colour.RED), anything=object()))
