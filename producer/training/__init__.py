"""What a trainer needs beside a client: staleness under control, and books of its samples that add up."""

from .books import REASONS, Books, Measured, Prompt, Why
from .spread import Spread
from .staleness import OnStale, Staleness

__all__ = ["REASONS", "Books", "Measured", "OnStale", "Prompt", "Spread", "Staleness", "Why"]
