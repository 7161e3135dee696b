"""One report of a tensor-parallel engine out of its ranks' reports."""

from __future__ import annotations

from itertools import permutations

import pytest

from rolloutmq.sync.transfer.order import TransferReport
from rolloutmq.worker.sglang.weights import combine

DONE = TransferReport(ok=True, phase="done", readback=True)
STAGED = TransferReport(ok=True, phase="staged")
REFUSED = TransferReport(ok=False, phase="verify", error="tensor w: digest")
BROKEN = TransferReport(ok=False, phase="load", error="tensor w: the engine holds", intact=False)


@pytest.mark.parametrize("reports", list(permutations([DONE, REFUSED, DONE])))
def test_new_weights_on_one_rank_and_old_ones_on_another_are_no_version(reports: list[TransferReport]) -> None:
    found = combine(reports)
    assert (found.ok, found.intact, found.phase, found.error) == (False, False, "verify", REFUSED.error)


@pytest.mark.parametrize("reports", list(permutations([STAGED, REFUSED, REFUSED])))
def test_who_only_received_still_has_the_old_weights(reports: list[TransferReport]) -> None:
    assert combine(reports) == REFUSED


@pytest.mark.parametrize("others", [[DONE], [REFUSED], [STAGED], [REFUSED, DONE]])
def test_the_worst_failure_wins(others: list[TransferReport]) -> None:
    for reports in permutations([BROKEN, *others]):
        assert combine(list(reports)) == BROKEN


def test_the_engine_took_as_long_as_its_slowest_rank() -> None:
    reports = [
        TransferReport(ok=True, phase="done", tensors=7, nbytes=9, rendezvous_s=1.0, receive_s=5.0, load_s=3.0),
        TransferReport(ok=True, phase="done", tensors=7, nbytes=9, rendezvous_s=4.0, receive_s=2.0, load_s=6.0),
    ]
    for given in (reports, reports[::-1]):
        found = combine(given)
        assert (found.ok, found.intact, found.tensors, found.nbytes) == (True, True, 7, 9)
        assert (found.rendezvous_s, found.receive_s, found.load_s) == (4.0, 5.0, 6.0)


def test_it_was_read_back_only_if_every_rank_did() -> None:
    without = TransferReport(ok=True, phase="done", readback=False)
    assert combine([DONE, DONE]).readback
    assert not combine([DONE, without]).readback
    assert not combine([without, DONE]).readback


def test_one_ranks_report_is_the_engines() -> None:
    switched = TransferReport(ok=True, phase="done", load_s=0.5, readback=True, switched={"a": 3})
    for report in (switched, REFUSED, BROKEN):
        assert combine([report]) == report
