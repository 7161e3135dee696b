"""A job's inputs and outputs as data: media, decoding, tools, masks."""

from .decode import Decoder
from .media import from_openai, medium

__all__ = ["Decoder", "from_openai", "medium"]
