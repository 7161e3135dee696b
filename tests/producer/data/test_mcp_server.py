"""Tools of real MCP servers: a program over its standard input and output, and one over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.pools.pool import eventually

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model.tools import ToolCall
from rolloutmq.producer.data import ToolRegistry, run_tool_calls

SERVER = str(Path(__file__).parents[2] / "support" / "specimens" / "mcp_tools.py")
PROGRAM = {"command": sys.executable, "args": [SERVER]}
NAMES = {"add", "environment", "broken", "picture", "hang", "pid", "die"}


def load(folder: Path, target: dict[str, Any], **more: Any) -> ToolRegistry:
    """A registry from files in VERL's form."""
    (folder / "servers.json").write_text(json.dumps({"mcpServers": {"specimen": target}}))
    entry = {
        "class_name": "verl.tools.mcp_search_tool.MCPSearchTool",
        "config": {"type": "mcp", "timeout": 120, "rate_limit": 1000},
        "mcp": {"mcp_servers_config_path": str(folder / "servers.json")} | more,
    }
    (folder / "tools.json").write_text(json.dumps({"tools": [entry]}))
    return ToolRegistry.load(folder / "tools.json")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of a server over HTTP, on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module", params=["program", "url"])
def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolRegistry]:
    target = PROGRAM if request.param == "program" else {"url": request.getfixturevalue("url")}
    made = load(tmp_path_factory.mktemp("mcp"), target)
    yield made
    made.close()


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(id=name, name=name, arguments=arguments)


def test_tools_are_listed_and_called_from_any_loop(registry: ToolRegistry) -> None:
    tools = {tool.function.name: tool.function for tool in registry.tools}
    assert tools.keys() == NAMES
    assert tools["add"].description == "Adds two numbers."
    assert tools["add"].parameters["required"] == ["a", "b"]
    for _loop in range(2):
        calls = [call("add", a=place, b=1, tool="x") for place in range(5)]
        outcomes = asyncio.run(run_tool_calls(calls, registry, 120))
        assert [outcome.content for outcome in outcomes] == ["1", "2", "3", "4", "5"]


async def test_what_goes_wrong_is_told_to_the_model(registry: ToolRegistry) -> None:
    calls = [call("broken"), call("add", a="x"), call("picture"), call("add", a=1, b=2)]
    broken, invalid, picture, right = await run_tool_calls(calls, registry, 120)
    assert broken.error == "broken: RuntimeError: Error executing tool broken"
    assert invalid.content.startswith("Error: add: RuntimeError: ")
    assert "valid integer" in invalid.content
    assert picture.error is not None
    assert "only its text fits" in picture.error
    assert right.content == "3"


async def test_a_call_that_takes_too_long_is_cancelled_at_the_server(registry: ToolRegistry, tmp_path: Path) -> None:
    mark = tmp_path / "called"
    hanging = asyncio.create_task(run_tool_calls([call("hang", mark=str(mark))], registry))
    await eventually(mark.exists)
    hanging.cancel()
    await eventually(mark.with_suffix(".cancelled").exists)
    (late,) = await run_tool_calls([call("hang", mark=str(mark))], registry, 0.05)
    assert late.error == "hang did not answer within 0.05 s"
    assert (await run_tool_calls([call("add", a=1, b=2)], registry, 120))[0].content == "3"


async def test_after_a_lost_connection_the_next_call_connects_again(tmp_path: Path) -> None:
    registry = load(tmp_path, PROGRAM | {"env": {"MARK": "here"}}, tool_selected_list=["die", "pid", "environment"])
    assert {tool.function.name for tool in registry.tools} == {"die", "pid", "environment"}
    (first,) = await run_tool_calls([call("pid")], registry, 120)
    waiting, lost = await run_tool_calls([call("die"), call("die")], registry, 120)
    assert waiting.error is not None
    assert lost.error is not None
    second, variable = await run_tool_calls([call("pid"), call("environment", variable="MARK")], registry, 120)
    assert second.ok
    assert second.content != first.content
    assert variable.content == "here"
    registry.close()
    with pytest.raises(ProcessLookupError):
        os.kill(int(second.content), 0)
    registry.close()
    assert (await run_tool_calls([call("pid")], registry, 120))[
        0
    ].error == "pid: RuntimeError: the connection is closed"


async def test_calls_under_way_end_when_the_registry_is_closed(tmp_path: Path) -> None:
    registry, mark = load(tmp_path, PROGRAM), tmp_path / "called"
    hanging = asyncio.create_task(run_tool_calls([call("hang", mark=str(mark))], registry))
    await eventually(mark.exists)
    await asyncio.to_thread(registry.close)
    (outcome,) = await hanging
    assert outcome.error is not None


async def test_a_server_that_does_not_answer_in_time(tmp_path: Path) -> None:
    registry = load(tmp_path, PROGRAM)
    (server,) = registry._servers
    server._timeout = 0.05
    (late,) = await run_tool_calls([call("hang", mark=str(tmp_path / "called"))], registry)
    assert late.error == "hang: RuntimeError: no answer within 0.05 s"
    registry.close()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"mcp": {}}, "servers, or a file"),
        ({"mcp": {"server": {}}}, r"mcp\.server is unknown"),
        ({"config": {"type": "mcp"}}, "mcp=None: a mapping"),
        ({"mcp": {"servers": {"s": {"url": 5}}}}, "either command, args"),
        ({"mcp": {"servers": {"s": {"command": "x", "url": "y"}}}}, "either command, args"),
        ({"mcp": {"servers": {"s": {"command": "/no/such/program"}}}}, "'s': FileNotFoundError"),
        ({"mcp": {"servers": {"s": {"command": sys.executable, "args": ["-c", ""]}}}}, "MCP server 's'"),
        ({"mcp": {"servers": {"s": {"url": "http://127.0.0.1:9/mcp"}}}}, "MCP server 's'"),
        ({"mcp": {"mcp_servers_config_path": "/no/such/file"}}, "no JSON with mcpServers"),
        ({"mcp": {"servers": {"s": PROGRAM}, "tool_selected_list": ["none"]}}, "no server has the tool 'none'"),
        ({"mcp": {"servers": {"s": PROGRAM, "t": PROGRAM}}}, "a name that no other tool has"),
        ({"mcp": {"servers": {"s": PROGRAM}}, "config": {"timeout": 0}}, "timeout=0"),
        ({"mcp": {"servers": {"s": PROGRAM}}, "config": {"num_workers": 4}}, r"config\.num_workers is unknown"),
        ({"mcp": {"servers": {"s": PROGRAM}}, "class_name": "my.Tool"}, "need no class"),
        ({"mcp": {"servers": {"s": PROGRAM}}, "tool_schema": {}}, "tool_schema is unknown beside mcp"),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    (tmp_path / "tools.json").write_text(json.dumps([{"config": {"timeout": 120}} | entry]))
    with pytest.raises(ConfigError, match=message):
        ToolRegistry.load(tmp_path / "tools.json")


def test_without_the_library_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigError, match=r"pip install rolloutmq\[mcp\]"):
        load(tmp_path, PROGRAM)
