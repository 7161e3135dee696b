"""`python -m fuzz.http_requests`: HTTP requests that are broken in every layer, at any server, through raw sockets.

    PYTHONPATH=tests python -m fuzz.http_requests --port 8000 --count 50000 --seed 7 [--key rmq-…]
    PYTHONPATH=tests python -m fuzz.http_requests --port 8000 --seed 7 --case 123

A server passes if it answers each of them with 2xx or 4xx, or hangs up, and if it does so in time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fuzz.mutator import mutated_bytes

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
AT_A_TIME = 64
ANSWER_S = 60.0
"""An answer, or the end of the connection, has to be there by then: the server's own limits are shorter."""
CHAT = {
    "model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 1.0, "n": 1,
    "stop": [], "tool_choice": "none", "logprobs": True, "top_logprobs": 0, "seed": 1, "stream": False,
    "return_token_ids": True,
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    "weight_version": {"min_version": 0}, "priority": 0, "session_id": "s",
}  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/sessions/s/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "n": 1, "logprobs": 0, "stream": True},
    "/v1/embeddings": {"model": "m", "input": [[1, 2, 3]], "encoding_format": "float"},
    "/tokenize": {"model": "m", "messages": CHAT["messages"], "add_generation_prompt": True},
    "/detokenize": {"model": "m", "tokens": [1, 2, 3]},
    "/finish_session?session_id=s": {},
}
READS = ("/health", "/v1/models", "/v1/requests/x?wait=0", "/openapi.json")
METHODS = (
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"get",
    b"P\x00ST",
    b"",
    b"X" * 300,
)
TARGETS = (
    b"*", b"//", b"/../../etc/passwd", b"/%00", b"/%ff%fe", b"/%zz", b"http://[::1", b"http://h:99999/",
    b"/v1/\xc3\xa9",    b"/v1/models?" + b"a=b&" * 3000, b"/" + b"x/" * 5000, b"/\r\nX: y", b"/ /", b"",
)  # fmt: skip
VERSIONS = (b"HTTP/1.0", b"HTTP/0.9", b"HTTP/2.0", b"HTTP/1.1 ", b"HTTP/9.9", b"http/1.1", b"", b"ICY")
LINES = (
    b"Content-Length: -1", b"Content-Length: 5, 6", b"Content-Length: 99999999999999999999", b"Content-Length: 1e3",
    b"Content-Length: 3\r\nContent-Length: 4", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5", b"Transfer-Encoding: \x0bchunked", b"Content-Type: text/plain",
    b"Content-Type: application/json; charset=utf-16", b"Content-Encoding: gzip", b"Expect: 100-continue", b"Expect: x",
    b"Connection: close", b"Connection: upgrade\r\nUpgrade: websocket", b"Upgrade: h2c\r\nHTTP2-Settings: AA",
    b"Authorization: Bearer", b"Authorization: Bearer \xff\xfe", b"X-Session-ID: " + b"s" * 9000, b"Host: a\r\nHost: b",
    b"Idempotency-Key: \x7f", b"X-Session-ID: a\r\n b", b": nameless", b"No colon", b"Bad name: x", b"Nul: \x00",
    b"X-Stainless-Retry-Count: -1", b"Cookie: " + b"c" * 40_000, b"\r\n".join(b"X-%d: v" % i for i in range(300)),
    b"Range: bytes=0-", b"If-None-Match: *", b"X-HTTP-Method-Override: DELETE",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 63, 1 << 200, 1.5, float("nan"), float("inf"), 1e308, "", "x" * 50_000, "\ud800", "\0", [],
    [[]], {}, {"": {}}, [None] * 5000, {"a": [{"b": [[{}]]}]}, [1 << 40], ["x", 1], "data:image/png;base64,!!!",
)  # fmt: skip


def case(seed: int, number: int) -> bytes:
    """Request `number`: what is sent. It depends on these two alone."""
    rng = Random(f"{seed}:{number}")
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 10, 1000, 100_000)))
    target, body = _request(rng)
    method = rng.choice(METHODS) if rng.random() < 0.1 else b"POST" if body else rng.choice((b"GET", b"DELETE"))
    version = rng.choice(VERSIONS) if rng.random() < 0.1 else b"HTTP/1.1"
    lines = [b"Host: h"] if rng.random() < 0.95 else []
    for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
        lines.insert(rng.randint(0, len(lines)), rng.choice(LINES))
    if rng.random() < 0.2:
        lines.append(b"Transfer-Encoding: chunked")
        body = _chunks(body, rng)
    elif rng.random() < 0.9:
        lines.append(b"Content-Length: %d" % (len(body) + rng.choice((0,) * 8 + (-1, 1, 1000))))
    end = b"\n" if rng.random() < 0.05 else b"\r\n"
    whole = end.join([b" ".join((method, target, version)), *lines, b"", b""]) + body
    if rng.random() < 0.15:
        whole = mutated_bytes(whole, rng)
    return whole[: rng.randint(0, len(whole))] if rng.random() < 0.1 else whole * rng.choice((1,) * 19 + (20,))


def _request(rng: Random) -> tuple[bytes, bytes]:
    """A target, and a body of JSON that is wrong in a place or two, or everywhere."""
    if rng.random() < 0.2:
        return (rng.choice(TARGETS) if rng.random() < 0.5 else rng.choice(READS).encode()), b""
    target = rng.choice([*BODIES])
    body = json.loads(json.dumps(BODIES[target]))
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        _put(body, rng)
    text = json.dumps(body).encode()
    if rng.random() < 0.1:
        depth = rng.choice((100, 1000, 100_000))
        text = rng.choice(
            (b"[" * depth, b'{"a":' * depth, b'{"messages":' + b"[" * depth, b"", b"null", b"NaN", b"{}x")
        )
    return target.encode(), mutated_bytes(text, rng) if rng.random() < 0.15 else text


def _put(tree: Any, rng: Random) -> None:
    """Another value somewhere in it, or one more field."""
    while True:
        keys = [*tree] if isinstance(tree, dict) else [*range(len(tree))]
        key = rng.choice([*keys, "unknown"] if isinstance(tree, dict) else keys or [0])
        inner = tree.get(key) if isinstance(tree, dict) else tree[key] if keys else None
        if isinstance(inner, dict | list) and inner and rng.random() < 0.6:
            tree = inner
            continue
        if isinstance(tree, dict) or keys:
            tree[key] = deepcopy(rng.choice(VALUES))
        return


def _chunks(body: bytes, rng: Random) -> bytes:
    size = rng.choice(
        (b"%x" % len(body), b"%x" % len(body), b"%x;ext=" % len(body) + b"e" * 5000, b"-1", b"zz", b"f" * 20)
    )
    return (
        size + b"\r\n" + body + rng.choice((b"\r\n0\r\n\r\n", b"\r\n0\r\nT: " + b"t" * 3000 + b"\r\n\r\n", b"0", b""))
    )


@dataclass
class Outcome:
    """statuses: how often each came first on a connection; 0: it was closed without one. faults: what must not be."""

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


async def send_all(
    port: int, seed: int, numbers: Collection[int], *, key: str = "", due: Collection[int] = (), host: str = "127.0.0.1"
) -> Outcome:
    """Send these requests, many at a time. key: put into each of them. due: statuses from 500 on that may come."""
    outcome, left = Outcome(), iter(numbers)

    async def take() -> None:
        for number in left:
            data = case(seed, number).replace(
                b"Host: h", b"Host: h\r\nAuthorization: Bearer " + key.encode() if key else b"Host: h"
            )
            try:
                status = await _send(host, port, data, Random(number))
                why = f"answered {status}" if status >= 500 and status not in due else ""
                outcome.statuses[status] += 1
            except (TimeoutError, ValueError) as error:
                why = str(error) or f"no answer within {ANSWER_S:g} s"
            if why:
                outcome.faults.append(f"request {number} of seed {seed}: {why}; it begins with {data[:200]!r}")

    await asyncio.gather(*(take() for _ in range(AT_A_TIME)))
    return outcome


async def _send(host: str, port: int, data: bytes, rng: Random) -> int:
    """The status of the first answer; 0 if there is none. Some send in two pieces, and some hang up at once.

    Raises TimeoutError, and ValueError for what is no HTTP.
    """
    reader, writer = await asyncio.open_connection(host, port)
    head = b""
    try:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(ANSWER_S):
                at = rng.randint(0, len(data)) if rng.random() < 0.2 else len(data)
                writer.write(data[:at])
                await writer.drain()
                writer.write(data[at:])
                if rng.random() >= 0.1:
                    head = (await reader.read(1 << 16)).removeprefix(CONTINUE)
                    head = head or await reader.read(1 << 16)  # nothing at the end of a connection
    finally:
        writer.transport.abort()
    if head and not re.match(rb"HTTP/1\.1 [2-5]\d\d ", head):
        raise ValueError(f"the answer is no HTTP: {head[:100]!r}")
    return int(head[9:12] or 0)


def main(run: Callable[[Any], Outcome] = asyncio.run) -> int:
    parser = argparse.ArgumentParser(prog="fuzz.http_requests", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--count", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--key", default="", help="an API key")
    options = parser.parse_args()
    numbers = range(options.count) if options.case is None else [options.case]
    outcome = run(send_all(options.port, options.seed, numbers, key=options.key, host=options.host))
    print(*outcome.faults[:20], f"{dict(sorted(outcome.statuses.items()))}, {len(outcome.faults)} faults", sep="\n")
    return int(bool(outcome.faults))


if __name__ == "__main__":
    sys.exit(main())
