"""Tool classes in VERL's form: one object for many trajectories, with a life of its own for each call."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any
from uuid import uuid4

from ...messages.errors import ConfigError, InvalidField
from ...messages.model import MediaKind, Medium, Tool
from .media import medium

log = logging.getLogger(__name__)
RELEASE_S = 30.0
"""The longest wait for `release`, in seconds: the call's own timeout is over by then, perhaps."""
METHODS = ("create", "execute", "calc_reward", "release")


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a call gave. content: text, or anything that becomes JSON. The rest as in `ToolOutcome`."""

    content: Any
    reward: float | None = None
    state_reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    media: tuple[Medium, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolClass:
    """A runner that calls an instance of a tool class as VERL 0.9 does.

    Each call awaits `create(instance_id, create_kwargs=...)`, `execute(instance_id, parameters)`,
    `calc_reward(instance_id)` and `release(instance_id)`. `release` is called however the call ends, also if `create`
    failed or was cancelled. A `release` that fails or takes longer than 30 seconds is logged and costs no answer.

    tool: the instance. name: of the tool. create_kwargs: for `create`.
    """

    tool: Any
    name: str
    create_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def is_one(found: type) -> bool:
        """Whether a class has the methods of a tool class."""
        return all(callable(getattr(found, name, None)) for name in METHODS)

    @classmethod
    def make(cls, found: type, config: Mapping[str, Any], schema: Mapping[str, Any] | None) -> ToolClass:
        """Make the instance by `found(config, tool_schema)`. schema: None if the class has its own.

        Raises what the constructor raises, and ConfigError if a method is no coroutine function, or the tool has no
        schema.
        """
        for name in METHODS:
            if not inspect.iscoroutinefunction(getattr(found, name)):
                raise ConfigError(f"{name} has to be a coroutine function (async def)")
        # VERL's own schema where its classes are loaded: they read parameters.properties as attributes.
        schemas = sys.modules.get("verl.tools.schemas")
        model: Any = schemas.OpenAIFunctionToolSchema if schemas is not None else Tool
        tool = found(dict(config), model.model_validate(schema) if schema is not None else None)
        if getattr(tool, "tool_schema", None) is None:
            raise ConfigError("tool_schema is needed: the class has none of its own")
        return cls(tool, tool.tool_schema.function.name)

    @property
    def schema(self) -> dict[str, Any]:
        """In OpenAI's form."""
        shown: dict[str, Any] = self.tool.tool_schema.model_dump(exclude_none=True)
        return shown

    def created_with(self, create_kwargs: Mapping[str, Any]) -> ToolClass:
        """The same tool, whose instances are created with these arguments."""
        return ToolClass(self.tool, self.name, create_kwargs)

    async def __call__(self, **arguments: Any) -> ToolAnswer:
        """One call, from `create` to `release`. Raises what they raise, and InvalidField for what is no medium.

        An answer's `image` and `video` are lists of what `medium` takes, but for paths and URLs.
        """
        instance_id = uuid4().hex
        try:
            created = await self.tool.create(instance_id, create_kwargs=dict(self.create_kwargs))
            instance_id = created[0] if isinstance(created, tuple) else created or instance_id
            executed = await self.tool.execute(instance_id, arguments)
            response, reward, metrics = executed if isinstance(executed, tuple) else (executed, None, None)
            media = await asyncio.to_thread(_media, response)
            content = getattr(response, "text", response)
            state_reward = await self.tool.calc_reward(instance_id)
        finally:
            await self._release(instance_id)
        return ToolAnswer("" if content is None else content, reward, state_reward, metrics or {}, media)

    async def _release(self, instance_id: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_S):
                await self.tool.release(instance_id)
        except Exception as error:  # of the user's own code
            log.warning("tool %s: release(%r) failed: %r", self.name, instance_id, error)


def _media(response: Any) -> tuple[Medium, ...]:
    """What a ToolResponse shows, pictures first. Encoding takes a while.

    A text is refused: a path or URL may be the model's own, and a tool reads what it shows by itself.
    """
    kinds: tuple[MediaKind, ...] = "image", "video"
    found = []
    for kind in kinds:
        for one in getattr(response, kind, None) or ():
            if isinstance(one, str | PurePath):
                raise InvalidField(kind, str(one)[:80], "bytes, pictures or arrays, which the tool has read")
            found += [medium(kind, one)] if one is not None else []
    return tuple(found)
