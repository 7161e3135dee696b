"""The audit of a live pool's records in Redis."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from ....messages.model import Float, Int
from ..audit import Sweep
from .operation import Context, operation


@operation(found_trouble=lambda result: bool(result["violations"]))
async def audit_broker(
    context: Context,
    *,
    pause_s: Annotated[Float, Field(gt=0, le=60)] = 0.5,
    most: Annotated[Int, Field(ge=1, le=5000)] = 1000,
) -> dict[str, Any]:
    """Check what is in Redis against the pool's promises, while it works; reports what stays wrong.

    pause_s: longest pause between two looks at what seemed wrong. most: violations that are reported one by one.
    Changes nothing, so it may be repeated at will.
    """
    return await Sweep(context.redis, context.pool, context.progress, pause_s, most).run()
