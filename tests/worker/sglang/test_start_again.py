"""An engine that opened and then cannot be used leaves nothing open: it can be started again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.messages.errors import EngineError
from rolloutmq.worker.engine.protocol import EngineInfo
from rolloutmq.worker.sglang import engine as module
from rolloutmq.worker.sglang.config import SGLangConfig
from rolloutmq.worker.sglang.engine import SGLangEngine

INFO = EngineInfo("sglang", "0.5.23", "m", "float32", "cpu", 8, 512)


class Run:
    """What an engine sees of its processes. As there, one may be open in a process."""

    open_ones: list[Any]
    trouble: BaseException | None
    alive = True

    def __init__(self, *_: Any) -> None:
        self.manager = SimpleNamespace()
        self.engine = SimpleNamespace(shapes=self._shapes)

    async def open(self) -> EngineInfo:
        if self.open_ones:
            raise EngineError("an SGLang engine is already running in this process")
        self.open_ones.append(self)
        return INFO

    def _shapes(self) -> Any:
        if self.trouble is not None:
            raise self.trouble
        return module.Shapes()

    async def close(self) -> None:
        self.open_ones.remove(self)


@pytest.mark.parametrize("trouble", [KeyError("hidden_size"), EngineError("no head"), asyncio.CancelledError()])
async def test_it_can_be_started_after_it_opened_in_vain(
    trouble: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SGLangRun", Run)
    monkeypatch.setattr(module, "features", lambda *_: frozenset())
    monkeypatch.setattr(Run, "open_ones", [], raising=False)
    monkeypatch.setattr(Run, "trouble", trouble, raising=False)
    engine = SGLangEngine(SGLangConfig(model="m"))
    with pytest.raises(asyncio.CancelledError if isinstance(trouble, asyncio.CancelledError) else EngineError):
        await engine.start()
    assert Run.open_ones == []
    monkeypatch.setattr(Run, "trouble", None)
    await engine.start()
    assert len(Run.open_ones) == 1
