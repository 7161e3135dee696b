"""Files of tools: YAML or JSON, in this package's names or VERL's."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import Tool, as_invalid_field
from .mcp_server import McpServer, mcp_tools
from .tool_class import ToolClass

_NAMES = (("class_path", "class_name"), ("schema", "tool_schema"))
_KEYS = {name for names in _NAMES for name in names} | {"config"}
_MCP_CLASSES = "verl.tools.mcp_"
"""What the names of VERL's own classes for MCP begin with. Their place is taken by the client here."""


def read_tool_file(path: Path, opened: list[McpServer]) -> Iterator[tuple[str, Tool, Callable[..., Any]]]:
    """(place in the file, tool, runner) of each tool; see `ToolRegistry.load`. Raises ConfigError.

    opened: gets the MCP servers that were connected.
    """
    found = _read(path)
    entries = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: tools: a list of at least one tool is needed")
    for place, entry in enumerate(entries):
        where = f"{path}: tools.{place}"
        try:
            for tool, runner in _entry(entry, opened):
                yield where, tool, runner
        except (InvalidField, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error


def _entry(entry: Any, opened: list[McpServer]) -> Sequence[tuple[Tool, Callable[..., Any]]]:
    if not isinstance(entry, dict):
        raise ConfigError("a mapping with class_path and schema is needed")
    config = entry.get("config") or {}
    if not isinstance(config, dict):
        raise ConfigError(f"config={config!r}: a mapping of arguments")
    if "mcp" in entry or config.get("type") == "mcp":
        return _mcp(entry, opened)
    return [_class_or_function(entry, config)]


def _mcp(entry: dict[str, Any], opened: list[McpServer]) -> Sequence[tuple[Tool, Callable[..., Any]]]:
    if unknown := sorted(map(str, entry.keys() - {"mcp", "config", *_NAMES[0]})):
        raise ConfigError(f"{unknown[0]} is unknown beside mcp: the server describes its tools")
    own = entry.get("class_path", entry.get("class_name"))
    if own is not None and not str(own).startswith(_MCP_CLASSES):
        raise ConfigError(f"class_path={own!r}: tools of MCP servers need no class; leave out mcp, and let it ask them")
    return mcp_tools(entry, opened)


def _class_or_function(entry: dict[str, Any], config: dict[str, Any]) -> tuple[Tool, Callable[..., Any]]:
    if unknown := sorted(map(str, entry.keys() - _KEYS)):
        raise ConfigError(f"{unknown[0]} is unknown; known are {', '.join(sorted(_KEYS))}")
    class_path, schema = (entry.get(a, entry.get(b)) for a, b in _NAMES)
    if not isinstance(class_path, str):
        raise ConfigError("class_path and schema are needed")
    found = _imported(class_path)
    if inspect.isclass(found) and ToolClass.is_one(found):
        try:
            made = ToolClass.make(found, config, schema)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise ConfigError(f"class_path={class_path!r}: {error}") from error
        return read_tool("schema", made.schema), made
    if not isinstance(schema, dict):
        raise ConfigError("class_path and schema are needed")
    return read_tool("schema", schema), _runner(class_path, found, config)


def read_tool(field: str, schema: Any) -> Tool:
    """Read a tool in OpenAI's form. Raises InvalidField. field: the start of the name in that error."""
    try:
        return Tool.model_validate(schema)
    except ValidationError as error:
        invalid = as_invalid_field(error)
        raise InvalidField(f"{field}.{invalid.field}", invalid.value, invalid.allowed) from None


def _imported(class_path: str) -> Any:
    module, _, name = class_path.replace(":", ".").rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"class_path={class_path!r}: cannot be imported: {error}") from error


def _runner(class_path: str, found: Any, config: Mapping[str, Any]) -> Callable[..., Any]:
    if inspect.isclass(found):
        try:
            found = found(**config)
        except TypeError as error:
            raise ConfigError(f"class_path={class_path!r}: {error}") from error
    elif config:
        raise ConfigError(f"class_path={class_path!r}: a function takes no config")
    if not callable(found):
        raise ConfigError(f"class_path={class_path!r}: what it names, or an instance of it, has to be callable")
    return found  # type: ignore[no-any-return]


def _read(path: Path) -> dict[str, Any] | list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    try:
        if path.suffix == ".json":
            found = json.loads(text)
        else:
            yaml: Any = importlib.import_module("yaml")
            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ConfigError(f"{path}: not YAML: {error}") from error
    except ImportError:
        raise ConfigError(f"{path}: reading YAML needs PyYAML; a .json file needs nothing") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, dict | list):
        raise ConfigError(f"{path}: a mapping with tools, or a list of them, is needed")
    return found
