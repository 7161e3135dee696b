"""Reads a Redis URL: one server, its sentinels or a cluster, the login, and what confirms a write."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import SplitResult, parse_qs, urlsplit

from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import RedisError

from ..errors import ConfigError

MAX_REPLICA_TIMEOUT_MS = 3000
"""The longest time for one WAIT: together with its script it must fit into the time for one reply."""
MAX_SHARDS = 64
SHOWN = 200
"""An error shows at most so many characters of a URL."""
_SENTINEL_PORT, _PORT = 26379, 6379
# The options that a URL's query may have. redis-py does not know the others, and would complain only at the first
# command, or they would change what this package relies on (protocol, decode_responses, timeouts).
_QUERY = {"db", "username", "password", "client_name", "max_connections"}
_OURS = {"durable", "min_replicas", "replica_timeout_ms", "shards"}
_LEVELS = ("memory", "disk")
_SENTINELS = {"sentinel_username", "sentinel_password"}
_TLS = {name for name in inspect.signature(SSLConnection.__init__).parameters if name.startswith("ssl_")}
_SCHEME = re.compile(r"(rediss?)\+(sentinel|cluster)://(.*)", re.DOTALL)
_NODE = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?")
_EXAMPLES = {
    "sentinel": "redis+sentinel://host1:26379,host2:26379/SERVICE/0",
    "cluster": "redis+cluster://host1:6379,host2:6379",
}
Kind = Literal["single", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class Durability:
    """What must have an important write before the call returns. By default the server's memory is enough.

    min_replicas: so many replicas. timeout_ms: the time of one wait for them. disk: the server's own disk, see disk.py.
    """

    min_replicas: int = 0
    timeout_ms: int = 1000
    disk: bool = False

    @property
    def waits(self) -> bool:
        """Whether a call has to wait at all."""
        return self.disk or self.min_replicas > 0


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed URL. nodes: (host, port) of the server, the sentinels, or some nodes of the cluster; empty for a socket.

    options: for redis-py's connections. sentinel_login: for the sentinels themselves. shards: how many the URL names, 0
    if it does not say, see shards.py.
    """

    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    tls: bool
    options: dict[str, Any] = field(repr=False)
    service: str = ""
    sentinel_login: dict[str, str] = field(default_factory=dict, repr=False)
    durability: Durability = Durability()
    shards: int = 0

    @property
    def where(self) -> str:
        """The address, for people."""
        nodes = ",".join(f"{host}:{port}" for host, port in self.nodes)
        if self.kind == "sentinel":
            return f"the primary of {self.service!r}, as sentinels {nodes} know it"
        return f"cluster {nodes}" if self.kind == "cluster" else nodes or str(self.options.get("path"))


def parse(url: str) -> Target:
    """Parse the URL of one server, of its sentinels or of a cluster; see `shards.parse_shards` for those of several.

    Raises ConfigError, without showing a password, for a URL that cannot be used.
    """
    if not isinstance(url, str):
        raise ConfigError(f"Redis URL must be a string such as redis://127.0.0.1:6379/0, not {type(url).__name__}")
    try:
        several = _SCHEME.fullmatch(url)
        if several is None:
            return _single(url)
        return _several(several[1], "sentinel" if several[2] == "sentinel" else "cluster", several[3])
    except _Flaw as flaw:
        raise ConfigError(f"Redis URL {redacted(url)[:SHOWN]!r}: {flaw}") from None


def redacted(url: str) -> str:
    """`url` without the passwords anywhere in it, so it can be logged."""
    # From the first password to the last @: of several URLs the first ones may have none.
    hidden = re.sub(r"([\w+]+://[^/@:]*:).*@", r"\1***@", url, flags=re.DOTALL)
    return re.sub(r"([?&]\w*pas\w*=)[^&]*", r"\1***", hidden)  # misspelt ones, too


class _Flaw(Exception):
    """The fault of a URL, in a text that quotes no part where a password might be."""


def _single(url: str) -> Target:
    parts = _split(url)
    if "," in parts.netloc.rpartition("@")[2]:
        raise _Flaw(
            "each of several servers needs a complete URL, with commas and no spaces between them, as in "
            "redis://host1:6379/0,redis://host2:6379/0"
        )
    options = _options(url)
    _check_query(parts, _QUERY | _OURS)
    if parts.scheme == "unix":
        if not options.get("path"):
            raise _Flaw("the path of the socket is missing, as in unix:///run/redis.sock?db=0")
        return Target("single", (), False, _plain(options), durability=_durability(options), shards=_shards(options))
    if not parts.hostname:
        raise _Flaw("the host is missing, as in redis://127.0.0.1:6379/0")
    if not re.fullmatch(r"/?[0-9]{0,9}", parts.path):
        raise _Flaw("after host and port only the database's number may follow, as in redis://127.0.0.1:6379/0")
    if parts.port == 0:
        raise _Flaw("the port must be a number from 1 to 65535")
    node = (options["host"], options.get("port", _PORT))
    return Target(
        "single",
        (node,),
        parts.scheme == "rediss",
        _plain(options),
        durability=_durability(options),
        shards=_shards(options),
    )


def _several(scheme: str, kind: Literal["sentinel", "cluster"], rest: str) -> Target:
    parts = _split(f"{scheme}://{rest}")
    login, at, hosts = parts.netloc.rpartition("@")
    nodes = tuple(_node(text, kind) for text in hosts.split(",")) if hosts else ()
    if not nodes:
        raise _Flaw(f"the hosts are missing, as in {_EXAMPLES[kind]}")
    path = parts.path.strip("/").split("/") if parts.path.strip("/") else []
    service = path.pop(0) if path and kind == "sentinel" else ""
    if kind == "sentinel" and not re.fullmatch(r"[\w.-]+", service):
        raise _Flaw(f"the name under which the sentinels know the primary is missing, as in {_EXAMPLES[kind]}")
    db = path.pop(0) if path else "0"
    if path or not re.fullmatch(r"[0-9]{1,9}", db) or (kind == "cluster" and int(db)):
        rest_may_be = "only the service and the database's number" if kind == "sentinel" else "nothing (or /0)"
        raise _Flaw(f"after the hosts {rest_may_be} may follow, as in {_EXAMPLES[kind]}")
    # The rest is redis-py's to read, as if there were one host.
    options = _options(f"{scheme}://{login}{at}h:1/{db}?{parts.query}")
    _check_query(parts, (_QUERY | _OURS | _SENTINELS) if kind == "sentinel" else (_QUERY | _OURS) - {"db"})
    sentinel_login = {name.removeprefix("sentinel_"): options.pop(name) for name in _SENTINELS if name in options}
    durability, shards = _durability(options), _shards(options)
    for name in ("host", "port"):
        options.pop(name)
    return Target(kind, nodes, scheme == "rediss", _plain(options), service, sentinel_login, durability, shards)


def _node(text: str, kind: Literal["sentinel", "cluster"]) -> tuple[str, int]:
    found = _NODE.fullmatch(text)
    port = int(found[2] or (_SENTINEL_PORT if kind == "sentinel" else _PORT)) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise _Flaw(
            f"each host must be a name or address and a port up to 65535, as in {_EXAMPLES[kind]}; "
            "special characters in a password need percent-encoding"
        )
    return found[1].strip("[]"), port


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:  # its text may quote the password
        raise _Flaw(
            "host and port cannot be read; an IPv6 address needs [ and ], special characters %-encoding"
        ) from None


def _options(url: str) -> dict[str, Any]:
    _split(url)
    try:
        options = dict(parse_url(url))
    except ValueError as error:
        if "Port" in str(error):  # its text quotes what it took for a port
            raise _Flaw(
                "the port must be a number up to 65535; special characters in a password need percent-encoding"
            ) from None
        if "scheme" in str(error):
            raise _Flaw(
                "its scheme must be one of redis://, rediss:// (TLS), unix://, redis+sentinel://, redis+cluster://, "
                "rediss+sentinel://, rediss+cluster://"
            ) from None
        raise _Flaw(str(error)) from None
    for name, low, high in (("db", 0, 10**9 - 1), ("max_connections", 1, 10**6)):
        _number(options, name, low, high, low)
    return options


def _check_query(parts: SplitResult, allowed: set[str]) -> None:
    tls = parts.scheme == "rediss"
    for name, values in parse_qs(parts.query).items():
        if name in {"ssl_ca_certs", "ssl_certfile", "ssl_keyfile"} and not Path(values[0]).is_file():
            raise _Flaw(f"{name}: there is no such file")
    allowed = allowed | _TLS if tls else allowed
    if unknown := parse_qs(parts.query).keys() - allowed:
        also = "" if tls else "; ssl_* belong to rediss://"
        raise _Flaw(f"unknown option {', '.join(sorted(unknown))}; allowed are {', '.join(sorted(allowed))}{also}")


def _durability(options: dict[str, Any]) -> Durability:
    level = options.get("durable", "memory")
    if level not in _LEVELS:
        raise _Flaw(f"durable must be one of {', '.join(_LEVELS)}")
    return Durability(
        _number(options, "min_replicas", 0, 16, 0),
        _number(options, "replica_timeout_ms", 1, MAX_REPLICA_TIMEOUT_MS, 1000),
        disk=level == "disk",
    )


def _shards(options: dict[str, Any]) -> int:
    return _number(options, "shards", 1, MAX_SHARDS, 1) if "shards" in options else 0


def _number(options: dict[str, Any], name: str, low: int, high: int, default: int) -> int:
    text = str(options.get(name, default))
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise _Flaw(f"{name} must be a number from {low} to {high}")
    return int(text)


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """The options for redis-py. Its connection class follows from the rest. Raises _Flaw for TLS that cannot be."""
    if tls := {name: value for name, value in options.items() if name.startswith("ssl_")}:
        try:  # or redis-py complains at the first command, in its own words
            SSLConnection(**tls).ssl_context.get()
        except (RedisError, OSError, ValueError) as error:
            raise _Flaw(f"{', '.join(sorted(tls))}: {error}") from None
    return {name: value for name, value in options.items() if name not in _OURS | {"connection_class"}}
