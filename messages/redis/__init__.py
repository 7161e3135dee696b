"""Connections to Redis: URLs, topologies, retries, key names, and the pool's bell."""

from ..defaults import DEFAULT_URL
from .answers import told_as_ours
from .bell import Bell, Ring
from .connection import ONCE_S, PoolRedis, connect, default_url, ping
from .disk import Flush, how_to_flush
from .keys import Keys
from .layout import remind
from .raw import is_wrong_type, name_once, text, whole
from .retry import RETRY_BUDGET_S, within
from .shards import first_node_url, parse_one, parse_shards, shard_of
from .url import Durability, redacted

__all__ = [
    "DEFAULT_URL",
    "ONCE_S",
    "RETRY_BUDGET_S",
    "Bell",
    "Durability",
    "Flush",
    "Keys",
    "PoolRedis",
    "Ring",
    "connect",
    "default_url",
    "first_node_url",
    "how_to_flush",
    "is_wrong_type",
    "name_once",
    "parse_one",
    "parse_shards",
    "ping",
    "redacted",
    "remind",
    "shard_of",
    "text",
    "told_as_ours",
    "whole",
    "within",
]
