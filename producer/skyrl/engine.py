"""SkyRL's inference engine, over a pool of any number of workers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...messages.errors import RolloutMQError
from .disk import DiskMethods

TEARDOWN_S = 30.0
INTERFACES = (
    "skyrl_train.inference_engines.base",
    "skyrl.backends.skyrl_train.inference_engines.base",
)
"""Where SkyRL has its InferenceEngineInterface: by release."""


class SkyRLEngine(DiskMethods):
    """One engine with the methods of SkyRL's InferenceEngineInterface, behind which a whole pool generates.

        engine = SkyRLEngine(redis_url, tokenizer="Qwen/Qwen3-0.6B", sampling_params={"max_generate_length": 256})
        output = await engine.generate({"prompts": conversations, "sampling_params": {"n": 8, "logprobs": 0}})

    Made anywhere; connects with the first call, on its event loop. Methods may be called from many tasks of it. What
    the pool cannot do raises FeatureUnavailable and names it: nothing is ever made up. docs/skyrl.md says method by
    method what each does, and where it goes beyond SkyRL.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        tokenizer: one of transformers' kind, or the path or name of one; by default that of the pool's model, where
            the workers' path of it leads to one here, too.
        sampling_params: for calls without their own; in any dialect.
        publisher: what sends weights to the pool; by default one of its own, made when weights come, with
            mode="in_place". A given one is not closed by `teardown`.
        timeout_s: so long `generate` and its kin wait for the whole answer; None for ever.
        receiver_ranks: how many ranks of a trainer's broadcast group this process fills; by default all from
            rank_offset on, which is right for the only engine of that trainer.
        receiver_device: where tensors of NCCL broadcasts and CUDA IPC arrive: "cuda:1"; broadcasts over gloo arrive in
            host memory.
        weights_timeout_s: for joining the group, and for each tensor.

    Raises InvalidField.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        register()

    async def teardown(self) -> None:
        """End what is under way here, leave the trainer's group, disconnect; half a minute at most. Workers go on.

        For good: later calls raise RolloutMQError. Safe to call twice.
        """
        if self._closed:
            return
        client, self._closed = self._client, True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TEARDOWN_S):
                try:
                    await self._end(client)
                finally:
                    await self.close_weights()
        self._sessions.clear()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a SkyRLEngine is not copied: weights that were sent to one copy would be published by none. "
            "Make it a Ray actor, as SkyRL does with its engines: every handle then speaks to the same one"
        )

    async def _end(self, client: Any) -> None:
        if client is None or self._loop is not asyncio.get_running_loop():
            return
        with contextlib.suppress(RolloutMQError, OSError):
            await client.cancel_all()
        await client.aclose()


def register() -> None:
    """Make SkyRLEngine a virtual subclass of SkyRL's interface, if SkyRL is here; without it nothing happens."""
    for name in INTERFACES:
        try:
            there = name in sys.modules or find_spec(name) is not None
            interface = getattr(import_module(name), "InferenceEngineInterface", None) if there else None
        except ImportError:  # it is not here, or something that it needs is not
            continue
        if interface is not None:
            interface.register(SkyRLEngine)
