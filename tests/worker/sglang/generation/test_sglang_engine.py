"""SGLangEngine on real SGLang: what it generates, refuses, aborts, loads, and how it survives a dead scheduler."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from support.engines import substitute_loader
from support.engines.remote import descendants
from support.peers.peers import Line, order_from

from rolloutmq.messages.errors import EngineDead, EngineError, RequestRefused
from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.sync.transfer.order import TransferOrder, TransferReport
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="session")]
PROMPT = (11, 23, 5, 301, 42, 7)
_ids = itertools.count(1)


def request(
    prompt: tuple[int, ...] = PROMPT, *, max_new_tokens: int = 24, cache_key: str = "0", **sampling: Any
) -> EngineRequest:
    tokens = np.array(prompt, np.int32)
    return EngineRequest(f"{next(_ids):032x}", tokens, SamplingParams(**sampling), max_new_tokens, cache_key)


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    """The trainer's end of the wire."""
    made = Line()
    yield made
    made.close()


@pytest.fixture(scope="module")
def weights(tiny_model: Path) -> dict[str, Any]:
    """The tensors of the checkpoint."""
    from safetensors.torch import load_file  # noqa: PLC0415

    return load_file(tiny_model / "model.safetensors")


@dataclass
class Update:
    """What became of both halves of an update."""

    prepared: TransferReport
    committed: TransferReport | None


async def update(
    engine: SGLangEngine, line: Line, version: int, tensors: dict[str, Any], *, commit: bool = True
) -> Update:
    from rolloutmq.sync.packing.packing import PackedWeights  # noqa: PLC0415

    snapshot = PackedWeights(version, tensors, 100_000).snapshot()
    sending = line.begin(snapshot, ["worker"], timeout_s=10.0)
    [order] = sending.orders
    prepared = await engine.prepare_weights(order)
    committed = await engine.commit_weights(order) if commit and prepared.ok else None
    await asyncio.to_thread(line.over, sending)
    return Update(prepared, committed)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # between two looks, not instead of one


def reference_logprobs(model: Any, prompt: tuple[int, ...], tokens: np.ndarray) -> np.ndarray:
    """(n, vocabulary) log-probabilities at the positions where `tokens` were drawn."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *tokens.tolist()]])).logits[0].float()
    return torch.log_softmax(logits, -1)[len(prompt) - 1 : -1].numpy()


def assert_greedy(output: EngineOutput, model: Any, tolerance: float, prompt: tuple[int, ...] = PROMPT) -> None:
    expected = reference_logprobs(model, prompt, output.token_ids)
    chosen = expected[np.arange(output.token_ids.size), output.token_ids]
    np.testing.assert_allclose(output.logprobs, chosen, atol=tolerance)
    np.testing.assert_allclose(chosen, expected.max(-1), atol=2 * tolerance)


async def test_info(engine: SGLangEngine) -> None:
    info = engine.info
    assert (info.name, info.dtype, info.vocab_size, info.tp_size) == ("sglang", "float32", 512, 1)
    assert 900 < info.context_length < 1024
    assert info.fingerprint()["engine"].startswith("sglang-0.5")
    assert await engine.healthy()


async def test_greedy_is_the_models_own_choice(engine: SGLangEngine, reference: Any) -> None:
    output = await engine.generate(request(temperature=0))
    assert (output.finish_reason, output.token_ids.size) == ("length", 24)
    assert output.token_ids.dtype == np.int32
    assert output.logprobs.dtype == np.float32
    expected = reference_logprobs(reference, PROMPT, output.token_ids)
    assert output.token_ids.tolist() == expected.argmax(-1).tolist()
    assert_greedy(output, reference, 1e-4)


async def test_a_batch_of_different_lengths_is_right_for_each(engine: SGLangEngine, reference: Any) -> None:
    prompts = [tuple(range(1, 2 + 7 * i)) for i in range(6)]
    requests = [request(p, temperature=0, max_new_tokens=10 + 5 * i) for i, p in enumerate(prompts)]
    outputs = await asyncio.gather(*map(engine.generate, requests))
    assert [o.token_ids.size for o in outputs] == [10 + 5 * i for i in range(6)]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(output, reference, 1e-3, prompt)


async def test_logprobs_are_before_temperature(engine: SGLangEngine, reference: Any) -> None:
    output = await engine.generate(request(temperature=2.0, top_k=40))
    expected = reference_logprobs(reference, PROMPT, output.token_ids)
    chosen = expected[np.arange(output.token_ids.size), output.token_ids]
    np.testing.assert_allclose(output.logprobs, chosen, atol=1e-3)


async def test_stop_token_ends_the_sample_and_is_part_of_it(engine: SGLangEngine) -> None:
    stops = tuple(range(0, 512, 9))[:64]
    output = await engine.generate(request(max_new_tokens=900, stop_token_ids=stops))
    assert output.finish_reason == "stop"
    assert output.token_ids[-1] in stops
    assert output.matched_stop == output.token_ids[-1]
    assert not set(output.token_ids[:-1].tolist()) & set(stops)


async def test_logit_bias_is_applied(engine: SGLangEngine) -> None:
    output = await engine.generate(request(temperature=0, logit_bias={77: 1000.0}, max_new_tokens=4))
    assert output.token_ids.tolist() == [77] * 4


async def test_abort_returns_the_partial_sample(engine: SGLangEngine, reference: Any) -> None:
    wanted = request(temperature=0, max_new_tokens=900)
    task = asyncio.create_task(engine.generate(wanted))
    states = engine._run.manager.rid_to_state
    await until(lambda: wanted.request_id in states and len(states[wanted.request_id].output_ids) > 0)
    engine.abort(wanted.request_id)
    output = await task
    assert output.finish_reason == "abort"
    assert 0 < output.token_ids.size < 900
    assert output.logprobs.size == output.token_ids.size
    assert_greedy(output, reference, 1e-3)


async def test_progress_is_a_prefix_of_what_comes_out(engine: SGLangEngine) -> None:
    wanted = request(temperature=1.0, max_new_tokens=400)
    assert engine.progress(wanted.request_id) is None
    task = asyncio.create_task(engine.generate(wanted))
    await until(lambda: (seen := engine.progress(wanted.request_id)) is not None and seen.token_ids.size >= 100)
    seen = engine.progress(wanted.request_id)
    output = await task
    assert seen.token_ids.size == seen.logprobs.size < 400
    np.testing.assert_array_equal(seen.token_ids, output.token_ids[: seen.token_ids.size])
    np.testing.assert_array_equal(seen.logprobs, output.logprobs[: seen.logprobs.size])
    assert engine.progress(wanted.request_id) is None


async def test_abort_of_an_unknown_request_is_ignored(engine: SGLangEngine) -> None:
    engine.abort("f" * 32)
    assert (await engine.generate(request(max_new_tokens=2))).token_ids.size == 2


async def test_abort_all_returns_running_and_waiting_requests(engine: SGLangEngine) -> None:
    requests = [request(max_new_tokens=800) for _ in range(24)]
    tasks = [asyncio.create_task(engine.generate(r)) for r in requests]
    states = engine._run.manager.rid_to_state
    await until(lambda: any(len(s.output_ids) > 0 for s in states.values()))
    engine.abort_all()
    outputs = await asyncio.wait_for(asyncio.gather(*tasks), 30)
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert all(o.token_ids.size == o.logprobs.size for o in outputs)
    assert any(o.token_ids.size > 0 for o in outputs)
    assert sum(o.token_ids.size == 0 for o in outputs) >= 24 - 2 * 8  # never ran: the queue behind 8 running ones


async def test_a_cancelled_caller_frees_the_engine(engine: SGLangEngine) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=900)))
    states = engine._run.manager.rid_to_state
    await until(lambda: len(states) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not states)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"max_new_tokens": 1024}, r"token_ids \(6\) \+ max_new_tokens \(1024\) = 1030 tokens: at most \d+ fit"),
        ({"prompt": (1, 512)}, "token_ids has 512: token ids of this model are 0 to 511"),
        ({"prompt": (1, -1)}, "token_ids has -1"),
        ({"prompt": ()}, "at least one token"),
        ({"stop_token_ids": (700,)}, "sampling.stop_token_ids has 700"),
        ({"logit_bias": {512: 1.0}}, "sampling.logit_bias has 512"),
    ],
)
async def test_refused_with_the_reason(engine: SGLangEngine, bad: dict[str, Any], text: str) -> None:
    with pytest.raises(RequestRefused, match=text):
        await engine.generate(request(**bad))


async def test_what_sglang_refuses_is_refused(engine: SGLangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.worker.sglang.engine.check_request", lambda *_, **__: None)
    with pytest.raises(RequestRefused, match="SGLang refused the request"):
        await engine.generate(request(max_new_tokens=1 << 20))
    assert not engine._run.manager.rid_to_state


async def test_the_longest_request_runs_to_its_end(engine: SGLangEngine) -> None:
    limit = engine.info.context_length
    output = await engine.generate(request(tuple([3] * (limit - 8)), max_new_tokens=8))
    assert (output.finish_reason, output.token_ids.size) == ("length", 8)
    output = await engine.generate(request((3,), max_new_tokens=limit - 1))
    assert (output.finish_reason, output.token_ids.size) == ("length", limit - 1)


async def test_prefixes_are_shared_only_within_a_cache_key(engine: SGLangEngine) -> None:
    prompt = tuple(range(100, 180))
    outputs = [await engine.generate(request(prompt, cache_key=key, temperature=0)) for key in ("a1", "a1", "b2", "b2")]
    assert [o.cached_tokens > 0 for o in outputs] == [False, True, False, True]
    assert len({tuple(o.token_ids.tolist()) for o in outputs}) == 1


async def test_weights_reach_the_model_and_prefixes_of_older_ones_are_not_found(
    engine: SGLangEngine, reference: Any, line: Line, weights: dict[str, Any]
) -> None:
    prompt = tuple(range(200, 260))
    await engine.generate(request(prompt, cache_key="11"))
    zero = weights | {"lm_head.weight": 0 * weights["lm_head.weight"]}  # each token has probability 1 / vocabulary
    done = await update(engine, line, 12, zero)
    assert (done.prepared.ok, done.prepared.phase) == (True, "staged")
    assert (done.committed.ok, done.committed.phase, done.committed.readback) == (True, "done", True)
    assert done.committed.tensors == len(weights)
    output = await engine.generate(request(prompt, temperature=0, cache_key="12"))
    assert output.cached_tokens == 0
    np.testing.assert_allclose(output.logprobs, -np.log(512), atol=1e-4)
    done = await update(engine, line, 13, weights)
    assert done.committed.ok
    output = await engine.generate(request(prompt, temperature=0, cache_key="13"))
    assert output.cached_tokens == 0
    assert_greedy(output, reference, 1e-3, prompt)


async def test_the_first_half_leaves_the_old_weights_serving(
    engine: SGLangEngine, reference: Any, line: Line, weights: dict[str, Any]
) -> None:
    wanted = request(temperature=0, max_new_tokens=600)
    task = asyncio.create_task(engine.generate(wanted))
    await until(lambda: (seen := engine.progress(wanted.request_id)) is not None and seen.token_ids.size > 0)
    done = await update(engine, line, 14, {name: 0 * tensor for name, tensor in weights.items()}, commit=False)
    assert done.prepared.ok
    assert not task.done()
    assert_greedy(await task, reference, 1e-3)


@pytest.mark.parametrize(
    "case",
    [
        ("missing", r"missing \['model.norm.weight'\]"),
        ("extra", r"unknown \['model.layers.7.extra'\]"),
        ("shape", r"tensor model.norm.weight: shape \(127,\), the model's is \(128,\)"),
        ("nan", "tensor model.norm.weight: has NaN or Inf"),
    ],
)
async def test_other_tensors_than_the_models_are_refused_by_name(
    engine: SGLangEngine, reference: Any, line: Line, weights: dict[str, Any], case: tuple[str, str]
) -> None:
    change, said = case
    sent, norm = dict(weights), weights["model.norm.weight"]
    if change == "missing":
        del sent["model.norm.weight"]
    elif change == "extra":
        sent["model.layers.7.extra"] = norm
    elif change == "shape":
        sent["model.norm.weight"] = norm[:-1].clone()
    else:
        sent["model.norm.weight"] = norm.clone()
        sent["model.norm.weight"][3] = float("nan")
    done = await update(engine, line, 15, sent)
    report = done.committed or done.prepared
    assert (report.ok, report.intact) == (False, True)
    assert re.search(said, report.error)
    assert_greedy(await engine.generate(request(temperature=0, cache_key="13")), reference, 1e-3)


async def test_a_bit_that_changes_after_the_load_is_found_by_reading_back(
    engine: SGLangEngine, reference: Any, line: Line, weights: dict[str, Any]
) -> None:
    done = await update(engine, line, substitute_loader.TAMPERED, weights)
    assert (done.committed.ok, done.committed.phase, done.committed.intact) == (False, "load", False)
    assert "tensor lm_head.weight: the engine holds" in done.committed.error
    done = await update(engine, line, 667, weights)  # and a whole version mends it
    assert done.committed.ok
    assert_greedy(await engine.generate(request(temperature=0, cache_key="667")), reference, 1e-3)


async def test_a_failed_transfer_is_reported_not_raised(engine: SGLangEngine) -> None:
    nobody = TransferOrder(700, 1000, "127.0.0.1:1", "token", "", "worker", timeout_s=1.0)
    report = await engine.prepare_weights(nobody)
    assert (report.ok, report.phase, report.intact) == (False, "rendezvous", True)
    assert "nobody answers at 127.0.0.1:1" in report.error
    report = await engine.commit_weights(nobody)
    assert (report.ok, report.phase, report.intact) == (False, "load", True)
    assert report.error == "transfer 1000 is not prepared here"


async def test_one_engine_in_a_process(engine: SGLangEngine) -> None:
    with pytest.raises(EngineError, match="already running"):
        await engine.start()
    with pytest.raises(EngineError, match="one per process"):
        await SGLangEngine(engine.config).start()
    assert await engine.healthy()


async def test_a_killed_scheduler_is_noticed_and_the_engine_starts_again(
    engine: SGLangEngine, reference: Any, weights: dict[str, Any]
) -> None:
    """It comes back in bfloat16, so that this start serves two tests."""
    from rolloutmq.sync.packing.packing import PackedWeights  # noqa: PLC0415
    from rolloutmq.sync.wire.shelf import Offer, Shelf  # noqa: PLC0415

    others = descendants() - {p.pid for p in psutil.Process(active_children()[0].pid).children(recursive=True)}
    others -= {child.pid for child in active_children()}
    bystander = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)  # noqa: ASYNC220
    sigterm, sigquit = signal.getsignal(signal.SIGTERM), engine._run._sigquit
    tasks = [asyncio.create_task(engine.generate(request(max_new_tokens=900))) for _ in range(12)]
    snapshot, shelf = PackedWeights(900, weights).snapshot(), Shelf("127.0.0.1")
    offer = shelf.put(Offer("token", lambda: snapshot.manifest, len(snapshot.buckets), snapshot.buckets.__getitem__))
    transfer = asyncio.create_task(engine.prepare_weights(order_from([shelf.address], "token", snapshot)))
    await until(lambda: len(engine._run.manager.rid_to_state) == 12)
    await until(lambda: bool(offer._encoded))  # and then it waits for buckets, of which none comes
    [scheduler] = active_children()
    os.kill(scheduler.pid, signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, transfer, return_exceptions=True), 2)
    assert {type(r) for r in results} == {EngineDead}
    assert "exit code -9" in str(results[0])
    shelf.close()
    assert not await engine.healthy()
    with pytest.raises(EngineDead):
        await engine.generate(request())
    await engine.close()
    await engine.close()
    assert descendants() == others | {bystander.pid}
    assert signal.getsignal(signal.SIGTERM) is sigterm
    assert signal.getsignal(signal.SIGQUIT) == sigquit
    bystander.communicate()

    engine.config = engine.config.model_copy(update={"dtype": "bfloat16"})
    await engine.start()
    assert engine.info.dtype == "bfloat16"
    assert_greedy(await engine.generate(request(temperature=0)), reference.bfloat16(), 0.02)


async def test_a_failure_that_a_child_signals_does_not_end_this_process(engine: SGLangEngine) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=900)))
    await until(lambda: len(engine._run.manager.rid_to_state) == 1)
    os.kill(os.getpid(), signal.SIGQUIT)
    with pytest.raises(EngineDead, match="reported a failure"):
        await task
    assert not await engine.healthy()


async def test_a_model_that_cannot_be_loaded(engine: SGLangEngine, tmp_path: Any) -> None:
    await engine.close()
    missing = SGLangEngine(SGLangConfig(model=str(tmp_path / "nothing")))
    with pytest.raises(EngineError, match="nothing"):
        await missing.start()
    assert not await missing.healthy()
    assert active_children() == []
