"""Stopping SGLang's profiler, as far as it needs no SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rolloutmq.messages.errors import EngineError, RequestRefused
from rolloutmq.worker.sglang import operations


class Busy:
    """An engine whose profiler does not stop the first time. It is its own manager."""

    def __init__(self) -> None:
        self.asked = 0
        self.manager = self

    async def stop_profile(self) -> None:
        self.asked += 1
        if self.asked == 1:
            raise RuntimeError("busy")


async def test_a_profiler_that_did_not_stop_can_be_told_again(tmp_path: Path) -> None:
    run: Any = Busy()
    operations._profiles[run] = str(tmp_path)
    with pytest.raises(EngineError, match="busy"):
        await operations._stop_profile(run, None, {})  # type: ignore[arg-type]
    assert await operations._stop_profile(run, None, {}) == {"folder": str(tmp_path), "files": {}}  # type: ignore[arg-type]
    with pytest.raises(RequestRefused):
        await operations._stop_profile(run, None, {})  # type: ignore[arg-type]
