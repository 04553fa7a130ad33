"""vLLM's side of `rollout.py`, run by the interpreter of vLLM's own environment; in process, at its defaults but for
what makes the work equal: float32, the same slots, no stop ids, each request's own limit, prefix caching off (no two
prompts share one)."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from benchmarks.speed.grpo_work import Wire
from benchmarks.speed.rollout_work import Job, Play, Work, serve

CACHE_GIB = "1"


class Vllm:
    def __init__(self, job: Job) -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", CACHE_GIB)
        from vllm import LLM, SamplingParams

        self.params = SamplingParams
        self.llm = LLM(
            model=job.checkpoint,
            dtype="float32",
            max_num_seqs=job.slots,
            max_model_len=job.context,
            enable_prefix_caching=False,
            disable_log_stats=True,
            seed=0,
        )

    def play(self, work: Work) -> tuple[list[list[int]], dict[str, Any]]:
        prompts = [{"prompt_token_ids": ids} for ids in work.prompts]
        params = [
            self.params(
                temperature=1.0, top_p=1.0, top_k=0, min_tokens=0, max_tokens=n, ignore_eos=True, detokenize=False
            )
            for n in work.lengths
        ]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(prompts, params, use_tqdm=False)], {}


def main(job: Job) -> None:
    wire = Wire()

    def load() -> dict[str, Play]:
        return {"vllm": Vllm(job).play}

    serve(wire, load)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
