"""One side of `learner.py`: a process that takes one optimizer step on the same trajectories per command.

    ours     the trainer of posttrain at its defaults: packed micro-batches, shared prompts once, the head in tiles
    unshared the same with `model.share_prefixes=false`
    naive    transformers' model on sequences padded to the longest of their micro-batch, a log-softmax of all logits
    trl      the loss of TRL's `GRPOTrainer` (`compute_loss`), on sequences padded to the longest of the step

All minimise -(advantage x log-prob), averaged over all spoken tokens, clip the gradient at 1 and step AdamW.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.speed.grpo_work import LR, PROMPT, SIBLINGS, SYMBOLS, Job, StepMemory, Wire, lengths_PG, reward

CLIP = 1.0
FIRST = 3
"""The first token id that is a symbol."""
HALF = "half"
"""The regime in which the prompt is half of every sequence."""
HALF_TOKENS, HALF_SIBLINGS = 64, 16
"""Tokens of a prompt and of each answer there, and siblings of a prompt."""
IDEAL = 2 * HALF_SIBLINGS / (HALF_SIBLINGS + 1)
"""How many times as many positions are computed there where none are shared."""


@dataclass(frozen=True)
class Trajectories:
    """What is learned from: S sequences, siblings side by side, in the order of the prompts."""

    ids: tuple[np.ndarray, ...]
    """int32, the prompt and what was said."""
    advantage_S: np.ndarray
    spoken: int
    prompt: int
    """Tokens of every prompt."""

    @staticmethod
    def of(job: Job) -> Trajectories:
        """The lengths of `grpo_step.py` with drawn tokens; nothing but the job decides them."""
        rng = np.random.default_rng(5)
        half = job.regime == HALF
        begin, siblings = (HALF_TOKENS, HALF_SIBLINGS) if half else (PROMPT, SIBLINGS)
        lengths = np.full((job.prompts, siblings), HALF_TOKENS) if half else lengths_PG(job.regime, job.prompts)
        ids = list[np.ndarray]()
        for row in lengths:
            prompt = rng.integers(FIRST, FIRST + len(SYMBOLS), begin)
            ids += [
                np.concatenate([prompt, rng.integers(FIRST, FIRST + len(SYMBOLS), n)]).astype(np.int32) for n in row
            ]
        advantage = rng.normal(size=(job.prompts, siblings))
        advantage -= advantage.mean(1, keepdims=True)
        return Trajectories(tuple(ids), advantage.ravel(), int(lengths.sum()), begin)


class Side(ABC):
    """A learner of one library."""

    def __init__(self, job: Job) -> None:
        self.job, self.work = job, Trajectories.of(job)

    @abstractmethod
    def step(self, micro: int) -> float:
        """One optimizer step in micro-batches of `micro` sequences; the gradient norm before the clip."""

    def steps(self) -> AbstractContextManager[None]:
        """Around all steps, as the library has it."""
        return nullcontext()

    def told(self) -> dict[str, Any]:
        """What else there is to say of the last step."""
        return {}


class Ours(Side):
    """`Trainer.step`. `micro` is not read: micro-batches are packed by tokens."""

    @cached_property
    def parts(self) -> Any:
        from posttrain.algorithm.loss.losses import Likelihood
        from posttrain.config.model_settings import Lora
        from posttrain.config.run import Model, Reinforce
        from posttrain.config.stages.stage import Optimizer
        from posttrain.core.batch import Batch
        from posttrain.core.sampling import Sampling
        from posttrain.core.streams import WEIGHT
        from posttrain.core.types import Segment
        from posttrain.engine.learner.learner import HFLearner
        from posttrain.engine.model.policy_model import load_policy
        from posttrain.engine.optimizer.optimizer import StageOptimizer
        from posttrain.role.trainer import Trainer

        segments = list[Segment]()
        for ids in self.work.ids:
            mask = np.arange(len(ids)) >= self.work.prompt
            blank = np.where(mask, -1.0, np.nan).astype(np.float32)
            segments.append(Segment(ids, mask, blank, np.where(mask, 0, -1).astype(np.int32), Sampling()))
        said = [s.spoken for s in segments]
        batch = Batch.of(segments, streams={WEIGHT: np.repeat(self.work.advantage_S, said) / self.work.spoken})
        lora = Lora(rank=self.job.rank) if self.job.rank else None
        model = Model(path=self.job.checkpoint, share_prefixes=self.job.share, lora=lora)
        learner = HFLearner(load_policy(model, None, 0))
        optimizer = StageOptimizer(learner.parameters(), Optimizer(lr=LR, warmup=0, clip=CLIP))
        return Trainer(learner, optimizer, Reinforce(name="rl").micro_tokens), batch, Likelihood()

    def steps(self) -> AbstractContextManager[None]:
        from posttrain.system.machine import during_steps

        return during_steps()

    def step(self, micro: int) -> float:
        trainer, batch, loss = self.parts
        self._gauges = trainer.step(batch, loss)
        return self._gauges["optim/grad_norm"].mean

    def told(self) -> dict[str, Any]:
        return {name: g.mean for name, g in self._gauges.items() if name.startswith("learner/")}


class Naive(Side):
    """Autograd over padded sequences, by the shortest program that is right."""

    @cached_property
    def model(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.job.checkpoint, dtype=torch.float32).train()

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, micro: int) -> float:
        ids, advantage, prompt = self.work.ids, torch.from_numpy(self.work.advantage_S).float(), self.work.prompt
        self.optimizer.zero_grad()
        for begin in range(0, len(ids), micro):
            rows, mask = padded(ids[begin : begin + micro])
            logits = self.model(input_ids=rows, attention_mask=mask, use_cache=False).logits[:, prompt - 1 : -1]
            logp = logits.log_softmax(-1).gather(2, rows[:, prompt:, None])[..., 0]
            weighted = logp * advantage[begin : begin + micro, None] * mask[:, prompt:]
            (-weighted.sum() / self.work.spoken).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return float(norm)


class Trl(Side):
    """`GRPOTrainer.compute_loss` of micro-batches cut from the padded step, and the trainer's own optimizer."""

    @cached_property
    def trainer(self) -> Any:
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=SIBLINGS,
            gradient_accumulation_steps=self.job.prompts,
            num_generations=SIBLINGS,
            max_completion_length=self.job.cap,
            beta=0.0,
            loss_type="dapo",
            max_steps=10_000,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.95,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(self.job.checkpoint, dtype=torch.float32),
            reward_funcs=lambda completions, **_: [reward(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=AutoTokenizer.from_pretrained(self.job.checkpoint),
        )
        trainer.create_optimizer()
        trainer.current_gradient_accumulation_steps = config.steps_per_generation
        trainer.model.train()
        return trainer

    def step(self, micro: int) -> float:
        trainer, prompt = self.trainer, self.work.prompt
        rows, mask = padded(self.work.ids)
        whole = {
            "prompt_ids": rows[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "completion_ids": rows[:, prompt:],
            "completion_mask": mask[:, prompt:],
            "advantages": torch.from_numpy(self.work.advantage_S).float(),
        }
        count = torch.tensor(self.work.spoken)
        trainer.optimizer.zero_grad()
        for begin in range(0, len(rows), micro):
            inputs = {k: x[begin : begin + micro] for k, x in whole.items()} | {"num_items_in_batch": count}
            trainer.compute_loss(trainer.model, inputs).backward()
        norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        return float(norm)


def padded(ids: tuple[np.ndarray, ...]) -> tuple[Tensor, Tensor]:
    """(ids, mask) [S, longest], padding on the right."""
    longest = max(map(len, ids))
    rows = torch.zeros(len(ids), longest, dtype=torch.long)
    mask = torch.zeros(len(ids), longest, dtype=torch.long)
    for i, x in enumerate(ids):
        rows[i, : len(x)], mask[i, : len(x)] = torch.from_numpy(x.astype(np.int64)), 1
    return rows, mask


def main(name: str, job: Job) -> None:
    torch.set_num_threads(job.threads)
    wire, side = Wire(), {"ours": Ours, "unshared": Ours, "naive": Naive, "trl": Trl}[name](job)
    memory = StepMemory()
    with side.steps():
        while (command := wire.receive())["do"] == "step":
            memory.begin()
            begun, cpu = time.perf_counter(), _cpu()
            norm = side.step(command.get("micro", 0))
            seconds, used = time.perf_counter() - begun, _cpu() - cpu
            wire.send(seconds=seconds, process_seconds=used, norm=norm, extra=side.told(), **memory.told())


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main(sys.argv[1], Job(**json.loads(sys.argv[2])))
