"""A tool class in VERL's form that shows the model a part of a picture. image_zoom.yaml loads it by name.

    registry = ToolRegistry.load("examples/verl/image_zoom.yaml")      # with examples/verl on PYTHONPATH
    kwargs = {"image_zoom_in_tool": {"create_kwargs": {"image": picture}}}
    environment = ToolEnvironment(prompt, registry, tools_kwargs=kwargs)

Its answer has the part as a picture, so the next prompt has it behind all earlier ones.
"""

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from PIL import Image

SMALLEST = 28
"""Pixels of a side; what is smaller is enlarged, because encoders of pictures take no less."""


@dataclass
class ToolResponse:
    """As verl.tools.schemas has it."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class ImageZoom:
    """`execute` takes bbox_2d, [left, top, right, bottom] in pixels, and perhaps a label of what is there."""

    def __init__(self, config, tool_schema):
        self.config, self.tool_schema = config, tool_schema
        self._pictures = {}

    async def create(self, instance_id=None, create_kwargs=None, **_kwargs):
        """create_kwargs: `image`, a PIL image, a path or the bytes of a file."""
        source = (create_kwargs or {})["image"]
        picture = source if isinstance(source, Image.Image) else Image.open(_file(source))
        instance_id = instance_id or uuid4().hex
        self._pictures[instance_id] = picture.convert("RGB")
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **_kwargs):
        picture = self._pictures[instance_id]
        box = parameters.get("bbox_2d")
        try:
            left, top, right, bottom = (round(float(number)) for number in box)
        except (TypeError, ValueError, OverflowError):
            return ToolResponse(text=f"Error: bbox_2d={box!r}: four numbers are needed"), 0.0, {"success": False}
        left, top, right, bottom = max(0, left), max(0, top), min(picture.width, right), min(picture.height, bottom)
        if left >= right or top >= bottom:
            error = f"Error: bbox_2d={box!r}: no part of a picture of {picture.width} x {picture.height}"
            return ToolResponse(text=error), 0.0, {"success": False}
        part = picture.crop((left, top, right, bottom))
        if min(part.size) < SMALLEST:
            part = part.resize(tuple(max(SMALLEST, side) for side in part.size))
        label = parameters.get("label")
        text = f"This is the part {[left, top, right, bottom]}" + (f" with {label}." if label else ".")
        return ToolResponse(text=text, image=[part]), 0.0, {"success": True}

    async def calc_reward(self, instance_id, **_kwargs):
        return 0.0

    async def release(self, instance_id, **_kwargs):
        self._pictures.pop(instance_id, None)


def _file(source):
    return io.BytesIO(source) if isinstance(source, bytes) else Path(source)
