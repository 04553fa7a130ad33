"""api.overrides: one line changes one thing, the lineage says so, and a wrong line says what would be right."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.env import Reward
from posttrain.config.overrides import address, apply, surface
from posttrain.config.run import Env, Reinforce, Run, Supervised
from posttrain.ladder import algorithm as A
from posttrain.ladder.pieces.baseline import Others, Value
from posttrain.ladder.pieces.correction import Mask
from posttrain.ladder.pieces.pull import KL, SequenceL2
from posttrain.ladder.pieces.shape import Overlong, Signed
from posttrain.ladder.pieces.token_choice import EntropyBonus
from posttrain.ladder.pieces.trust_region import Clip
from posttrain.ladder.policy_rows import DAPO, GRPO, LADDER, RLOO
from posttrain.recipe.recipes import recipe
from posttrain.system.errors import ConfigError

RUN = Run(
    recipe="test",
    env=Env(name="arithmetic", args={"terms": 3}, heldout=64),
    stages=(
        Supervised(name="pretrain", style="document"),
        Supervised(name="sft", style="answer"),
        Reinforce(name="rl"),
    ),
)


def rl(*overrides: str, run: Run = RUN) -> Reinforce:
    stage = apply(run, overrides).stage("rl")
    assert isinstance(stage, Reinforce)
    return stage


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        apply(RUN, overrides)
    return str(error.value)


def test_nothing_asked_nothing_changed() -> None:
    assert apply(RUN, []) == RUN


def test_stage_paths_and_keys_of_one_stage() -> None:
    assert rl("rl.prompts=64").prompts == rl("prompts=64").prompts == 64
    assert rl("rl.steps=50").steps == 50
    assert rl("sampling.temperature=0.8").sampling.temperature == 0.8
    assert rl("rl.wall_time=none").wall_time is None and rl("rl.wall_time=90").wall_time == 90.0
    changed = apply(
        RUN, ["seed=3", "evaluation.greedy=false", "trackers=tensorboard,wandb", "sft.wrong=0.5", "threads=2"]
    )
    assert (changed.seed, changed.evaluation.greedy, changed.trackers, changed.threads) == (
        3,
        False,
        ("tensorboard", "wandb"),
        2,
    )
    assert changed.stage("sft").wrong == 0.5 and RUN.seed == 0


def test_a_key_of_several_stages_lists_the_full_paths() -> None:
    assert (
        refused("steps=50")
        == "steps=50: 3 stages have 'steps'; say which: pretrain.steps=50, sft.steps=50, rl.steps=50"
    )
    assert "pretrain.style=cot, sft.style=cot" in refused("style=cot")
    assert "rl.optimizer.lr=1" in refused("optimizer.lr=1")


def test_one_word_for_a_branch() -> None:
    assert apply(RUN, ["model=/some/path"]).model.path == "/some/path"
    assert apply(RUN, ["model=none"]).model.path is None
    assert apply(RUN, ["model=P", "model.device=cuda"]).model.device == "cuda"
    env = apply(RUN, ["env=prompts", "env.prompts=data.jsonl", "env.rewards=my.py:score,other.py:f"]).env
    assert env == Env(
        name="prompts",
        prompts="data.jsonl",
        rewards=(Reward(function="my.py:score"), Reward(function="other.py:f")),
        heldout=64,
    )
    assert apply(RUN, ["env.rewards=my.py:score", "env.rewards.0.weight=0.5"]).env.rewards == (
        Reward(function="my.py:score", weight=0.5),
    )


def test_environment_arguments_take_any_name_and_the_plainest_type() -> None:
    args = apply(
        RUN, ["env.args.terms=4", "env.args.p=0.5", "env.args.fast=true", "env.args.op=+", "env.args.n=1e3"]
    ).env.args
    assert args == {"terms": 4, "p": 0.5, "fast": True, "op": "+", "n": 1000}
    assert [type(v) for v in args.values()] == [int, float, bool, str, int]


def test_algorithm_by_name_is_the_ladder_entry_itself() -> None:
    assert rl("algorithm=dapo").algorithm is DAPO
    assert rl("rl.algorithm=rloo").algorithm is RLOO
    assert "did you mean 'dapo'" in refused("algorithm=dapoo")


def test_changes_inside_become_one_last_patch_whatever_the_order() -> None:
    words = ["clip.high=0.3", "algorithm=dapo", "algorithm.aggregate=token_mean", "rl.filter=none"]
    a = rl(*words).algorithm
    assert a == rl(*reversed(words)).algorithm
    assert (a.name, a.paper, a.parent) == ("dapo+user", "your patch", DAPO)
    assert A.differences(DAPO, a) == {
        "clip": (Clip(low=0.2, high=0.28), Clip(low=0.2, high=0.3)),
        "aggregate": ("prompt_mean", "token_mean"),
        "filter": ("mixed", None),
    }


def test_pieces() -> None:
    assert rl("clip=none").algorithm.clip is None
    assert rl("baseline=others").algorithm.baseline == Others()
    assert rl("algorithm=reinforce", "pull=kl", "pull.coef=0.1").algorithm.pull == KL(coef=0.1)
    assert rl("pull=sequence_l2").algorithm.pull == SequenceL2()
    assert rl("shape=signed,overlong").algorithm.shape == (Signed(), Overlong())
    assert rl("algorithm=dapo", "shape.overlong.cache=0.5").algorithm.shape == (Signed(), Overlong(cache=0.5))
    assert rl("algorithm=dapo", "shape=none").algorithm.shape == ()
    assert rl("algorithm=ppo", "baseline.clip=none").algorithm.baseline == Value(clip=None)
    assert rl("pull.estimator=k1", "pull.placement=reward").algorithm.pull == KL(estimator="k1", placement="reward")
    assert rl("entropy=entropybonus").algorithm.entropy == EntropyBonus()
    assert rl("correction=mask", "correction.mask.level=sequence").algorithm.correction == (Mask(level="sequence"),)


def test_the_best_of_all_siblings_is_refused_only_where_it_tells_them_not_apart() -> None:
    assert rl("algorithm=pkpo", "siblings=4").siblings == 4
    assert "needs as many siblings" in refused("algorithm=pkpo", "siblings=3")
    assert "the same for all siblings" in refused("algorithm=pass_at_k", "siblings=4")


def test_a_change_that_changes_nothing_is_no_patch() -> None:
    assert rl("clip.high=0.2").algorithm is GRPO
    assert rl("clip.high=0.2", "pull=none").algorithm == A.patch(GRPO, "grpo+user", "your patch", pull=None)


def test_patching_a_patched_run_keeps_one_last_patch() -> None:
    once = apply(RUN, ["clip.high=0.3"])
    twice = rl("pull=none", run=once).algorithm
    assert twice.parent is GRPO and set(A.differences(GRPO, twice)) == {"clip", "pull"}
    assert rl("clip.high=0.2", run=once).algorithm is GRPO


def test_everything_is_checked_once_together() -> None:
    assert rl("minibatches=3", "prompts=30").minibatches == 3
    assert "divisor" in refused("minibatches=3")
    asleep = apply(RUN, ["engine.sleep=true"])
    awake = apply(asleep, ["rl.staleness=1", "engine.sleep=false"])
    assert awake == apply(RUN, ["rl.staleness=1"]), "the new stage is valid with the new engine, and not with the old"
    assert apply(awake, ["engine.sleep=true", "rl.staleness=0"]) == asleep
    assert "anchor=behaviour" in refused("anchor=behaviour", "correction=truncate")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts", "'prompts' is not an override: write key=value"),
        ("promts=4", "promts=4: no such setting; did you mean rl.prompts, env.prompts?"),
        ("rl.promts=4", "rl.promts: Reinforce has no such setting; did you mean 'prompts'?"),
        ("temperature=1", "did you mean rl.sampling.temperature?"),
        ("lr=1", "did you mean pretrain.optimizer.lr, sft.optimizer.lr, rl.optimizer.lr?"),
        ("xyzzy=1", "settings begin with one of"),
        ("prompts=many", "rl.prompts=many: expected a whole number"),
        ("prompts=3.5", "rl.prompts=3.5: expected a whole number"),
        (
            "prompts=rows.jsonl",
            "rl.prompts=rows.jsonl: expected a whole number. Rows of yours are env.prompts=rows.jsonl",
        ),
        ("evaluation.greedy=yes", "evaluation.greedy=yes: expected true or false"),
        ("rl.optimizer.lr=nan", "rl.optimizer.lr=nan: expected a number"),
        ("ratio=tokn", "rl.algorithm.ratio=tokn: did you mean 'token'?"),
        ("filter=mxed", "did you mean 'mixed'? (valid: mixed, none)"),
        ("clip=clop", "rl.algorithm.clip=clop: did you mean 'clip'? (valid: none, clip, cap,"),
        ("baseline=none", "use one of zero, togo, ema, groupmean,"),
        ("clip.hihg=1", "rl.algorithm.clip.hihg: Clip has no such setting; did you mean 'high'?"),
        ("baseline.decay=1", "GroupMean has no such setting"),
        ("algorithm.name=x", "rl.algorithm.name: an algorithm has no such choice"),
        ("sampling=greedy", "rl.sampling is a group of settings; set one of rl.sampling.temperature"),
        ("seed.x=1", "seed.x: seed has no parts; it is a whole number"),
        ("rl.name=x", "the recipe decides this"),
        ("recipe=x", "the recipe decides this"),
        ("stages=x", "address a stage by its name"),
        ("env.rewards.0.weight=1", "env.rewards.0: no such element; env.rewards is empty"),
        ("trackers=tensorbord", "did you mean 'tensorboard'?"),
        ("model.arch=qwen2", "model.arch=qwen2: did you mean 'qwen3'?"),
        ("rl=x", "rl is a group of settings"),
        ("sampling.top_p=0", "sampling.top_p=0.0: must lie in (0, 1]"),
    ],
)
def test_refusals(override: str, message: str) -> None:
    assert message in refused(override)


def test_a_setting_of_another_choice_says_whose_it_is() -> None:
    said = "engine.sleep: VLLM has no such setting; engine=embedded has it: set that too, or leave this out"
    assert said in refused("engine=vllm", "engine.sleep=true")


def test_parts_of_nothing_say_how_to_get_it() -> None:
    assert "rl.algorithm.pull is none; choose it first, for example rl.algorithm.pull=kl" in refused(
        "algorithm=dapo", "pull.coef=1"
    )


def test_one_place_given_twice_is_refused_unless_equal() -> None:
    assert refused("prompts=64", "rl.prompts=32") == "rl.prompts is given twice, as '64' and as '32'; keep one"
    assert rl("prompts=64", "rl.prompts=64").prompts == 64


def test_numbers_as_people_write_them() -> None:
    assert rl("steps=1", run=Run(recipe="r", stages=(Reinforce(name="rl"),))).steps == 1
    assert rl("rl.micro_tokens=1e4").micro_tokens == 10000
    assert rl("rl.optimizer.lr=3e-4").optimizer.lr == 3e-4
    assert rl("rl.optimizer.clip=inf").optimizer.clip == math.inf
    assert rl("sampling.stop_ids=1,2").sampling.stop_ids == (1, 2) and rl("sampling.stop_ids=").sampling.stop_ids == ()


def test_the_surface_is_addressable() -> None:
    paths = [path for path, _ in surface(RUN)]
    for path in (
        "rl.algorithm.clip.high",
        "rl.algorithm.baseline.gae_lambda",
        "env.args.NAME",
        "rl.algorithm.shape.overlong.cache",
        "model",
    ):
        assert path in paths
    for path in paths:
        assert ".".join(address(RUN, path)) == path


@settings(max_examples=60)
@given(st.text(max_size=30), st.sampled_from([path for path, _ in surface(RUN)]))
def test_no_word_ever_raises_anything_but_a_config_error(word: str, path: str) -> None:
    for algorithm in ("grpo", "ppo"):
        try:
            apply(RUN, [f"algorithm={algorithm}", f"{path}={word}"])
        except ConfigError as error:
            assert str(error)


@settings(max_examples=60)
@given(st.sampled_from(sorted(LADDER)), st.floats(0, 1), st.integers(1, 500))
def test_what_is_asked_for_is_what_is_there(name: str, high: float, steps: int) -> None:
    words = [
        f"algorithm={name}",
        f"rl.steps={steps}",
        *([f"clip.high={high!r}"] if LADDER[name].clip == Clip() else []),
    ]
    words += ["rl.reference=teacher"] if LADDER[name].taught else []
    words += ["rl.optimizer.ema=0.95"] if LADDER[name].own_teacher else []
    stage = rl(*words)
    assert stage.steps == steps and stage.algorithm.lineage()[0].name == "reinforce"
    if LADDER[name].clip == Clip():
        assert stage.algorithm.clip == Clip(low=0.2, high=high)


def test_a_model_at_a_path_brings_its_own_context() -> None:
    """A recipe's context is that of the model it would build; only the user's own word bounds one that exists."""
    run = recipe("arithmetic")
    assert run.model.context == 128
    for words, wanted in (
        (["model=somewhere"], None),
        (["model.path=somewhere"], None),
        (["model=somewhere", "model.context=32"], 32),
        (["model.context=32", "model.path=somewhere"], 32),
        (["model.context=32"], 32),
        (["model=none"], 128),
    ):
        assert apply(run, words).model.context == wanted, words
