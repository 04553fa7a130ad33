"""TRL's side of `preference.py`: a worker process that runs `DPOTrainer` or `RewardTrainer`, one update per command.

What is set away from TRL's defaults, each in TRL's favour or for equality: float32 (default bfloat16), no gradient
checkpointing (on by default), no logging, no checkpoints, rows in the order of the file, so that every update has the
same pairs as on the other side. Tokens are made before the first update and are not part of any.
Facts of TRL 1.16 that this relies on: its head works in tiles and never holds all logits; without a GPU it reads every
position, prompts and padding too; `padding_free` is switched off for preferences.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer

from benchmarks.speed.grpo_work import StepMemory, Wire, memory_mb
from benchmarks.speed.preference_work import BETA, LR, PairJob
from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.engine.head.value_heads import RewardHead

UPDATES = 16
"""Updates of an epoch: the same pairs so many times, because the end of an epoch costs something."""


class CommandedStepper(TrainerCallback):
    """Holds the trainer between updates until a command comes, and times what lies between."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.norm, self._memory = wire, 0.0, StepMemory()
        self.after: dict[str, Any] = {}
        """The command that ended this trainer."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.wire.send(ready=True, **memory_mb())
        self._next(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._begun
        self.wire.send(seconds=seconds, norm=self.norm, **self._memory.told())
        self._next(control)

    def _next(self, control: Any) -> None:
        command = self.wire.receive()
        if command["do"] != "step":
            self.after = command
            control.should_training_stop = True
            return
        self._memory.begin()
        self._begun = time.perf_counter()


def settings(job: PairJob, micro: int, folder: str) -> dict[str, Any]:
    """What both configs share."""
    if job.pairs % micro:
        raise SystemExit(f"a micro-batch of {micro} does not divide {job.pairs} pairs")
    return {
        "output_dir": folder,
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": job.pairs // micro,
        "max_steps": 10_000,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "train_sampling_strategy": "sequential",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }


def make_trainer(job: PairJob, micro: int, folder: str, stepper: CommandedStepper) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(job.checkpoint)
    rows = [json.loads(line) for line in Path(job.data).read_text(encoding="utf-8").splitlines()]
    data = Dataset.from_list(rows * UPDATES)
    both: dict[str, Any] = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [stepper]}
    given = settings(job, micro, folder)
    if job.what == "reward":
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            job.checkpoint, num_labels=1, dtype=torch.float32
        )
        with torch.no_grad():  # the same head as on the other side
            model.score.weight.copy_(RewardHead(HeadShape(), model.config.hidden_size).score.weight)
        trainer: Any = RewardTrainer(model=model, args=RewardConfig(max_length=None, **given), **both)
    else:
        ahead = job.what == "dpo_ahead"
        model = AutoModelForCausalLM.from_pretrained(job.checkpoint, dtype=torch.float32)
        config = DPOConfig(beta=BETA, max_length=None, precompute_ref_log_probs=ahead, **given)
        trainer = DPOTrainer(model=model, args=config, **both)
    clip = trainer.accelerator.clip_grad_norm_

    def noted(*args: Any, **kwargs: Any) -> Any:
        stepper.norm = float(norm := clip(*args, **kwargs))
        return norm

    trainer.accelerator.clip_grad_norm_ = noted
    return trainer


def main(job: PairJob) -> None:
    """A trainer per `configure` command, which is then stepped until the next one."""
    torch.set_num_threads(job.threads)
    wire = Wire()
    command = wire.receive()
    while command["do"] == "configure":
        stepper = CommandedStepper(wire)
        with tempfile.TemporaryDirectory() as folder:
            trainer = make_trainer(job, command["micro"], folder, stepper)
            trainer.train()
        del trainer
        command = stepper.after


if __name__ == "__main__":
    main(PairJob(**json.loads(sys.argv[1])))
