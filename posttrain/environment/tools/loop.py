"""The tool loop: the policy says, its calls are made, it is shown what came of them, until a turn calls nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from posttrain.core.gauge import Gauge, Gauges
from posttrain.core.ports import Talk
from posttrain.core.stop import EpisodeLimits
from posttrain.core.types import Message, Stop
from posttrain.environment.tools.tool import CallCounts, Observation, Toolbox
from posttrain.verifier.calling import parse

PLAIN = "pythonic"
"""Format of calls where there is no chat template: `[buy(item="tea", count=2)]`."""


def bracketed(results: Sequence[Observation]) -> str:
    """What is shown where there is no chat template: `[result]`, one after the other."""
    return "".join(f"[{r.text}]" for r in results)


@dataclass
class Loop:
    """How the episodes of one environment use tools, and what came of all of them."""

    limits: EpisodeLimits
    turns: int
    """Most turns of the policy, the answer included."""
    show: Callable[[Sequence[Observation]], str] = bracketed
    """Results in words, for prompts that are text."""
    counts: CallCounts = field(default_factory=CallCounts)

    async def converse(self, talk: Talk, prompt: str | Sequence[Message], box: Toolbox) -> Stop:
        """One episode. A turn without a call is the answer and ends it; so does a limit. Whatever happens, the state
        the tools have come to is left to the verifiers.

        Calls are read in the format of the chat template (`Talk.format`); in text, and under a template that writes
        none we read, as `[name(argument=value)]`. Several calls of a turn are made in their order.
        """
        chat = not isinstance(prompt, str)
        format = (talk.format if chat else None) or PLAIN
        talk.leave(box.state())
        talk.see(prompt, tools=box.schemas if chat else ())
        late = 0
        try:
            for left in reversed(range(self.turns)):
                said = await talk.say()
                calls = parse(said.text, format).calls if said.stop.finished else ()
                if not calls:
                    return said.stop
                results: list[Observation] = []
                for call in calls:
                    results.append(await box.call(call, self.limits))
                    self.counts.add(results[-1])
                    late += results[-1].kind == "timeout"
                    if late >= self.limits.tool_timeouts:
                        return Stop.TOOLS
                if left:
                    talk.see(_messages(results) if chat else self.show(results))
            return Stop.TURNS
        finally:
            talk.leave(box.state())

    def gauges(self) -> Gauges:
        """Calls by what came of them, and seconds a call of each tool, since last asked."""
        taken, self.counts = self.counts, CallCounts()
        total = sum(taken.kinds.values())
        shares = {f"tools/{kind}": Gauge(n, total) for kind, n in taken.kinds.items()}
        return shares | {f"tools/seconds/{name}": Gauge(seconds, n) for name, (seconds, n) in taken.seconds.items()}


def _messages(results: Sequence[Observation]) -> list[Message]:
    """Results as a chat template takes them: one message a call, in order, with made-up ids of the length that
    templates accept."""
    return [
        Message(role="tool", name=r.name or "unknown", content=r.text, tool_call_id=f"call{i:05}")
        for i, r in enumerate(results)
    ]
