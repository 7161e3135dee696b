"""Two runs' journals: one run, or the step, the sample and the token at which they part."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.journals import Problems, segments
from typer.testing import CliRunner

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.ids import derived_id
from rolloutmq.messages.journal import Entry, Journal
from rolloutmq.messages.model import RolloutResult, Segment, Timings
from rolloutmq.ops.cli.main import app
from rolloutmq.ops.replay.checks import diff


def result(number: int, sample: int = 0, tokens: int = 5, client: bytes = b"client....", **more: Any) -> RolloutResult:
    """What a prompt's sample is in every run; the job's id depends on the client."""
    ids = np.arange(tokens, dtype=np.int32) + number
    fields = {
        "job_id": derived_id(number, client),
        "sample": sample,
        "n": 2,
        "group_id": "g",
        "token_ids": ids,
        "logprobs": -ids.astype(np.float32) / 7,
        "finish_reason": "length",
        "segments": (Segment(1, tokens - 1), Segment(2, 1)),
        "worker_id": "w",
        "attempt": 1,
        "timings": Timings(),
    }
    return RolloutResult(**(fields | more))


def write(folder: Path, results: Iterable[RolloutResult], trained: bool = True, begin: int = 0) -> str:
    """A run: two prompts of two samples a step."""
    with Journal(folder) as journal:
        for place, one in enumerate(results, begin):
            journal.add(Entry("result", 1.0 + place, one.job_id, "client", sample=one.sample, attempt=1, content=one))
            if trained:
                journal.note(one, trained=place // 4)
    return str(folder)


def run(
    steps: int = 3, change: dict[tuple[int, int], dict[str, Any]] | None = None, **all_: Any
) -> list[RolloutResult]:
    places = [(number, sample) for number in range(2 * steps) for sample in range(2)]
    return [result(*place, **(all_ | (change or {}).get(place, {}))) for place in places]


def parted(tmp_path: Path, one: list[RolloutResult], other: list[RolloutResult]) -> Any:
    problems = Problems()
    found = diff((write(tmp_path / "a", one), write(tmp_path / "b", other)), problems)
    assert not problems
    return found


def test_one_run_is_one_whatever_the_clients_name(tmp_path: Path) -> None:
    found = parted(tmp_path, run(), run(client=b"other....."))
    assert (found.parts, found.steps, found.samples, found.tokens) == ("", 3, 12, 60)
    assert found.lines() == ["the same: 3 steps, 12 samples, 60 tokens"]


def logprobs(at: int) -> Any:
    """The least that can differ: the last bit."""
    values = result(3).logprobs.copy()  # type: ignore[union-attr]
    values[at] = np.nextafter(values[at], np.float32(1))
    return values


PARTED: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "id": ({"token_ids": np.array([3, 4, 9, 6, 7], np.int32)}, 2, "they part at token 2, id 5 and 9"),
    "version": ({"segments": (Segment(1, 3), Segment(2, 2))}, 3, "they part at token 3, version 1 and 2"),
    "logprob": ({"logprobs": logprobs(4)}, 4, "they part at token 4, logprob -1.0 and -0.9999999403953552"),
    "length": ({"tokens": 4, "segments": (Segment(1, 4),)}, 4, "they part at token 4, 5 tokens and 4"),
    "end": ({"finish_reason": "stop"}, None, "it ended by length and stop"),
}


@pytest.mark.parametrize("name", PARTED)
def test_the_first_step_sample_and_token_are_named(tmp_path: Path, name: str) -> None:
    change, token, how = PARTED[name]
    later = {"token_ids": np.zeros(5, np.int32)}
    found = parted(tmp_path, run(), run(change={(3, 1): change, (5, 0): later}))
    assert (found.step, found.sample, found.token) == (1, "3.1", token)
    assert found.parts == f"step 1, sample 3.1: {how}"
    assert (found.steps, found.samples, found.tokens) == (2, 7, 35)


def test_what_one_lacks_is_where_they_part(tmp_path: Path) -> None:
    found = parted(tmp_path, run(), run(2))
    assert found.parts == "step 2, sample 4.0: only A has it"


def test_another_order_is_another_run(tmp_path: Path) -> None:
    one, other = run(), run()
    other[3], other[4] = other[4], other[3]
    assert parted(tmp_path, one, other).parts == "step 0, sample 1.1: trained by A at step 0 and B at step 1"


def test_a_step_that_was_taken_again_is_compared_again(tmp_path: Path) -> None:
    """A trainer was killed: the journal has two writers, and some samples twice."""
    whole = run()
    write(tmp_path / "b", whole[:8])
    write(tmp_path / "b", whole[4:], begin=4)
    assert not diff((write(tmp_path / "a", whole), str(tmp_path / "b")), Problems()).parts
    write(tmp_path / "b", [result(3, 1, finish_reason="stop")], begin=7)
    found = diff((str(tmp_path / "a"), str(tmp_path / "b")), Problems())
    assert found.parts == "step 1, sample 3.1: a journal has it twice, and not the same"


def test_without_a_trainers_notes_all_results_are_compared(tmp_path: Path) -> None:
    folders = write(tmp_path / "a", run(), False), write(tmp_path / "b", run(change={(4, 1): {"tokens": 9}}), False)
    found = diff(folders, Problems())
    assert (found.parts, found.samples) == ("sample 4.1: they part at token 4, version 2 and 1", 9)


def test_memory_does_not_grow_with_the_runs(tmp_path: Path) -> None:
    folders = []
    for name in ("a", "b"):
        folders.append(write(tmp_path / name, run(600)))
    tracemalloc.start()
    try:
        assert diff((folders[0], folders[1]), Problems()).samples == 2400
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20


def test_hostile_journals_are_told_and_never_raise(tmp_path: Path) -> None:
    rng = random.Random(3)
    hostile = [
        Entry("note", 1.0, "x" * 5000, sample=0, data={"trained": 1}),
        Entry("note", 1.0, "\0<b>'; DROP TABLE seen;--", sample=2**31 - 1, data={"trained": True}),
        Entry("note", 1.0, "zz", sample=-1, data={"trained": 1 << 60}),
        Entry("note", 1.0, "zz", sample=3, data={"trained": [1, {"a": 2}]}),
        Entry("result", 1.0, "zz", sample=3, content=b"\x01\x00\x02" + rng.randbytes(50)),
        Entry("result", 1.0, "", sample=0, content=b""),
    ]
    with Journal(tmp_path / "b") as journal:
        for entry in hostile:
            journal.add(entry)
    write(tmp_path / "a", run())
    write(tmp_path / "b", run())
    [path, *_] = segments(tmp_path / "b")
    path.write_bytes(path.read_bytes()[:-9])
    problems = Problems()
    found = diff((str(tmp_path / "a"), str(tmp_path / "b")), problems)
    assert "only B has it" in found.parts
    assert any("zz.3 of B cannot be read" in line for line in problems)


def test_the_command_says_it_and_ends_with_it(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", run()), write(tmp_path / "b", run(change={(2, 0): {"finish_reason": "stop"}}))
    assert command("replay", "diff", a, a).exit_code == 0
    told = command("replay", "diff", a, b)
    assert told.exit_code == 1
    assert "step 1, sample 2.0: it ended by length and stop" in told.output
    assert command("replay", "diff", a).exit_code == 2
    assert command("replay", "diff", a, str(tmp_path / "none")).exit_code == 2


def command(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments)


def test_a_folder_without_results_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", run())
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="b has no results"):
        diff((str(tmp_path / "a"), str(tmp_path / "b")), Problems())
