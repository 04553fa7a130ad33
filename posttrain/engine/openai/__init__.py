"""Any OpenAI-compatible endpoint as a sampler: for evaluation and judging, by text, or by tokens where it takes and returns them."""

from posttrain.engine.openai.look import Look, look
from posttrain.engine.openai.text import Pieces, TextDialogue, TextSampler
from posttrain.engine.openai.tokens import TokenSampler

__all__ = ["Look", "Pieces", "TextDialogue", "TextSampler", "TokenSampler", "look"]
