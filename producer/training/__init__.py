"""What a trainer needs beside a client: staleness under control, and books of its samples that add up."""

from .books import REASONS, Books, Prompt, Why
from .spread import Spread
from .staleness import OnStale, Staleness

__all__ = ["REASONS", "Books", "OnStale", "Prompt", "Spread", "Staleness", "Why"]
