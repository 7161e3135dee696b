"""A version taken out of the trainer: gathered, named as a checkpoint names it, copied into flat buckets."""

from .buckets import fill, release_host_memory
from .experts import unfuse_experts
from .gather import strip_wrappers
from .packing import PackedWeights

__all__ = ["PackedWeights", "fill", "release_host_memory", "strip_wrappers", "unfuse_experts"]
