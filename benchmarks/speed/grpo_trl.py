"""TRL's side of `grpo_step.py`: a worker process that runs `GRPOTrainer`, one optimizer step per command.

What is set away from TRL's defaults, each in TRL's favour or for equality: float32 (default bfloat16), no gradient
checkpointing (on by default, about 20 % slower), KL off (`beta=0`, its default), no logging, no checkpoints.
Facts of TRL 1.16 that this relies on: `generate` runs eagerly (`disable_compile=True`); with one optimizer step per
generation the old log-probs are not recomputed; completions are padded to the longest of their generation batch
before training; with one `generate` per step the micro-batch changes the training part only.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor, LogitsProcessorList, TrainerCallback
from transformers.generation.continuous_batching import ContinuousBatchingManager
from trl import GRPOConfig, GRPOTrainer

from benchmarks.speed.grpo_work import LR, SIBLINGS, TASKS, Job, Wire, lengths_PG, memory_mb, prompt, reward


class ForceLengths(LogitsProcessor):
    """Row b says its stop token as token number `lengths[b]`, and never before."""

    seconds = 0.0
    """Spent here, over all rows and steps."""

    def __init__(self, stop: int, lengths_B: np.ndarray, prompt_tokens: int) -> None:
        self.stop, self.prompt_tokens = stop, prompt_tokens
        self.ending = {int(n): torch.from_numpy(np.flatnonzero(lengths_B == n)) for n in np.unique(lengths_B)}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        scores[:, self.stop] = -torch.inf
        rows = self.ending.get(input_ids.shape[1] - self.prompt_tokens + 1)
        if rows is not None:
            scores[rows] = -torch.inf
            scores[rows, self.stop] = 0.0
        ForceLengths.seconds += time.perf_counter() - begun
        return scores


class Stepper(TrainerCallback):
    """Holds the trainer between optimizer steps until a command comes, and times what lies between."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.trainer: Timed
        self.after: dict[str, Any] = {}
        """The command that ended this trainer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wire.send(ready=True, **memory_mb())
        self._next(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._begun
        t = self.trainer
        roles = {"generation": t.generation, "reward": t.scoring - t.generation, "the rest": seconds - t.scoring}
        extra = {"length_forcing": ForceLengths.seconds, "loss": float(t.last_loss)}
        self.wire.send(seconds=seconds, roles=roles, spoken=t.spoken, extra=extra, **memory_mb())
        self._next(control)

    def _next(self, control: Any) -> None:
        command = self.wire.receive()
        if command["do"] == "step":
            self.trainer.begin(np.minimum(self.trainer.table, command.get("at_most", 10**9)))
            self._begun = time.perf_counter()
        else:
            self.after = command
            control.should_training_stop = True


class Timed(GRPOTrainer):
    """GRPOTrainer with a clock around generation and scoring, and with lengths given from outside."""

    table: np.ndarray
    """Lengths of a whole step, flat, in the order of the prompts."""

    def begin(self, lengths: np.ndarray) -> None:
        self._lengths, self._cursor = lengths, 0
        self.generation = self.scoring = 0.0
        self.spoken = 0
        self.last_loss = 0.0
        ForceLengths.seconds = 0.0

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        wanted = self._lengths[self._cursor : self._cursor + len(prompt_ids)]
        self._cursor += len(prompt_ids)
        self.model.forced = wanted
        out = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        said = [len(ids) for ids in out[0]]
        if said != wanted.tolist():
            raise AssertionError(f"TRL said {said[:8]}..., wanted {wanted[:8].tolist()}...")
        self.spoken += sum(said)
        self.generation += time.perf_counter() - begun
        return out

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        begun = time.perf_counter()
        out = super()._generate_and_score_completions(inputs)
        self.scoring += time.perf_counter() - begun
        return out

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.last_loss += loss.detach()
        return loss


def judge(completions: list[str], **kwargs: Any) -> list[float]:
    return [reward(text) for text in completions]


def force_lengths(model: Any, stop: int) -> None:
    """Give `model.generate` the length-forcing processor, and continuous batching its token limits."""
    plain = model.generate

    def generate(**kwargs: Any) -> Any:
        processor = ForceLengths(stop, model.forced, kwargs["input_ids"].shape[1])
        return plain(**kwargs, logits_processor=LogitsProcessorList([processor]))

    model.generate = generate
    add = ContinuousBatchingManager.add_request

    def add_request(self: Any, input_ids: Any, request_id: str, **kwargs: Any) -> Any:
        """Requests are numbered in the order of the prompts; a limit of tokens costs nothing at all."""
        limit = int(model.forced[int(request_id.removeprefix("req_"))])
        return add(self, input_ids, request_id, **(kwargs | {"max_new_tokens": limit, "eos_token_id": -1}))

    ContinuousBatchingManager.add_request = add_request


def config(job: Job, how: dict[str, Any], folder: str) -> GRPOConfig:
    samples = job.prompts * SIBLINGS
    return GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=how["micro"],
        gradient_accumulation_steps=samples // how["micro"],
        generation_batch_size=how["generation"],
        num_generations=SIBLINGS,
        max_completion_length=job.cap,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        max_steps=10_000,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        shuffle_dataset=False,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        cache_implementation=how.get("cache"),
        use_transformers_continuous_batching=how.get("continuous", False),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def serve(wire: Wire, job: Job) -> None:
    """Build a trainer per `configure` command, then step it until the next one."""
    data = Dataset.from_dict({"prompt": [prompt(i) for i in range(TASKS)]})
    restore = ContinuousBatchingManager.add_request
    command = wire.receive()
    while command["do"] == "configure":
        ContinuousBatchingManager.add_request = restore
        tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
        model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
        force_lengths(model, tokenizer.eos_token_id)
        stepper = Stepper(wire)
        with tempfile.TemporaryDirectory() as folder:
            trainer = Timed(
                model=model,
                reward_funcs=judge,
                args=config(job, command, folder),
                train_dataset=data,
                processing_class=tokenizer,
                callbacks=[stepper],
            )
            trainer.table = lengths_PG(job.regime, job.prompts).ravel()
            stepper.trainer = trainer
            trainer.train()
        del trainer, model
        command = stepper.after


def main(job: Job) -> None:
    torch.set_num_threads(job.threads)
    serve(Wire(), job)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
