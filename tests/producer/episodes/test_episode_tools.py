"""The tools that are shipped: what they answer, and what hostile arguments cost."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
from support.pools.pool import eventually

from rolloutmq import InvalidField
from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.model import ToolCall
from rolloutmq.producer.data import ToolRegistry, run_tool_calls
from rolloutmq.producer.episodes import Calculator, PythonTool, Search, python_tool

NAMESPACES = python_tool.namespaces_permitted()


# --- calculator ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        (" (3 + 4) ** 2 / 7 ", "7.0"),
        ("-7 // 2 + 7 % 4", "-1"),
        ("sqrt(2) * sqrt(2) > 1 or 1", None),
        ("max(1, 2.5, abs(-3))", "3"),
        ("round(2 / 3, 3)", "0.667"),
        ("floor(e) + ceil(pi)", "6"),
        ("2 ** -2", "0.25"),
        ("2 ** 100", str(2**100)),
    ],
)
async def test_arithmetic(expression: str, value: str | None) -> None:
    if value is None:
        with pytest.raises(ValueError, match="is not arithmetic"):
            await Calculator()(expression)
    else:
        assert await Calculator()(expression) == value


@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "9 ** 9 ** 9",
        "9 ** 9 ** 9 ** 9",
        "(9 ** 999) * (9 ** 999) * (9 ** 999)",
        "2 ** 4000 * 2 ** 4000",
        "10.0 ** 1000",
        "round(1, -999999999)",
        "round(1, 1.5)",
        "(-8) ** 0.5",
        "1 / 0",
        "1e999",
        "1e308 * 10 - 1e308 * 10",
        "True",
        "'a' * 1000000000",
        "[1] * 1000000000",
        "__import__('os').system('true')",
        "().__class__",
        "max(*[1, 2])",
        "max(1, key=abs)",
        "max()",
        "log(-1)",
        "e(1)",
        "x",
        "lambda: 1",
        "(" * 250 + "1" + ")" * 249,
        "9" * 501,
        "1\0",
        "\ud800",
        None,
        7,
    ],
    ids=lambda it: repr(it)[:24],
)
async def test_a_hostile_expression_is_a_value_error(hostile: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        print(await Calculator()(hostile))


# --- search ----------------------------------------------------------------------------------------------------------

DOCUMENTS = [
    ("Lease", "A worker holds its jobs for as long as its lease lasts."),
    ("Fence", "A fencing token keeps a dead worker's late results out."),
    ("Größe", "Straße, naïve, 漢字: other letters."),
]


def test_documents_are_found_by_their_words(tmp_path: Path) -> None:
    search = Search(DOCUMENTS, tmp_path / "index")
    assert search("what is a fencing token?").startswith("1. Fence\nA fencing token")
    assert search("worker", count=1).count("\n\n") == 0
    assert "Größe" in search("STRASSE naïve")
    assert search("zebra") == search("") == search("?!") == "nothing found"
    search.close()
    again = Search(path=tmp_path / "index")
    assert again("lease").startswith("1. Lease")
    again.close()


@pytest.mark.parametrize(
    "query",
    ["'", '"', '" OR "', "NEAR(", "a AND", "title:", "a*", "^a", "{a b}:c", "a) OR (", "\0", "\ud800", "a " * 9999],
    ids=lambda it: repr(it)[:16],
)  # fmt: skip
def test_no_query_is_read_as_a_query_language(query: str) -> None:
    search = Search(DOCUMENTS)
    assert isinstance(search(query), str)
    search.close()


def test_wrong_arguments_of_a_search_are_value_errors() -> None:
    search = Search(DOCUMENTS)
    for wrong in ({"query": 3}, {"query": "a", "count": 0}, {"query": "a", "count": "3"}, {"query": "a", "count": 99}):
        with pytest.raises(ValueError, match=r"query|count"):
            search(**wrong)
    search.close()


# --- python ----------------------------------------------------------------------------------------------------------


def tool(**more: Any) -> PythonTool:
    return PythonTool(**{"namespaces": NAMESPACES, "timeout": 60.0} | more)


async def test_a_program_says_what_it_prints() -> None:
    python = tool()
    assert await python("import math\nprint(math.comb(5, 2))") == "10\n"
    assert "ZeroDivisionError" in await python("1 / 0")
    assert (await python("import sys; print(1); sys.exit(3)")).endswith("[ended with 3]")
    assert "SyntaxError" in await python("if")
    assert await python("") == ""


async def test_a_program_sees_nothing_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    assert "SECRET" not in await tool()("import os; print(dict(os.environ), os.listdir('.'))")
    assert (await tool()("import os; print(os.listdir('.'), __name__)")).strip() == "[] __main__"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = 'a' * (1 << 30)", "MemoryError"),
        ("open('f', 'wb').write(b'a' * (2 << 20))", "File too large"),
        ("files = [open('f', 'w') for _ in range(99)]", "Too many open files"),
        ("while True: pass", "ended with"),
        ("print('a' * 100_000)", "[cut]"),
        ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (999, 999))", "not allowed to raise maximum limit"),
    ],
)
async def test_limits_hold(code: str, says: str) -> None:
    if "setrlimit" in code and not NAMESPACES and os.geteuid() == 0:
        pytest.skip("root may raise its limits")
    assert says in await tool(cpu_s=1)(code)


async def test_what_hangs_is_killed(tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:

        def held() -> bool:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return True
            fcntl.flock(lock, fcntl.LOCK_UN)
            return False

        code = f"import fcntl, time\nf = open({lock.name!r}, 'w')\nfcntl.flock(f, 2)\ntime.sleep(600)"
        running = asyncio.create_task(tool()(code))
        await eventually(held)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await eventually(lambda: not held())
    with pytest.raises(ValueError, match=r"did not end within 0.5 s"):
        await tool(timeout=0.5)("import time; time.sleep(600)")


@pytest.mark.skipif(not NAMESPACES, reason="this host permits no user namespaces")
async def test_a_program_has_no_network_and_sees_no_other_process() -> None:
    reach = "import socket\ntry:\n socket.create_connection(('127.0.0.1', 1), 5)\nexcept OSError as e: print(e.errno)"
    assert (await tool()(reach)).strip() in {"101", "99"}, "its loopback is down, too"
    assert (await tool()("import os; print(os.getpid())")).strip() == "1"


async def test_a_host_without_namespaces_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "namespaces_permitted", lambda: False)
    with pytest.raises(ConfigError, match="namespaces=False runs it with this host's network"):
        PythonTool()
    PythonTool(namespaces=False)
    with pytest.raises(InvalidField, match="memory=0"):
        tool(memory=0)


async def test_all_three_in_a_registry() -> None:
    registry = ToolRegistry()
    search = Search(DOCUMENTS)
    for schema, runner in ((Calculator.SCHEMA, Calculator()), (Search.SCHEMA, search), (PythonTool.SCHEMA, tool())):
        registry.add(schema, runner)
    calls = [
        ToolCall(id="a", name="calculator", arguments={"expression": "6 * 7"}),
        ToolCall(id="b", name="search", arguments={"query": "fence"}),
        ToolCall(id="c", name="python", arguments={"code": "print(1)"}),
        ToolCall(id="d", name="calculator", arguments={"expression": "x"}),
        ToolCall(id="e", name="calculator", arguments={"nothing": "x"}),
    ]
    outcomes = await run_tool_calls(calls, registry, 60)
    search.close()
    assert [it.ok for it in outcomes] == [True, True, True, False, False]
    assert outcomes[0].content == "42"
    assert "is not arithmetic" in outcomes[3].content
    assert "unexpected keyword" in outcomes[4].content
