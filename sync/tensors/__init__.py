"""Work on many tensors at once: digests, copies, places in buckets, staging memory."""

from .copies import Copies
from .digester import Digester, digest, digests, hex_of, length_term, values_of
from .places import ALIGN, LONGEST_NAME, Place, Places, Planner, dtype_name, dtype_named, padded
from .snapshot import Snapshot, check_places, unpack
from .staging import Staging
from .streams import side_stream
from .turns import short_turns

__all__ = [
    "ALIGN",
    "LONGEST_NAME",
    "Copies",
    "Digester",
    "Place",
    "Places",
    "Planner",
    "Snapshot",
    "Staging",
    "check_places",
    "digest",
    "digests",
    "dtype_name",
    "dtype_named",
    "hex_of",
    "length_term",
    "padded",
    "short_turns",
    "side_stream",
    "unpack",
    "values_of",
]
