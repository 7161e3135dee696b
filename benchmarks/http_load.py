"""The load of `python -m benchmarks gateway`, in a process of its own, which checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from rolloutmq import GenerateJob, RolloutClient, RolloutResult, SamplingParams

from .parts import Part

POOL = "bench"
PROMPT = 64
"""Tokens of each prompt; each is random, so no cache has any."""
VOCAB = 250


@dataclass(frozen=True, slots=True)
class Load:
    """count: of requests. at_once: so many of them, or as they come at `rate` a second (Poisson). tokens: of an answer.
    where: "pool", "gateway" or "sglang". at: its URL or port."""

    where: str
    at: str
    count: int
    tokens: int
    at_once: int = 0
    rate: float = 0.0
    stream: bool = False
    seed: int = 0

    def prompts(self) -> list[list[int]]:
        draw = random.Random(f"{self.where}{self.stream}{self.seed}")
        return [draw.choices(range(VOCAB), k=PROMPT) for _ in range(self.count)]


def drive(given: dict[str, Any]) -> None:
    """Ask for all answers of a Load, check each, and print how long they took."""
    print(json.dumps(asyncio.run(_drive(Load(**given)))))


async def _drive(load: Load) -> dict[str, Any]:
    async with contextlib.AsyncExitStack() as stack:
        ask = await (_pool if load.where == "pool" else _http)(load, stack)
        await ask([1] * PROMPT)  # opens connections, loads what is loaded late
        took, one_more = [0.0] * load.count, asyncio.Semaphore(load.at_once or load.count)
        draw, began, cpu = random.Random(load.seed), time.perf_counter(), time.process_time()

        async def one(place: int, prompt: list[int], due: float) -> None:
            async with one_more:
                came = due or time.perf_counter()
                if (found := await ask(prompt)) != load.tokens:
                    raise SystemExit(f"{found} tokens came back, {load.tokens} were asked for")
                took[place] = time.perf_counter() - came

        tasks, due = list[asyncio.Task[None]](), 0.0
        for place, prompt in enumerate(load.prompts()):
            if load.rate:
                due = (due or began) + draw.expovariate(load.rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(asyncio.create_task(one(place, prompt, due)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    cuts = statistics.quantiles(took, n=100)
    found = {"seconds": seconds, "cpu": time.process_time() - cpu, "tokens": load.count * load.tokens}
    return found | {"p50_ms": cuts[49] * 1000, "p99_ms": cuts[98] * 1000}


Ask = Callable[[list[int]], Awaitable[int]]
"""The tokens that came back for a prompt."""


async def _pool(load: Load, stack: contextlib.AsyncExitStack) -> Ask:
    client = await stack.enter_async_context(RolloutClient(load.at, POOL, max_outstanding=1 << 20))
    sampling = SamplingParams(max_new_tokens=load.tokens, ignore_eos=True)

    async def ask(prompt: list[int]) -> int:
        job = await client.submit(GenerateJob(token_ids=prompt, sampling=sampling))
        return sum(len(found.token_ids) for found in await client.wait(job) if isinstance(found, RolloutResult))

    return ask


async def _http(load: Load, _: contextlib.AsyncExitStack) -> Ask:
    """Token ids in, ids and log-probabilities out. Connections are kept."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    path = "/generate" if load.where == "sglang" else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: "

    async def ask(prompt: list[int]) -> int:
        body = orjson.dumps(_body(load, prompt))
        reader, writer = idle.pop() if idle else await asyncio.open_connection("127.0.0.1", int(load.at), limit=1 << 24)
        writer.write(f"{head}{len(body)}\r\n\r\n".encode() + body)
        found = await _answer(reader)
        idle.append((reader, writer))
        return _tokens(load, found)

    return ask


def _body(load: Load, prompt: list[int]) -> dict[str, Any]:
    if load.where == "sglang":
        params = {"max_new_tokens": load.tokens, "ignore_eos": True}
        return {"input_ids": prompt, "sampling_params": params, "return_logprob": True, "stream": load.stream}
    more = {"logprobs": 0, "return_token_ids": True, "stream": load.stream}
    return {"prompt": prompt, "max_tokens": load.tokens, "ignore_eos": True, **more}


async def _answer(reader: asyncio.StreamReader) -> bytes:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    headers = {name: value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    found = []
    if b"content-length" in headers:
        found.append(await reader.readexactly(int(headers[b"content-length"])))
    else:
        while size := int(await reader.readuntil(b"\r\n"), 16):
            found.append((await reader.readexactly(size + 2))[:-2])
        await reader.readexactly(2)
    if b" 200 " not in status:
        raise SystemExit(f"{status.decode()}: {b''.join(found)[:500].decode(errors='replace')}")
    return b"".join(found)


def _tokens(load: Load, answer: bytes) -> int:
    if not load.stream:
        told = orjson.loads(answer)
        return len(told["output_ids"]) if load.where == "sglang" else len(told["choices"][0]["token_ids"])
    events = [line[6:] for line in answer.split(b"\n") if line.startswith(b"data: ")]
    if events[-1] != b"[DONE]":
        raise SystemExit(f"a stream ended with {events[-1][:500]!r}")
    chunks = [orjson.loads(one) for one in events[:-1]]
    if load.where == "sglang":
        return int(chunks[-1]["meta_info"]["completion_tokens"])
    if chunks[-1]["choices"][0]["finish_reason"] != "length":
        raise SystemExit(f"a stream ended with {events[-2][:500]!r}")
    return sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks)


def run(load: Load) -> dict[str, Any]:
    with Part(drive, {name: getattr(load, name) for name in load.__dataclass_fields__}) as part:
        found: dict[str, Any] = part.answer()
    return found
