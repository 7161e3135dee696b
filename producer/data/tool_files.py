"""Files of tools: YAML or JSON, in this package's names or VERL's."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import Tool, as_invalid_field
from .tool_class import ToolClass

_NAMES = (("class_path", "class_name"), ("schema", "tool_schema"))
_KEYS = {name for names in _NAMES for name in names} | {"config"}
_NO_MCP = "MCP servers are not called, as in VERL 0.9: name a class whose execute asks the server, with its schema"


def read_tool_file(path: Path) -> Iterator[tuple[str, Tool, Callable[..., Any]]]:
    """(place in the file, tool, runner) of each entry; see `ToolRegistry.load`. Raises ConfigError."""
    found = _read(path)
    entries = found.get("tools") if isinstance(found, dict) else found
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: tools: a list of at least one tool is needed")
    for place, entry in enumerate(entries):
        where = f"{path}: tools.{place}"
        try:
            yield where, *_entry(entry)
        except (InvalidField, ConfigError) as error:
            raise ConfigError(f"{where}: {error}") from error


def _entry(entry: Any) -> tuple[Tool, Callable[..., Any]]:
    if not isinstance(entry, dict):
        raise ConfigError("a mapping with class_path and schema is needed")
    config = entry.get("config") or {}
    if "mcp" in entry or (isinstance(config, dict) and config.get("type") == "mcp"):
        raise ConfigError(_NO_MCP)
    if unknown := sorted(map(str, entry.keys() - _KEYS)):
        raise ConfigError(f"{unknown[0]} is unknown; known are {', '.join(sorted(_KEYS))}")
    class_path, schema = (entry.get(a, entry.get(b)) for a, b in _NAMES)
    if not isinstance(class_path, str):
        raise ConfigError("class_path and schema are needed")
    if not isinstance(config, dict):
        raise ConfigError(f"config={config!r}: a mapping of arguments")
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
