"""SGLang's own weight update, the engine's side: join a group, receive request by request, leave.

The sender is sync/wire/stock.py. SGLang has no way to call a waiting engine off: its scheduler blocks in the
rendezvous (up to 30 minutes) or in a broadcast, and everything else with it. So each call here has a deadline; after
TransferTimeout the engine has to be restarted. Works with and without `begin_weight_update`, see :mod:`.sglang_compat`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from ...messages.errors import TransferTimeout, WeightSyncError
from ...sync.wire import StockRequest


class StockReceiver:
    """One engine's part in one update group. Its methods are called one at a time."""

    def __init__(self, manager: Any, name: str) -> None:
        """manager: SGLang's tokenizer manager. name: the group's, the same at the sender."""
        self.name = name
        self._manager = manager

    async def join(
        self, *, host: str, port: int, rank_offset: int, world: int, backend: Literal["gloo", "nccl"], timeout_s: float
    ) -> None:
        """Join; tensor-parallel rank r becomes rank `rank_offset + r`. The sender must make its group meanwhile.

        Raises TransferTimeout, after which the engine has to be restarted, or WeightSyncError if SGLang refuses.
        """
        from sglang.srt.managers import io_struct  # noqa: PLC0415  (only where an engine runs already)

        request = io_struct.InitWeightsUpdateGroupReqInput(
            master_address=host,
            master_port=port,
            rank_offset=rank_offset,
            world_size=world,
            group_name=self.name,
            backend=backend,
        )
        async with self._deadline(timeout_s, "the update group was not full"):
            _expect(await self._manager.init_weights_update_group(request, None))

    async def receive(
        self,
        requests: Sequence[StockRequest],
        *,
        timeout_s: float,
        after: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """One version: every request in turn, then `after()` within the same update session (a check, for example).

        No request may be running, unless the engine is paused: SGLang waits for them all. Prefixes cached under older
        weights are not dropped. Success means that the copies are queued; `after` has to see to the rest.

        Raises TransferTimeout or WeightSyncError; the weights are partly written then.
        """
        from sglang.srt.managers import io_struct  # noqa: PLC0415

        from . import compat as sglang_compat  # noqa: PLC0415

        async with self._deadline(timeout_s, "the update did not come through"):
            try:
                async with sglang_compat.weight_update(self._manager):
                    for request in requests:
                        update = io_struct.UpdateWeightsFromDistributedReqInput(
                            names=list(request.names),
                            dtypes=list(request.dtypes),
                            shapes=[list(shape) for shape in request.shapes],
                            group_name=self.name,
                            flush_cache=False,
                            load_format="flattened_bucket" if request.bucketed else None,
                        )
                        _expect(await self._manager.update_weights_from_distributed(update, None))
                    if after is not None:
                        await after()
            except RuntimeError as error:
                raise WeightSyncError(f"SGLang refused the update: {error}") from error

    async def leave(self, timeout_s: float) -> None:
        """Leave the group. Raises like `join`."""
        from sglang.srt.managers import io_struct  # noqa: PLC0415

        request = io_struct.DestroyWeightsUpdateGroupReqInput(group_name=self.name)
        async with self._deadline(timeout_s, "the update group was not given up"):
            _expect(await self._manager.destroy_weights_update_group(request, None))

    @asynccontextmanager
    async def _deadline(self, timeout_s: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as error:
            raise TransferTimeout(f"{what} within {timeout_s:.1f} s; the engine has to be restarted") from error


def _expect(answer: tuple[bool, str]) -> None:
    success, message = answer
    if not success:
        raise WeightSyncError(f"SGLang refused: {message}")
