"""Tools of MCP servers, over the official client: `pip install rolloutmq[mcp]`."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import json
import math
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import Tool

T = TypeVar("T")
CLOSED = -32000
"""MCP's code of a connection that was closed."""
MOST_TOOLS = 256
"""Of one server. A server that lists more is refused."""
CLOSE_S = 10.0
_PROGRAM, _URL = ("command", "args", "env", "cwd"), ("url", "headers", "auth_token")
_CONFIG = ("timeout", "rate_limit", "type", "use_mcp")
_PLACES = ("servers", "mcp_servers_config_path", "tool_selected_list")


class McpServer:
    """A connection to an MCP server: a program on this host, over its standard input and output, or a URL (streamable
    HTTP).

    It is kept on a thread with an event loop of its own, so calls may come from any loop. A call whose connection is
    lost raises; it is not repeated, because the server may have done it. The next call connects again.

    Args:
        name: for errors.
        target: `command`, `args`, `env` and `cwd` of a program; or `url`, `headers` and `auth_token` (a bearer token).
        timeout: seconds for connecting, and for each call.
        rate_limit: calls per second that are begun at most; None for any number.

    Raises ConfigError if the target is neither, or the client library is not installed.
    """

    def __init__(
        self, name: str, target: Mapping[str, Any], *, timeout: float = 30.0, rate_limit: float | None = None
    ) -> None:
        self._name, self._target, self._timeout = name, _checked(name, target), _seconds("timeout", timeout)
        self._pause = 0.0 if rate_limit is None else 1 / _seconds("rate_limit", rate_limit)
        self._next_call = 0.0
        _library("mcp")
        self._lost = asyncio.Event()
        self._ready: asyncio.Future[Any] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._closing, self._closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"rolloutmq-mcp-{name}", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program that was started here has to end, too

    def tools(self) -> list[Tool]:
        """What the server offers. Raises ConfigError if it cannot be reached, or describes a tool wrongly."""
        try:
            listed = self._soon(self._list()).result()
        except Exception as error:
            raise ConfigError(f"MCP server {self._name!r}: {_cause(error)}") from error
        try:
            return [Tool.model_validate(each) for each in listed]
        except ValueError as error:
            raise ConfigError(f"MCP server {self._name!r} describes a tool wrongly: {error}") from error

    def runner(self, tool: str) -> Callable[..., Coroutine[Any, Any, str]]:
        """A function that calls the tool and returns the text of its answer. If the caller is cancelled, the call is.

        It raises RuntimeError for what the server calls an error, for a lost connection and a missed deadline, and
        ValueError for an answer that is no text.
        """

        async def run(**arguments: Any) -> str:
            return await asyncio.wrap_future(self._soon(self._call(tool, arguments)))

        return run

    def close(self) -> None:
        """Disconnect, and end the program that was started. Calls under way and later ones raise RuntimeError.

        Closing again does nothing.
        """
        with self._closing:
            if self._closed:
                return
            self._closed = True
            ended = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        atexit.unregister(self.close)
        with contextlib.suppress(Exception):
            ended.result(2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _soon(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it on the loop; what is begun before `close` is ended by it."""
        with self._closing:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError("the connection is closed")

    # --- on the loop of its own --------------------------------------------------------------------------------------

    async def _list(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        cursor = None
        async with asyncio.timeout(self._timeout):
            client = await self._client()
            while True:
                page = await client.list_tools(cursor=cursor)
                found += [
                    {"function": {"name": it.name, "description": it.description or "", "parameters": it.input_schema}}
                    for it in page.tools
                ]
                cursor = page.next_cursor
                if cursor is None or len(found) > MOST_TOOLS:
                    break
        if len(found) > MOST_TOOLS:
            raise ValueError(f"more than {MOST_TOOLS} tools")
        return found

    async def _call(self, tool: str, arguments: dict[str, Any]) -> str:
        begin = max(self._loop.time(), self._next_call)
        self._next_call = begin + self._pause
        await asyncio.sleep(begin - self._loop.time())
        lost = self._lost
        try:
            async with asyncio.timeout(self._timeout):
                result = await (await self._client()).call_tool(tool, arguments)
        except TimeoutError:
            raise RuntimeError(f"no answer within {self._timeout:g} s") from None
        except Exception as error:
            if getattr(error, "code", CLOSED) == CLOSED:  # else it is the server's answer
                lost.set()
            raise RuntimeError(_cause(error)) from error
        texts = [block.text for block in result.content if block.type == "text"]
        if result.is_error:
            raise RuntimeError("\n".join(texts) or "an error without a text")
        if len(texts) < len(result.content):
            raise ValueError("an answer with media: only its text fits a message of a tool")
        return "\n".join(texts) if texts else json.dumps(result.structured_content, ensure_ascii=False)

    async def _client(self) -> Any:
        """The connected client. Whoever is cancelled meanwhile leaves the connecting to others."""
        if self._closed:
            raise RuntimeError("the connection is closed")
        if self._ready is None or self._keeper is None or self._keeper.done() or self._lost.is_set():
            self._lost, self._ready = asyncio.Event(), self._loop.create_future()
            self._keeper = self._loop.create_task(self._keep(self._ready, self._lost))
        return await asyncio.shield(self._ready)

    async def _keep(self, ready: asyncio.Future[Any], lost: asyncio.Event) -> None:
        """A connection, from its beginning to its end. The library wants both in one task."""
        try:
            async with contextlib.AsyncExitStack() as stack:
                async with asyncio.timeout(self._timeout):
                    client = await stack.enter_async_context(_library("mcp").Client(await self._transport(stack)))
                ready.set_result(client)
                await lost.wait()
        except BaseException as error:
            lost.set()
            if not ready.done():
                ready.set_exception(error if isinstance(error, Exception) else RuntimeError("closed"))
                ready.exception()  # that nobody may wait for it is no fault

    async def _transport(self, stack: contextlib.AsyncExitStack) -> Any:
        target = dict(self._target)
        if "command" in target:
            return _library("mcp").StdioServerParameters(**target)
        headers = dict(target.get("headers") or {})
        if token := target.get("auth_token"):
            headers["Authorization"] = f"Bearer {token}"
        http = _library("httpx2").AsyncClient(headers=headers, timeout=self._timeout)
        await stack.enter_async_context(http)
        return _library("mcp.client.streamable_http").streamable_http_client(target["url"], http_client=http)

    async def _end(self) -> None:
        self._lost.set()
        if others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others, timeout=CLOSE_S)
            for task in others:
                task.cancel()
            await asyncio.wait(others, timeout=1)


def mcp_tools(entry: Mapping[str, Any], opened: list[McpServer]) -> list[tuple[Tool, Callable[..., Any]]]:
    """The tools of an entry with `mcp`, in VERL's words: `mcp_servers_config_path` names a JSON file with `mcpServers`,
    or `servers` has them; `tool_selected_list` leaves out others.

    opened: gets the servers, also where this raises ConfigError.
    """
    place, config = entry.get("mcp"), entry.get("config") or {}
    _known("mcp", place, _PLACES)
    _known("config", config, _CONFIG)
    assert isinstance(place, Mapping)
    selected = place.get("tool_selected_list")
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        raise ConfigError(f"tool_selected_list={selected!r}: a list of names")
    limits = {name: config[name] for name in ("timeout", "rate_limit") if config.get(name) is not None}
    found: list[tuple[Tool, Callable[..., Any]]] = []
    for name, target in _servers(place).items():
        opened.append(McpServer(name, target, **limits))
        found += [(tool, opened[-1].runner(tool.function.name)) for tool in opened[-1].tools()]
    if missing := sorted(set(selected or ()) - {tool.function.name for tool, _ in found}):
        raise ConfigError(f"tool_selected_list: no server has the tool {missing[0]!r}")
    return [it for it in found if not selected or it[0].function.name in selected]


def _known(field: str, given: Any, names: Sequence[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{field}={given!r}: a mapping with {', '.join(names)}")
    if unknown := sorted(map(str, given.keys() - set(names))):
        raise ConfigError(f"{field}.{unknown[0]} is unknown; known are {', '.join(names)}")


def _servers(place: Mapping[str, Any]) -> dict[str, Any]:
    found = place.get("servers")
    if path := place.get("mcp_servers_config_path"):
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))["mcpServers"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"mcp_servers_config_path={path!r}: no JSON with mcpServers: {error!r}") from error
    if not isinstance(found, dict) or not found:
        raise ConfigError("mcp: servers, or a file mcp_servers_config_path, with at least one server is needed")
    return found


def _checked(name: str, target: Any) -> Mapping[str, Any]:
    if isinstance(target, Mapping):
        for known in (_PROGRAM, _URL):
            if isinstance(target.get(known[0]), str) and not target.keys() - set(known):
                return target
    raise ConfigError(f"MCP server {name!r}: either {', '.join(_PROGRAM)}, or {', '.join(_URL)}; the first is needed")


def _seconds(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InvalidField(field, value, "a number above 0")
    return float(value)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError("MCP servers need the package mcp 2: pip install rolloutmq[mcp]") from error


def _cause(error: BaseException) -> str:
    """What happened, out of the groups that the library raises."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
