"""Connections to Redis: URLs, topologies, retries, key names, and the pool's bell."""

from ..defaults import DEFAULT_URL
from .answers import told_as_ours
from .bell import Bell, Ring
from .connection import ONCE_S, PoolRedis, connect, default_url, ping
from .disk import Flush, how_to_flush
from .fields import ADAPTERS_FROM, ENTRY, ENTRY_BYTES, JOB, PROGRESS, SESSION, SLOT, SLOTS_FROM, piece_field
from .keys import KEYS, Key, Keys, later_member, script_words
from .layout import remind
from .raw import is_wrong_type, name_once, text, whole
from .retry import RETRY_BUDGET_S, insist, within
from .shards import first_node_url, parse_one, parse_shards, shard_of
from .url import Durability, redacted

__all__ = [
    "ADAPTERS_FROM",
    "DEFAULT_URL",
    "ENTRY",
    "ENTRY_BYTES",
    "JOB",
    "KEYS",
    "ONCE_S",
    "PROGRESS",
    "RETRY_BUDGET_S",
    "SESSION",
    "SLOT",
    "SLOTS_FROM",
    "Bell",
    "Durability",
    "Flush",
    "Key",
    "Keys",
    "PoolRedis",
    "Ring",
    "connect",
    "default_url",
    "first_node_url",
    "how_to_flush",
    "insist",
    "is_wrong_type",
    "later_member",
    "name_once",
    "parse_one",
    "parse_shards",
    "piece_field",
    "ping",
    "redacted",
    "remind",
    "script_words",
    "shard_of",
    "text",
    "told_as_ours",
    "whole",
    "within",
]
