"""transformers' sides of `rollout.py`: `generate` over static batches, in arrival order or sorted by length, and
continuous batching.

A static batch runs to its longest request with stop ids off, and each row is cut to its own length: cheaper than any
logits processor, and the least a static batch can do. Continuous batching gets each request's own limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.speed.grpo_work import Wire
from benchmarks.speed.rollout_work import Job, Play, Work, serve

PAGE = 32
"""Tokens of a page of continuous batching's cache."""


class Static:
    """`generate` on batches of `slots` requests."""

    def __init__(self, job: Job, sort: bool) -> None:
        self.model = _model(job)
        self.slots, self.sort = job.slots, sort

    def play(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        order = list(range(len(work.prompts)))
        if self.sort:
            order.sort(key=lambda i: work.lengths[i])
        said: list[list[int]] = [[] for _ in order]
        for start in range(0, len(order), self.slots):
            rows = order[start : start + self.slots]
            ids = torch.tensor([work.prompts[i] for i in rows])
            longest = max(work.lengths[i] for i in rows)
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=_sampling(max_new_tokens=longest)
            )
            for i, row in zip(rows, out[:, ids.shape[1] :].tolist(), strict=True):
                said[i] = row[: work.lengths[i]]
        return said, {}


class Continuous:
    """transformers' continuous batching: one manager for all plays."""

    def __init__(self, job: Job) -> None:
        pages = job.slots * -(-job.context // PAGE)
        config = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages + 1,
            max_batch_tokens=1024,
            max_requests_per_batch=job.slots,
            allow_block_sharing=False,
        )
        self.model = _model(job)
        self.manager = self.model.init_continuous_batching(_sampling(), config)
        self.manager.warmup()

    def play(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        self.manager.start()
        try:
            for i, (prompt, count) in enumerate(zip(work.prompts, work.lengths, strict=True)):
                self.manager.add_request(prompt, request_id=str(i), max_new_tokens=count, eos_token_id=-1)
            said: list[list[int]] = [[] for _ in work.prompts]
            for i, ids in self._results(len(said)):
                said[i] = ids
        finally:
            self.manager.stop(block=True, keep_for_next_session=True)
        return said, {}

    def _results(self, count: int) -> Iterator[tuple[int, list[int]]]:
        while count:
            result = self.manager.get_result(timeout=1)
            if result is None:
                if not self.manager.is_running():
                    raise SystemExit("continuous batching stopped before it was done")
            elif result.is_finished():
                if result.error is not None:
                    raise SystemExit(f"continuous batching failed: {result.error}")
                yield int(result.request_id), list(result.generated_tokens)
                count -= 1


def _model(job: Job) -> Any:
    torch.set_num_threads(job.threads)
    return AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32).eval()


def _sampling(**more: Any) -> GenerationConfig:
    """Temperature 1 over the whole vocabulary, no stop id."""
    return GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0, **more
    )


def main(job: Job) -> None:
    mode = job.options["mode"]

    def load() -> dict[str, Play]:
        side = Continuous(job) if mode == "continuous" else Static(job, sort=mode == "sorted")
        return {mode: side.play}

    serve(Wire(), load)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
