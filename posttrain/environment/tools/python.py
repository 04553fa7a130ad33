"""Python as a tool: each episode runs its code in an interpreter of its own, in the sandbox."""

from __future__ import annotations

import asyncio
from typing import Annotated
from weakref import WeakKeyDictionary

from posttrain.environment.tools.tool import Toolbox, ToolError, tool
from posttrain.sandbox.program_session import PythonSession
from posttrain.sandbox.sandbox_pool import Sandbox
from posttrain.sandbox.sandbox_types import ProgramLimits, SandboxBroken

AT_ONCE = 64
"""The most interpreters at once. Each takes about 30 MiB."""
SHARE = 0.8
"""The share of a call's seconds for which the code may run. It is less than 1 so that the code is stopped before the
call times out, and the interpreter is kept."""
LOST = "the interpreter was ended; what was defined before is gone"


class InterpreterSlots:
    """A sandbox and a number of slots for its sessions. An episode waits for one before it begins, so that no call
    times out because of another episode."""

    def __init__(self, sandbox: Sandbox, seconds: float, slots: int = AT_ONCE) -> None:
        self.sandbox = sandbox
        self.limits = ProgramLimits(wall=SHARE * seconds, cpu=SHARE * seconds)
        self._count = slots
        self._free: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def free(self) -> asyncio.Semaphore:
        """The semaphore of the free slots for the running event loop: it cannot serve several loops."""
        return self._free.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._count))


class Python(Toolbox):
    """An interpreter that keeps its variables. It starts with the first call and ends with the episode."""

    def __init__(self, interpreters: InterpreterSlots) -> None:
        self._interpreters = interpreters
        self._slots: asyncio.Semaphore | None = None
        """The semaphore of which this episode holds a slot; None: it holds none."""
        self._session: PythonSession | None = None
        self._lost = False

    async def open(self) -> None:
        # Before the first turn: during a call the wait would use up the call's time limit.
        free = self._interpreters.free
        await free.acquire()
        self._slots = free

    @tool
    async def python(self, code: Annotated[str, "a piece of a program; print what you want to see"]) -> str:
        """Runs Python. Shows what is printed and the value of a last expression; variables stay for the next piece."""
        if self._session is None:
            self._session = self._interpreters.sandbox.session(limits=self._interpreters.limits)
        # A cancelled call ended the session, and the policy is not to blame, so the next answer says what was lost.
        was_lost, self._lost = self._lost, False
        try:
            ran = await self._session.run(code)
        except asyncio.CancelledError:  # which ends the session
            self._session, self._lost = None, True
            raise
        except SandboxBroken as error:
            # No ToolError, because the policy did nothing wrong: the episode is a failure and no result.
            raise RuntimeError(f"the sandbox of the Python tool was lost: {error}") from error
        printed = ran.said.rstrip("\n") + ("\n(output was cut)" if ran.cut else "")
        note = f"{LOST}\n" if was_lost else ""
        if ran.why == "ok":
            return note + (printed or "(nothing was printed)")
        why = ran.complaint if ran.why == "error" and ran.complaint else ran.why
        raise ToolError(note + "\n".join(x for x in (why, printed, LOST if ran.lost else "") if x))

    async def close(self) -> None:
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            if self._slots is not None:
                self._slots.release()
                self._slots = None
