"""Chat templates that loop, fill the memory, crash or refuse: bounded in time, and ended with a sentence."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from posttrain.core.types import Message
from posttrain.environment.templates import template_process
from posttrain.environment.templates.renderer import RenderedDialogue, Renderer
from posttrain.system.errors import DataError, LimitError
from tests.engine.run_parts import mine, model_at, refused
from tests.environment.template_parts import FAMILIES, tokenizer

TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "hi 🙂\0\ufdd0 é"},
    {"role": "assistant", "content": "ok", "reasoning_content": None, "tool_calls": None},
    {"role": "user", "content": "x" * 1000},
]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLE = "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}"


def words(template: str) -> Any:
    made = tokenizer(FAMILIES["qwen2.5"])
    made.chat_template = template
    return made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("generate", [True, False])
def test_the_process_apart_writes_what_transformers_writes(name: str, generate: bool) -> None:
    made: Any = tokenizer(FAMILIES[name])
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    for given in (TALK[:1], TALK):
        for listed in ([], tools):
            try:
                wanted = made.apply_chat_template(
                    given, tokenize=False, add_generation_prompt=generate, tools=listed or None
                )
            except Exception as error:
                with pytest.raises(template_process.RefusedError) as told:
                    template_process.apply(made, given, generate=generate, tools=listed)
                assert str(told.value) == f"{type(error).__name__}: {error}"
            else:
                assert template_process.apply(made, given, generate=generate, tools=listed) == wanted


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (LOOP, "2 s of processor time"),
        pytest.param("{{ lipsum(n=10**7) }}", "2 s of processor time", marks=pytest.mark.prove),
        ("{{ 'a' * 10**10 }}", "1024 MiB of memory"),
        ("{{ 'a' | center(10**10) }}", "1024 MiB of memory"),
        ("{{ 'a' | indent(10**10) }}", "1024 MiB of memory"),
        (DOUBLE, "1024 MiB of memory"),
    ],
)
def test_a_template_that_does_not_end_is_stopped(template: str, why: str) -> None:
    """Before, the first kept the process busy for hours and the last filled the machine's memory."""
    before = time.process_time()
    with pytest.raises(LimitError, match=why):
        template_process.apply(words(template), TALK, generate=True)
    assert time.process_time() - before < 1
    assert template_process.apply(words("{{ messages[0]['role'] }}"), TALK, generate=True) == "user", (
        "the next one is served"
    )


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('not for you') }}", "TemplateError: not for you"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ 'a' * 20000000 }}", "it wrote 20,000,000 characters, and at most 16,777,216"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% for", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.at.all }}", "UndefinedError"),
        ("{{ raise_exception('a' * 10000000) }}", "TemplateError: a{900,1000}$"),
    ],
)
def test_a_template_that_refuses_is_quoted(template: str, why: str) -> None:
    made = words(template)
    with pytest.raises(template_process.RefusedError, match=why):
        template_process.apply(made, TALK, generate=True)
    with pytest.raises(DataError, match=r"the chat template refused messages with roles \['user'\]: "):
        Renderer(made, [made.eos_token_id]).prompt([Message(role="user", content="hi")])


@pytest.mark.prove
def test_a_template_that_loops_only_later_or_at_a_word_of_the_policy_is_stopped_too() -> None:
    plain = FAMILIES["qwen2.5"].template
    for condition in ("messages | length > 2", "'magic' in messages[-1]['content']"):
        made = words(f"{{% if {condition} %}}{LOOP}{{% endif %}}{plain}")
        stop = int(made.convert_tokens_to_ids("<|im_end|>"))
        dialogue = RenderedDialogue(Renderer(made, [stop], history="rewrite"), "t")
        dialogue.see([Message(role="user", content="hi")])
        dialogue.said([*made.encode("a"), stop])
        with pytest.raises(LimitError, match="processor time"):
            dialogue.see([Message(role="user", content="magic")])


@pytest.mark.prove
def test_it_is_started_again_where_the_thread_that_started_it_has_ended() -> None:
    template_process._SERVER.end()  # pyright: ignore[reportPrivateUsage]
    made = words("{{ messages[0]['role'] }}")
    said: list[str] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: said.append(template_process.apply(made, TALK, generate=True)))
        thread.start()
        thread.join()
        time.sleep(0.2)
    assert [*said, template_process.apply(made, TALK, generate=True)] == ["user"] * 3


def test_a_forked_child_has_a_process_of_its_own() -> None:
    made = words("{{ messages[0]['role'] }}")
    template_process.apply(made, TALK, generate=True)
    child = os.fork()
    if child == 0:
        good = template_process.apply(made, TALK, generate=True) == "user"
        template_process._SERVER.end()  # pyright: ignore[reportPrivateUsage]
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0 and template_process.apply(made, TALK, generate=True) == "user"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param(LOOP, "the chat template was stopped", marks=pytest.mark.prove),
        ("{{ raise_exception('no') }}", "the chat template refused"),
    ],
)
def test_a_run_with_such_a_template_does_not_start(
    template: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = mine(tmp_path / "data")
    rows = [
        {"prompt": [{"role": "user", "content": f"say {a}: "}], "answer": str(a), "completion": str(a)}
        for a in range(12)
    ]
    (tmp_path / "data" / "mine.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    model = model_at(tmp_path / "model", tokenizer="byte_level")
    (model / "chat_template.jinja").write_text(template)
    assert says in refused(capsys, "run", *given, f"model={model}", "--out", str(tmp_path / "run"), code=4)
