"""The names that settings of TRL, transformers and PEFT have here, and words that people try first: for whoever writes
the name that they know (docs/start/coming-from-trl.md has all fields of all configurations)."""

from __future__ import annotations

BATCH = "batch, and in RL prompts x siblings; micro_tokens splits the work"
EPOCHS = "epochs of a stage that learns from rows (sft, dpo, reward_model), else steps"
PULL = "pull.coef in RL, beta of a stage that learns from pairs"
GPUS = "posttrain run ... --nproc N (docs/guides/ranks.md)"
OTHERS: dict[str, str] = {
    "model_name_or_path": "model",
    "train_dataset": "env.prompts (from Python env=posttrain.prompts(...))",
    "dataset_name": "env.prompts",
    "eval_dataset": "env.heldout, a part of env.prompts",
    "reward_funcs": "env.rewards (from Python rewards=[...])",
    "reward_weights": "env.rewards.0.weight (from Python rewards=[(function, 0.5)])",
    "peft_config": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "r": "model.lora.rank",
    "lora_dropout": "model.lora, which is trained without dropout",
    "lora_alpha": "model.lora.alpha",
    "target_modules": "model.lora.targets",
    "load_in_4bit": "model.quantize=nf4",
    "load_in_8bit": "model.quantize=int8",
    "callbacks": "on_step, from Python",
    "output_dir": "--out FOLDER (from Python out=)",
    "resume_from_checkpoint": "--resume RUN (from Python resume=)",
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup",
    "warmup_ratio": "optimizer.warmup, in steps",
    "max_grad_norm": "optimizer.clip",
    "optim": "optimizer.kind",
    "max_steps": "steps",
    "num_train_epochs": EPOCHS,
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": BATCH,
    "num_generations": "siblings",
    "num_iterations": "epochs of an RL stage",
    "max_completion_length": "sampling.max_tokens",
    "max_length": "model.context",
    "max_prompt_length": "model.context; a longer prompt is refused, not cut",
    "beta": PULL,
    "epsilon": "clip.low and clip.high",
    "epsilon_high": "clip.high",
    "loss_type": "aggregate, or another algorithm",
    "scale_rewards": "scale",
    "bf16": "model.dtype=bfloat16",
    "fp16": "model.dtype=float16",
    "use_vllm": "engine=vllm",
    "report_to": "trackers",
    "run_name": "--out FOLDER, or the variable WANDB_NAME",
    "project": "the variable WANDB_PROJECT",
    "save_steps": "checkpoint_every",
    "save_total_limit": "keep_checkpoints",
    "eval_steps": "eval_every",
    "eval_strategy": "eval_every",
    "logging_steps": "not needed: every step is written",
    "packing": "not needed: sequences are always packed",
}
"""The name elsewhere -> ours."""
FIRST_TRIED: dict[str, str] = {
    "data": "env.prompts",
    "dataset": "env.prompts",
    "train_file": "env.prompts",
    "batch": "prompts x siblings of an RL stage; micro_tokens splits the work",
    "batch_size": BATCH,
    "group_size": "siblings",
    "num_epochs": EPOCHS,
    "kl_coef": PULL,
    "max_new_tokens": "sampling.max_tokens",
    "vllm": "engine=vllm",
    "lora": "model.lora.rank=16",
    "lora_rank": "model.lora.rank",
    "use_peft": "model.lora.rank=16",
    "gpus": GPUS,
    "num_gpus": GPUS,
}
"""A word that people try first, where it is no setting -> ours."""


def our_name(name: str) -> str:
    """Returns our name for a name of another library or a word tried first, for an error; '' where it is neither."""
    if name in OTHERS:
        return f"{name} of other libraries is here: {OTHERS[name]} (docs/start/coming-from-trl.md)"
    return f"{name} is here: {FIRST_TRIED[name]}" if name in FIRST_TRIED else ""
