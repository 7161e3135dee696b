"""Finds the server for every new connection, by asking sentinels or the nodes of a cluster.

redis-py's own classes do not serve. Its SentinelManagedConnection asks only in `connect`, but a command that is sent
again after an error reconnects by another way, to the old primary. Its RedisCluster brings timeouts and retries of its
own (with asyncio.wait_for, see BoundedRetry), opens connections to every node, and splits pipelines to spread keys over
nodes. A pool's keys are all in one slot, so it needs only the node that has the slot.
"""

from __future__ import annotations

import asyncio
import builtins
import re
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import Sentinel
from redis.crc import key_slot
from redis.exceptions import ConnectionError, RedisError, ResponseError, TimeoutError

from ..errors import InvalidField, RedisRefused
from .answers import FULL, meaning, said
from .keys import Keys
from .retry import REPLY_TIMEOUT_S, RETRY_BUDGET_S, Once
from .url import Target

ASK_TIMEOUT_S = 1.0
"""Seconds that one sentinel or node has to connect, and to answer, before the next one is asked."""
_NO_ANSWER = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Raised where a server that is no sentinel and no node answers something else."""
# The last: a unix socket of redis-py that is closed during its handshake connects inside its own connecting.
_BROKEN_OFF = re.compile(r"while (writing|reading)|closed by server|[Cc]onnection (lost|reset)|recursion")
Node = tuple[str, int]


class Finder(ABC):
    """Finds the server that accepts writes now."""

    def __init__(self, target: Target, login: dict[str, Any]) -> None:
        self._nodes = list(target.nodes)
        tls = {name: value for name, value in target.options.items() if name.startswith("ssl_")}
        self._options: dict[str, Any] = {
            **login,
            **(tls | {"ssl": True} if target.tls else {}),
            "protocol": 2,
            "socket_timeout": None,
            "socket_connect_timeout": ASK_TIMEOUT_S,
            "retry": Once(0.0, ASK_TIMEOUT_S),
        }

    @abstractmethod
    async def find(self) -> Node:
        """The server's host and port. Raises ConnectionError if none is known now."""


class SentinelFinder(Finder):
    """Asks the sentinels one after the other for the primary of a service."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, target.sentinel_login)
        self._service = target.service

    async def find(self) -> Node:
        failures: list[str] = []
        for node in self._nodes:
            asked: Any = Sentinel([node], sentinel_kwargs=self._options)  # type: ignore[no-untyped-call]
            client = asked.sentinels[0]
            try:
                state = (await client.sentinel_masters()).get(self._service)
                if state and asked.check_master_state(state, self._service):
                    # The one that answered is asked first next time, not one that may be down.
                    self._nodes = [node, *(other for other in self._nodes if other != node)]
                    return str(state["ip"]), int(state["port"])
                failures.append(f"{node[0]}:{node[1]}: it knows none that is up")
            except (RedisError, OSError, *_NO_ANSWER) as error:
                failures.append(f"{node[0]}:{node[1]}: {said(error)}")
            finally:
                await client.aclose()
        raise ConnectionError(f"no sentinel names a primary of {self._service!r}: {'; '.join(failures)}")


class ClusterFinder(Finder):
    """Asks the nodes of a cluster, given and discovered ones, which node has the pool's slot."""

    def __init__(self, target: Target, keys: Keys) -> None:
        login = {name: value for name, value in target.options.items() if name in {"username", "password"}}
        super().__init__(target, login)
        self._seeds = target.nodes
        self._slot = key_slot(keys.prefix.encode())

    async def find(self) -> Node:
        failures: list[str] = []
        for host, port in self._nodes:
            client: Any = Redis(host=host, port=port, **self._options)
            try:
                ranges = _ranges(await client.execute_command("CLUSTER SLOTS"), host)
            except (RedisError, OSError, *_NO_ANSWER) as error:
                failures.append(f"{host}:{port}: {said(error)}")
                continue
            finally:
                await client.aclose()
            owner = next((nodes[0] for first, last, nodes in ranges if first <= self._slot <= last), None)
            if owner is None:
                failures.append(f"{host}:{port}: nobody has slot {self._slot}")
                continue
            known = [node for _, _, nodes in ranges for node in nodes]
            self._nodes = list(dict.fromkeys([owner, *known, *self._seeds]))
            return owner
        raise ConnectionError(f"no node of the cluster tells who has slot {self._slot}: {'; '.join(failures)}")


def _ranges(answer: Any, asked: str) -> list[tuple[int, int, list[Node]]]:
    """CLUSTER SLOTS as (first slot, last slot, nodes with the primary first), as redis-py parses it or raw."""
    if isinstance(answer, dict):
        entries = [(first, last, [of["primary"], *of["replicas"]]) for (first, last), of in answer.items()]
    else:
        entries = [(entry[0], entry[1], entry[2:]) for entry in answer]
    # An empty host: the node does not know its own address, but we have just reached it.
    return [(int(a), int(b), [(_text(n[0]) or asked, int(n[1])) for n in nodes]) for a, b, nodes in entries]


def _text(value: Any) -> str:
    text = value.decode() if isinstance(value, bytes) else value or ""
    return "" if text == "?" else str(text)


class _Plain(AbstractConnection):
    """A connection that raises an exception for each meaning where redis-py raises ResponseError.

    It raises InvalidField for text that cannot be sent, whichever call the text was given to.
    """

    async def connect(self) -> None:
        # redis-py before 8 has the handshake outside its retries, where nothing else bounds it.
        try:
            async with asyncio.timeout(RETRY_BUDGET_S + REPLY_TIMEOUT_S):
                await super().connect()  # type: ignore[no-untyped-call]
        except builtins.TimeoutError as error:
            raise TimeoutError(f"no connection within {RETRY_BUDGET_S + REPLY_TIMEOUT_S:g} s") from error
        except ConnectionError as error:
            if _BROKEN_OFF.search(str(error)) and await self._is_turned_away():
                raise ConnectionError(FULL) from error
            raise

    async def _is_turned_away(self) -> bool:
        """Whether the server has no room for connections. It says so at once; who sends first may not hear it."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                if path := getattr(self, "path", ""):
                    reader, writer = await asyncio.open_unix_connection(path)
                else:
                    reader, writer = await asyncio.open_connection(getattr(self, "host", ""), getattr(self, "port", 0))
        except OSError:
            return False
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return FULL.encode() in await reader.readline()
        except (OSError, ValueError):
            return False
        finally:
            writer.close()

    async def check_health(self) -> None:
        # A server that cannot save to disk refuses PING too, but its data can still be read.
        with suppress(RedisRefused):
            await super().check_health()  # type: ignore[no-untyped-call]

    def pack_command(self, *args: Any) -> list[bytes]:
        try:
            return super().pack_command(*args)
        except UnicodeEncodeError as error:
            raise InvalidField("text", error.object, "characters that UTF-8 can encode, no lone surrogates") from None

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)
        except ResponseError as error:
            raise meaning(error) from None


class _Found(Connection):
    """A connection that asks a Finder where to go every time it connects."""

    def __init__(self, *, finder: Finder, **options: Any) -> None:
        self._finder = finder
        super().__init__(**options)
        if isinstance(finder, SentinelFinder):
            self.register_connect_callback(self._check_role)  # type: ignore[no-untyped-call]

    async def _connect(self) -> None:
        self.host, self.port = await self._finder.find()
        await super()._connect()  # type: ignore[no-untyped-call]

    async def _check_role(self, _: AbstractConnection) -> None:
        """Refuse a replica. A sentinel may not know yet that its primary became one, and a replica answers reads."""
        await self.send_command("ROLE", check_health=False)
        role = (await self.read_response())[0]
        if role != b"master":
            await self.disconnect()
            raise ConnectionError(f"{self.host}:{self.port} is no primary any more ({role.decode()})")


def link(target: Target, keys: Keys | None) -> dict[str, Any]:
    """The connection class for `target`, and the arguments that only it needs. keys: of the shard, for a cluster."""
    if not target.nodes:
        return {"connection_class": _link(UnixDomainSocketConnection)}
    kind = SSLConnection if target.tls else Connection
    if target.kind == "single":
        return {"connection_class": _link(kind)}
    finder: Finder = (
        SentinelFinder(target) if keys is None or target.kind == "sentinel" else ClusterFinder(target, keys)
    )
    return {"connection_class": _link(_Found, kind) if target.tls else _link(_Found), "finder": finder}


@cache
def _link(*kinds: type) -> type:
    """The class of such connections that raises as _Plain does."""
    return type("Link", (_Plain, *kinds), {})
