"""What an RL engineer meets first: names, signatures in an editor, errors that say what to write, blocking twins."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.pools.pool import short_retries

import rolloutmq
from rolloutmq import GenerateJob, InvalidField, LogprobOptions, SamplingParams
from rolloutmq.messages import decode, encode
from rolloutmq.messages.model import EmbedJob, JobFields, QueueFields, RewardJob, ScoreJob
from rolloutmq.messages.model.base import Record
from rolloutmq.messages.model.tasks import TaskJob
from rolloutmq.producer import (
    BlockingJobHandle,
    BlockingPoolControl,
    BlockingRolloutClient,
    BlockingRolloutFeed,
    BlockingSession,
    JobHandle,
    PoolControl,
    RolloutClient,
    RolloutFeed,
    Session,
)
from rolloutmq.sync import PublishHandle

TWINS = [(RolloutClient, BlockingRolloutClient), (Session, BlockingSession), (PoolControl, BlockingPoolControl)]
DOORS = [
    *("", ".messages", ".messages.broker", ".messages.dialects", ".messages.journal", ".messages.model"),
    *(".producer", ".producer.calls", ".producer.data", ".producer.episodes", ".producer.inbox"),
    *(".producer.openai", ".producer.training"),
]
"""Of the rooms that a trainer without torch works with."""
PAIRS = [*TWINS, (JobHandle, BlockingJobHandle), (RolloutFeed, BlockingRolloutFeed)]


def public(kind: type) -> dict[str, Any]:
    """Name -> method or property."""
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


# --- the package ------------------------------------------------------------------------------------------------------


def test_dir_shows_what_there_is_and_nothing_else() -> None:
    assert dir(rolloutmq) == sorted(rolloutmq.__all__)
    assert all(getattr(rolloutmq, name) is not None for name in rolloutmq.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        rolloutmq.nothing  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(rolloutmq.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert sorted(seen) == sorted(rolloutmq.__all__)


def test_importing_the_package_imports_nothing_until_a_name_is_used() -> None:
    script = (
        "import sys, rolloutmq\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'pydantic', 'redis', 'numpy', 'asyncio'}))\n"
        "rolloutmq.BlockingRolloutClient, rolloutmq.SkyRLEngine\n"
        "print('redis' in sys.modules, 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["[]", "True False"]


def test_the_light_install_is_enough_for_everything_but_weights() -> None:
    """Of everything that a trainer imports, with all packages hidden but those that `pip install rolloutmq` brings."""
    brings = {"redis", "hiredis", "msgpack", "pydantic", "numpy"}
    theirs = {"async_timeout", "pydantic_core", "annotated_types", "typing_extensions", "typing_inspection"}
    script = f"""
import importlib, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        package = name.partition('.')[0]
        if package not in {brings | theirs | {"rolloutmq"} | set(sys.stdlib_module_names)} and package[0] != '_':
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
missing = []
for room in {DOORS}:
    door = importlib.import_module(f'rolloutmq{{room}}')
    for name in door.__all__:
        try:
            getattr(door, name)
        except ModuleNotFoundError as error:
            missing.append(f'{{name}} {{error.name}}')
print(sorted(missing))
"""
    project = tomllib.loads((Path(rolloutmq.__file__).parent / "pyproject.toml").read_text())["project"]
    assert {line.partition(">")[0] for line in project["dependencies"]} == brings
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    weights = ["PublishHandle", "PublishProgress", "PublishReport", "RolloutBatch", "WeightPublisher"]
    named = [f"{name} torch" for name in (*weights, "strip_wrappers", "unfuse_experts")]
    assert shown.stdout.strip() == str(named), shown.stderr


# --- fields -----------------------------------------------------------------------------------------------------------


def test_editors_know_every_field_of_a_job() -> None:
    assert JobFields.__optional_keys__ == GenerateJob.model_fields.keys()
    assert QueueFields.__optional_keys__ == TaskJob.model_fields.keys() - {"id", "reply_to"}
    assert all(QueueFields.__optional_keys__ < job.model_fields.keys() for job in (EmbedJob, RewardJob, ScoreJob))


@pytest.mark.parametrize("part", [("sampling", SamplingParams), ("logprobs", LogprobOptions)], ids=lambda part: part[0])
def test_a_field_in_the_wrong_place_is_told_its_place(part: tuple[str, type[Any]]) -> None:
    where, kind = part
    for name in kind.model_fields.keys() - GenerateJob.model_fields.keys() - {"prompt"}:
        with pytest.raises(InvalidField) as caught:
            GenerateJob.build(token_ids=[1], **{name: 0.5})
        assert caught.value.field == name
        assert f"{where}={kind.__name__}({name}=0.5)" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"temprature": 0.5}, "sampling=SamplingParams(temperature=...)"),
        ({"prioritty": "high"}, "nearest: priority"),
        ({"max_tokens": 16}, "sampling=SamplingParams(max_new_tokens=...)"),
        ({"prompt": "Once"}, "text="),
        ({"Zzzzzz": 1}, "GenerateJob has no such field"),
    ],
    ids=lambda it: "-".join(it) if isinstance(it, dict) else "",
)
def test_a_misspelt_field_is_told_the_nearest(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidField, match=re.escape(told)) as caught:
        GenerateJob.build(token_ids=[1], **given)
    assert [caught.value.field] == list(given)


@pytest.mark.parametrize(
    ("build", "field", "told"),
    [
        (lambda: SamplingParams(max_tokens=5), "max_tokens", "nearest: max_new_tokens"),  # type: ignore[call-arg]
        (lambda: SamplingParams(n=4), "n", "a field of the job"),  # type: ignore[call-arg]
        (lambda: LogprobOptions(topp=1), "topp", "nearest: top"),  # type: ignore[call-arg]
        (lambda: GenerateJob(text="a", sampling={"max_tokens": 5}), "sampling.max_tokens", "nearest: max_new_tokens"),
        (lambda: GenerateJob(messages=[{"rol": "user"}]), "messages.0.rol", "nearest: role"),
        (lambda: GenerateJob(text="a", seeed=1), "seeed", "nearest: seed"),  # type: ignore[call-arg]
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_a_class_that_is_called_directly_tells_the_same(build: Callable[[], Any], field: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as caught:
        build()
    (error,) = caught.value.errors()
    assert (".".join(map(str, error["loc"])), error["type"]) == (field, "extra_forbidden")


def test_what_is_decoded_does_not_pass_through_a_constructor_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = encode(GenerateJob(token_ids=[1], sampling=SamplingParams(max_new_tokens=3)))
    monkeypatch.setattr(Record, "__init__", None)
    assert decode(frame, GenerateJob).sampling.max_new_tokens == 3


async def test_submit_says_where_temperature_belongs(client: RolloutClient) -> None:
    with pytest.raises(InvalidField, match=r"^temperature=0.5: .*sampling=SamplingParams\(temperature=0.5\)"):
        await client.submit(token_ids=[1], temperature=0.5)  # type: ignore[call-arg]
    assert client.outstanding == 0


@pytest.mark.slow
def test_type_checkers_hold_callers_of_both_sides_to_the_fields(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(
        "from rolloutmq import BlockingRolloutClient, PoolControl, RolloutClient\n"
        "async def right(client: RolloutClient, control: PoolControl) -> list[int]:\n"
        "    handle = await client.submit(token_ids=[1], n=2, timeout=3)\n"
        "    await control.pause('finish', timeout=1.0)\n"
        "    return [result.sample for result in await handle]\n"
        "def plain(client: BlockingRolloutClient) -> list[int]:\n"
        "    for group in client.generate([[1]], n=2, seed=3, timeout=None): print(group.prompt_ids)\n"
        "    for delta in client.stream(text='Once', n=2): print(delta.token_ids)\n"
        "    return [result.sample for result in client.submit(token_ids=[1]).result(timeout=2)]\n"
        "def wrong(client: BlockingRolloutClient) -> None:\n"
        "    client.submit(token_ids=[1], temperature=0.5)\n"
        "    client.generate([[1]], n='2')\n"
        "    client.control.pause('gently')\n"
    )
    asked = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary", str(script)]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "rolloutmq").symlink_to(Path(rolloutmq.__file__).parent)  # mypy follows no editable install
    where = os.environ | {"MYPYPATH": str(tmp_path / "src")}
    found = subprocess.run(asked, capture_output=True, text=True, check=False, env=where)
    errors = [line.split(":")[1] for line in found.stdout.splitlines() if ": error:" in line]
    assert errors == ["11", "12", "13"], found


# --- the blocking twins -----------------------------------------------------------------------------------------------


def plain(annotation: object) -> str:
    """A type as the blocking side has it."""
    text = re.sub(r"Async(Iterator|Generator)\[", "Iterator[", str(annotation))
    return re.sub(r"\b(?:Blocking)?(JobHandle|Session|PoolControl|RolloutClient|RolloutFeed)\b", r"Blocking\1", text)


@pytest.mark.parametrize(("asyncio_class", "blocking"), PAIRS, ids=lambda kind: kind.__name__)
def test_every_public_method_has_a_blocking_twin_with_the_same_signature(asyncio_class: type, blocking: type) -> None:
    twin = {"aclose": "close", "broker": None}
    names = {twin.get(name, name) for name in public(asyncio_class)} - {None}
    # Which a Session or a feed sets when it is made.
    assert public(blocking).keys() - names <= {"session_id", "worker", "books", "staleness", "rules"}
    assert names <= public(blocking).keys()
    for name, method in public(asyncio_class).items():
        other = public(blocking).get(twin.get(name, name) or "")
        if not inspect.isfunction(method) or name == "aclose":
            continue
        ours, theirs = inspect.signature(method), inspect.signature(other)
        assert list(ours.parameters.values()) == list(theirs.parameters.values()), name
        assert plain(ours.return_annotation) == plain(theirs.return_annotation), name
        assert not inspect.iscoroutinefunction(other)
        assert other.__doc__


@pytest.mark.parametrize(("asyncio_class", "blocking"), TWINS[:1] + TWINS[2:], ids=lambda kind: kind.__name__)
def test_both_are_made_with_the_same_arguments(asyncio_class: type, blocking: type) -> None:
    ours, theirs = inspect.signature(asyncio_class), inspect.signature(blocking)
    assert list(ours.parameters.values()) == list(theirs.parameters.values())


def test_seconds_to_wait_are_called_timeout_everywhere() -> None:
    for kind in {kind for pair in PAIRS for kind in pair} | {PublishHandle}:
        for name, method in public(kind).items():
            if inspect.isfunction(method):
                given = [one for one in inspect.signature(method).parameters if "timeout" in one]
                assert given in ([], ["timeout"]), f"{kind.__name__}.{name}"


async def test_a_control_is_opened_alone_or_found_at_its_client(redis_db: str) -> None:
    async with PoolControl(redis_db) as control, RolloutClient(redis_db) as client:
        assert dict(await control.version()) == dict(await client.control.version()) == {}
        await client.control.aclose()  # the connection is the client's
        assert (await client.load()).open_jobs == 0


def test_the_same_without_asyncio(redis_db: str) -> None:
    with BlockingPoolControl(redis_db) as control, BlockingRolloutClient(redis_db) as client:
        with client.control as shared:
            assert dict(control.version()) == dict(shared.version()) == {}
        assert client.load().open_jobs == 0
        assert client.control is shared


def test_a_control_without_a_redis_says_so_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    short_retries(monkeypatch)
    with pytest.raises(rolloutmq.RedisUnavailable), BlockingPoolControl("redis://127.0.0.1:1/0"):
        pass
