"""Findings about a pool's Redis: docs/redis.md says why each matters."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from ...messages.broker import Broker, Caps, broker_of
from ...messages.redis import PoolRedis, how_to_flush, parse_shards
from ...producer.diagnosis import NO_FAULT, PoolReading, read_pool, reasons
from ..redis import connected
from ..sharing import COSTLY, read_sharing, update_share
from .finding import Finding, Level

OLDEST = (6, 2)
PINGS = 20
SLOW_MS, STUCK_MS = 10.0, 100.0
SKEW_S = 1.0
FULL, NEARLY_FULL = 0.95, 0.8
RECORD_BYTES = 8192
FEW_CLIENTS = 1000
UNEVEN = 1.5
LOOKS, LOOK_S = 5, 1.0
"""At loads, and seconds between them."""
_LOCAL = {"localhost", "127.0.0.1", "::1"}
Facts = Mapping[str, Any]


async def redis_findings(redis_url: str, pool: str) -> list[Finding]:
    """Raises ConfigError or InvalidField. A Redis that does not answer is a finding.

    Of a pool over several Redis it looks at the pool alone.
    """
    shards = parse_shards(redis_url)
    target = shards.targets[0]
    try:
        if shards.count > 1:
            async with connected(redis_url, pool, all_shards=True, lenient=True) as redis:
                return _waits(await read_pool(broker_of(redis, pool)))
        async with connected(redis_url, pool) as redis:
            return [
                Finding("redis", "ok", f"answers at {target.where}"),
                *await _server(redis),
                *await _speed(redis),
                *_ways_in(target.tls, [host for host, _ in target.nodes], login="password" in target.options),
                *await _pool(redis, pool),
            ]
    except RedisError as error:  # its text says what to do
        return [Finding("redis", "problem", str(error), "Nothing else about Redis could be looked at.")]


async def _server(redis: PoolRedis) -> list[Finding]:
    try:
        info: Facts = await redis.info()
    except NoPermissionError:
        return [
            Finding(
                "redis settings",
                "warning",
                "this user may not run INFO",
                "Run doctor as a user with +info +config|get.",
            )
        ]
    try:
        config = {str(name): value for name, value in (await redis.config_get()).items()}
    except RedisError:  # not this user's, or a hosted Redis that has no CONFIG
        config = {}
    return [
        _version(info),
        *_replication(info, redis.durability.min_replicas),
        *await _persistence(redis, info, config),
        _eviction(info),
        _memory(info),
        _clients(info, config),
        *_records(config),
    ]


def _version(info: Facts) -> Finding:
    valkey = info.get("valkey_version")
    name = f"Valkey {valkey}" if valkey else f"Redis {info.get('redis_version', 'of no known version')}"
    numbers = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2] if part.isdigit())
    if not valkey and numbers < OLDEST:
        return Finding("redis version", "problem", name, "Use Redis 6.2 or newer, or Valkey: scripts use its commands.")
    return Finding("redis version", "ok", name)


def _replication(info: Facts, wanted: int) -> list[Finding]:
    if info.get("role", "master") != "master":
        advice = "Name the primary in the URL, or the sentinels that know it."
        return [Finding("replication", "problem", "this server is a replica and takes no writes", advice)]
    there = int(info.get("connected_slaves", 0))
    if there < wanted:
        found = f"{there} replicas are connected, and the URL has min_replicas={wanted}"
        return [
            Finding("replication", "problem", found, "Connect replicas: every submission fails with NotReplicated.")
        ]
    return [Finding("replication", "ok", f"a primary with {there} replicas")]


async def _persistence(redis: PoolRedis, info: Facts, config: Facts) -> list[Finding]:
    findings = []
    for name, what in (("aof_last_write_status", "append-only file"), ("rdb_last_bgsave_status", "snapshot")):
        if info.get(name, "ok") != "ok":
            advice = "Look at the server's log and its disk: it may soon refuse writes."
            findings.append(Finding("persistence", "problem", f"the last write of its {what} failed", advice))
    if redis.durability.disk:
        flush = await how_to_flush(redis)  # `connected` has refused what cannot promise it
        how = "WAITAOF" if flush.waits else "its settings"
        return [*findings, Finding("durability", "ok", f"durable=disk: each promise waits for the disk, seen by {how}")]
    if not info.get("aof_enabled"):
        found = "no append-only file: the end of the server is the end of all jobs"
        advice = "Set `appendonly yes`, and give clients and workers a URL with ?durable=disk."
        return [*findings, Finding("durability", "warning", found, advice)]
    if config.get("appendfsync") == "always" and config.get("no-appendfsync-on-rewrite", "no") == "no":
        return [*findings, Finding("durability", "ok", "appendfsync always: it flushes before it answers")]
    found = f"appendfsync {config.get('appendfsync', 'not known')}: a killed server loses up to 2 s of accepted jobs"
    return [
        *findings,
        Finding("durability", "warning", found, "Put ?durable=disk into the URL of clients and workers."),
    ]


def _eviction(info: Facts) -> Finding:
    policy = str(info.get("maxmemory_policy", "not known"))
    if policy in {"noeviction", "not known"}:
        return Finding("eviction", "ok", f"maxmemory-policy {policy}")
    limited = bool(info.get("maxmemory"))
    advice = "Set `maxmemory-policy noeviction`: with this one Redis throws jobs away when memory runs out."
    return Finding("eviction", "problem" if limited else "warning", f"maxmemory-policy {policy}", advice)


def _memory(info: Facts) -> Finding:
    used, most, caps = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0)), Caps().nbytes
    limit, name = (most, "maxmemory") if most else (int(info.get("total_system_memory", 0)), "memory of its host")
    found = f"{_gib(used)} used of {_gib(limit)} {name}" if limit else f"{_gib(used)} used"
    if limit and used > FULL * limit:
        return Finding(
            "memory", "problem", found, "Raise it, or end jobs and drop results that nobody takes: it refuses jobs."
        )
    if limit and used > NEARLY_FULL * limit:
        return Finding("memory", "warning", found, "Raise it before it is full: jobs are refused then.")
    if limit and limit < caps * 1.25:
        advice = (
            f"Give it more, or clients smaller caps: by default a pool may hold {_gib(caps)} before it says PoolBusy."
        )
        return Finding("memory", "warning", found, advice)
    if not most:
        return Finding(
            "memory", "ok", found + ", without maxmemory", "Set `maxmemory`, so that a full pool is an error."
        )
    return Finding("memory", "ok", found)


def _clients(info: Facts, config: Facts) -> Finding:
    open_now = int(info.get("connected_clients", 0))
    most = int(info.get("maxclients") or config.get("maxclients") or 0)
    if not most:
        return Finding("connections", "ok", f"{open_now} open; maxclients is not known")
    found = f"{open_now} open of {most} (maxclients)"
    advice = "Raise `maxclients`, and `ulimit -n` of the server with it: Redis lowers it to that without a word."
    if open_now > FULL * most:
        return Finding("connections", "problem", found, advice)
    if open_now > NEARLY_FULL * most or most < FEW_CLIENTS:
        return Finding("connections", "warning", found, advice)
    return Finding("connections", "ok", found)


def _records(config: Facts) -> list[Finding]:
    value = config.get("hash-max-listpack-value") or config.get("hash-max-ziplist-value")
    if value is None or int(value) >= RECORD_BYTES:
        return []
    advice = f"`hash-max-listpack-value {RECORD_BYTES}` (6.2: ziplist) saves a quarter of its CPU in large pools."
    return [Finding("job records", "ok", f"hash-max-listpack-value {value}", advice)]


async def _speed(redis: PoolRedis) -> list[Finding]:
    took, seconds, micros, middle = [], 0, 0, 0.0
    for _ in range(PINGS):
        began = time.monotonic()
        seconds, micros = await redis.time()
        took.append(time.monotonic() - began)
        middle = time.time() - took[-1] / 2
    ms, worst = statistics.median(took) * 1000, max(took) * 1000
    found = f"{ms:.1f} ms to Redis and back ({worst:.1f} at most, of {PINGS})"
    advice = "Put Redis nearer, or look what keeps it busy (SLOWLOG): each claim and each result waits for this."
    level: Level = "problem" if ms > STUCK_MS else "warning" if ms > SLOW_MS else "ok"
    skew = seconds + micros / 1e6 - middle
    skewed = abs(skew) > SKEW_S
    sync = "Synchronize both clocks (NTP): leases do not follow them, but times that people read and --since do."
    return [
        Finding("latency", level, found, "" if level == "ok" else advice),
        Finding(
            "clock",
            "warning" if skewed else "ok",
            f"Redis' clock is {skew:+.2f} s off this host's",
            sync if skewed else "",
        ),
    ]


def _ways_in(tls: bool, hosts: list[str], *, login: bool) -> list[Finding]:
    if not hosts or all(host in _LOCAL for host in hosts):
        return [Finding("tls", "ok", "not needed: Redis is on this host")]
    findings = [Finding("tls", "ok", "on")]
    if not tls:
        advice = "Use rediss://, or keep this network closed: prompts, results and passwords travel as they are."
        findings = [Finding("tls", "warning", "off", advice)]
    if not login:
        advice = "Set a password or ACL users: whoever reaches this Redis belongs to the pool."
        findings.append(Finding("login", "warning", "the URL has no password", advice))
    return findings


async def _pool(redis: PoolRedis, pool: str) -> list[Finding]:
    broker = Broker(redis, pool)
    aside = (await broker.load()).set_aside
    if aside:
        advice = "See what is broken with `rolloutmq ops run audit-broker --here`."
        found = f"pool {pool}: {aside} keys were set aside as nobody could use them"
        first = Finding("pool", "warning", found, advice)
    else:
        first = Finding("pool", "ok", f"pool {pool}: no key was ever set aside")
    reading = await read_pool(broker)
    return [first, await _spread(broker), _updates(reading), *_waits(reading)]


def _waits(reading: PoolReading) -> list[Finding]:
    """Why jobs of the pool wait, and what would stop some."""
    found = []
    for reason in reasons(reading):
        level: Level = "ok" if reason.cause in NO_FAULT else "problem"
        found.append(Finding("jobs", level, f"{reason.cause}: {reason.found}", reason.do))
    return found or [Finding("jobs", "ok", "none wait")]


async def _spread(broker: Broker) -> Finding:
    """Work that runs is moved within seconds, so loads that are uneven for a moment are no finding."""
    for look in range(LOOKS):
        await asyncio.sleep(LOOK_S if look else 0.0)
        sharing = await read_sharing(broker.parts)
        found = f"the fullest of {len(sharing.takers)} workers holds {sharing.imbalance:.2f} times its share"
        if sharing.imbalance < UNEVEN:
            return Finding("spread", "ok", found if sharing.takers else "no worker has claimed anything")
    queued = sum((await broker.load()).queued)
    found += f", {sharing.count('below')} hold less than theirs, and {queued} jobs wait"
    advice = (
        "See shares, and workers that are paused, with `rolloutmq status`. Jobs that prefer a worker, sessions and "
        "jobs that were lost before stay where they are."
    )
    return Finding("spread", "warning", found, advice)


def _updates(reading: PoolReading) -> Finding:
    share = update_share(reading.alive)
    found = f"updates of the weights cost {share:.0%} of the workers' last minute"
    if share < COSTLY:
        return Finding("updates", "ok", found)
    advice = (
        "They interrupt samples, which compute their caches anew. Publish with mode='auto' or 'in_place', or publish "
        "less often; see docs/weights.md."
    )
    return Finding("updates", "warning", found, advice)


def _gib(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 29 else f"{number / (1 << 20):.0f} MiB"
