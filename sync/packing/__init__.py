"""A version taken out of the trainer: gathered, named as a checkpoint names it, copied into flat buckets."""

from .buckets import Keep, fill, release_host_memory
from .packing import PackedWeights

__all__ = ["Keep", "PackedWeights", "fill", "release_host_memory"]
