"""TRL's side of `parity.py`: its trainers' own loss methods on a prepared batch. No formula is written here."""

from __future__ import annotations

import tempfile
from functools import cached_property
from typing import Any

import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.parity.parity_cases import Case

VERSION = trl.__version__
PAD = 0
PAIR: dict[str, list[Any]] = {"prompt": ["一"], "chosen": ["丁"], "rejected": ["丂"]}
PLAIN: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "logging_strategy": "no",
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "max_steps": 1,
}
RESET: dict[str, dict[str, Any]] = {
    "dpo": {
        "label_smoothing": 0.0,
        "f_divergence_type": "reverse_kl",
        "f_alpha_divergence_coef": 0.5,
        "ld_alpha": None,
        "use_weighting": False,
    },
    "weighted": {},
    "kto": {"desirable_weight": 1.0, "undesirable_weight": 1.0},
    "cpo": {"label_smoothing": 0.0, "simpo_gamma": 0.5, "alpha": 0.0},
    "orpo": {},
    "tpo": {"label_smoothing": 0.0},
}
"""What a case leaves as it is is set back to this."""


def rows(parts: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
    """(prompt, completion) pairs as ids, attention and completion mask, padded on the right."""
    longest = max(len(p) + len(c) for p, c in parts)
    out = {k: torch.zeros(len(parts), longest, dtype=torch.long) for k in ("ids", "attention", "completion")}
    out["ids"] += PAD
    for i, (p, c) in enumerate(parts):
        out["ids"][i, : len(p) + len(c)] = torch.from_numpy(np.concatenate([p, c]).astype(np.int64))
        out["attention"][i, : len(p) + len(c)] = 1
        out["completion"][i, len(p) : len(p) + len(c)] = 1
    return out


class Trainers:
    """The trainers on one policy and one reference, each made when a case asks for it."""

    def __init__(self, policy: str, reference: str) -> None:
        self.policy, self.reference = policy, reference
        self.tokenizer = AutoTokenizer.from_pretrained(policy)

    def _model(self, path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def _made(self, kind: Any, config: Any, data: dict[str, list[Any]], **more: Any) -> Any:
        return kind(
            model=self._model(self.policy),
            args=config,
            train_dataset=Dataset.from_dict(data),
            processing_class=self.tokenizer,
            **more,
        )

    @cached_property
    def dpo(self) -> Any:
        config = trl.DPOConfig(output_dir=tempfile.mkdtemp(), **PLAIN)
        return self._made(trl.DPOTrainer, config, PAIR, ref_model=self._model(self.reference))

    @cached_property
    def weighted(self) -> Any:
        """A DPO trainer whose head also computes what WPO reads, which is decided when it is made."""
        config = trl.DPOConfig(output_dir=tempfile.mkdtemp(), use_weighting=True, **PLAIN)
        return self._made(trl.DPOTrainer, config, PAIR, ref_model=self._model(self.reference))

    @cached_property
    def kto(self) -> Any:
        config = trl.KTOConfig(output_dir=tempfile.mkdtemp(), per_device_train_batch_size=2, **PLAIN)
        data = {"prompt": ["一", "丁"], "completion": ["丁", "丂"], "label": [True, False]}
        return self._made(trl.KTOTrainer, config, data, ref_model=self._model(self.reference))

    @cached_property
    def cpo(self) -> Any:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return self._made(CPOTrainer, CPOConfig(output_dir=tempfile.mkdtemp(), **PLAIN), PAIR)

    @cached_property
    def orpo(self) -> Any:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return self._made(ORPOTrainer, ORPOConfig(output_dir=tempfile.mkdtemp(), **PLAIN), PAIR)

    @cached_property
    def tpo(self) -> Any:
        from trl.experimental.tpo import TPOConfig, TPOTrainer

        data = {**PAIR, "reference": ["七"]}
        return self._made(TPOTrainer, TPOConfig(output_dir=tempfile.mkdtemp(), **PLAIN), data)

    def of(self, case: Case, texts: Any) -> tuple[float, dict[str, torch.Tensor]]:
        """The loss of a case and the gradient of each weight."""
        trainer = getattr(self, case.trainer)
        for name, value in {**RESET[case.trainer], **case.settings}.items():
            if not (hasattr(trainer, name) or hasattr(trainer.args, name)):
                raise AssertionError(f"TRL's {case.trainer} trainer has no {name!r} any more: see how it is set there")
            setattr(trainer, name, value)
        trainer.model.train()
        trainer.model.zero_grad(set_to_none=True)
        loss = getattr(self, f"_{case.trainer}_loss")(trainer, texts)
        loss.backward()
        named = trainer.model.named_parameters()
        return float(loss.detach()), {n: p.grad.clone() for n, p in named if p.grad is not None}

    def rewarding(
        self, folder: str, pairs: list[tuple[np.ndarray, np.ndarray]], margins: list[float], centre: float
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """What `RewardTrainer` makes of a reward model that it loads from a directory: the loss of pairs of token ids,
        the chosen one first, and the gradient of each weight."""
        config = trl.RewardConfig(
            output_dir=tempfile.mkdtemp(),
            center_rewards_coefficient=centre,
            model_init_kwargs={"dtype": "float32"},
            **PLAIN,
        )
        data = {"chosen": ["丁"], "rejected": ["丂"]}
        trainer: Any = trl.RewardTrainer(model=folder, args=config, train_dataset=Dataset.from_dict(data))
        rows = [
            {"chosen_ids": c.tolist(), "rejected_ids": r.tolist(), "margin": m}
            for (c, r), m in zip(pairs, margins, strict=True)
        ]
        model = trainer.model.train()
        loss = trainer.compute_loss(model, trainer.data_collator(rows))
        loss.backward()
        return float(loss.detach()), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    def _dpo_loss(self, trainer: Any, texts: Any) -> Any:
        at = {s: k for k, s in enumerate(texts.side[0])}
        parts = [(p, each[at[s]]) for s in (1, 0) for p, each in zip(texts.prompts, texts.completions, strict=True)]
        made = rows(parts)
        inputs = {
            "input_ids": made["ids"],
            "attention_mask": made["attention"],
            "completion_mask": made["completion"],
        }
        return trainer.compute_loss(trainer.model, inputs)

    _weighted_loss = _dpo_loss

    def _kto_loss(self, trainer: Any, texts: Any) -> Any:
        trainer.calculate_KL = trainer.loss_type == "kto"
        said = [each[0] for each in texts.completions]
        own = rows(list(zip(texts.prompts, said, strict=True)))
        other = rows(list(zip(texts.prompts, [said[-1], *said[:-1]], strict=True)))
        inputs = {
            "input_ids": own["ids"],
            "attention_mask": own["attention"],
            "completion_mask": own["completion"],
            "KL_input_ids": other["ids"],
            "KL_attention_mask": other["attention"],
            "KL_completion_mask": other["completion"],
            "label": torch.tensor([s[0] == 1 for s in texts.side]),
        }
        if not trainer.calculate_KL:
            inputs = {k: v for k, v in inputs.items() if not k.startswith("KL_")}
        return trainer.compute_loss(trainer.model, inputs)

    def _paired(self, trainer: Any, texts: Any) -> Any:
        inputs = dict[str, Any]()
        for k, word in enumerate(("chosen", "rejected")):
            made = rows([(p, each[k]) for p, each in zip(texts.prompts, texts.completions, strict=True)])
            inputs[f"{word}_input_ids"] = made["ids"]
            inputs[f"{word}_attention_mask"] = made["attention"]
            inputs[f"{word}_labels"] = made["ids"].masked_fill(made["completion"] == 0, -100)
        return trainer.compute_loss(trainer.model, inputs)

    _cpo_loss = _orpo_loss = _paired

    def _tpo_loss(self, trainer: Any, texts: Any) -> Any:
        at = {s: k for k, s in enumerate(texts.side[0])}
        parts = [(p, each[at[s]]) for s in (1, 0, 2) for p, each in zip(texts.prompts, texts.completions, strict=True)]
        made = rows(parts)
        inputs = {
            "input_ids": made["ids"],
            "attention_mask": made["attention"],
            "completion_mask": made["completion"],
        }
        return trainer.compute_loss(trainer.model, inputs)
