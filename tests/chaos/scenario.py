"""The list of scenarios. One is an async function that takes its `Chaos` and gets everything answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from .context import Chaos

Body = Callable[[Chaos], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario.

    lease_s: of its workers. config: more settings of its Redis. lossless: no worker dies in it, no lease ends.
    slow: needs SGLang, or minutes. timeout_s: at most. finish_s: at most, for draining and judging.
    shards: of its pool, at least, each on a Redis of its own. one_redis: why it cannot run on a pool with several.
    bent: its Redis is a HostRedis. lasts: its body goes on for as many minutes as the command line says.
    """

    name: str
    body: Body
    lease_s: float = 1.0
    config: dict[str, str] = field(default_factory=dict)
    lossless: bool = False
    slow: bool = False
    timeout_s: float = 60.0
    finish_s: float = 60.0
    shards: int = 1
    one_redis: str = ""
    bent: bool = False
    lasts: bool = False


ALL: dict[str, Scenario] = {}


def scenario(name: str, **more: object) -> Callable[[Body], Body]:
    """Register a function as a scenario."""

    def register(body: Body) -> Body:
        assert name not in ALL, name
        ALL[name] = Scenario(name, body, **more)  # type: ignore[arg-type]
        return body

    return register
