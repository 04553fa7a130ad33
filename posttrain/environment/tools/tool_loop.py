"""The tool loop: the policy's calls are run and it is shown the results, until one of its turns has no call."""

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
"""Format of calls without a chat template: `[buy(item="tea", count=2)]`."""


def bracketed(results: Sequence[Observation]) -> str:
    """The results as shown without a chat template: one `[result]` after the other."""
    return "".join(f"[{r.text}]" for r in results)


@dataclass
class Loop:
    """Plays the tool episodes of one environment and counts their calls."""

    limits: EpisodeLimits
    turns: int
    """The largest number of turns of the policy, the answer included."""
    show: Callable[[Sequence[Observation]], str] = bracketed
    """Writes the results, if the prompt is text."""
    counts: CallCounts = field(default_factory=CallCounts)

    async def converse(self, talk: Talk, prompt: str | Sequence[Message], box: Toolbox) -> Stop:
        """One episode. A turn without a call is the answer and ends it, and so does a limit. However it ends, the final
        state of the tools is recorded for the verifiers.

        Calls are parsed in the format of the chat template (`Talk.format`). In text, and under a template without a
        known format, they are `[name(argument=value)]`. The calls of a turn run in their order.
        """
        chat = not isinstance(prompt, str)
        format = (talk.format if chat else None) or PLAIN
        # The state is recorded before the first turn too, so that an episode that ends at once has one.
        talk.leave(box.state())
        talk.see(prompt, tools=box.schemas if chat else ())
        timeouts = 0
        try:
            for turns_left in reversed(range(self.turns)):
                turn = await talk.say()
                # A thought that the prompt opened belongs to the turn when it is parsed. A turn that was cut off may
                # end inside a call, so its calls are not run.
                calls = parse(turn.opened + turn.text, format).calls if turn.stop.finished else ()
                if not calls:
                    return turn.stop
                # The calls run in the policy's order, because a later call may need the result of an earlier one.
                results: list[Observation] = []
                for call in calls:
                    results.append(await box.call(call, self.limits))
                    self.counts.add(results[-1])
                    timeouts += results[-1].kind == "timeout"
                    if timeouts >= self.limits.tool_timeouts:
                        return Stop.TOOLS
                # After the last turn the policy does not speak again, so the results are not shown.
                if turns_left:
                    talk.see(_messages(results) if chat else self.show(results))
            return Stop.TURNS
        finally:
            talk.leave(box.state())

    def gauges(self) -> Gauges:
        """The shares of calls by kind of result, and the seconds per call of each tool, since the last call."""
        counts, self.counts = self.counts, CallCounts()
        total = sum(counts.kinds.values())
        shares = {f"tools/{kind}": Gauge(n, total) for kind, n in counts.kinds.items()}
        shares |= {f"tools/failed/{name}": Gauge(bad, n) for name, (bad, n) in counts.tried.items()}
        return shares | {f"tools/seconds/{name}": Gauge(seconds, n) for name, (seconds, n) in counts.seconds.items()}


def _messages(results: Sequence[Observation]) -> list[Message]:
    """Results as messages for a chat template: one for each call, in order. Their ids are invented, with 9 characters,
    as Mistral's templates want them."""
    return [
        Message(role="tool", name=r.name or "unknown", content=r.text, tool_call_id=f"call{i:05}")
        for i, r in enumerate(results)
    ]
