"""Requests that keep an engine busy while its weights change, and the tokens that arrive of them."""

from __future__ import annotations

import asyncio
import random
import secrets

import numpy as np

from rolloutmq.messages.model import SamplingParams
from rolloutmq.worker.engine import EngineRequest

from .child import now
from .loader import BenchEngine

GLANCE_S = 0.002
STREAMS = 8


class Load:
    """`running` requests at once, some of which stream, which shows the engine's steps as they happen.

    (If all streamed, this process would be so busy that it saw them late.) A request that ends is not followed by
    another one, so no prefill falls into the measurement. version: of the weights for new requests. They share no
    prefixes with those of other versions.
    """

    def __init__(self, engine: BenchEngine, running: int, *, prompt: int, new: int, version: int) -> None:
        self.version = version
        self.arrivals: list[list[float]] = [[] for _ in range(min(running, STREAMS))]
        self._engine, self._prompt, self._new = engine, prompt, new
        self._draw = random.Random(0)
        self._current: list[str | None] = [None] * running
        self._gate = asyncio.Event()
        self._gate.set()
        self._slots = [asyncio.create_task(self._slot(number)) for number in range(running)]

    async def seen(self, each: int, timeout_s: float) -> None:
        """Wait until every streaming request has `each` more tokens.

        Raises TimeoutError, or RuntimeError if one ended.
        """
        wanted = [len(arrived) + each for arrived in self.arrivals]
        async with asyncio.timeout(timeout_s):
            while any(len(arrived) < count for arrived, count in zip(self.arrivals, wanted, strict=True)):
                for slot in self._slots:
                    if slot.done():
                        raise slot.exception() or RuntimeError("a request came to its end during the measurement")
                await asyncio.sleep(GLANCE_S)

    async def pause(self, timeout_s: float) -> None:
        """Abort what runs, keep its tokens, and wait until nothing runs."""
        self._gate.clear()
        self._engine.abort_all()
        async with asyncio.timeout(timeout_s):
            while any(request is not None for request in self._current):  # noqa: ASYNC110
                await asyncio.sleep(GLANCE_S / 4)

    def resume(self) -> None:
        """Continue where `pause` interrupted. Prompt and partial answer are computed again."""
        self._gate.set()

    async def stop(self, timeout_s: float) -> None:
        """Abort and forget everything. Raises what a request raised."""
        await self.pause(timeout_s)
        for slot in self._slots:
            slot.cancel()
        ended = await asyncio.gather(*self._slots, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):
                raise error

    async def _slot(self, number: int) -> None:
        vocab = self._engine.info.vocab_size
        tokens, left = [self._draw.randrange(vocab) for _ in range(self._prompt)], self._new
        while left > 0:
            await self._gate.wait()
            generated = await self._run(number, tokens, left)
            left -= generated
            # Only the number of tokens that are computed again matters, and not which ones.
            tokens += [self._draw.randrange(vocab) for _ in range(generated)]

    async def _run(self, number: int, tokens: list[int], left: int) -> int:
        request = EngineRequest(
            request_id=secrets.token_hex(16),
            token_ids=np.array(tokens, np.int32),
            sampling=SamplingParams(max_new_tokens=left, ignore_eos=True),
            max_new_tokens=left,
            cache_key=str(self.version),
        )
        self._current[number] = request.request_id
        try:
            if number >= len(self.arrivals):
                return int((await self._engine.generate(request)).token_ids.size)
            return await self._stream(number, request)
        finally:
            self._current[number] = None

    async def _stream(self, number: int, request: EngineRequest) -> int:
        from rolloutmq.worker.sglang.calls.ask import generate_input

        asked = generate_input(request)
        asked.stream = True
        count = 0
        try:
            async for answer in self._engine.manager.generate_request(asked, None):
                had, count = count, int(answer["meta_info"]["completion_tokens"])
                if count > had:
                    self.arrivals[number].append(now())
        except ValueError as error:
            if type(error).__name__ != "RequestAbortedError":  # older releases, of one that never ran
                raise
        return count
