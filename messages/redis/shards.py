"""A pool over several Redis servers: which shards it has, where they are, and which of them has a job.

Each shard is a pool by itself, with all that belongs to its jobs: records, queues, leases, results. Shard k is on the
server k modulo the number of servers; in a cluster its hash tag decides. The first shard is the pool's home: the ledger
of weights, the commands and the list of workers for people are only there.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .url import Target, parse, redacted

_NEXT = re.compile(r",(?=(?:rediss?(?:\+\w+)?|unix)://)")


@dataclass(frozen=True, slots=True)
class Shards:
    """Of a parsed URL. targets: the servers, the home of the pool first. count: how many shards there are."""

    targets: tuple[Target, ...]
    count: int

    def target(self, shard: int) -> Target:
        """Where a shard is."""
        return self.targets[shard % len(self.targets)]


def parse_shards(url: str) -> Shards:
    """Parse any URL: one as `url.parse` takes it, or several with commas between them, each with all of its options.

    `shards=N` in any of them says how many shards the pool has; by default as many as there are URLs.
    Raises ConfigError, without showing a password.
    """
    parts = split_urls(url) if isinstance(url, str) else [url]
    targets = tuple(parse(part) for part in parts)
    said = {target.shards for target in targets if target.shards}
    shown = redacted(url) if isinstance(url, str) else ""
    if len(said) > 1:
        raise ConfigError(f"Redis URL {shown!r}: shards= must be the same wherever it is given, not {sorted(said)}")
    count = said.pop() if said else len(targets)
    if len(targets) > 1 and any(target.kind == "cluster" for target in targets):
        raise ConfigError(f"Redis URL {shown!r}: a cluster spreads shards by itself: give one URL of it, with ?shards=")
    if count < len(targets):
        raise ConfigError(f"Redis URL {shown!r}: shards must be at least {len(targets)}, one for each server")
    if len({target.durability for target in targets}) > 1:
        raise ConfigError(
            f"Redis URL {shown!r}: durable, min_replicas and replica_timeout_ms must be the same for all servers"
        )
    if len({_place(target) for target in targets}) < len(targets):
        raise ConfigError(f"Redis URL {shown!r}: the same server twice. ?shards= puts several shards on a server")
    return Shards(targets, count)


def _place(target: Target) -> tuple[Any, ...]:
    return target.nodes, target.service, target.options.get("path"), target.options.get("db", 0)


def parse_one(url: str, what: str) -> Target:
    """Parse the URL of a pool with one shard. what: says in an error what cannot work with more of them."""
    shards = parse_shards(url)
    if shards.count > 1:
        raise ConfigError(
            f"Redis URL {redacted(url)!r}: {what} works with one Redis, and this pool has {shards.count} shards"
        )
    return shards.targets[0]


def split_urls(url: str) -> list[str]:
    """The URLs of which `url` consists."""
    return _NEXT.split(url)


def first_node_url(url: str) -> str:
    """A plain URL of the first host in `url`, without credentials, to find the route to its Redis."""
    target = parse_shards(url).targets[0]
    if not target.nodes:
        return "unix:///"
    host, port = target.nodes[0]
    return f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}"


def shard_of(job_id: str, shards: int) -> int:
    """The shard that has a job, whoever asks and whenever: a job that is submitted again meets its record."""
    return zlib.crc32(job_id.encode(errors="replace")) % shards
