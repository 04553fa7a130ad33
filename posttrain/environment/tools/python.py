"""Python as a tool: pieces of a program in one interpreter of the episode's own, in the sandbox."""

from __future__ import annotations

from typing import Annotated

from posttrain.environment.sandbox.pool import Sandbox
from posttrain.environment.sandbox.port import Limits, SandboxBroken
from posttrain.environment.tools.tool import Toolbox, ToolError, tool

PIECE = Limits(wall=8.0, cpu=5.0)
"""Of one piece: ended a little before the call itself would run out of time (`env.limits.tool_seconds`)."""
LOST = "the interpreter was ended; what was defined before is gone"


class Python(Toolbox):
    """A notebook that keeps its variables. The interpreter begins with the first piece and ends with the episode."""

    def __init__(self, sandbox: Sandbox, limits: Limits = PIECE) -> None:
        self._session = sandbox.session(limits=limits)

    @tool
    async def python(self, code: Annotated[str, "a piece of a program; print what you want to see"]) -> str:
        """Runs Python. Shows what is printed and the value of a last expression; variables stay for the next piece."""
        try:
            ran = await self._session.run(code)
        except SandboxBroken as error:
            raise RuntimeError(f"the sandbox of the Python tool was lost: {error}") from error
        said = ran.said.rstrip("\n") + ("\n(output was cut)" if ran.cut else "")
        if ran.why == "ok":
            return said or "(nothing was printed)"
        why = ran.complaint if ran.why == "error" and ran.complaint else ran.why
        raise ToolError("\n".join(x for x in (why, said, LOST if ran.lost else "") if x))

    async def close(self) -> None:
        await self._session.close()
