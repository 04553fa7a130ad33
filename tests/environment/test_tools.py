"""Tools: what the policy is told of them, what happens to what it sends, the loop, and that nothing of an episode
stays."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.config.run import Env
from posttrain.core.ports import Attempt
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Message, Stop, Task
from posttrain.environment.gallery.shop import Shop
from posttrain.environment.make import environment
from posttrain.environment.scripted_policy import ScriptedPolicy, attempt, judged
from posttrain.environment.tools.database import Database
from posttrain.environment.tools.library_tools import MOST_BYTES, Calculator, Files, KeyValue
from posttrain.environment.tools.offered import OfferedTools
from posttrain.environment.tools.tool import Toolbox, Toolboxes, ToolError, tool
from posttrain.environment.tools.tool_loop import Loop
from posttrain.system.errors import ConfigError, DataError
from posttrain.verifier.calling import Malformed, ToolCall

LIMITS = EpisodeLimits()


class Odd(Toolbox):
    """One tool of every kind of trouble."""

    def __init__(self) -> None:
        self.closed = 0
        self.calls: list[str] = []

    @tool
    def add(self, a: Annotated[int, "one number"], b: int = 1, how: Literal["up", "down"] = "up") -> int:
        """Adds two numbers."""
        self.calls.append("add")
        return a + b if how == "up" else a - b

    @tool
    async def wait(self, seconds: float) -> str:
        """Waits."""
        await asyncio.sleep(seconds)
        return "done"

    @tool
    def refuse(self) -> str:
        """Refuses."""
        raise ToolError("not today")

    @tool
    def late(self) -> str:
        """Has a time-out of its own."""
        raise TimeoutError("its own")

    @tool
    def much(self, n: int) -> str:
        """Says much."""
        return "".join(chr(ord("a") + i % 26) for i in range(n))

    def state(self) -> list[str]:
        return list(self.calls)

    async def close(self) -> None:
        self.closed += 1


async def call(box: Toolbox, name: str, /, **arguments: Any) -> tuple[str, str]:
    seen = await box.call(ToolCall(name, arguments), LIMITS)
    return seen.kind, seen.text


def test_the_schema_is_the_signature() -> None:
    schema = Odd().tools["add"].schema
    assert schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["a"],
                "properties": {
                    "a": {"type": "integer", "description": "one number"},
                    "b": {"type": "integer", "default": 1},
                    "how": {"type": "string", "enum": ["up", "down"], "default": "up"},
                },
            },
        },
    }
    assert list(Odd().tools) == ["add", "wait", "refuse", "late", "much"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"a": 2}, ("ok", "3")),
        ({"a": 2, "b": 5, "how": "down"}, ("ok", "-3")),
        ({}, ("arguments", "error: a: Field required")),
        ({"a": "2"}, ("arguments", "error: a: Input should be a valid integer")),
        ({"a": True}, ("arguments", "error: a: Input should be a valid integer")),
        ({"a": 1.5}, ("arguments", "error: a: Input should be a valid integer")),
        ({"a": 1, "c": 2}, ("arguments", "error: c: Extra inputs are not permitted")),
        ({"a": 1, "how": "left"}, ("arguments", "error: how: Input should be 'up' or 'down'")),
        ({"a": None, "b": [1], "how": {}, "x": 1}, ("arguments", "; and 1 more")),
    ],
)
async def test_arguments_are_checked_by_type(arguments: dict[str, Any], said: tuple[str, str]) -> None:
    kind, text = await call(Odd(), "add", **arguments)
    assert kind == said[0] and said[1] in text


async def test_nothing_a_policy_calls_raises() -> None:
    box = Odd()
    assert await call(box, "ad") == (
        "unknown",
        "error: no tool 'ad': did you mean 'add'? (valid: add, wait, refuse, late, much)",
    )
    assert await call(box, "refuse") == ("refused", "error: not today")
    seen = await box.call(Malformed("{", "not valid JSON"), LIMITS)
    assert (seen.kind, seen.text) == ("malformed", "error: this is no call: not valid JSON")
    seen = await box.call(ToolCall("wait", {"seconds": 30.0}), replace(LIMITS, tool_seconds=0.02))
    assert (seen.kind, seen.text) == ("timeout", "error: wait took longer than 0.02 s and was stopped")
    with pytest.raises(TimeoutError, match="its own"):
        await call(box, "late")  # the environment's fault, not the clock's


async def test_long_results_keep_their_ends_and_secrets_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = await Odd().call(ToolCall("much", {"n": 5000}), replace(LIMITS, observation=100))
    assert (
        len(seen.text) <= 100
        and seen.text.startswith("abcd")
        and seen.text.endswith("efgh")
        and "4934 characters left out" in seen.text
        and len(seen.text.replace(" ...(4934 characters left out)... ", "")) == 5000 - 4934
    )
    assert (
        await Odd().call(ToolCall("much", {"n": 5000}), replace(LIMITS, observation=20))
    ).text == "abcdefghijklmnopqrst"
    for wrong in (ToolCall("add", {5000 * "x": 1}), ToolCall(5000 * "x", {}), Malformed("{", 5000 * "x")):
        assert len((await Odd().call(wrong, replace(LIMITS, observation=100))).text) <= 100
    monkeypatch.setenv("JUDGE_API_KEY", "abcdefghijkl")
    assert (await Odd().call(ToolCall("much", {"n": 14}), LIMITS)).text == "[JUDGE_API_KEY]mn"


def test_a_tool_that_cannot_be_told_is_refused() -> None:
    class Mute(Toolbox):
        @tool
        def f(self, a: int) -> str:
            return ""

    class Untyped(Toolbox):
        @tool
        def f(self, a) -> str:  # type: ignore[no-untyped-def]
            """F."""
            return ""

    class Starred(Toolbox):
        @tool
        def f(self, *a: int) -> str:
            """F."""
            return ""

    with pytest.raises(ConfigError, match="'f' of Mute has no docstring"):
        _ = Mute().tools
    for box in (Untyped(), Starred()):
        with pytest.raises(ConfigError, match="parameter 'a' needs a type, and to be given by name"):
            _ = box.tools
    with pytest.raises(ConfigError, match="two tools are called 'add'"):
        Toolboxes([Odd(), Odd()])


# --- the loop ---------------------------------------------------------------------------------------------------------


@dataclass
class Play:
    """One scripted episode of a loop."""

    stop: Stop
    talk: ScriptedPolicy
    box: Odd
    loop: Loop = field(repr=False)


async def played(
    turns: Sequence[str], *, prompt: Any = "go", most: int = 4, limits: EpisodeLimits = LIMITS, stop: Any = Stop.SAID
) -> Play:
    box, talk, loop = Odd(), ScriptedPolicy(turns, stop), Loop(limits, most)
    async with box:
        end = await loop.converse(talk, prompt, box)
    return Play(end, talk, box, loop)


async def test_the_loop_in_text() -> None:
    p = await played(["[add(a=1),add(a=2,b=2)]", "[refuse()]", "5"])
    assert (p.stop, p.talk.seen, p.talk.said[-1]) == (Stop.SAID, ["go", "[2][4]", "[error: not today]"], "5")
    assert p.talk.state == ["add", "add"] and p.box.closed == 1 and p.talk.tools == ()
    gauges = p.loop.gauges()
    assert (gauges["tools/ok"].mean, gauges["tools/refused"].mean) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert gauges["tools/seconds/add"].count == 2 and not p.loop.gauges()


async def test_the_loop_in_messages() -> None:
    """Schemas go into the prompt; calls are read as the template writes them; results are messages with the tool's
    name."""
    prompt = (Message(role="user", content="go"),)
    p = await played(
        ['<think>hm</think><tool_call>{"name": "add", "arguments": {"a": 4}}</tool_call>', "5"], prompt=prompt
    )
    assert [t["function"]["name"] for t in p.talk.tools] == list(p.box.tools)
    assert p.talk.seen == [prompt, (Message(role="tool", name="add", content="5", tool_call_id="call00000"),)]
    p = await played(["<tool_call>{add}</tool_call>", "sorry"], prompt=prompt)
    assert p.talk.seen[1][0]["content"].startswith("error: this is no call: not valid JSON") and p.stop is Stop.SAID  # type: ignore[index]


async def test_every_limit_has_its_reason() -> None:
    p = await played(["[add(a=1)]"] * 4)
    assert p.stop is Stop.TURNS and p.talk.seen == ["go", "[2]", "[2]", "[2]"] and len(p.box.calls) == 4, (
        "the last call counts, its result is not shown"
    )
    p = await played(["[wait(seconds=9.0)]"] * 4, limits=EpisodeLimits(tool_seconds=0.01, tool_timeouts=2))
    assert p.stop is Stop.TOOLS and len(p.talk.said) == 2 and p.box.closed == 1
    p = await played(
        ["[" + ",".join(["wait(seconds=9.0)"] * 50) + "]"], limits=EpisodeLimits(tool_seconds=0.01, tool_timeouts=3)
    )
    assert p.stop is Stop.TOOLS and p.loop.gauges()["tools/timeout"].sum == 3, "a turn of many calls is no way around"
    p = await played(["[add(a=1)]", "[add(a="], stop=[Stop.SAID, Stop.LENGTH])
    assert p.stop is Stop.LENGTH and p.talk.state == ["add"], "what was cut off is no call"


async def test_what_breaks_closes_the_tools_and_leaves_their_state() -> None:
    box, talk = Odd(), ScriptedPolicy(["[add(a=1)]", "[late()]"])
    with pytest.raises(TimeoutError):
        async with box:
            await Loop(LIMITS, 4).converse(talk, "go", box)
    assert box.closed == 1 and talk.state == ["add"]
    box, talk = Odd(), ScriptedPolicy(["[add(a=1)]", "[wait(seconds=60.0)]"])

    async def episode() -> None:
        async with box:
            await Loop(LIMITS, 4).converse(talk, "go", box)

    task = asyncio.create_task(episode())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert box.closed == 1 and talk.state == ["add"]


async def test_a_bench_closes_all_whatever_one_does() -> None:
    class Broken(Toolbox):
        async def close(self) -> None:
            raise OSError("stuck")

    last = Odd()
    with pytest.raises(OSError, match="stuck"):
        await Toolboxes([Broken(), last]).close()
    assert last.closed == 1


# --- the boxes --------------------------------------------------------------------------------------------------------


async def test_calculator_and_store() -> None:
    assert await call(Calculator(), "calculate", expression="(3+5)*4/6") == ("ok", "16/3")
    assert (await call(Calculator(), "calculate", expression="9**9**9"))[0] == "refused"
    box = KeyValue({"a": "1"})
    assert await call(box, "get", key="a") == ("ok", "1") and await call(box, "put", key="b", value="2") == ("ok", "ok")
    assert await call(box, "keys") == ("ok", '["a", "b"]') and await call(box, "remove", key="a") == ("ok", "ok")
    assert await call(box, "get", key="a") == ("refused", "error: no key 'a'") and box.state() == {"b": "2"}
    assert (await call(box, "put", key="c", value="x" * MOST_BYTES))[0] == "refused" and box.state() == {"b": "2"}
    for i in range(1100):
        await call(box, "put", key=str(i), value="")
    assert len(box.state()) == 1000


async def test_files() -> None:
    box = Files({"/notes/a.txt": "one"})
    assert await call(box, "read_file", path="./notes/a.txt") == ("ok", "one")
    assert await call(box, "append_file", path="notes/a.txt", text=" two") == ("ok", "ok")
    assert await call(box, "write_file", path="b", text="x") == ("ok", "ok")
    assert (await call(box, "write_file", path="b/c", text="x"))[1] == "error: 'b/c' cannot be a file and a folder"
    assert (await call(box, "write_file", path="notes", text="x"))[0] == "refused"
    assert await call(box, "delete_file", path="b") == ("ok", "ok") and await call(box, "list_files") == (
        "ok",
        '["notes/a.txt"]',
    )
    assert box.state() == {"notes/a.txt": "one two"}
    for path in ("../x", "a/../../x", "..", "", "/", "a//b", "a\0b", "a/./b", "x" * 300):
        assert (await call(box, "write_file", path=path, text="x"))[0] == "refused", path


@given(st.lists(st.tuples(st.text("ab./\0", max_size=8), st.text(max_size=5)), max_size=12))
@settings(max_examples=100)
def test_no_path_leads_anywhere_else(writes: list[tuple[str, str]]) -> None:
    """Whatever is written stays under one spelling inside the folder, and is read back."""
    box = Files()
    for path, text in writes:
        if asyncio.run(call(box, "write_file", path=path, text=text))[0] == "ok":
            assert asyncio.run(call(box, "read_file", path=path)) == ("ok", text)
    for path in box.state():
        assert not path.startswith("/") and not {"", ".", ".."} & set(path.split("/"))


async def test_database() -> None:
    box = Database("CREATE TABLE t (a INTEGER, b TEXT); INSERT INTO t VALUES (1, 'x'), (2, NULL);")
    async with box:
        assert await call(box, "query", sql="SELECT * FROM t") == ("ok", "a | b\n1 | x\n2 | NULL")
        assert await call(box, "query", sql="UPDATE t SET b = 'y' WHERE a = 2") == ("ok", "1 rows changed")
        assert await call(box, "query", sql="SELEC") == ("refused", 'error: near "SELEC": syntax error')
        many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200) SELECT i FROM n"
        assert (await call(box, "query", sql=many))[1].endswith("(more than 50 rows; the rest is not shown)")
        assert box.state() == {"t": [[1, "x"], [2, "y"]]}


@pytest.mark.parametrize(
    "sql",
    [
        "ATTACH DATABASE '/etc/passwd' AS p",
        "PRAGMA writable_schema = 1",
        "VACUUM INTO 'copy.db'",
        "SELECT load_extension('x')",
        "SELECT 1; SELECT 2",
        "CREATE TEMP TABLE t (a)",
        "CREATE VIRTUAL TABLE t USING fts5(a)",
        "SELECT zeroblob(1000000000)",
        "SELECT hex(randomblob(10000000))",
        "SELECT " + "(" * 200 + "1" + ")" * 200,
        "SELECT '" + "x" * 200_000 + "'",
        "\0",
    ],
)
async def test_sql_stays_inside(sql: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async with Database() as box:
        assert (await call(box, "query", sql=sql))[0] == "refused"
        assert await call(box, "query", sql="SELECT 1") == ("ok", "1\n1")
    assert not list(tmp_path.iterdir())


async def test_a_query_without_end_is_stopped_and_the_database_goes_on() -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    box = Database("CREATE TABLE t (a);")
    async with box:
        begun = time.monotonic()
        seen = await box.call(ToolCall("query", {"sql": endless}), replace(LIMITS, tool_seconds=0.1))
        assert seen.kind == "timeout" and time.monotonic() - begun < 5
        assert await call(box, "query", sql="SELECT 7") == ("ok", "7\n7")
        task = asyncio.create_task(call(box, "query", sql=endless))
        await asyncio.sleep(0.05)
        task.cancel()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        box._connection.execute("SELECT 1")


async def test_whatever_a_policy_makes_of_its_tables_can_be_looked_at() -> None:
    async with Database() as box:
        for sql in ('CREATE TABLE "a""b" (x)', 'INSERT INTO "a""b" VALUES (1)'):
            assert (await call(box, "query", sql=sql))[0] == "ok", sql
        assert box.state() == {'a"b': [[1]]}


async def test_columns_that_are_computed_fill_no_memory() -> None:
    """A database is small, and what a query makes of it may be of any size."""
    many = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 40)"
    async with Database("CREATE TABLE t (a, b AS (zeroblob(900000))); CREATE TABLE u (a);") as box:
        assert await call(box, "query", sql=f"{many} INSERT INTO t SELECT i FROM n") == ("ok", "40 rows changed")
        assert box.state() == {"t": [], "u": []}
        kind, text = await call(box, "query", sql="SELECT * FROM t")
        assert kind == "refused" and "more than 16777216 bytes" in text
        assert (await call(box, "query", sql="DROP TABLE t"))[0] == "ok" and box.state() == {"u": []}


async def test_a_full_database_says_so() -> None:
    async with Database("CREATE TABLE t (a);") as box:
        fill = (
            "INSERT INTO t SELECT zeroblob(900000) FROM (WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n"
            " WHERE i < 40) SELECT i FROM n)"
        )
        assert (await call(box, "query", sql=fill))[1] == "error: database or disk is full"


# --- tools for prompts of one's own, and the shop ---------------------------------------------------------------------


def prompts(tmp_path: Any, rows: str, reward: str = "", **args: Any) -> Any:
    (tmp_path / "p.jsonl").write_text(rows)
    (tmp_path / "r.py").write_text(
        reward
        or "def kept(prompts, completions, state, want, **_):\n"
        "    return [float(s['files'] == w) for s, w in zip(state, want)]\n"
    )
    from posttrain.config.env import Reward

    return environment(
        Env(
            name="prompts",
            prompts=str(tmp_path / "p.jsonl"),
            heldout=0,
            args=args,
            rewards=(Reward(function=f"{tmp_path / 'r.py'}:kept"),),
        ),
        0,
    )


async def test_prompts_of_ones_own_with_tools(tmp_path: Any) -> None:
    row = '{"prompt": "append x to a", "files": {"a": "1"}, "want": {"a": "1x"}}\n'
    env = prompts(tmp_path, row, tools="calculator,files", turns=3)
    task = env.train.task(0)
    for turns, reward in (['[append_file(path="a",text="x")]', "done"], 1.0), (["done"], 0.0):
        (verdict,) = await judged(env, task, turns)
        assert verdict.verdict.score == reward
    assert env.gauges()["tools/ok"].mean == 1.0
    env.close()


def test_tools_of_a_wrong_name_or_beginning_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="no tool 'filles': did you mean 'files'"):
        prompts(tmp_path, '{"prompt": "x", "want": {}}\n', tools="filles")
    with pytest.raises(DataError, match="column 'files' does not say how files begins"):
        prompts(tmp_path, '{"prompt": "x", "want": {}, "files": [1]}\n', tools="files")
    with pytest.raises(DataError, match="column 'database'"):
        prompts(tmp_path, '{"prompt": "x", "want": {}, "database": "SELEC"}\n', tools="database")


async def test_the_shop_pays_for_the_world_it_is_left_with() -> None:
    env = Shop()
    task = env.heldout[0]
    first, second, last = env.gold(task)
    said = await attempt(env, task, [first, second, last])
    assert said.state == task.answer and said.stop is Stop.SAID
    twice = await attempt(env, task, [first, second, second, last])
    assert env.verify(twice).score == 0.0, "bought twice"
    early = await attempt(env, task, [second, last])
    assert env.verify(early).score == 1.0, "who knows the numbers need not look them up"
    babble = await attempt(env, task, ["[buy(id=1,n=1)]", "[find()]", "[what", "done"])
    assert babble.state == {"cart": {}, "calendar": {}} and env.verify(babble).score == 0.0
    assert env.verify(Attempt(task, ("done",), Stop.SAID)).score == 0.0


def test_shop_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean 'both'"):
        Shop(kinds="bothh")
    with pytest.raises(ConfigError, match="has room for"):
        Shop(kinds="buy")
    with pytest.raises(ConfigError, match="heldout=31, but kinds='buy,book,both' has room for 30"):
        Shop(kinds="buy,book,both", heldout_count=31)
    mixed = Shop(kinds="buy,book,both", heldout_count=30)
    asked = [sum(part in mixed.train.task(i).info for part in ("n", "errand")) for i in range(100)]
    assert asked.count(1) > 30 and asked.count(2) > 15, "every kind is trained on"
    with pytest.raises(ConfigError, match="turns=1"):
        Shop(turns=1)


def test_offered_refuses_twice() -> None:
    with pytest.raises(ConfigError, match="twice"):
        OfferedTools.of("files,files")
    assert OfferedTools(("files",)).box(Task("t", "?", info={"files": {"a": "b"}})).state() == {"files": {"a": "b"}}
