"""posttrain's side of `rollout.py`: the embedded engine at its defaults, asked through `generate` as a controller asks
it."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.speed.grpo_work import Wire
from benchmarks.speed.rollout_work import Job, Play, Work, serve, tokens
from posttrain.core.sampling import Sampling
from posttrain.engine.embedded import EmbeddedEngine
from posttrain.engine.embedded.cache.cache_blocks import BLOCK, blocks_for
from posttrain.engine.layers import attention

SIBLINGS, LONG, SHORT = 16, 512, 32
"""Siblings of a prompt, tokens of the prompt, tokens each says."""
TURNS, OPENING, REPLY, ANSWER = 3, 61, 29, 31
"""Turns of an episode; tokens of its prompt, of what it is answered and of what it says. Odd, so that no block ends
with a turn."""


class Engine:
    """The engine and its event loop. Requests are numbered across plays, so that each draws its own randomness."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        attention.register()
        module = AutoModelForCausalLM.from_pretrained(
            job.checkpoint, dtype=torch.float32, attn_implementation=attention.NAME
        )
        self.engine = EmbeddedEngine(module, slots=job.slots, context=job.context, **job.options)
        self.loop = asyncio.new_event_loop()
        self.asked = 0
        self.held: list[int] = []

    async def say(self, prompt: list[int], count: int) -> list[int]:
        self.asked += 1
        said = await self.engine.generate(
            torch.tensor(prompt).int().numpy(), Sampling(max_tokens=count, stop_ids=()), self.asked
        )
        return said.ids.tolist()

    async def watch(self) -> None:
        """Note the cache blocks in use after every step."""
        while True:
            self.held.append(self.engine.blocks_in_use)
            await asyncio.sleep(0)

    async def watched(self, work: Any) -> Any:
        self.held = []
        watch = asyncio.ensure_future(self.watch())
        try:
            return await work
        finally:
            watch.cancel()

    def run(self, work: Any) -> tuple[Any, dict[str, Any]]:
        """The result, with the gauges of this play alone and the blocks held, summed over the steps."""
        self.engine.gauges()
        out = self.loop.run_until_complete(self.watched(work))
        gauges = {name: (g.sum, g.count) for name, g in self.engine.gauges().items()}
        return out, {"gauges": gauges, "held_block_steps": sum(self.held), "left_blocks": self.engine.blocks_in_use}

    def play(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        async def every() -> list[list[int]]:
            return await asyncio.gather(*(self.say(p, n) for p, n in zip(work.prompts, work.lengths, strict=True)))

        said, extra = self.run(every())
        return said, extra | needed(work)

    def siblings(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        """As many long prompts as make `requests` requests, `SIBLINGS` of each."""
        return self._long([tokens(1, work.salt, i // SIBLINGS, LONG) for i in range(len(work.prompts))])

    def apart(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        """The same with a prompt of its own for each request."""
        return self._long([tokens(2, work.salt, i, LONG) for i in range(len(work.prompts))])

    def _long(self, prompts: list[list[int]]) -> tuple[list[list[int]], dict[str, Any]]:
        async def every() -> list[list[int]]:
            return await asyncio.gather(*(self.say(p, SHORT) for p in prompts))

        return self.run(every())

    def turns(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        """Episodes of three turns, all at once; what comes back is what each said in all."""

        async def episode(index: int) -> list[int]:
            ids = tokens(3, work.salt, index, OPENING)
            spoken: list[int] = []
            for turn in range(TURNS):
                said = await self.say(ids, ANSWER)
                spoken += said
                ids = ids + said + tokens(4 + turn, work.salt, index, REPLY)
            return spoken

        async def every() -> list[list[int]]:
            return await asyncio.gather(*(episode(i) for i in range(len(work.prompts))))

        once = OPENING + TURNS * ANSWER + (TURNS - 1) * REPLY - 1
        out, extra = self.run(every())
        return out, extra | {"positions_needed": len(work.prompts) * once}


def needed(work: Work) -> dict[str, int]:
    """What the requests take at least, counted without the engine.

    Positions: every token of every sequence once, without the last said, which nothing follows. Block steps: the
    blocks of every sequence's cached tokens after each of its steps but the last, when they are free again.
    """
    positions = sum(len(p) + n - 1 for p, n in zip(work.prompts, work.lengths, strict=True))
    held = sum(blocks_for(len(p) + t) for p, n in zip(work.prompts, work.lengths, strict=True) for t in range(n - 1))
    return {"positions_needed": positions, "least_block_steps": held, "block_tokens": BLOCK}


def main(job: Job) -> None:
    def load() -> dict[str, Play]:
        e = Engine(job)
        return {"ours": e.play, "siblings": e.siblings, "apart": e.apart, "turns": e.turns}

    serve(Wire(), load)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
