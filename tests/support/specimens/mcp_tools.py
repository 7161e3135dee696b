"""An MCP server with the library's own server side: over its standard input and output, or with a port over HTTP.

`python mcp_tools.py [PORT]`
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import Image, MCPServer

server = MCPServer("specimen")


@server.tool()
def add(a: int, b: int, tool: str = "") -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def environment(variable: str) -> str:
    """A variable of this process."""
    return os.environ.get(variable, "")


@server.tool()
def broken() -> str:
    """Raises an error."""
    raise ValueError("secret details")


@server.tool()
def picture() -> Image:
    """Answers with something that is no text."""
    return Image(data=b"\x89PNG", format="png")


@server.tool()
async def hang(mark: str) -> str:
    """Leaves a file when it is called, and another one when the call is cancelled."""
    leave(mark)
    try:
        await asyncio.Event().wait()
    finally:
        leave(f"{mark}.cancelled")
    return ""


def leave(file: str) -> None:
    Path(file).touch()


@server.tool()
def pid() -> int:
    """The number of this process."""
    return os.getpid()


@server.tool()
def die() -> str:
    """Ends this process."""
    os._exit(1)


def main() -> None:
    if len(sys.argv) == 1:
        server.run()
    else:
        server.run("streamable-http", port=int(sys.argv[1]))


if __name__ == "__main__":
    main()
