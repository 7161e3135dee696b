"""What a worker gives to one that has less: what it hears, what a move is worth, and which jobs go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.engines.manual import Bench
from support.pools.fixtures import MakeLease
from support.specimens.messages import job

from rolloutmq.messages import GenerateJob, Lease, SamplingParams, Segment
from rolloutmq.messages.broker import Claim
from rolloutmq.messages.model import EmbedJob
from rolloutmq.messages.model.media import Medium
from rolloutmq.worker.jobs import HeldJob, HeldJobs, SampleRun
from rolloutmq.worker.jobs.task import TaskRun
from rolloutmq.worker.moving import MOST_MOVES, Moving, Plan, gain, plans_for
from rolloutmq.worker.text import SampleStream

LONG = SamplingParams(max_new_tokens=4000)
HALF = Plan("taker", 1, 4, 4)
"""Of the eight samples that the giver has, four."""


class Giver:
    """A worker's jobs, and who decides which of them go."""

    def __init__(self, lease: Lease) -> None:
        self.bench, self.held, self.lease = Bench(), HeldJobs(), lease
        self._moving = Moving(self.bench.engine, self.bench.generation, self.held, None)  # type: ignore[arg-type]

    def hold(self, of: Any = None, *, runs: bool = False, version: int = 1, **claim: Any) -> str:
        """One more job; runs: its samples are in the engine."""
        of = of or job(sampling=LONG)
        held = HeldJob(
            Claim(**({"attempt": 1, "queued_s": 0.0, "left_s": None} | claim), job_id=of.id, n=of.n, payload=b""), of
        )
        kind: Any = SampleRun if isinstance(of, GenerateJob) else TaskRun
        held.samples = {i: kind(of, np.array([1, 2, 3], np.int32), i, 1, 0.0) for i in range(of.n)}
        self.held.add(held)
        for sample in held.samples.values() if runs else ():
            self.bench.generation.in_flight.add(sample.begin_leg(version), sample)
        return of.id

    def sample(self, job_id: str) -> SampleRun:
        held = self.held.get(job_id)
        sample = held.samples[0]
        assert isinstance(sample, SampleRun)
        return sample

    def gives(self, plan: Plan = HALF) -> list[str]:
        return [held.id for held in self._moving.choose(plan, self.lease)]


@pytest.fixture
async def giver(joined: MakeLease) -> Giver:
    return Giver(await joined())


def test_a_ring_tells_each_giver_what_it_gives_to_whom() -> None:
    ring = {"kind": "move", "moves": "a x 3 8 b x 3 2 a y 4 1 a z 3 0", "level": "16"}
    assert plans_for("a", ring) == [Plan("x", 3, 8, 16), Plan("y", 4, 1, 16)]
    assert plans_for("b", ring) == [Plan("x", 3, 2, 16)]
    assert plans_for("c", ring) == []


@pytest.mark.parametrize(
    "ring",
    [
        {},
        {"moves": "a x 3 8"},
        {"moves": "a x 3", "level": "1"},
        {"moves": "a x 3 8 a", "level": "1"},
        {"moves": "a x 3 many", "level": "1"},
        {"moves": "a x 3 8", "level": ""},
    ],
)
def test_a_ring_that_says_nothing_of_the_kind_is_left(ring: dict[str, str]) -> None:
    assert plans_for("a", ring) == []


def test_a_move_gains_what_a_step_is_shorter_for_each_token_that_is_left() -> None:
    assert gain(0, [0], 1000, 300, 150) == 300, "a step takes half as long, for 300 tokens"
    assert gain(0, [100], 1000, 300, 75) == 100 - 2, "and 100 tokens to be read again cost one step, doubled"
    assert gain(1000, [0, 0], 1000, 300, 150) == 600 - 20, "samples of a job share their prompt"
    assert gain(0, [400], 1000, 300, 150) == 200 - 8, "longer than the mean: half as long again"
    assert gain(0, [990], 1000, 300, 150) == 10 - 19.8, "but no longer than it may be"
    assert gain(0, [200], 1000, 0, 150) == 400 - 4, "nothing is known: half of what it may be"
    assert gain(0, [0], 1000, 300, 0) == gain(0, [1000], 1000, 300, 150) + 20 == 0
    assert gain(0, [0], 1000, 300, -10) < 0


async def test_what_waits_goes_first_and_the_newest_of_it(giver: Giver) -> None:
    running = [giver.hold(runs=True) for _ in range(2)]
    waiting = [giver.hold() for _ in range(6)]
    assert giver.gives() == waiting[:1:-1]
    assert giver.gives(Plan("taker", 1, 7, 0)) == [*reversed(waiting), running[0]]


async def test_of_what_runs_that_goes_which_has_most_to_come(giver: Giver) -> None:
    running = [giver.hold(runs=True) for _ in range(8)]
    for done, job_id in enumerate(running):
        leg = giver.sample(job_id).leg
        giver.bench.engine.made[leg.request_id] = 630 - 90 * done  # only the engine knows
    giver.bench.generation.mean_tokens = 2000.0
    assert giver.gives() == running[:3:-1]


async def test_nothing_that_runs_goes_for_less_than_it_costs(giver: Giver) -> None:
    for _ in range(8):
        giver.hold(job(sampling=SamplingParams(max_new_tokens=4)), runs=True)
    assert giver.gives() == []


async def test_whole_jobs_go_and_the_taker_gets_no_more_than_the_giver_keeps(giver: Giver) -> None:
    big = [giver.hold(job(n=8, sampling=LONG)) for _ in range(2)]
    assert giver.gives(Plan("taker", 1, 8, 8)) == big[1:]
    assert giver.gives(Plan("taker", 1, 3, 3)) == [], "less than half of a job"
    alone = Giver(giver.lease)
    alone.hold(job(n=8, sampling=LONG))
    assert alone.gives(Plan("taker", 1, 4, 4)) == [], "it would be as uneven as before, the other way round"


STAYS: dict[str, dict[str, Any]] = {
    "preferred": {"preferred": True},
    "lost before": {"lost": 1},
    "to be ended": {"ending": True},
    "moved often": {"moves": MOST_MOVES},
    "of a session": {"session_id": "s"},
}


@pytest.mark.parametrize("why", STAYS)
@pytest.mark.parametrize("runs", [False, True])
async def test_some_jobs_stay(giver: Giver, why: str, runs: bool) -> None:
    claim = dict(STAYS[why])
    session = claim.pop("session_id", None)
    goes = [giver.hold(runs=runs, moves=MOST_MOVES - 1) for _ in range(3)]
    for _ in range(5):
        giver.hold(job(sampling=LONG, session_id=session), runs=runs, **claim)
    assert sorted(giver.gives()) == goes


async def test_a_job_that_ends_or_generates_nothing_stays(giver: Giver) -> None:
    ends, ended, _ = giver.hold(), giver.hold(), giver.hold(EmbedJob(token_ids=[[1, 2]], reply_to="c"))
    giver.sample(ends).ending, giver.sample(ended).finish_reason = True, "stop"
    goes = giver.hold()
    assert giver.gives(Plan("taker", 1, 4, 1)) == [goes]


async def test_a_sample_that_newer_weights_began_does_not_go_to_older_ones(giver: Giver) -> None:
    begun, running, new = giver.hold(), giver.hold(runs=True, version=2), giver.hold()
    giver.sample(begun).segments = [Segment(1, 5), Segment(2, 5)]
    giver.bench.generation.state.version = 2
    assert giver.gives(Plan("taker", 1, 2, 1)) == [new]
    assert giver.gives(Plan("taker", 2, 2, 0)) == [new, begun]
    assert giver.gives(Plan("taker", 2, 3, -1)) == [new, begun, running]


async def test_what_has_begun_goes_on_under_the_version_that_it_would_have_here(giver: Giver) -> None:
    waiting, running, new = giver.hold(), giver.hold(runs=True, version=0), giver.hold()
    giver.sample(waiting).segments = [Segment(0, 5)]
    giver.bench.generation.state.version = 0
    assert giver.gives(Plan("taker", 1, 3, -1)) == [new]
    giver.bench.generation.state.version = 1
    assert giver.gives(Plan("taker", 1, 3, -1)) == [new, waiting, running]


async def test_nothing_is_interrupted_that_could_not_run_on_here(giver: Giver) -> None:
    """An update may wait for it, or a pause lets it run to its end."""
    running, new = giver.hold(runs=True), giver.hold()
    for _ in range(2):
        giver.hold(runs=True)
    with giver.bench.generation.gate.holder("update"):
        assert giver.gives(Plan("taker", 1, 2, -2)) == [new]
    assert giver.gives(Plan("taker", 1, 2, -2)) == [new, running]


@pytest.mark.parametrize("fields", [{"media": (Medium(kind="image", data=b"x"),)}, {"exact_version": 1}])
async def test_what_would_begin_again_is_not_interrupted(giver: Giver, fields: dict[str, Any]) -> None:
    of = [GenerateJob(text="a", sampling=LONG, **fields) for _ in range(8)]
    for one in of[:4]:
        giver.sample(giver.hold(one, runs=True)).starts_over |= "exact_version" in fields
    waiting = [giver.hold(one) for one in of[4:]]
    assert giver.gives(Plan("taker", 1, 6, 0)) == waiting[::-1]


@pytest.mark.parametrize("include_stop", [False, True])
async def test_a_stream_that_holds_tokens_back_is_not_interrupted(giver: Giver, include_stop: bool) -> None:
    """They cannot be handed over, because its client may not see them yet."""
    sampling = SamplingParams(max_new_tokens=4000, stop_token_sequences=[[7, 8]], include_stop=include_stop)
    of = [job(sampling=sampling, stream=True) for _ in range(8)]
    for one in of[:4]:
        sample = giver.sample(giver.hold(one, runs=True))
        sample.stream = SampleStream(one, None)
    waiting = [giver.hold(one) for one in of[4:]]
    running = [one.id for one in of[:2]] if include_stop else []
    assert giver.gives(Plan("taker", 1, 6, 0)) == [*waiting[::-1], *running]
