"""Chat templates are third-party programs, so they are rendered in a separate process with limits.

jinja2's sandbox keeps a template from files and from Python, but not from endless loops or from filling the memory. One
process renders all templates of a program, in less than a millisecond more than here. A rendering may use `SPEC.cpu`
seconds. A process that had to be stopped is replaced within milliseconds.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain.core.content import plain
from posttrain.system.errors import DataError, LimitError
from posttrain.verifier.workers.worker_process import EndedError, Spec, WorkerError, WorkerProcess

LARGEST = 16 << 20
"""The most characters that a template may write."""
SPEC = Spec(f"{__name__}:handler", cpu=2, wall=60.0, memory=1024, preload=True, quiet=True, most=8 * LARGEST)
"""The limits of a rendering, in seconds and MiB. Real templates take a few milliseconds. `most` bounds the reply in
bytes. It is JSON, in which nearly every character has 6 bytes at most."""
LONGEST_ERROR = 1000
"""The most characters of a template's own error message that are passed on."""


class RefusedError(Exception):
    """The template raised an error. The message gives it."""


def apply(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, generate: bool, tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The result of `tokenizer.apply_chat_template`, rendered in the separate process. A tokenizer that overrides that
    method has code that the user trusts, so the method is called here.

    Raises:
        RefusedError: the template raised.
        LimitError: it used more time or memory than allowed.
        DataError: the process did not start.
    """
    tool_list = [dict(t) for t in tools] or None
    conversation = [
        {**m, "content": plain(m["content"])} if isinstance(m.get("content"), tuple) else dict(m) for m in messages
    ]
    if getattr(type(tokenizer).apply_chat_template, "__module__", "") != "transformers.tokenization_utils_base":
        arguments = {"tools": tool_list} if tool_list else {}
        return tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=generate, **arguments)
    source = tokenizer.get_chat_template(None, tool_list)
    special_tokens = {
        name: str(token) for name, token in tokenizer.special_tokens_map.items() if not isinstance(token, list)
    }
    reply = _ask(pickle.dumps((source, special_tokens, conversation, tool_list, generate)), len(messages))
    if "text" not in reply:
        raise RefusedError(reply.get("error", "it wrote nothing"))
    return str(reply["text"])


def _ask(request: bytes, message_count: int) -> dict[str, Any]:
    """The process's reply. A process that was killed, or has ended with the thread that started it, is started anew."""
    with _SERVER.lock:
        for last_try in (False, True):
            try:
                return _SERVER.worker().ask(request)
            except WorkerError as error:
                if error.kind == "start":
                    raise DataError(f"the process that renders chat templates did not start: {error.why}") from None
                # The process may have been killed from outside: by the kernel without free memory, or with the thread
                # that started it. The template is not to blame, and the request is sent once more. A crash of the
                # rendering itself, or a limit, would happen again.
                if error.kind == "crash" and (error.killed or not isinstance(error, EndedError)) and not last_try:
                    continue
                raise LimitError(
                    f"the chat template was stopped while it wrote {message_count} messages: its process"
                    f" {error.why.removeprefix('the worker ')}. Templates take milliseconds; correct this one"
                    " (chat_template.jinja, or chat_template in tokenizer_config.json), or use another model"
                ) from None
    raise AssertionError("unreachable")


class _Server:
    """The one rendering process, and the lock for its use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._worker: WorkerProcess | None = None

    def worker(self) -> WorkerProcess:
        if self._worker is None or not self._worker.usable:
            self._worker = WorkerProcess(SPEC)
        return self._worker

    def end(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def forget(self) -> None:
        """In a forked child: drop the process, which belongs to the parent."""
        self.lock, self._worker = threading.Lock(), None


_SERVER = _Server()
atexit.register(_SERVER.end)
# A forked child has a copy of the pipe to the process of its parent. If both wrote to it, their requests would mix. A
# lock that another thread held would stay locked in the child.
os.register_at_fork(after_in_child=_SERVER.forget)


def handler(_: str) -> Callable[[Any], dict[str, Any]]:
    """Renders with the function of transformers that `apply_chat_template` calls."""
    render = importlib.import_module("transformers.utils.chat_template_utils").render_jinja_template

    def answer(request: Any) -> dict[str, Any]:
        source, special_tokens, messages, tools, generate = request
        # Null fields are removed, because templates test for a field by `is defined`, and null is defined.
        conversation = [{name: value for name, value in m.items() if value is not None} for m in messages]
        try:
            written, _ = render(
                conversations=[conversation],
                tools=tools,
                chat_template=source,
                add_generation_prompt=generate,
                **special_tokens,
            )
        # On a MemoryError the process reached its limit and ends.
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything it likes
            return {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]}
        if len(written[0]) > LARGEST:
            return {"error": f"it wrote {len(written[0]):,} characters, and at most {LARGEST:,} are taken"}
        return {"text": written[0]}

    return answer
