"""A trainer and workers that share a GPU: the memory changes hands, whoever dies, refuses, or asks for work meanwhile.

The scripted engine ends the run if a request or a version comes to memory that is given up. A real SGLang on a CPU has
a stand-in for its memory saver, which spoils what sleeps: tests/gpu/test_gpu_sleep.py has the real one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.lazily import Lazily
from support.pools.gpu import running
from support.pools.pool import Running, eventually, worker
from support.specimens.messages import job

from rolloutmq import RolloutClient
from rolloutmq.messages import Broker
from rolloutmq.messages.errors import InvalidField
from rolloutmq.producer.blocking import BlockingPoolControl
from rolloutmq.producer.control import CommandFailed, PoolControl
from rolloutmq.producer.diagnosis import read_pool, reasons
from rolloutmq.worker.scripted.engine import ScriptedEngine
from rolloutmq.worker.sglang import operations

pytestmark = [pytest.mark.timeout(300)]
made = Lazily("support.trainers.trl")
ALL = ("kv_cache", "cuda_graph", "weights")
KV = ("kv_cache",)


@asynccontextmanager
async def echoing(url: str) -> AsyncIterator[Running]:
    """A worker whose tokens the tiny model knows: those of the prompt."""
    async with worker(url, engine=ScriptedEngine(echo=True), max_running=32) as one:
        yield one


def watch(trainer: Any, look: Callable[[], None]) -> None:
    """Call `look` whenever the trainer's model has computed."""
    trainer.model.register_forward_hook(lambda *_: look())


def logged(trainer: Any, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.mark.parametrize("tags", [ALL, KV])
async def test_workers_sleep_whenever_the_model_computes_and_never_else(
    tags: Any, tiny: Path, redis_db: str, tmp_path: Path, client: RolloutClient
) -> None:
    """Two steps for each batch, so that one of them begins without generating. A job of another client's waits."""
    asleep: list[set[str]] = []
    others: list[Any] = []
    loop = asyncio.get_running_loop()

    def look() -> None:
        asleep.append(set(one.engine.ops.asleep))
        if not others:
            others.append(asyncio.run_coroutine_threadsafe(client.submit(job()), loop).result(30))

    async with echoing(redis_db) as one:
        trainer, rollouts = made.grpo_trainer(
            tiny, tmp_path, redis_db, colocated=tags, num_iterations=2, max_steps=4, per_device_eval_batch_size=8
        )
        watch(trainer, look)
        await asyncio.to_thread(trainer.train)
        assert one.engine.ops.asleep == set(tags)
        assert one.generation.version == rollouts.weights.version
        await asyncio.to_thread(rollouts.close)
        assert not one.engine.ops.asleep
        assert len(await client.wait(others[0], 60)) == 1
        assert one.worker._keeper.restarts == 0
    assert asleep
    assert asleep == [set(tags)] * len(asleep)
    for name in ("sleep_s", "wake_weights_s", "wake_s"):
        assert logged(trainer, f"rollout/{name}"), name


async def test_close_waits_for_the_weights_that_sleep_has_cost(
    tiny: Path, redis_db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has them when the trainer is gone. The engine takes them only when it has been asked once more."""
    again, trained, wake, asks = asyncio.Event(), asyncio.Event(), BlockingPoolControl.wake, itertools.count()

    def asked(*given: Any, **options: Any) -> Any:
        if next(asks):
            loop.call_soon_threadsafe(again.set)
        return wake(*given, **options)

    async def slow(order: Any) -> Any:
        if trained.is_set():
            await again.wait()
        return await commit(order)

    loop = asyncio.get_running_loop()
    async with echoing(redis_db) as one:
        commit = one.engine.commit_weights
        monkeypatch.setattr(one.engine, "commit_weights", slow)
        trainer, rollouts = made.grpo_trainer(tiny, tmp_path, redis_db, colocated=ALL)
        await asyncio.to_thread(trainer.train)
        trained.set()
        monkeypatch.setattr(BlockingPoolControl, "wake", asked)
        await asyncio.to_thread(rollouts.close)
        assert one.generation.version == rollouts.weights.version


async def test_no_rank_computes_before_the_last_one_has_generated(tiny: Path, redis_db: str, tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "support" / "peers" / "colocated_ranks.py"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    async with echoing(redis_db) as one:
        started = await asyncio.create_subprocess_exec(
            *(sys.executable, *torchrun, str(program), str(tiny), str(tmp_path), redis_db),
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}, start_new_session=True,
        )  # fmt: skip
        try:
            assert await asyncio.wait_for(started.wait(), 240) == 0
        finally:
            if started.returncode is None:
                started.terminate()
                await started.wait()
        assert not one.engine.ops.asleep
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(2)] == ["2 0", "2 0"]


async def test_an_engine_and_a_worker_that_die_asleep_cost_no_step(tiny: Path, redis_db: str, tmp_path: Path) -> None:
    loop, dead = asyncio.get_running_loop(), list[str]()

    async def die() -> None:
        two.engine.kill()
        await three.die()

    def look() -> None:
        if not dead:
            dead.append(three.id)
            asyncio.run_coroutine_threadsafe(die(), loop).result(30)

    async with echoing(redis_db) as one, echoing(redis_db) as two, echoing(redis_db) as three:
        trainer, rollouts = made.grpo_trainer(tiny, tmp_path, redis_db, colocated=ALL)
        watch(trainer, look)
        await asyncio.to_thread(trainer.train)
        await asyncio.to_thread(rollouts.close)
        await eventually(lambda: one.status.state == two.status.state == "serving")
        assert two.worker._keeper.restarts == 1
    assert dead
    assert trainer.state.global_step == 3


async def test_what_a_dead_trainer_left_asleep_is_told_and_the_next_one_wakes_it(
    tiny: Path, redis_db: str, tmp_path: Path, broker: Broker
) -> None:
    def dies(**_columns: Any) -> list[float]:
        raise KilledError

    async with echoing(redis_db) as one:
        trainer, left = made.grpo_trainer(tiny, tmp_path, redis_db, rewards=dies, colocated=ALL)
        with pytest.raises(KilledError):
            await asyncio.to_thread(trainer.train)
        assert one.engine.ops.asleep == set(ALL)
        await broker.enqueue([job()])
        await eventually(lambda: told(broker))
        trainer, rollouts = made.grpo_trainer(tiny, tmp_path, redis_db, colocated=KV)
        await asyncio.to_thread(trainer.train)
        assert one.engine.ops.asleep == set(KV)
        await asyncio.to_thread(rollouts.close)
        await asyncio.to_thread(left.close)


class KilledError(Exception):
    """Nobody cleans up after it."""


async def told(broker: Broker) -> bool:
    return "asleep" in {reason.cause for reason in reasons(await read_pool(broker))}


async def test_a_worker_that_cannot_sleep_ends_training_with_its_reason(
    tiny: Path, redis_db: str, tmp_path: Path
) -> None:
    async with echoing(redis_db) as one, echoing(redis_db) as two:
        one.engine.ops.can_sleep = False
        trainer, rollouts = made.grpo_trainer(tiny, tmp_path, redis_db, colocated=KV)
        with pytest.raises(CommandFailed, match=rf"sleep: {one.id}: RequestRefused: .*memory saver"):
            await asyncio.to_thread(trainer.train)
        await asyncio.to_thread(rollouts.close)
        assert one.status.state == two.status.state == "serving", "the other one slept"


@pytest.mark.parametrize("tags", ["kv_cache", ["kv"], [["kv_cache"]], {"kv_cache"}, None])
def test_what_is_no_memory_is_refused(tags: Any) -> None:
    with pytest.raises(InvalidField, match="colocated"):
        made.PoolRollouts("redis://127.0.0.1:1", colocated=tags)


@pytest.mark.sglang
async def test_real_engines_tokens_are_those_of_each_steps_weights(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of SGLang wake as zeros, and trainer and engine agree on every token all the same."""
    options: dict[str, Any] = {"dtype": "float32", "attention_backend": None, "max_total_tokens": 16384}
    async with running(tiny, **options) as pool:
        run = pool.engine._run
        slept: list[str] = []

        async def release(request: Any) -> None:
            slept.extend(request.tags)

        async def resume(request: Any) -> None:
            if "weights" in request.tags:
                await run.channel.operate(0, "load_sharded", path=spoiled)

        spoiled = await spoil(pool.control, tmp_path / "spoiled")
        monkeypatch.setattr(operations, "_check_memory", lambda run, info: None)
        monkeypatch.setattr(run.manager, "release_memory_occupation", release)
        monkeypatch.setattr(run.manager, "resume_memory_occupation", resume)
        url = pool.worker.config.redis_url
        trainer, rollouts = made.grpo_trainer(tiny, tmp_path / "out", url, colocated=ALL)
        await asyncio.to_thread(trainer.train)
        await asyncio.to_thread(rollouts.close)
        assert sorted(set(slept)) == sorted(ALL)
        assert len(slept) == 3 * len(ALL)
        assert (await pool.control.audit()).clean
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) <= 1e-4
    assert logged(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0] * 3, abs=1e-3)


async def spoil(control: PoolControl, folder: Path) -> str:
    """A sharded state of the engine's with zeros for weights."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    (answer,) = (await control.save(str(folder), format="sharded")).check().values()
    for file in await asyncio.to_thread(lambda: list(Path(str(answer.result["path"])).glob("*"))):
        if file.suffix == ".safetensors":
            save_file({name: tensor * 0 for name, tensor in load_file(file).items()}, file)
        else:
            file.unlink()  # the digests
    return str(answer.result["path"])
