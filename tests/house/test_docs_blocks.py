"""Every Python and shell block of README, CONTRIBUTING and docs: run, or parsed by the real command line, or compiled.

The blocks of a page run in one namespace, against a real Redis and a real SGLang worker with the tiny model. A block
whose fence has `title="needs a GPU"` is compiled, and what it imports from here is imported. A title that is a file
name makes a block a file beside the program.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import shlex
import threading
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import nbformat
import pytest
import typer
from chaos import __main__ as chaos_run
from chaos import scenario
from chaos.context import Chaos
from nbclient import NotebookClient
from support.command_line import parse
from support.engines.remote import RemoteEngine
from support.pools.pool import worker
from support.specimens.byte_tokenizer import Bytes
from typer.testing import CliRunner

from benchmarks.__main__ import app as benchmarks
from rolloutmq.messages.errors import RolloutMQError
from rolloutmq.ops.cli import app
from rolloutmq.ops.cli.main import COMMANDS, load
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.worker.scripted.engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GPU = "needs a GPU"
ELSEWHERE = {
    "configuration.md": "ops/config/test_config_docs.py",
    "generation.md": "worker/sglang/pools/test_stops_pool.py",
    "logits.md": "worker/sglang/generation/test_deterministic.py",
    "operations.md": "ops/operations/test_operations_docs.py",
    "trainers.md": "producer/trl/test_trl_examples.py",
}
"""Pages whose Python needs an engine or a place of its own: the test that runs it."""
RUN = (
    "status",
    "weights list",
    "control version",
    "tiny-model",
    "dead list",
    "score",
    "submit",
    "ops run audit-broker --here",
)
"""Commands that are run as they are written. Others serve for ever, change a pool, or need what is not here."""


class Block(NamedTuple):
    page: str
    language: str
    title: str
    code: str


def blocks_of(page: Path) -> list[Block]:
    fences = re.findall(r'^```(\w*)(?: title="([^"]*)")?[^\n]*\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(page.name, *fence) for fence in fences]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
HERE = sorted({block.page for block in PYTHON} - ELSEWHERE.keys())
LONG = {"tutorial.md", "tasks.md"}
SHELL = [block for block in BLOCKS if block.language == "shell"]


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, without variables before them."""
    for line in code.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
            elif words:
                yield words
                words = []


def is_ours(words: list[str]) -> bool:
    return Path(words[0]).name == "rolloutmq"


def is_run(words: list[str]) -> bool:
    return is_ours(words) and " ".join(words[1:]).startswith(RUN)


def write_files(folder: Path) -> None:
    """What pages take for granted in the folder of their reader."""
    for name in ("prompts.jsonl", "texts.jsonl"):
        (folder / name).write_text('{"token_ids": [10, 20, 30], "n": 2}\n{"text": "Once upon"}\n')
    (folder / "my_project").mkdir()
    (folder / "my_project" / "tools.py").write_text(
        "class Search:\n    def __init__(self, index): pass\n    def __call__(self, query): return query\n"
    )
    for block in BLOCKS:
        if "." in block.title:
            (folder / block.title).write_text(block.code)


@pytest.fixture(scope="module")
def place(text_engine: RemoteEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder like the one a reader is in: a Redis, a worker with the tiny model, and the files that pages name."""
    folder = tmp_path_factory.mktemp("reader")
    write_files(folder)
    with contextlib.chdir(folder), EmbeddedRedis() as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUTMQ_REDIS", server.url)
        patch.setenv("STEPS", "2")
        patch.syspath_prepend(str(folder))
        made = CliRunner().invoke(app, ["tiny-model", "out/tiny"])
        assert made.exit_code == 0, made.output
        with text_engine.worker(server.url), embedding_worker(server.url, pool="embed"):
            yield folder


@contextlib.contextmanager
def embedding_worker(url: str, pool: str) -> Iterator[None]:
    """A worker without a model, on an event loop of its own: blocks have theirs."""
    engine = ScriptedEngine()
    engine.tasks = frozenset({"task:embed"})
    joined, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with worker(url, engine=engine, tokenizer=Bytes(), pool=pool):
            joined.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert joined.wait(20)
        yield
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


@pytest.mark.sglang
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] if page in LONG else []) for page in HERE]
)
def test_the_programs_of_a_page_run_one_after_the_other(page: str, place: Path) -> None:
    names: dict[str, Any] = {"__name__": page}
    try:
        for block in PYTHON:
            if block.page == page and block.title != GPU:
                exec(compile(block.code, page, "exec"), names)
    finally:
        for value in names.values():  # what a program leaves open ends with its process; here it is closed
            if callable(close := getattr(value, "close", None)) and not isinstance(value, type | ModuleType):
                with contextlib.suppress(RolloutMQError):  # a session whose client is closed
                    close()


@pytest.mark.sglang
def test_the_notebook_runs(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a kernel of its own, from its first cell to its last; what is committed has no outputs."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "examples" / "tutorial.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)
    NotebookClient(notebook, timeout=150, resources={"metadata": {"path": str(place)}}).execute()
    shown = "\n".join(str(output) for cell in cells for output in cell.outputs)
    assert len(re.findall(r"\d+ reward 0\.\d+ <Group \w+…\w+: 8 results", shown)) == 3
    assert "state='committed'" in shown
    assert "'rollout/workers/count': 1.0" in shown
    assert "8 samples, at attempt 1" in shown


@pytest.mark.parametrize("block", [block for block in PYTHON if block.title == GPU], ids=lambda block: block.page)
def test_what_needs_a_gpu_compiles_and_imports(block: Block) -> None:
    tree = ast.parse(block.code)
    compile(tree, block.page, "exec")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("rolloutmq"):
            module = import_module(str(node.module))
            assert all(hasattr(module, name.name) for name in node.names)


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items(), ids=ELSEWHERE.keys())
def test_what_runs_elsewhere_runs(page: str, test: str) -> None:
    assert any(block.page == page for block in PYTHON)
    assert page in (ROOT / "tests" / test).read_text()


async def test_the_scenario_shown_keeps_the_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [one for one in blocks_of(ROOT / "tests/chaos/README.md") if one.language == "python"]
    monkeypatch.setattr(scenario, "ALL", {})
    monkeypatch.setattr(chaos_run, "OUT", tmp_path)
    exec(compile(block.code, "README.md", "exec"), {"scenario": scenario.scenario, "Chaos": Chaos})
    (shown,) = scenario.ALL.values()
    figures = await chaos_run.run(shown, "7", keep=True)
    broken = [
        one for one in figures["violations"] if "recovered after" not in str(one)
    ]  # the clock is chaos's business
    assert (broken, figures["lost"], figures["published"]) == ([], 0, 64)


@pytest.mark.parametrize("page", sorted({block.page for block in SHELL}))
def test_every_command_is_one(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    for words in [words for block in SHELL if block.page == page for words in commands(block.code)]:
        if is_ours(words):
            parse(words[1:])
        elif words[0] == "make":
            assert f"\n{words[1]}:" in makefile, words
        elif words[:2] == ["pip", "install"]:
            (wanted,) = re.fullmatch(r"rolloutmq(?:\[(\w+)\])?", words[2]).groups()  # type: ignore[union-attr]
            assert wanted is None or wanted in extras
        elif words[1:3] == ["-m", "benchmarks"]:
            assert CliRunner().invoke(benchmarks, [words[3], "--help"]).exit_code == 0
        elif words[1:3] == ["-m", "torch.distributed.run"]:
            assert (ROOT / words[-1]).is_file(), words
        else:
            assert Path(words[0]).name == "python", words
            assert (ROOT / words[1]).is_file(), words


def test_every_example_in_a_help_text_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    (tmp_path / "answers.jsonl").touch()
    waiting, shown = [load(name) for name in COMMANDS], 0
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for words in commands("\n".join(re.findall("^rolloutmq .*", command.help or "", re.MULTILINE))):
            parse(words[1:])
            shown += 1
    assert shown > 10


@pytest.mark.sglang
@pytest.mark.parametrize(
    "words", [words for block in SHELL for words in commands(block.code) if is_run(words)], ids=" ".join
)
def test_commands_that_only_look_or_generate_run(words: list[str], place: Path) -> None:
    ran = CliRunner().invoke(app, words[1:])
    assert ran.exit_code == 0, ran.output


def test_nothing_else_is_called_code() -> None:
    """A language that no test above knows would be shown and never run."""
    known = {"python", "shell", "yaml", "toml", ""}
    assert {block.language for block in BLOCKS} <= known
    assert len([block for block in PYTHON if block.title == GPU]) == 2, "few blocks may be compiled only"
    assert not [block for block in BLOCKS if not block.language and re.search(r"^(rolloutmq|make) ", block.code, re.M)]


@pytest.mark.parametrize("wrong", ["status --no-such-flag", "nonsense", "control pause --mode", "control cache"])
def test_a_command_that_is_none_is_seen(wrong: str) -> None:
    with pytest.raises(Exception, match=r"No such|requires an argument|Missing"):
        parse(wrong.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_exist(page: Path) -> None:
    """`rolloutmq …` between backticks: each flag belongs to the command it stands behind."""
    root = typer.main.get_command(app)
    for text in re.findall(r"`(?:\.venv/bin/)?rolloutmq ([a-z][^`]*)`", page.read_text()):
        command: Any = root
        for word in re.split(r"[\s|]+", text.partition("&&")[0]):
            if word in getattr(command, "commands", {}):
                context = command.make_context("", [], resilient_parsing=True)
                command = command.resolve_command(context, [word])[1]
            elif word.startswith("--"):
                flags = {flag for it in command.params for flag in (*it.opts, *it.secondary_opts)}
                assert word.partition("=")[0] in {*flags, "--help"}, f"{text}: {word}"
            elif hasattr(command, "commands"):
                assert word in ("…", "ACTION", "COMMAND"), f"{text}: {word}"
        if command is root:
            raise AssertionError(text)
