"""A tiny model with a chat template, on disk, and a server over it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from openai import AsyncOpenAI
from transformers import PreTrainedTokenizerFast

from posttrain.config.run import Model
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.model.tiny_models import build_module
from posttrain.serve.caller_limits import CallerLimits
from posttrain.serve.command import make_served
from posttrain.serve.intake import ServedModel
from posttrain.serve.listen import listening
from posttrain.serve.routes import Server
from tests.vocabularies import train_byte_level

TOKEN = "a-token-for-the-tests"
TEXTS = [
    f"user says {a} and {b}; the assistant: " for a in range(20) for b in ("cat", "naïve café", "日本語の文", "42 + 7")
]
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' +"
    " m['role']) }}{% endif %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt"
    " %}assistant: {% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    made = train_byte_level(TEXTS, 300)
    made.chat_template = template
    return made


def save_model(folder: Path, template: str | None = TEMPLATE, context: int = 96) -> Path:
    """A random model whose distributions are far from uniform."""
    words = tokenizer(template)
    module = build_module(Model(hidden=32, layers=2, heads=4, kv_heads=2, ffn=48, context=context), words, 0)
    with torch.no_grad():
        for p in module.parameters():
            if p.ndim > 1:
                p.mul_(2)
    module.save_pretrained(folder)
    words.save_pretrained(folder)
    load_policy(Model(path=str(folder)), None, 0)
    return folder


@dataclass
class Up:
    """A listening server, its engine, and a client of it."""

    client: AsyncOpenAI
    engine: Any
    url: str
    served: ServedModel
    server: Server


@asynccontextmanager
async def up(folder: Path, *overrides: str, limits: CallerLimits | None = None, **changes: Any) -> AsyncIterator[Up]:
    served, _ = make_served(folder, "threads=1", "slots=8", *overrides, token=TOKEN, name="tiny")
    served = replace(served, **changes)
    server = Server(served, limits or CallerLimits())
    async with (
        listening(server, "127.0.0.1", 0) as url,
        AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0, timeout=60) as client,
    ):
        yield Up(client, served.sampler, url, served, server)
