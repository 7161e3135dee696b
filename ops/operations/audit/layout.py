"""The table of a pool's keys: their names, their types, and why each one ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....messages.model import PRIORITIES

Life = Literal["fixed", "ttl", "worker", "job", "client"]
"""fixed: one of a few names, may stay. ttl: must expire. worker: belongs to a registered worker. job: open, or expires.
client: exists only while it names open jobs."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of key: `name` is all of it, or its beginning where it ends with ':'. type: as Redis' TYPE says it."""

    name: str
    type: str
    life: Life
    index: bool = False
    """Its members are ids of jobs: see rules.MEMBERS."""

    def matches(self, name: bytes) -> bool:
        mine = self.name.encode()
        return name.startswith(mine) and len(name) > len(mine) if self.name.endswith(":") else name == mine


KINDS = (
    Kind("job:", "hash", "job"),
    *(Kind(f"queue:{index}", "list", "fixed") for index in range(len(PRIORITIES))),
    *(Kind(f"later:{index}", "zset", "fixed", index=True) for index in range(len(PRIORITIES))),
    Kind("prefers", "zset", "fixed", index=True),
    Kind("suspects", "list", "fixed"),
    Kind("held:", "set", "worker", index=True),
    Kind("client:", "set", "client", index=True),
    Kind("deadlines", "zset", "fixed", index=True),
    Kind("workers", "zset", "fixed"),
    Kind("worker:", "hash", "worker"),
    Kind("ward", "string", "ttl"),
    Kind("mark", "string", "ttl"),
    Kind("wake", "list", "ttl"),
    Kind("token:", "list", "ttl"),
    Kind("news:", "stream", "ttl"),
    Kind("reply:", "stream", "ttl"),
    Kind("load", "hash", "fixed"),
    Kind("unread", "hash", "fixed"),
    Kind("bell", "stream", "fixed"),
    Kind("dead", "stream", "fixed"),
    Kind("weights", "hash", "fixed"),
    Kind("wanted", "hash", "fixed"),
    Kind("version:", "hash", "ttl"),
    Kind("epoch:", "hash", "ttl"),
    Kind("command:", "hash", "ttl"),
    Kind("answers:", "hash", "ttl"),
)


def kind_of(name: bytes) -> Kind | None:
    """The kind of a key, by its name without the pool's prefix; None if the table has none."""
    return next((kind for kind in KINDS if kind.matches(name)), None)
