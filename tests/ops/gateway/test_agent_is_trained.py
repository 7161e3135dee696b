"""An agent that knows of no training is trained through two gateways: examples/train_through_gateway.py.

A gateway dies in the middle of its requests, in the long form a worker too. The judges are the agent, which knows what
it asked and was told, and the trainer, which computes each log-probability itself.
"""

from __future__ import annotations

import asyncio
import runpy
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.engines.remote import RemoteEngine
from support.pools.pool import eventually
from support.pools.served import Balancer, port, start_gateway
from support.pools.worker_process import WorkerProcess

from rolloutmq import BlockingRolloutClient
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.training import Row
from rolloutmq.producer.training.batch import RolloutBatch

EXAMPLES = Path(__file__).parents[3] / "examples"
TOLERANCE = 1e-3
"""Of a log-probability, both sides in float32."""
pytestmark = pytest.mark.sglang
Turn = tuple[tuple[int, ...], str]
"""What the model was shown, and what it said."""


class Witness:
    """Watches the example: what its agents were told, and what is trained on. at: what to do before which turn."""

    def __init__(self, model: Path, patch: pytest.MonkeyPatch, at: dict[int, Callable[[], Any]]) -> None:
        from transformers import AutoTokenizer  # noqa: PLC0415

        self.told: Counter[Turn] = Counter()
        self.rows: list[list[Row]] = []
        self._tokenizer, self._lock, self._begun, self._at = (
            AutoTokenizer.from_pretrained(model),
            threading.Lock(),
            0,
            at,
        )
        patch.syspath_prepend(str(EXAMPLES))
        patch.delitem(sys.modules, "agent_openai", raising=False)
        import agent_openai  # noqa: PLC0415

        says_yes, of = agent_openai.says_yes, RolloutBatch.of

        def watched(client: Any, talk: list[dict[str, str]]) -> bool:
            self._begins()
            shown = self._tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
            answer: bool = says_yes(client, talk)
            with self._lock:
                self.told[tuple(shown), talk[-1]["content"]] += 1
            return answer

        def batch(rows: Sequence[Row]) -> RolloutBatch:
            self.rows.append(list(rows))
            return of(rows)

        patch.setattr(agent_openai, "says_yes", watched)
        patch.setattr(RolloutBatch, "of", staticmethod(batch))

    def _begins(self) -> None:
        with self._lock:
            self._begun += 1
            action = self._at.get(self._begun)
        if action is not None:
            action()

    def check(self, steps: int) -> None:
        """Each turn was trained once, with its very tokens, under the weights of its step."""
        trained: Counter[Turn] = Counter()
        assert len(self.rows) == steps
        for version, rows in enumerate(self.rows, 1):
            for row in rows:
                assert row.versions[row.mask == 1].tolist() == [version] * int(row.mask.sum())
                for number in np.unique(row.turns[row.mask == 1]):
                    (places,) = np.nonzero(row.turns == number)
                    said = self._tokenizer.decode(row.ids[places], skip_special_tokens=True)
                    trained[tuple(row.ids[: places[0]].tolist()), said or "?"] += 1
        assert trained == self.told


@contextmanager
def two_gateways(redis_url: str, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Gateways behind a balancer, for the example; yields what kills one of them."""
    ports = [port(), port()]
    servers = [
        start_gateway(redis_url, folder / f"gateway-{it}.log", "--served-model-name", "tiny", at=it) for it in ports
    ]
    balancer = Balancer(ports)
    try:
        for server in servers:
            server.wait_ready()
        patch.setenv("GATEWAY", balancer.url)
        yield servers[0].kill
    finally:
        balancer.close()
        for server in servers:
            server.kill()


def run(steps: int, model: Path, redis_url: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The example's names when it has ended."""
    (folder / "out").mkdir()
    (folder / "out" / "tiny").symlink_to(model)
    patch.chdir(folder)
    patch.setenv("ROLLOUTMQ_REDIS", redis_url)
    patch.setenv("STEPS", str(steps))
    # Not as __main__, which the processes that are started meanwhile would run, too.
    return runpy.run_path(str(EXAMPLES / "train_through_gateway.py"), run_name="example")


@pytest.mark.timeout(300)
def test_a_gateway_dies_and_each_turn_is_trained_once(
    text_engine: RemoteEngine, text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        EmbeddedRedis() as server,
        text_engine.worker(server.url),
        two_gateways(server.url, tmp_path, monkeypatch) as kill,
    ):
        witness = Witness(text_model, monkeypatch, {100: kill})
        names = run(3, text_model, server.url, tmp_path, monkeypatch)
        told = witness.told.total()
        with BlockingRolloutClient(server.url) as client:
            asyncio.run(eventually(lambda: generated(client) >= told and client.load().open_jobs == 0))
            assert generated(client) == told, "nothing was generated twice"
    witness.check(3)
    assert max(names["gaps"]) < TOLERANCE


def generated(client: BlockingRolloutClient) -> int:
    """Samples that the pool's workers have finished."""
    return sum(worker.finished_samples for worker in client.workers())


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_it_learns_while_a_worker_and_a_gateway_die(
    text_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, options = 50, ("--dtype", "float32", "--max-running", "32")
    with EmbeddedRedis() as server, ExitStack() as stack:
        workers: list[WorkerProcess] = []

        def start() -> None:
            log = tmp_path / f"worker-{len(workers)}.log"
            workers.append(WorkerProcess(text_model, server.url, log, *options))
            stack.callback(workers[-1].kill)

        def replace() -> None:
            workers[0].kill()
            start()

        start()
        start()
        for worker in workers:
            worker.wait_joined()
        with two_gateways(server.url, tmp_path, monkeypatch) as kill:
            witness = Witness(text_model, monkeypatch, {1500: replace, 3000: kill})
            names = run(steps, text_model, server.url, tmp_path, monkeypatch)
    witness.check(steps)
    assert max(names["gaps"]) < TOLERANCE
    curve = names["curve"]
    assert sum(curve[:5]) / 5 <= 0.4
    assert sum(curve[-5:]) / 5 >= 0.9
