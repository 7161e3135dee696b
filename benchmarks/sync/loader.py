"""Code inside the benchmark's engines: RolloutMQ's own loader, and a few orders more."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from rolloutmq.worker.sglang.engine import SGLangEngine
from rolloutmq.worker.sglang.inside import control
from rolloutmq.worker.sglang.weights import run_loader

STAGING = "rolloutmq-bench-staging-"
"""A tensor whose name has this and a policy behind it sets whether to stage from now on. So one engine is measured both
ways."""


def receive(model: Any, named_tensors: Any) -> Any:
    """Load as SGLang's hook. It is RolloutMQ's own for everything but that name."""
    named = list(named_tensors)
    what = named[0][0] if len(named) == 1 else ""
    if what.startswith(STAGING):
        policy: Any = what.removeprefix(STAGING)
        if control._server is not None:
            control._server.receiver.stage(policy)
        return None
    return resolve_name(SGLangEngine._weight_loader)(model, named)


class BenchEngine(SGLangEngine):
    """RolloutMQ's engine with that hook in place of its own."""

    _weight_loader = f"{__name__}.receive"

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, for the stock path."""
        return self._current().manager

    async def settle(self) -> None:
        """Wait until the engine's device has done everything. SGLang's "success" only says that copies are queued."""
        for rank in range(self.config.tp_size):
            await self._current().channel.operate(rank, "synchronize")

    async def stage(self, policy: str) -> None:
        """Set whether to stage from now on: "on", "off" or "auto". No effect on a CPU, which always stages."""
        self.manager.auto_create_handle_loop()  # without it nobody receives the answer of an engine's first request
        await run_loader(self.manager, self._weight_loader, STAGING + policy, self.config.tp_size)
