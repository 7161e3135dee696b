"""What this package changes in SGLang's tokenizer manager."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.worker.cpu_support import prepare_engine


@pytest.mark.sglang
def test_an_abort_that_may_have_missed_its_request_is_sent_again() -> None:
    prepare_engine()
    from rolloutmq.worker.sglang.launch import Manager  # noqa: PLC0415 – it imports SGLang

    manager: Any = Manager.__new__(Manager)
    sent: list[str] = []
    manager.rid_to_state, manager.enable_metrics = {"a": SimpleNamespace(abort_sent=False)}, False
    manager._dispatch_to_scheduler = lambda request: sent.append(request.rid)
    for _ in range(3):
        manager.abort_request("a")
    assert sent == ["a"] * 3
