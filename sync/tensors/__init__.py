"""Work on many tensors at once: digests, copies, their places in buckets, and the memory that receives them."""

from .copies import Copies
from .digest_keys import length_term
from .digester import Digester, digest, digests, hex_of, look, values_of
from .places import ALIGN, LONGEST_NAME, Place, PlacePlanner, Places, dtype_name, dtype_named, padded
from .runtime import short_turns, side_stream
from .snapshot import Snapshot, check_places, unpack
from .staging import Staging

__all__ = [
    "ALIGN",
    "LONGEST_NAME",
    "Copies",
    "Digester",
    "Place",
    "PlacePlanner",
    "Places",
    "Snapshot",
    "Staging",
    "check_places",
    "digest",
    "digests",
    "dtype_name",
    "dtype_named",
    "hex_of",
    "length_term",
    "look",
    "padded",
    "short_turns",
    "side_stream",
    "unpack",
    "values_of",
]
