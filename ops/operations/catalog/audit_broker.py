"""The audit of a live pool's records in Redis."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from ....messages.model import Float, Int
from ..audit import Sweep
from .operation import Context, Operation, Params, operation


class AuditBrokerParams(Params):
    """pause_s: longest pause between two looks at what seemed wrong. most: violations that are reported one by one."""

    pause_s: Float = Field(default=0.5, gt=0, le=60)
    most: Int = Field(default=1000, ge=1, le=5000)


@operation
class AuditBroker(Operation[AuditBrokerParams]):
    """Check what is in Redis against the pool's promises, while it works; reports what stays wrong."""

    name = "audit-broker"
    params = AuditBrokerParams

    async def run(self, context: Context, params: AuditBrokerParams) -> dict[str, Any]:
        """Changes nothing, so it may be repeated at will."""
        return await Sweep(context.redis, context.pool, context.progress, params.pause_s, params.most).run()

    def found_trouble(self, result: dict[str, Any]) -> bool:
        return bool(result["violations"])
