"""Connections to Redis: URLs, topologies, retries, key names, and the pool's bell."""

from ..defaults import DEFAULT_URL
from .answers import told_as_ours
from .bell import Bell, Ring
from .connection import ONCE_S, PoolRedis, connect, default_url, ping
from .disk import Flush, how_to_flush
from .keys import Keys
from .raw import is_wrong_type, name_once, text, whole
from .retry import RETRY_BUDGET_S
from .url import Durability, first_node_url, parse, redacted

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
    "parse",
    "ping",
    "redacted",
    "text",
    "told_as_ours",
    "whole",
]
