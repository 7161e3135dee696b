"""A version taken out of the trainer: gathered, named as a checkpoint names it, copied into flat buckets."""

from .buckets import fill, release_host_memory
from .packing import PackedWeights

__all__ = ["PackedWeights", "fill", "release_host_memory"]
