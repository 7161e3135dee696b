"""Copies a version out of the trainer into flat buckets. Gathers sharded tensors, and names them as checkpoints do."""

from .buckets import fill, release_host_memory
from .experts import unfuse_experts
from .gather import strip_wrappers
from .packing import PackedWeights

__all__ = ["PackedWeights", "fill", "release_host_memory", "strip_wrappers", "unfuse_experts"]
