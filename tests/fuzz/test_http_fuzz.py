"""Requests at the gateway's server that are broken, or made of its OpenAPI page: none ends in a 5xx, answers are as the
page says, and the server needs no more memory after them than before."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jsonschema import Draft202012Validator
from support.http import Connection
from support.openapi_app import validator
from support.pools.pool import eventually, worker

from fuzz.http_page import PAGE, failures, page
from fuzz.http_requests import send_all

SEED = 20
TESTS = Path(__file__).parents[1]


@contextmanager
def serving(*served: Path | str) -> Iterator[tuple[psutil.Process, int]]:
    """The server's process and its port."""
    here = {**os.environ, "PYTHONPATH": ":".join([str(TESTS), *sys.path])}
    command = [sys.executable, "-m", "fuzz.http_process", *map(str, served)]
    with subprocess.Popen(command, env=here, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            yield psutil.Process(started.pid), int(started.stdout.readline())
        finally:
            started.terminate()
    assert started.returncode == 0


async def healthy(port: int) -> bool:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await connection.send(b"GET /health HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
    return (await connection.answer())[0] == 200


async def tokenizes(port: int) -> bool:
    connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
    await connection.send(b'POST /tokenize HTTP/1.1\r\nHost: h\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}')
    return (await connection.answer())[0] == 200


async def test_a_thousand_broken_requests() -> None:
    with serving() as (_, port):
        outcome = await send_all(port, SEED, range(1000))
        assert outcome.faults == []
        assert {200, 400, 404, 405, 408, 413, 431} <= outcome.statuses.keys()  # they get through to every layer
        assert await healthy(port)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_fifty_thousand_broken_requests_and_no_growth() -> None:
    with serving() as (process, port):
        sizes = []
        for start in range(0, 50_000, 10_000):
            outcome = await send_all(port, SEED, range(start, start + 10_000))
            assert outcome.faults == []
            sizes.append(process.memory_info().rss >> 20)
        assert sizes[-1] - sizes[0] <= 8, f"MiB after each ten thousand: {sizes}"
        assert process.num_fds() < 100
        assert await healthy(port)


@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
async def test_broken_requests_at_a_gateway(redis_db: str, text_model: Path, count: int) -> None:
    """It runs what is sound, and refuses the rest; it keeps nothing of either."""
    async with worker(redis_db) as running:
        with serving(redis_db, str(text_model)) as (process, port):
            await eventually(lambda: tokenizes(port))  # its tokenizer is loaded
            sizes = []
            for start in range(0, count, count // 5):
                outcome = await send_all(port, SEED, range(start, start + count // 5))
                assert outcome.faults == []
                sizes.append(process.memory_info().rss >> 20)
            assert await healthy(port)
            assert running.generation.finished > count // 400  # the others that are sound repeat a key, or hang up
            assert sizes[-1] - sizes[2] <= 8, f"MiB after each fifth: {sizes}"  # its caches are full by then
            assert process.num_fds() < 200


def test_the_page_is_sound() -> None:
    """Each schema is one, each reference leads somewhere, and each example is as its schema says."""
    found = page()
    text = PAGE.read_text()
    for reference in re.findall(r'"\$ref": "#/components/(\w+)/([\w-]+)"', text):
        assert reference[1] in found["components"][reference[0]], reference
    for schema in found["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    examples = [(it["schema"], it["example"]) for it in _contents(found) if "example" in it]
    assert len(examples) > 20
    for schema, example in examples:
        validator(found, schema).validate(example)
    names = [it["operationId"] for item in found["paths"].values() for it in item.values() if "operationId" in it]
    assert len({*names}) == len(names)


def _contents(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield from (it for it in tree.get("content", {}).values() if isinstance(it, dict))
        for inner in tree.values():
            yield from _contents(inner)


PATHS = [*page()["paths"]]


@pytest.mark.parametrize(
    ("examples", "paths"),
    [
        (4, [path for path in PATHS if not path.startswith("/sessions")]),
        pytest.param(20, PATHS, marks=pytest.mark.slow),
    ],
    ids=["few", "all"],
)
def test_a_server_that_does_what_the_page_says_passes(examples: int, paths: list[str]) -> None:
    with serving(PAGE) as (_, port):
        assert failures(f"http://127.0.0.1:{port}", examples, only=paths) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda page: page["paths"]["/health"]["get"]["responses"]["200"]["content"]["application/json"].update(
            example={"ready": "yes"}), "GET /health"),
        (lambda page: page["paths"].pop("/tokenize"), "POST /tokenize"),
        (lambda page: page["components"]["schemas"].update(DetokenizeBody={"type": "what"}), "POST /detokenize"),
    ],
    ids=["schema", "status", "failure"],
)  # fmt: skip
def test_a_server_that_does_not_is_found(change: Any, complaint: str, tmp_path: Path) -> None:
    wrong = page()
    change(wrong)
    path = tmp_path / "page.json"
    path.write_text(json.dumps(wrong))
    with serving(path) as (_, port):
        found = failures(f"http://127.0.0.1:{port}", 5, only={complaint.split()[1]})
    assert found
    assert {one.partition(",")[0] for one in found} == {complaint}
