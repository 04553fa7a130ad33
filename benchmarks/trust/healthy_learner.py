"""What `healthy.py` draws of the learner, for some of its runs: adapters, number types, optimizers, what is frozen, the
same bits on both sides.

A setting that the program refuses for a stated rule (DoRA over few bits, a pattern that fits no parameter of this
architecture, a package that is not installed) makes no run. It is drawn again and counted; any other refusal is none of
these and stays one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from posttrain.core import seeds

SHARE = 0.3
"""Of the runs draw settings of the learner."""
AGAIN = 8
"""Most draws of one run's settings."""
RULES = {
    "PEFT computes DoRA's norms from float weights": "DoRA over few bits",
    "computes with Conv1D": "few bits of GPT-2's layers",
    "in few bits. Take int8": "blocks of nf4 that do not fit",
    "is not installed: pip install": "a package that is not installed",
    "needs torchao: pip install": "a package that is not installed",
    "fits no parameter that is trained": "a pattern that fits nothing",
    "nothing would be trained": "a pattern that freezes everything",
    "would change nothing: raise the horizon": "a learning rate of 0 before the end",
    "and drafts differ in number": "the same bits with drafts",
    "engine.update=stale does not": "the same bits over stale caches",
}
"""Part of the sentence of a refusal -> what is counted."""
HALVES = ("bfloat16", "float16")
MOST_TAUGHT = 30
"""Most steps of SFT in number types that a CPU computes slowly."""
PARTS = {
    "gpt2": ("wte", "wpe", "h.0", "mlp", "ln_f", "attn.c_attn"),
    "": ("embed_tokens", "layers.0", "mlp", "self_attn", "norm", "down_proj"),
}
"""Patterns of parameters by architecture; '': every other one."""


def draws_learner(seed: int, index: int) -> bool:
    """Whether this run draws settings of the learner."""
    return seeds.generator(seed, "healthy-learner", index).random() < SHARE


def learner_words(seed: int, index: int, attempt: int, words: Sequence[str]) -> tuple[str, ...]:
    """The same run with settings of the learner, or `words` as they are: for most runs.

    Args:
        attempt: how often this run's settings were refused before.
    """
    if not draws_learner(seed, index):
        return tuple(words)
    rng = seeds.generator(seed, "healthy-learner", index, attempt + 1)

    def one(*choices: Any, p: Iterable[float] | None = None) -> Any:
        return choices[int(rng.choice(len(choices), p=None if p is None else list(p)))]

    settings = dict(word.split("=", 1) for word in words)
    drawn = dict[str, str]()
    while not drawn:
        if rng.random() < 0.45:
            drawn |= _adapter(rng, one)
        if rng.random() < 0.15:
            drawn["model.dtype"] = "float16"
        if rng.random() < 0.3:
            drawn["rl.optimizer.kind"] = one("muon", "sgd", "adamw8bit", p=(0.45, 0.45, 0.1))
        if rng.random() < 0.3:
            drawn |= _schedule(rng, one, settings)
        if rng.random() < 0.2:
            drawn["rl.optimizer.ema"] = one("0.9", "0.99")
        if rng.random() < 0.2:
            drawn["rl.optimizer.weight_decay"] = one("0.01", "0.1")
        parts = PARTS.get(settings["model.arch"], PARTS[""])
        if rng.random() < 0.2:
            drawn["rl.optimizer.freeze"] = one(*parts)
        if rng.random() < 0.2:
            drawn["rl.optimizer.rates"] = f"{one(*parts, 'value_head')}:{one('0.1', '3', '10')}"
        if rng.random() < 0.2 and "engine.lookup" not in settings:
            drawn["exact"] = "true"
    return tuple(f"{name}={value}" for name, value in _fitted(settings | drawn).items())


def _adapter(rng: Any, one: Any) -> dict[str, str]:
    drawn = {"model.lora.rank": one("2", "4", "8")}
    if rng.random() < 0.3:
        drawn |= {"model.lora.dora": "true"}
    if rng.random() < 0.2:
        drawn |= {"model.lora.rslora": "true"}
    if rng.random() < 0.3:
        drawn |= {"model.quantize": one("int8", "nf4", p=(0.85, 0.15))}
    return drawn


def _schedule(rng: Any, one: Any, settings: dict[str, str]) -> dict[str, str]:
    """A fall that ends inside the run or long after it."""
    horizon = int(settings["rl.optimizer.warmup"]) + one(3, 10, 40)
    drawn = {"rl.optimizer.schedule": one("linear", "cosine"), "rl.optimizer.horizon": str(horizon)}
    return drawn | ({"rl.optimizer.floor": "0"} if rng.random() < 0.3 else {})


def _fitted(settings: dict[str, str]) -> dict[str, str]:
    """The same, with less SFT where it would take minutes."""
    if settings.get("model.dtype") not in HALVES:
        return settings
    steps = ("sft.steps", "cot.steps", "pretrain.steps")
    return settings | {n: str(min(int(settings[n]), MOST_TAUGHT)) for n in steps if n in settings}


def rule_of(refused: str) -> str:
    """The stated rule that a refusal follows; '' where it follows none of them."""
    return next((rule for part, rule in RULES.items() if part in refused), "")


def drawn_of(words: Iterable[Sequence[str]]) -> dict[str, int]:
    """How often each setting of the learner was drawn."""
    found = Counter[str]()
    for run in words:
        settings = dict(word.split("=", 1) for word in run)
        named = {"model.lora.rank": "adapter", "model.lora.dora": "DoRA", "model.lora.rslora": "rsLoRA"}
        found.update(name for key, name in named.items() if key in settings)
        found.update([settings["model.dtype"]] if "model.dtype" in settings else [])
        found.update(["exact"] if "exact" in settings else [])
        found.update(settings[key] for key in ("model.quantize", "rl.optimizer.kind") if key in settings)
        more = ("schedule", "ema", "weight_decay", "freeze", "rates")
        found.update(name for name in more if f"rl.optimizer.{name}" in settings)
    return dict(sorted(found.items()))
