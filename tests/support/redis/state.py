"""Everything that Redis has of a pool, as the state machine looks at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LASTING = {
    "clock",
    "load",
    "bell",
    "weights",
    "holders",
    "transfers",
    "dead",
    "letters",
    "workers",
    "deadlines",
    "unread",
    "suspects",
    "prefers",
    "takers",
}
LASTING_KINDS = {"queued", "turns", "later", "held", "client", "worker"}
FLEETING_KINDS = {"reply", "version", "epoch", "news", "reader", "token"}


@dataclass
class State:
    """Every key of the pool, its content, and its TTL in ms (-1: none)."""

    keys: dict[str, Any]
    ttl: dict[str, int]

    @classmethod
    def read(cls, raw: list[list[Any]]) -> State:
        shape = {
            "hash": lambda flat: dict(zip(flat[::2], flat[1::2], strict=True)),
            "zset": lambda flat: {name: float(score) for name, score in zip(flat[::2], flat[1::2], strict=True)},
            "set": set,
            "list": list,
            "stream": lambda found: {id: dict(zip(flat[::2], flat[1::2], strict=True)) for id, flat in found},
            "string": str,
        }
        keys = {key: shape[kind](content) for key, kind, _, content in raw}
        ttl = {key: ttl for key, _, ttl, _ in raw}
        keys.get("load", {}).pop("busy", None)  # when somebody was refused, for people
        if "ward" in keys:  # its turn ends by the pool's clock
            until, _, keys["ward"] = keys["ward"].partition("@")
            ttl["ward"] = int(until) - int(keys["clock"]["at"])
        return cls(keys, ttl)

    def stable(self) -> dict[str, Any]:
        """What a script sent a second time must leave as it is: all but ends of leases and what only says 'look'."""
        look = ("bell", "transfers", "wake", "token", "news", "workers", "clock")
        quiet = {key: found for key, found in self.keys.items() if key.partition(":")[0] not in look}
        return quiet | {"workers": set(self["workers"])}

    def __getitem__(self, key: str) -> Any:
        kind = key.partition(":")[0]
        empty = {"suspects": list, "held": set, "client": set, "ward": str}.get(kind, dict)
        return self.keys.get(key, empty())

    def queue(self, cls: int) -> list[str]:
        """Ids by their turns."""
        return sorted(self[f"queued:{cls}"], key=lambda id: (self[f"queued:{cls}"][id], id))

    def later(self, cls: int) -> dict[str, float]:
        """The score of each id that was set aside."""
        return {member.partition(":")[2]: score for member, score in self[f"later:{cls}"].items()}

    def named(self, kind: str) -> dict[str, Any]:
        """Keys `<kind>:<name>` by name."""
        return {key[len(kind) + 1 :]: found for key, found in self.keys.items() if key.startswith(kind + ":")}
