"""Users' prompts: every way a file can be odd but fine, or wrong, and a split that cannot leak."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posttrain.build.build_environments import check_environment, make_environment
from posttrain.build.build_run import make_policy
from posttrain.config import overrides
from posttrain.config.env import Reward
from posttrain.config.run import Env, Reinforce
from posttrain.core.verdict import Judged, Verdict
from posttrain.environment.make import environment
from posttrain.environment.rows.own_prompts import PromptsEnv
from posttrain.environment.rows.row_reader import PromptRow
from posttrain.environment.scripted_policy import judged
from posttrain.recipe.recipes import recipe
from posttrain.system.errors import ConfigError, DataError
from tests.environment.environment_parts import read

EXACT = (Reward(function="exact"),)


def write(path: Path, rows: list[dict[str, Any]], end: str = "\n") -> str:
    path.write_bytes(end.join(json.dumps(r) for r in rows).encode())
    return str(path)


def env(path: str, **config: Any) -> PromptsEnv:
    built = environment(Env(name="prompts", prompts=path, rewards=config.pop("rewards", EXACT), **config), 0)
    assert isinstance(built, PromptsEnv)
    return built


def test_rows_become_tasks_with_answers_ids_and_columns(tmp_path: Path) -> None:
    rows = [{"id": 7, "prompt": "a", "answer": "1", "level": 2, "tags": ["x"]}, {"prompt": "b", "answer": 3}]
    first, second = (r.task for r in read(write(tmp_path / "p.jsonl", rows)))
    assert (first.id, first.prompt, first.answer, dict(first.info)) == ("7", "a", "1", {"level": 2, "tags": ["x"]})
    assert second.id and second.answer == 3 and not second.info


def test_made_ids_do_not_depend_on_the_order_and_tell_duplicates_apart(tmp_path: Path) -> None:
    rows = [{"prompt": p} for p in ("a", "b", "a")]
    forward = [r.task.id for r in read(write(tmp_path / "p.jsonl", rows))]
    backward = [r.task.id for r in read(write(tmp_path / "q.jsonl", rows[::-1]))]
    assert len(set(forward)) == 3 and set(forward) == set(backward) and forward[2] == forward[0] + "-2"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt":"a"}\n{"prompt":"b"}',
        b'{"prompt":"a"}\n{"prompt":"b"}\n',
        b'{"prompt":"a"}\r\n{"prompt":"b"}\r\n',
        b'\xef\xbb\xbf{"prompt":"a"}\n\n   \n{"prompt":"b"}\n\n',
        b'[{"prompt":"a"},\n {"prompt":"b"}]',
    ],
)
def test_line_ends_marks_and_blank_lines_are_fine(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(raw)
    assert [r.task.prompt for r in read(str(tmp_path / "p.jsonl"))] == ["a", "b"]


def test_emoji_and_line_separators_inside_a_string_survive(tmp_path: Path) -> None:
    text = "\U0001f9ee caf\u00e9 \u2028 next \u0085"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read(str(tmp_path / "p.jsonl"))[0].task.prompt == text


BAD = [
    ([b'{"prompt":"a"}', b'{"prompt":'], r"p.jsonl:2: not JSON: .* column 11"),
    ([b'{"prompt":"a"}', b"", b'{"prompt":"\xff"}'], r"p.jsonl:3: byte 12 \(0xff\) is not UTF-8"),
    ([b'"text"'], r"p.jsonl:1: a row is an object .* this is str"),
    ([b'{"promt":"a"}'], r"p.jsonl:1: no column 'prompt' .* did you mean 'promt'"),
    ([b"{}"], "the row is empty"),
    ([b'{"prompt":"  "}'], "p.jsonl:1: 'prompt' is empty"),
    ([b'{"prompt":3}'], "'prompt' is a number, wanted text"),
    ([b'{"prompt":null}'], "no column 'prompt'"),
    ([b'{"prompt":[]}'], "no message for the policy"),
    ([b'{"prompt":["a"]}'], "message 1 of 'prompt' is text"),
    ([b'{"prompt":[{"role":"user"}]}'], "message 1 of 'prompt': 'content' is missing"),
    ([b'{"prompt":[{"role":"user","content":[1]}]}'], "message 1 of 'prompt': content part 1 is int"),
    ([b'{"prompt":[{"role":"user","content":[]}]}'], "'content' is empty a list, wanted text or a list of parts"),
    ([b'{"prompt":[{"role":"user","content":[{"type":"text","txt":"a"}]}]}'], "has 'txt'.*did you mean 'text'"),
    (
        [b'{"prompt":[{"role":"user","content":[{"type":"image"}]}]}'],
        "p.jsonl:1: message 1 of 'prompt': .*'image' needs a media_type",
    ),
    ([b'{"prompt":[{"role":"user","content":[{"type":"text","text":"\\ud800"}]}]}'], "half of a surrogate pair"),
    ([b'{"prompt":[{"role":"user","content":"a","tool_calls":[1]}]}'], "has 'tool_calls'"),
    ([b'{"prompt":[{"role":"assistant","content":"a"}]}'], "no message for the policy"),
    ([b'{"prompt":"a","answer":{"x":1}}'], "'answer' is an object"),
    ([b'{"prompt":"a","id":1.5}'], "'id' is a number, wanted non-empty text or a whole number"),
    ([b'{"prompt":"a","id":""}'], "'id' is empty text"),
    ([b'{"prompt":"a","completion":5}'], "'completion' is a number"),
    ([b'{"prompt":"\\ud800"}'], "half of a surrogate pair"),
    (
        [b'{"prompt":"a","id":"x"}', b'{"prompt":"b","id":"y"}', b'{"prompt":"c","id":"x"}'],
        r"p.jsonl:3: id 'x' was already given at .*p.jsonl:1",
    ),
    ([b'{"prompt":"a"}', b'{"prompt":"b","answer":NaN}'], r"p.jsonl:2: 'answer' is nan, which nothing equals"),
    ([b'{"prompt":"b","answer":[1, -Infinity]}'], r"p.jsonl:1: 'answer' is -inf"),
    ([b'{"prompt":"b","answer":1e999}'], r"p.jsonl:1: 'answer' is inf"),
    ([b'{"prompt":"a","answer":"1","prompt":"b"}'], r"p.jsonl:1: key 'prompt' is given twice"),
    (
        [b'{"prompt":"a"}', b'{"prompt":[{"role":"user","content":"a","role":"system"}]}'],
        r"p.jsonl:2: key 'role' is given twice",
    ),
    ([b'[{"prompt":"a","x":{"y":1,"y":2}}]'], r"p.jsonl.*: key 'y' is given twice"),
    (
        [b'{"prompt":[{"role":"usr","content":"a"}]}'],
        r"p.jsonl:1: message 1 of 'prompt' has role 'usr'.*did you mean 'user'",
    ),
    (
        [b'{"prompt":"a","answer":"1"}', b'{"prompt":"b","answer":"1"}', b'{"prompt":"a","answer":"2"}'],
        r"p.jsonl:3: 'answer' is '2', and the same prompt has '1' at .*p.jsonl:1",
    ),
    ([], "has no rows"),
    ([b"", b"  "], "has no rows"),
    ([b"[" * 100_000], "p.jsonl.*JSON"),
    (["a".encode("utf-16")], "UTF-16"),
]


@pytest.mark.parametrize(("lines", "message"), BAD)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, lines: list[bytes], message: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message):
        read(str(tmp_path / "p.jsonl"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(str(tmp_path / "none.jsonl"))
    with pytest.raises(DataError, match="no data set saved"):
        read(str(tmp_path))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3),
    max_leaves=6,
)
rows_strategy = st.lists(
    st.dictionaries(st.sampled_from(["prompt", "messages", "id", "answer", "completion", "x"]), json_values), max_size=5
)


@given(rows_strategy)
def test_any_json_rows_are_read_or_refused_with_their_place(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    write(path, rows)
    try:
        tasks = [r.task for r in read(str(path))]
    except DataError as error:
        assert "any.jsonl" in str(error)
        return
    assert len(tasks) == len(rows) == len({t.id for t in tasks})


@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.jsonl"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"bytes.jsonl"):
        read(str(path))


@given(
    st.lists(st.text(alphabet="abcd", min_size=1, max_size=3), min_size=12, max_size=60),
    st.integers(1, 20),
    st.randoms(),
)
def test_equal_prompts_stay_together_and_the_split_ignores_the_order(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], count: int, random: Any
) -> None:
    distinct = set(prompts)
    if len(distinct) < 2:
        return
    path = tmp_path_factory.getbasetemp() / "split.jsonl"
    sides = []
    for _ in range(2):
        e = env(write(path, [{"prompt": p, "answer": "1"} for p in prompts]), heldout=count)
        held, train = {t.prompt for t in e.heldout}, {e.train.task(i).prompt for i in range(e.train.count or 0)}
        assert not held & train and held | train == distinct
        assert len(held) == min(count, max(1, len(distinct) // 5))
        assert len(e.heldout) + (e.train.count or 0) == len(prompts)
        sides.append([t.prompt for t in e.heldout])
        random.shuffle(prompts)
    assert sides[0] == sides[1]


def test_one_prompt_cannot_be_split_but_may_be_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1"}] * 3)
    with pytest.raises(ConfigError, match=r"env\.heldout=0"):
        _ = env(path).heldout
    assert env(path, heldout=0).train.count == 3 and env(path, heldout=0).heldout == ()


def test_a_mixed_set_whose_prompts_are_all_held_out_is_refused(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{i}", "answer": "1"} for i in range(20)]
    whole = write(tmp_path / "p.jsonl", rows)
    held = [{"prompt": t.prompt, "answer": "1"} for t in env(whole, heldout=4).heldout]
    mixed = env(whole, heldout=4, mix=((write(tmp_path / "few.jsonl", held[:2]), 0.1),))
    with pytest.raises(ConfigError, match=r"few.jsonl:1: all prompts of this data set are held out"):
        _ = mixed.train


def test_rows_of_mixed_sets_have_ids_of_their_own(tmp_path: Path) -> None:
    one, two = (
        write(tmp_path / f"{s}.jsonl", [{"id": i, "prompt": f"{s} {i}", "completion": f"{s} {i}"} for i in ids])
        for s, ids in (("one", ("x", "x@1", "y")), ("two", ("x", "y", "y@1")))
    )
    mixed = env(one, heldout=0, rewards=(), mix=((two, 1.0),))
    assert all(mixed.completion(r.task) == r.task.prompt for r in mixed.rows)


def test_a_zero_and_an_answer_of_several_lines_are_in_the_alphabet(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 0}, {"prompt": "b", "answer": ["x\ny"]}]
    assert {"0", "\n", "x"} <= set(env(write(tmp_path / "p.jsonl", rows), heldout=0).alphabet)


def test_messages_and_their_last_assistant_turn(tmp_path: Path) -> None:
    user, said = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    path = write(
        tmp_path / "p.jsonl",
        [{"messages": [user, said], "answer": "a"}, {"prompt": [user], "completion": [said], "answer": "a"}],
    )
    one, two = read(path)
    assert (
        one.task.prompt == two.task.prompt == (user,) and one.completion == two.completion == "a" and one.key == two.key
    )


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        [{"q": f"{i}", "gold": str(i), "answer": "no", "prompt": 3, "key": f"k{i}", "sft": "x"} for i in range(10)],
    )
    args = {"prompt_column": "q", "answer_column": "gold", "id_column": "key", "completion_column": "sft"}
    e = env(path, args=args)
    task = e.train.task(0)
    assert task.id == f"k{task.answer}" and task.info["gold"] == task.answer and task.info["answer"] == "no"
    assert e.demonstrate(task, "completion", np.random.default_rng(0), 0.0) == (task.prompt, "x")
    with pytest.raises(ConfigError, match="did you mean 'answer_column'"):
        env(path, args={"answer_colum": "gold"})


class Counted(tuple[PromptRow, ...]):
    """Rows that count how often somebody goes through them."""

    times = 0

    def __iter__(self) -> Iterator[PromptRow]:
        Counted.times += 1
        return super().__iter__()


def test_what_it_can_do_is_said_for_each_task_without_reading_all_rows_for_it(tmp_path: Path) -> None:
    """`abilities` is asked for once for each task: a file of n rows took time by n^2 before a run began."""
    built = env(write(tmp_path / "p.jsonl", [{"prompt": str(i), "answer": str(i)} for i in range(50)]))
    counted = replace(built, rows=Counted(built.rows))
    assert counted.abilities.rows == built.rows and counted.abilities.tools is None
    before = Counted.times
    for _ in counted.heldout:
        assert counted.abilities.tools is None
    assert Counted.times <= before + 2  # once to know what is held out


def test_completions_are_imitated_and_never_shown_to_rewards(tmp_path: Path) -> None:
    path = write(
        tmp_path / "p.jsonl",
        [{"prompt": f"{i}", "answer": "1", **({"completion": "c"} if i else {})} for i in range(4)],
    )
    e = env(path, heldout=0)
    assert e.styles == ("completion",) and "completion" not in e.train.task(1).info
    with pytest.raises(DataError, match="has no completion to imitate"):
        e.demonstrate(e.train.task(0), "completion", np.random.default_rng(0), 0.0)
    with pytest.raises(ConfigError, match="set wrong=0"):
        e.demonstrate(e.train.task(1), "completion", np.random.default_rng(0), 0.5)
    bare = env(write(tmp_path / "q.jsonl", [{"prompt": "a", "answer": "1"}]), heldout=0)
    with pytest.raises(ConfigError, match="no column 'completion'"):
        bare.demonstrate(bare.train.task(0), "completion", np.random.default_rng(0), 0.0)


def test_only_the_users_rewards_judge(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def long(prompts, completions, level, **columns):\n    return [level[0] * len(completions[0])]\n"
    )
    path = write(tmp_path / "p.jsonl", [{"prompt": f"{i}", "answer": "no", "level": 2} for i in range(6)])
    e = env(path, rewards=(Reward(function=f"{tmp_path}/r.py:long", weight=0.5), *EXACT))
    assert asyncio.run(judged(e, e.heldout[0], ["yes"])) == (
        Judged("long", 0.5, Verdict.value(6.0)),
        Judged("exact", 1.0, Verdict.value(0.0, "wrong", "said 'yes', wanted 'no'")),
    )
    assert set("012345no") == set(e.alphabet)


UNREADABLE = [
    *(("exact", answer) for answer in ([], ["a", None], True, "", [["a"]])),
    *(("contains", answer) for answer in (False, "  ", ["a", ""])),
    *(("last_integer", answer) for answer in ("twelve", "12.5", 0.5, ["3", "x"])),
]


@pytest.mark.parametrize(("reward", "answer"), UNREADABLE)
def test_an_answer_that_no_response_or_every_response_equals_is_refused(
    tmp_path: Path, reward: str, answer: Any
) -> None:
    rows = [{"prompt": "a", "answer": "3"}, {"prompt": "b", "answer": answer}]
    with pytest.raises(DataError, match=r"p\.jsonl:2: the answer .* of task"):
        env(write(tmp_path / "p.jsonl", rows), rewards=(Reward(function=reward),))


async def test_an_answer_is_read_as_a_response_would_give_it(tmp_path: Path) -> None:
    """Tables make floats of integers; a list has several right answers; verl keeps the answer in an object."""
    rows = [
        {"prompt": "a", "answer": 12.0},
        {"prompt": "b", "answer": ["four", 4.0]},
        {"prompt": "c", "answer": 12.5},
    ]
    built: Any = env(write(tmp_path / "p.jsonl", rows), heldout=0)
    for row, right in zip(built.rows, ("12", "4", "12.5"), strict=True):
        assert (await judged(built, row.task, [right]))[0].verdict.score == 1.0
        assert (await judged(built, row.task, built.gold(row.task)))[0].verdict.score == 1.0

    nested = [{"prompt": "a", "reward_model": {"ground_truth": "3", "style": "rule"}}, {"prompt": "b", "a.b": "4"}]
    for row, name in zip(nested, ("reward_model.ground_truth", "a.b"), strict=True):
        built = env(write(tmp_path / "p.jsonl", [row]), heldout=0, args={"answer_column": name})
        assert built.rows[0].task.answer in ("3", "4")
    with pytest.raises(DataError, match=r"answer_column=reward_model\.ground_truth or reward_model\.style"):
        env(write(tmp_path / "p.jsonl", nested[:1]), args={"answer_column": "reward_model"})


@pytest.mark.parametrize(
    ("name", "raw", "says"),
    [
        ("p.jsonl.gz", gzip.compress(b"{}", mtime=0), "this is gzip: unpack it"),
        ("p.csv", b"prompt,answer\na,3\n", "this is CSV"),
        ("p.tsv", b"prompt\tanswer\na\t3\n", "this is TSV"),
        ("p.xlsx", b"PK\x03\x04" + bytes(20), "Excel"),
        ("p.data", b"PAR1" + bytes(20), "parquet: let its name end"),
        ("p.jsonl.zst", b"\x28\xb5\x2f\xfd" + bytes(20), "this is zstd"),
    ],
    ids=["gzip", "csv", "tsv", "xlsx", "parquet", "zstd"],  # packed bytes hold the time, and differ by process
)
def test_a_file_of_another_format_is_called_by_its_name(tmp_path: Path, name: str, raw: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(DataError, match=says):
        env(str(tmp_path / name))
    if not name.endswith(".data"):
        with pytest.raises(DataError, match="no such file"):
            env(name)


def test_what_samples_prompts_needs_rewards_and_the_columns_they_read(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b"}])
    bare: Any = env(path, rewards=())
    with pytest.raises(ConfigError, match=r"rl needs verdicts .* needs env.rewards. Add env.rewards=mine.py:"):
        check_environment(bare, [Reinforce(name="rl")], Env())
    for function in ("exact", "math"):
        with pytest.raises(ConfigError, match=rf"p.jsonl:2: reward '{function}' requires column 'answer'"):
            env(path, rewards=(Reward(function=function),))


def test_one_answer_written_in_two_ways_is_one(tmp_path: Path) -> None:
    """Repeated rows are fine, and so are a number and its text, and a row without an answer beside one with it."""
    rows = [{"prompt": "a", "answer": a} for a in ("1", 1, "1", None)] + [
        {"prompt": "b", "answer": 1.0},
        {"prompt": "b", "answer": 1},
    ]
    assert len(read(write(tmp_path / "p.jsonl", rows))) == 6


IMAGE = {"type": "image", "media_type": "image/png", "path": "cat.png"}
SMALL = (
    "model.hidden=32",
    "model.layers=1",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=48",
    "model.context=32",
    "sampling.max_tokens=8",
)


@pytest.mark.parametrize(
    ("row", "says", "words"),
    [
        (
            {"prompt": "x" * 32, "answer": "1"},
            r"p.jsonl:7: task '\w+': the prompt has 32 tokens, and a context of 32",
            (),
        ),
        (
            {"prompt": "x" * 20, "answer": "1", "completion": "y" * 20},
            r"p.jsonl:7: the prompt and its completion have 41 tokens",
            (),
        ),
        ({"prompt": "x" * 20, "answer": "1", "completion": "y" * 20}, "", ("sft=none",)),
        ({"prompt": [{"role": "user", "content": "a"}], "answer": "1"}, "", ("sft=none",)),
        (
            {"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}], "answer": "1"},
            (
                r"p.jsonl:7: .*message 1: content has a part of type 'image' \(image/png, cat.png\), and this model"
                r" reads text alone"
            ),
            (),
        ),
    ],
)
def test_a_row_that_cannot_be_asked_is_named_before_anything_trains(
    tmp_path: Path, row: dict[str, Any], says: str, words: tuple[str, ...]
) -> None:
    rows = [{"prompt": f"q{i}", "answer": "1", "completion": "1"} for i in range(6)]
    path = write(tmp_path / "p.jsonl", [*rows, row])
    run = overrides.apply(recipe("verifiable"), [f"env.prompts={path}", *SMALL, *words])
    run = replace(run, env=replace(run.env, rewards=EXACT))
    if not says:
        assert make_policy(run, make_environment(run)).context == 32
        return
    with pytest.raises(DataError, match=says):
        make_policy(run, make_environment(run))


def test_data_sets_saved_in_a_folder_or_as_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": f"{i}", "level": i} for i in range(10)]
    data = datasets.Dataset.from_list(rows)
    data.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": data, "test": data.select([1])}).save_to_disk(str(tmp_path / "splits"))
    data.to_parquet(str(tmp_path / "p.parquet"))
    wanted = [r.task for r in read(write(tmp_path / "p.jsonl", rows))]
    for place in ("one", "splits", "p.parquet"):
        assert [r.task for r in read(str(tmp_path / place))] == wanted, place
    assert len(read(str(tmp_path / "splits"), PromptsEnv(split="test"))) == 1
    with pytest.raises(ConfigError, match=r"no split 'tset' .* did you mean 'test'"):
        read(str(tmp_path / "splits"), PromptsEnv(split="tset"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        read(str(tmp_path / "bad.parquet"))


def test_bad_rows_of_a_data_set_are_named_by_number(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a", "id": "x"}, {"prompt": "b", "id": "x"}]).save_to_disk(
        str(tmp_path / "d")
    )
    with pytest.raises(DataError, match=r"d row 2: id 'x' was already given at .*d row 1"):
        read(str(tmp_path / "d"))
