"""Runs inside the benchmark's engines: the project's own loader, and a few orders more."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from ....worker.sglang.engine import SGLangEngine
from ....worker.sglang.inside import control
from ....worker.sglang.weights import run_loader

STAGING = "rolloutmq-bench-staging-"
"""A tensor with this in its name, and a policy after it, asks to stage, or not, from now on: so that one engine can be
measured both ways."""


def receive(model: Any, named_tensors: Any) -> Any:
    """SGLang's hook; the project's own, for everything but that name."""
    named = list(named_tensors)
    what = named[0][0] if len(named) == 1 else ""
    if what.startswith(STAGING):
        policy: Any = what.removeprefix(STAGING)
        if control._server is not None:
            control._server.receiver.stage(policy)
        return None
    return resolve_name(SGLangEngine._weight_loader)(model, named)


class BenchEngine(SGLangEngine):
    """The project's engine with that hook in place of its own."""

    _weight_loader = f"{__name__}.receive"

    @property
    def manager(self) -> Any:
        """SGLang's tokenizer manager, for the stock path."""
        return self._current().manager

    async def settle(self) -> None:
        """Until everything queued on the engine's device is done: SGLang's "success" says that copies are queued."""
        for rank in range(self.config.tp_size):
            await self._current().channel.operate(rank, "synchronize")

    async def stage(self, policy: str) -> None:
        """Stage from now on, or not ("on", "off", "auto"); nothing on a CPU, which always does."""
        self.manager.auto_create_handle_loop()  # else nobody receives the answer of an engine's very first request
        await run_loader(self.manager, self._weight_loader, STAGING + policy, self.config.tp_size)
