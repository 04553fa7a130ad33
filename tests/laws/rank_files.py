"""Tasks of `test_ranks_files`: models read by rows, and the memory of each rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from law_ranks import Case, Groups, minibatch

from posttrain.config.model_settings import Lora
from posttrain.config.run import Model
from posttrain.engine.layers.fused_layers import SwiGLU
from posttrain.engine.model.policy_model import load_policy
from posttrain.engine.parallel import sharded_load
from posttrain.engine.parallel.gather import gathered
from posttrain.engine.parallel.ranks.process_ranks import ProcessRanks
from posttrain.engine.parallel.sharded_learner import ShardedLearner
from posttrain.engine.parallel.sharded_load import RowFiles, blank_policy, read_rows
from posttrain.role.sync import whole_tensors
from posttrain.system.errors import PosttrainError
from tests.engine.engine_parts import policy

BATCH = Case("likelihood", 4096)
WIDE = Model(arch="llama", hidden=512, layers=8, heads=4, kv_heads=4, ffn=1536, context=64)
"""27 million numbers, 109 MB: more than what a process needs beside."""
ASKED: dict[str, dict[str, Any]] = {"whole": {}, "bfloat16": {"dtype": "bfloat16"}, "adapter": {"lora": Lora(rank=4)}}


def load_by_rows(model: Model, ranks: ProcessRanks) -> ShardedLearner:
    return read_rows(blank_policy(model), ranks, ShardedLearner, ranks)


@dataclass(frozen=True)
class ByRows:
    """The same learner as from a whole copy: weights, scores and parameters; and what is refused."""

    def __call__(self, groups: Groups, folder: Path) -> dict[Any, Any]:
        everyone, out = groups[4], dict[Any, Any]()
        assert everyone is not None
        for arch in ("qwen3", "gpt2"):
            path = folder / arch
            if everyone.rank == 0:
                policy(arch).module.save_pretrained(path, max_shard_size="40KB")  # in several files
                policy(arch).tokenizer.save_pretrained(path)
            everyone.every("saved")
            out[arch, "files"] = len(list(path.glob("*.safetensors")))
            for word, more in ASKED.items():
                model = Model(path=str(path), context=64, **more)
                for ranks in (groups[2], everyone, everyone.part(range(4), 2)):
                    if ranks is not None:
                        out[arch, word, ranks.world, ranks.replicas] = _same(model, ranks)
        out["refused"] = _refused(folder / "gpt2", everyone)
        out["stale"] = _stale(folder / "gpt2", everyone)
        out["wrong layers"] = [_wrong(folder / "qwen3", everyone, fault) for fault in ("forward", "backward")]
        return out


def _same(model: Model, ranks: ProcessRanks) -> dict[str, Any]:
    kept = ShardedLearner(load_policy(model, None, 0), ranks)
    rows, batch = load_by_rows(model, ranks), minibatch(BATCH)
    same = [torch.equal(p, rows.parameters()[n]) for n, p in kept.parameters().items()]
    return {
        "fingerprint": kept.fingerprint() == rows.fingerprint(),
        "parameters": kept.parameters().keys() == rows.parameters().keys() and all(same),
        "scores": float(np.abs(kept.score(batch) - rows.score(batch)).max()),
    }


def _refused(path: Path, ranks: ProcessRanks) -> list[str]:
    out = list[str]()
    asked: list[dict[str, Any]] = [{"path": str(path), "lora": Lora(rank=4, dora=True)}, {"path": "nobody/nothing"}]
    for more in asked:
        try:
            load_by_rows(Model(context=64, **more), ranks)
        except PosttrainError as error:
            out.append(str(error))
    return out


def _stale(path: Path, ranks: ProcessRanks) -> str:
    """What a rank says where one of them sees other files."""
    with patch.object(sharded_load, "RowFiles", lambda p: RowFiles(path.with_name("qwen3") if ranks.rank == 1 else p)):
        try:
            load_by_rows(Model(path=str(path), context=64), ranks)
        except PosttrainError as error:
            return str(error)
    return ""


def _wrong(path: Path, ranks: ProcessRanks, method: str) -> str:
    """What a rank says where the fused gate computes something else, or another gradient of itself."""
    real = getattr(SwiGLU, method)

    def wrong(*given: Any) -> Any:
        found = real(*given)
        return found * 1.01 if method == "forward" else (found[0] * 1.01, *found[1:])

    with patch.object(SwiGLU, method, staticmethod(wrong)):
        try:
            load_by_rows(Model(path=str(path), context=64), ranks)
        except PosttrainError as error:
            return str(error)
    return ""


@dataclass(frozen=True)
class Memory:
    """The most memory that a rank needs to read its rows, and to come to its learner; what it has then; and the most
    that it needs to send its weights, as an engine reads them one after the other on rank 0. Beyond what it had before,
    in bytes."""

    def __call__(self, groups: Groups, folder: Path) -> dict[str, Any]:
        everyone, path = groups[4], folder / "wide"
        assert everyone is not None
        if everyone.rank == 0:
            made = load_policy(WIDE, "0123456789+-*= ", 0)
            made.module.save_pretrained(path, max_shard_size="8MB")
            made.tokenizer.save_pretrained(path)
        everyone.every("saved")
        model = Model(path=str(path), context=64)
        load_by_rows(Model(path=str(folder / "gpt2"), context=64), everyone)  # so that its modules are imported
        out: dict[str, Any] = {"all": sum(p.stat().st_size for p in path.glob("*.safetensors"))}
        for word in ("by rows", "whole"):
            before = _peak(afresh=True)
            prove = sharded_load._prove

            def read(policy: Any, before: int = before, prove: Any = prove) -> None:
                out["read"] = _peak() - before  # the checks at load come after
                prove(policy)

            with patch.object(sharded_load, "_prove", read):
                learner = load_by_rows(model, everyone) if word == "by rows" else _kept(model, everyone)
            out[word] = _peak() - before
            out[f"{word}, own"] = sum(p.numel() * 4 for p in learner.parameters().values())
            if word == "by rows":
                out["held"] = _resident() - before
                out["sent"] = _sent(learner, everyone)
            del learner
        return out


def _kept(model: Model, ranks: ProcessRanks) -> ShardedLearner:
    return ShardedLearner(load_policy(model, None, 0), ranks)


def _sent(learner: ShardedLearner, ranks: ProcessRanks) -> int:
    before = _peak(afresh=True)
    for _ in whole_tensors(gathered(learner.shards(), ranks, 0, bucket=8 << 20)):
        pass
    return _peak() - before


def _peak(afresh: bool = False) -> int:
    """Most resident bytes of this process; `afresh`: from now on."""
    if afresh:
        Path("/proc/self/clear_refs").write_text("5")
    return _of_status("VmHWM")


def _resident() -> int:
    return _of_status("VmRSS")


def _of_status(word: str) -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith(word)))
