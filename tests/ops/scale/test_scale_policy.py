"""The policy: what a pool needs, and that it neither flaps nor acts without data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from rolloutmq.ops.scale import Decision, History, PoolView, ScaleSettings, State, decide
from rolloutmq.ops.scale.policy import FULL, LONGEST_GAP_S, UNCLAIMED_S

SETTINGS = ScaleSettings(least=0, most=8, target_s=60.0, stabilise_s=300.0, startup_s=30.0)
EMPTY = PoolView(at=0.0)
BUSY = PoolView(
    at=0.0, queued=100, running=16, slots=16, serving=2, tokens_per_s=200.0, worker_tokens_per_s=100.0,
    tokens_per_sample=1000.0, sample_s=80.0,
)  # fmt: skip
"""Two full workers of 100 tokens/s, and 1,000 seconds of work for one."""


def one(view: PoolView | None, settings: ScaleSettings = SETTINGS, history: History | None = None) -> Decision:
    return decide(view, settings, History() if history is None else history)[0]


def watch(views: list[PoolView | None], settings: ScaleSettings = SETTINGS) -> list[Decision]:
    history, seen = History(), list[Decision]()
    for view in views:
        decision, history = decide(view, settings, history)
        seen.append(decision)
    return seen


CASES: dict[str, tuple[PoolView, int, State]] = {
    "nothing at all": (EMPTY, 0, "idle"),
    "work, and never a worker": (replace(EMPTY, queued=1000), 1, "starved"),
    "work, and the first worker starts": (replace(EMPTY, queued=1000, starting=1), 1, "starting"),
    "work, and what a worker can do is known": (
        replace(BUSY, serving=0, running=0, slots=0, queued=18, tokens_per_s=0.0), 3, "starved",
    ),
    "full, and nothing was measured yet": (replace(BUSY, worker_tokens_per_s=None), 4, "starved"),
    "full, nothing was measured yet, and workers start": (
        replace(BUSY, worker_tokens_per_s=None, starting=1), 3, "starting",
    ),
    "full, and more is wanted than may be": (BUSY, 8, "saturated"),
    "full, and a little waits": (replace(BUSY, queued=10), 2, "balanced"),
    "what waits is done before another one serves": (replace(BUSY, queued=14), 3, "starved"),
    "a start that takes longer than the work": (replace(BUSY, queued=4), 2, "balanced"),
    "slots are free": (replace(BUSY, running=4), 2, "balanced"),
    "a feed lets in no more": (replace(BUSY, queued=0, running=4, tokens_per_s=50.0, eta=1), 2, "bound by staleness"),
    "results wait too long for their clients": (
        replace(BUSY, eta=1, version_s=60.0, taken_tokens_per_s=80.0, unread_s=130.0), 2, "bound by staleness",
    ),
    "results wait as long as they may": (
        replace(BUSY, eta=1, version_s=60.0, taken_tokens_per_s=80.0, unread_s=110.0), 8, "saturated",
    ),
    "jobs for weights that are not there": (replace(EMPTY, serving=1, slots=8, held_back=5), 1, "bound by staleness"),
    "paused": (replace(BUSY, serving=0, paused=2), 2, "paused"),
    "those that drain do not count": (replace(BUSY, queued=10, draining=5), 2, "balanced"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_pool_needs(case: str) -> None:
    view, wanted, state = CASES[case]
    decision = one(view)
    assert (decision.wanted, decision.state) == (wanted, state), decision
    assert decision.why.endswith(".")


def test_another_worker_is_not_started_for_what_is_done_before_it_serves() -> None:
    view = replace(BUSY, queued=14)  # 70 s for two workers
    assert one(view).wanted == 3
    assert one(view, replace(SETTINGS, startup_s=120.0)).wanted == 2


def test_a_worker_leaves_when_it_was_not_needed_for_a_whole_window() -> None:
    idle = replace(BUSY, queued=0, running=0, tokens_per_s=0.0, serving=8)
    seen = watch([BUSY, *(replace(idle, at=10.0 * n) for n in range(1, 40))])
    assert [it.wanted for it in seen] == [8] * 30 + [0] * 10  # 300 s
    assert "needed within 300 s" in seen[1].why


def test_whoever_begins_to_watch_does_not_know_what_was_needed_before() -> None:
    idle = PoolView(at=5.0, serving=3, slots=24)
    assert [it.wanted for it in watch([idle, replace(idle, at=15.0)])] == [3, 3]


@pytest.mark.parametrize(
    ("measured", "window"),
    [
        ({"sample_s": 200.0}, 600.0),  # three times the mean is the p95
        ({"version_s": 400.0}, 800.0),
        ({"sample_s": 1e9}, 3600.0),
        ({"sample_s": 1.0, "version_s": 1.0}, 300.0),
    ],
)
def test_the_window_is_longer_than_the_p95_of_a_sample(measured: dict[str, float], window: float) -> None:
    assert one(replace(BUSY, **measured)).window_s == window
    assert one(BUSY, replace(SETTINGS, startup_s=500.0)).window_s == 500.0


def test_without_data_nothing_changes() -> None:
    idle = replace(BUSY, queued=0, running=0, tokens_per_s=0.0, at=100_000.0)  # after an outage, or a jump of the clock
    seen = watch([BUSY, None, None, idle, replace(idle, at=5.0)])
    assert [it.wanted for it in seen] == [8] * 5
    assert [it.state for it in seen][1:3] == ["unknown"] * 2
    assert SETTINGS.stabilise_s > LONGEST_GAP_S
    assert one(None, replace(SETTINGS, least=2)).wanted == 2


def test_jobs_that_no_worker_can_run_start_no_more_than_one() -> None:
    stuck = replace(BUSY, running=0, tokens_per_s=0.0, queued=100_000.0)
    seen = watch([replace(stuck, at=20.0 * n) for n in range(40)])
    assert max(it.wanted for it in seen) == 2
    assert seen[-1].wanted == 1
    assert [it.state for it in seen[: int(UNCLAIMED_S / 20)]] == ["balanced"] * 3
    assert {it.state for it in seen[3:]} == {"unclaimed"}


SAME = examples(derandomize=True, deadline=None)


def counts(most: int = 50) -> st.SearchStrategy[int]:
    return st.integers(0, most)


amounts = st.floats(0, 1e6, allow_nan=False)
maybe = st.none() | st.floats(0, 1e5, allow_nan=False)
views = st.builds(
    PoolView, at=amounts, queued=amounts, held_back=amounts, running=amounts, slots=amounts, serving=counts(),
    starting=counts(), draining=counts(), paused=counts(), tokens_per_s=amounts, worker_tokens_per_s=maybe,
    tokens_per_sample=maybe, sample_s=maybe, version_s=maybe, eta=st.none() | counts(8),
)  # fmt: skip
all_settings = st.builds(
    ScaleSettings, least=counts(5), most=st.integers(5, 40), target_s=st.floats(1, 600),
    stabilise_s=st.floats(0, 600), startup_s=st.floats(0, 900),
)  # fmt: skip


@SAME
@given(st.lists(st.none() | views, min_size=1, max_size=12), all_settings)
def test_the_bounds_hold_whatever_is_read(seen: list[PoolView | None], settings: ScaleSettings) -> None:
    history = History()
    for view in seen:
        decision, history = decide(view, settings, history)
        assert settings.least <= decision.wanted <= settings.most
        assert len(history.needs) <= max(need for _, need in history.needs) + 1 if history.needs else True


@SAME
@given(st.lists(views, max_size=6), views, amounts, all_settings)
def test_more_queued_work_never_means_fewer_workers(
    before: list[PoolView], view: PoolView, more: float, settings: ScaleSettings
) -> None:
    history = History()
    for seen in before:
        _, history = decide(seen, settings, history)
    less = one(view, settings, history).wanted
    assert one(replace(view, queued=view.queued + more), settings, history).wanted >= less


@dataclass(frozen=True)
class Load:
    """load: of so many full workers. batching: how much slower one sample is in a full batch than alone."""

    load: float
    batching: float
    sample_s: float
    startup_s: float
    target_s: float
    noise: float


loads = st.builds(
    Load, load=st.floats(0.05, 6.0), batching=st.sampled_from([0.0, 1.0, 4.0]), sample_s=st.floats(5, 200),
    startup_s=st.floats(0, 200), target_s=st.floats(20, 120), noise=st.floats(0, 0.3),
)  # fmt: skip


def constant_load(it: Load) -> tuple[list[int], float]:
    """What was wanted of a pool in simulated time, from nothing; and seconds of work that wait at the end."""
    load, sample_s, startup_s = it.load, it.sample_s, it.startup_s
    step, slots, tokens = 5.0, 16.0, 1000.0
    settings = ScaleSettings(0, 12, it.target_s, 120.0, startup_s)
    full_rate = slots * tokens / sample_s
    queued = running = done = 0.0
    serving, starting = 0, list[float]()
    learnt: float | None = None
    history, wanted = History(), list[int]()
    for tick in range(600):
        now = tick * step
        queued += load * full_rate / tokens * step * (1 + it.noise * (1 if tick % 2 else -1))
        serving += sum(at <= now for at in starting)
        starting = [at for at in starting if at > now]
        taken = min(queued, serving * slots - running)
        queued, running = queued - taken, running + taken
        share = running / (serving * slots) if serving else 0.0
        view = PoolView(
            at=now, queued=queued if queued > 1e-6 else 0.0, running=running, slots=serving * slots, serving=serving,
            starting=len(starting), tokens_per_s=done * tokens / step, worker_tokens_per_s=learnt,
            tokens_per_sample=tokens if learnt else None, sample_s=running * step / done if done else None,
        )  # fmt: skip
        decision, history = decide(view, settings, history)
        wanted.append(decision.wanted)
        starting += [now + startup_s] * (decision.wanted - serving - len(starting))
        if decision.wanted < serving + len(starting):
            starting.clear()
            serving = min(serving, decision.wanted)
            queued, running = queued + max(0.0, running - serving * slots), min(running, serving * slots)
        done = min(running, running * step / (sample_s * (1 + it.batching * share) / (1 + it.batching)))
        running -= done
        if share >= FULL:
            learnt = max(learnt or 0.0, done * tokens / step / serving) if serving else learnt
    return wanted, queued * tokens / full_rate / max(1, wanted[-1])


@SAME
@given(loads)
def test_a_constant_load_never_makes_it_oscillate(it: Load) -> None:
    """Once a worker has left, none is ever started again; and no more work waits than is allowed to."""
    wanted, waits_s = constant_load(it)
    left = next((n for n in range(1, len(wanted)) if wanted[n] < wanted[n - 1]), len(wanted))
    assert all(after <= before for before, after in pairwise(wanted[left:])), wanted
    assert waits_s <= max(it.target_s, it.startup_s) + 10 * it.load, wanted
