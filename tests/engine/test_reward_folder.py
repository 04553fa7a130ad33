"""Reward models on disk: what transformers computes of one of ours, and what we compute of somebody else's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.config.stages.reward_model_settings import HeadShape
from posttrain.core.batch import Packed
from posttrain.core.types import Segment
from posttrain.engine.files.reward_folder import pad_of, read_reward_model, write_reward_model
from posttrain.engine.head.value_heads import RewardHead
from posttrain.engine.learner.learner import HFLearner
from posttrain.engine.model.policy_model import Policy
from posttrain.report.export.export_reward import sequences
from posttrain.system.errors import ConfigError, DataError
from tests.engine.engine_parts import ARCHS, policy, segments, tiny

pytestmark = pytest.mark.prove


def rewarding(arch: str = "qwen3", shape: HeadShape = HeadShape(), **changes: Any) -> Policy:
    """A tiny policy with a reward head of random weights."""
    return replace(policy(arch), reward_head=RewardHead(shape, 32, seed=3), **changes)


def ending(made: Policy, count: int = 7) -> list[Segment]:
    """Segments of mixed lengths that end in the stop token."""
    out = segments(count, seed=5, vocabulary=20)
    for s in out:
        s.ids[-1] = made.stop_ids[0]
    return out


def theirs(folder: Path, said: list[Segment], side: str) -> np.ndarray:
    """What transformers' own forward gives for all of them in one padded batch."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    words: Any = AutoTokenizer.from_pretrained(folder)
    words.padding_side = side
    batch = words.pad({"input_ids": [s.ids.tolist() for s in said]}, return_tensors="pt")
    mask = batch["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    given = {"input_ids": batch["input_ids"], "attention_mask": mask, "position_ids": positions}
    assert model.config.num_labels == 1 and model.config.pad_token_id == words.pad_token_id is not None
    with torch.no_grad():
        return model(**given).logits[:, 0].numpy()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_scores_one_of_ours_the_same(arch: str, side: str, tmp_path: Path) -> None:
    """Mixed lengths in one batch, padded on either side, to 1e-5; and read back by us."""
    made = rewarding(arch)
    assert "ForSequenceClassification, one label" in write_reward_model(made, tmp_path / "rm")
    said = ending(made)
    ours = HFLearner(made).rewards(Packed.of(said))
    np.testing.assert_allclose(theirs(tmp_path / "rm", said, side), ours, atol=1e-5)
    again = HFLearner(read_reward_model(str(tmp_path / "rm"), tiny())).rewards(Packed.of(said))
    np.testing.assert_allclose(again, ours, atol=1e-6)
    assert ours.std() > 0.05


def test_padding_is_no_stop_token(tmp_path: Path) -> None:
    """Where the tokenizer pads with its end token, transformers would read a completion before its end."""
    made = rewarding()
    words: Any = made.tokenizer
    words.pad_token = words.eos_token
    assert pad_of(made)[0] not in made.stop_ids
    assert "its padding token is" in write_reward_model(made, tmp_path / "rm")
    said = ending(made)
    np.testing.assert_allclose(
        theirs(tmp_path / "rm", said, "right"), HFLearner(made).rewards(Packed.of(said)), atol=1e-5
    )


def test_a_model_that_pads_with_its_end_token_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    """Somebody's model has it so: then its score is read before the end tokens, here and there."""
    made = rewarding()
    write_reward_model(made, tmp_path / "rm")
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    (tmp_path / "rm" / "config.json").write_text(json.dumps({**config, "pad_token_id": made.stop_ids[0]}))
    words: Any = AutoTokenizer.from_pretrained(tmp_path / "rm")
    words.pad_token = words.eos_token
    words.save_pretrained(tmp_path / "rm")
    said = ending(made)
    found = HFLearner(read_reward_model(str(tmp_path / "rm"), tiny())).rewards(Packed.of(said))
    np.testing.assert_allclose(theirs(tmp_path / "rm", said, "right"), found, atol=1e-5)
    assert np.abs(found - HFLearner(made).rewards(Packed.of(said))).max() > 1e-3


SHAPES = (
    HeadShape(pool="mean"),
    HeadShape(pool="token"),
    HeadShape(outputs=("helpful", "short"), gate=True),
    HeadShape(outputs=("rating",), classes=5),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_other_heads_come_back(shape: HeadShape, tmp_path: Path) -> None:
    made = rewarding(shape=shape)
    assert "reward_head.json" in write_reward_model(made, tmp_path / "rm")
    again = read_reward_model(str(tmp_path / "rm"), tiny())
    assert again.reward_head is not None and again.reward_head.shape == shape
    said = Packed.of(ending(made))
    np.testing.assert_array_equal(HFLearner(again).rewards(said), HFLearner(made).rewards(said))


def test_what_an_export_is_checked_with_ends_in_its_only_stop_token() -> None:
    """Other heads read at the first stop token, transformers' at the last token."""
    stops = tuple(range(5, 26))
    for segment in sequences(replace(rewarding(), stop_ids=stops)):
        assert np.isin(segment.ids, stops).tolist() == [False] * (len(segment.ids) - 1) + [True]


def test_what_is_no_reward_model_is_refused_by_name(tmp_path: Path) -> None:
    plain = policy()
    plain.write(tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain is no reward model: its config.json names Qwen3ForCausalLM"):
        read_reward_model(str(tmp_path / "plain"), tiny())
    with pytest.raises(ConfigError, match="no reward head to write"):
        write_reward_model(plain, tmp_path / "x")
    made = rewarding()
    write_reward_model(made, tmp_path / "rm")
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    three = {**config, "id2label": {"0": "a", "1": "b", "2": "c"}}
    (tmp_path / "rm" / "config.json").write_text(json.dumps(three))
    with pytest.raises(ConfigError, match="it has 3 labels, and a reward is one number"):
        read_reward_model(str(tmp_path / "rm"), tiny())
    write_reward_model(rewarding(shape=HeadShape(pool="mean")), tmp_path / "mean")
    (tmp_path / "mean" / "reward_head.json").write_text('{"pool": "middle"}')
    with pytest.raises(DataError, match="its reward head is damaged"):
        read_reward_model(str(tmp_path / "mean"), tiny())
    (tmp_path / "mean" / "reward_head.json").write_text(json.dumps({"classes": 10**12}))
    with pytest.raises(DataError, match="belongs to another head"):
        read_reward_model(str(tmp_path / "mean"), tiny())


def test_a_reward_model_that_transformers_trained_scores_the_same_here(tmp_path: Path) -> None:
    """Their Trainer on a tiny classifier of their own, saved by them."""
    from transformers import Trainer, TrainingArguments

    made = policy("llama")
    config = made.module.config.__class__(**{**made.module.config.to_dict(), "num_labels": 1})
    config.pad_token_id = made.tokenizer.pad_token_id
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_config(config)
    said = ending(made, 12)
    rows = [{"input_ids": s.ids.tolist(), "labels": float(len(s.ids)) / 40} for s in said]

    def together(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        words: Any = made.tokenizer
        batch = words.pad({"input_ids": [r["input_ids"] for r in some]}, return_tensors="pt")
        return {**batch, "labels": torch.tensor([r["labels"] for r in some])}

    how = TrainingArguments(
        str(tmp_path / "out"),
        max_steps=3,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        per_device_train_batch_size=4,
    )
    trainer = Trainer(model=model, args=how, train_dataset=rows, data_collator=together)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model(str(tmp_path / "rm"))
    made.tokenizer.save_pretrained(tmp_path / "rm")
    found = HFLearner(read_reward_model(str(tmp_path / "rm"), tiny())).rewards(Packed.of(said))
    for side in ("left", "right"):
        np.testing.assert_allclose(theirs(tmp_path / "rm", said, side), found, atol=1e-5)
