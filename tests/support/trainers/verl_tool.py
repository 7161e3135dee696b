"""A tool class of verl's, which keeps an account of its calls. Needs verl."""

from __future__ import annotations

from typing import Any, ClassVar

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class Add(BaseTool):  # type: ignore[misc]
    """Adds two numbers, and what its trajectory was created with."""

    calls: ClassVar[list[tuple[str, Any]]] = []
    """(method, what it was given) of every call."""

    def __init__(self, config: dict[str, Any], tool_schema: Any) -> None:
        super().__init__(config, tool_schema)
        self._more: dict[str, int] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        made, answer = await super().create(instance_id)
        self._more[made] = kwargs["create_kwargs"].get("more", 0)
        self.calls.append(("create", self._more[made]))
        return made, answer

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        self.calls.append(("execute", parameters))
        total = parameters["a"] + parameters["b"] + self._more[instance_id]
        return ToolResponse(text=str(total)), 0.5, {}

    async def release(self, instance_id: str, **_kwargs: Any) -> None:
        self.calls.append(("release", self._more.pop(instance_id)))
