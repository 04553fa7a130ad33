"""Any OpenAI-compatible endpoint as a sampler, for evaluation and judging: by text, or by tokens where it has them."""

from posttrain.engine.endpoint.text_endpoint import TextDialogue, TextSampler, TextVocabulary
from posttrain.engine.endpoint.token_endpoint import TokenSampler
from posttrain.verifier.discover import RemoteModel, discover

__all__ = ["RemoteModel", "TextDialogue", "TextSampler", "TextVocabulary", "TokenSampler", "discover"]
