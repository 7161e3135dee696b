"""Tools that a trainer runs for its model: a registry loaded from the trainer's file, and runs of a turn's calls."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import MAX_TEXT, ChatMessage, Tool, ToolCall, as_invalid_field

Runner = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of one call. content: the tool's answer, or the error as text for the model. seconds: duration."""

    call: ToolCall
    content: str
    error: str | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the tool ran and answered."""
        return self.error is None

    def as_message(self) -> ChatMessage:
        """The message of the next prompt that answers the call."""
        return ChatMessage(role="tool", content=self.content, tool_call_id=self.call.id, name=self.call.name)


class ToolRegistry:
    """Tools by name. Each has a description for the model and a runner.

    A runner is called with the arguments by name. It may be a coroutine function. Several calls may run at once.
    """

    def __init__(self, tools: Mapping[str, tuple[Tool, Runner]] | None = None) -> None:
        self._tools = dict(tools or {})

    def add(self, tool: Tool | Mapping[str, Any], runner: Runner) -> None:
        """Add a tool. Raises InvalidField for a wrong description or a name that is in use."""
        whole = tool if isinstance(tool, Tool) else read_tool("tool", tool)
        if whole.function.name in self._tools:
            raise InvalidField("function.name", whole.function.name, "a name that no other tool has")
        self._tools[whole.function.name] = whole, runner

    @property
    def tools(self) -> tuple[Tool, ...]:
        """For `GenerateJob.tools`."""
        return tuple(tool for tool, _ in self._tools.values())

    def runner(self, name: str | None) -> Runner | None:
        """The runner of the tool of that name, or None."""
        return self._tools[name][1] if name in self._tools else None

    @classmethod
    def load(cls, path: str | Path) -> ToolRegistry:
        """The tools of a YAML (or JSON) file:

            tools:
              - class_path: my_project.tools.Search   # a class, made with `config`, or a plain function
                config: {index: /data/index}
                schema: {type: function, function: {name: search, description: …, parameters: {…}}}

        VERL's names, class_name and tool_schema, work too. The file decides which code runs in this process, so it must
        be the trainer's own. No message can change it. Raises ConfigError.
        """
        registry = cls()
        entries = _read(Path(path)).get("tools")
        if not isinstance(entries, list) or not entries:
            raise ConfigError(f"{path}: tools: a list of at least one tool is needed")
        for place, entry in enumerate(entries):
            where = f"{path}: tools.{place}"
            if not isinstance(entry, dict):
                raise ConfigError(f"{where}: a mapping with class_path and schema is needed")
            if unknown := sorted(map(str, entry.keys() - _KEYS)):
                raise ConfigError(f"{where}: {unknown[0]} is unknown; known are {', '.join(sorted(_KEYS))}")
            class_path, schema = (entry.get(a, entry.get(b)) for a, b in _NAMES)
            if not isinstance(class_path, str) or not isinstance(schema, dict):
                raise ConfigError(f"{where}: class_path and schema are needed")
            try:
                registry.add(read_tool("schema", schema), _runner(class_path, entry.get("config") or {}))
            except (InvalidField, ConfigError) as error:
                raise ConfigError(f"{where}: {error}") from error
        return registry


_NAMES = (("class_path", "class_name"), ("schema", "tool_schema"))
_KEYS = {name for names in _NAMES for name in names} | {"config"}


async def run_tool_calls(
    calls: Sequence[ToolCall], registry: ToolRegistry, timeout: float | None = None
) -> list[ToolOutcome]:
    """Run the calls of a turn at the same time. Returns their outcomes in the order of the calls.

    timeout: seconds for each call. A plain function cannot be stopped: after the timeout it runs on in its thread, and
    its answer is dropped. An invalid call and a tool's exception each become an outcome with an error.
    """
    return list(await asyncio.gather(*(_run(call, registry, timeout) for call in calls)))


async def _run(call: ToolCall, registry: ToolRegistry, timeout: float | None) -> ToolOutcome:
    runner = registry.runner(call.name)
    if call.error is not None or runner is None:
        error = call.error or f"there is no tool {call.name!r}"
        return ToolOutcome(call, f"Error: {error}", error)
    began = time.monotonic()
    try:
        async with asyncio.timeout(timeout):
            answer = _as_text(await _call(runner, call.arguments or {}))
    except TimeoutError:
        error = f"{call.name} did not answer within {timeout:g} s" if timeout else f"{call.name}: TimeoutError"
    except Exception as raised:  # a tool may raise anything; the other calls go on
        error = f"{call.name}: {type(raised).__name__}: {raised}"
    else:
        return ToolOutcome(call, answer, None, time.monotonic() - began)
    return ToolOutcome(call, f"Error: {error}", error, time.monotonic() - began)


async def _call(runner: Runner, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(runner) or inspect.iscoroutinefunction(getattr(runner, "__call__", None)):  # noqa: B004
        return await runner(**arguments)
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def finish(answer: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(answer)
        else:
            done.set_exception(error)

    def work() -> None:
        answer, error = None, None
        try:
            answer = runner(**arguments)
        except Exception as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(finish, answer, error)

    # Not the loop's own pool: tools that hang would fill it, and the process could not end.
    threading.Thread(target=work, name="rolloutmq-tool", daemon=True).start()
    answer = await done
    return await answer if inspect.isawaitable(answer) else answer


def _as_text(answer: Any) -> str:
    """The answer as the text of a message. Raises ValueError if it is too long."""
    if isinstance(answer, str):
        text = answer
    else:
        try:
            text = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(answer)
    if len(text) > MAX_TEXT:
        raise ValueError(f"an answer of {len(text)} characters: at most {MAX_TEXT} fit a message")
    return text.encode(errors="replace").decode()  # a lone surrogate cannot be encoded


def read_tool(field: str, schema: Any) -> Tool:
    """Read a tool in OpenAI's form. Raises InvalidField. field: the start of the name in that error."""
    try:
        return Tool.model_validate(schema)
    except ValidationError as error:
        invalid = as_invalid_field(error)
        raise InvalidField(f"{field}.{invalid.field}", invalid.value, invalid.allowed) from None


def _runner(class_path: str, config: Any) -> Runner:
    module, _, name = class_path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"class_path={class_path!r}: cannot be imported: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config={config!r}: a mapping of arguments")
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


def _read(path: Path) -> dict[str, Any]:
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
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a mapping with tools is needed")
    return found
