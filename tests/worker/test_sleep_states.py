"""Every state of an engine's memory, every command in it: what is legal, where it leads, why the rest is refused."""

from __future__ import annotations

from contextlib import suppress
from itertools import chain, combinations

import pytest

from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model.command_params import MEMORY_TAGS, MemoryTag
from rolloutmq.worker.sleep_states import SleepState

SETS = [frozenset(some) for some in chain.from_iterable(combinations(MEMORY_TAGS, n) for n in range(4))]
STATES = [SleepState(asleep, stale) for asleep in SETS for stale in (False, True)]


def named(tags: frozenset[MemoryTag]) -> str:
    """The same text in every run, whatever order a set has."""
    return "+".join(sorted(tags)) or "all"


def state_named(state: SleepState) -> str:
    return ("+".join(sorted(state.asleep)) or "awake") + ("-stale" if state.stale else "")


@pytest.mark.parametrize("tags", SETS, ids=named)
@pytest.mark.parametrize("state", STATES, ids=state_named)
def test_sleep(state: SleepState, tags: frozenset[MemoryTag]) -> None:
    """Memory that is awake goes to sleep; without tags all of it. What sleeps is not given up again."""
    wanted = tags or frozenset(MEMORY_TAGS)
    assert set(state.to_sleep(tuple(tags))) == wanted - state.asleep
    after = state.sleep(tuple(tags))
    assert (after.asleep, after.stale) == (state.asleep | wanted, state.stale)
    assert not after.may_run
    assert after.takes_weights == ("weights" not in after.asleep)
    assert after.sleep(tuple(tags)) == after


@pytest.mark.parametrize("intact", [True, False])
@pytest.mark.parametrize("tags", SETS, ids=named)
@pytest.mark.parametrize("state", STATES, ids=state_named)
def test_wake(state: SleepState, tags: frozenset[MemoryTag], intact: bool) -> None:
    """Memory that sleeps wakes, the KV cache not before the weights. What is awake is not taken again."""
    wanted = (tags or frozenset(MEMORY_TAGS)) & state.asleep
    if "kv_cache" in wanted and "weights" in state.asleep - wanted:
        with pytest.raises(RequestRefused, match="the weights are asleep, and come first"):
            state.wake(tuple(tags), intact=intact)
    else:
        assert set(state.to_wake(tuple(tags))) == wanted
        after = state.wake(tuple(tags), intact=intact)
        assert after.asleep == state.asleep - wanted
        assert after.stale == (state.stale or ("weights" in wanted and not intact))
        assert after.may_run == (not after.asleep and not after.stale)
        assert after.wake(tuple(tags), intact=intact) == after


@pytest.mark.parametrize("state", STATES, ids=state_named)
def test_a_version_is_loaded_into_weights_that_are_awake(state: SleepState) -> None:
    if "weights" in state.asleep:
        with pytest.raises(RequestRefused, match="while the weights are asleep"):
            state.synced()
    else:
        assert state.synced() == SleepState(state.asleep)


def test_every_legal_order_of_tags_leads_back_to_an_engine_that_serves() -> None:
    """From awake: any split of the three into commands, any legal order of waking them; illegal orders are few."""
    begun: list[SleepState] = [SleepState()]
    seen: set[SleepState] = set()
    while begun:
        state = begun.pop()
        if state in seen:
            continue
        seen.add(state)
        for tags in SETS[1:]:
            with suppress(RequestRefused):
                begun.append(state.sleep(tuple(tags)))
            with suppress(RequestRefused):
                begun.append(state.wake(tuple(tags), intact=False))
    assert seen == {SleepState(asleep, stale) for asleep in SETS for stale in (False, True)}
    for state in seen:
        awake = state.wake((), intact=True) if state.asleep else state
        assert awake.synced() == SleepState()


def test_tags_are_done_in_one_order_however_they_are_named() -> None:
    assert SleepState().to_sleep(("cuda_graph", "kv_cache", "weights")) == MEMORY_TAGS
    assert SleepState(frozenset(MEMORY_TAGS)).to_wake(("kv_cache", "weights")) == ("weights", "kv_cache")
