"""The weight benchmark runs end to end on a CPU, small; what it makes of clock readings is right; shapes are true."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.sync.bench import EXTRAS, PATHS, Plan, settled
from benchmarks.sync.child import Child, ChildFailed
from benchmarks.sync.figures import best, gb_s, ratios, span_ms, stall_ms, steps, summary
from benchmarks.sync.session import together
from benchmarks.sync.shapes import SHAPES
from rolloutmq.messages import ConfigError

KEYS = {
    "raw_gb_s", "stock_tensor_gb_s", "stock_bucket_gb_s", "ours_gb_s", "ours_unverified_gb_s", "raw_ms",
    "stock_tensor_ms", "stock_bucket_ms", "ours_ms", "ours_unverified_ms", "ours_publish_ms", "stall_ms",
    "stall_overlapped_ms", "stall_resume_ms", "first_sync_ms", "regroup_ms", "late_join_ms", "nbytes",
    "tensors", "rounds", "errors",
}  # fmt: skip


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_small_run_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_spec("sglang") is None:
        pytest.skip("SGLang is not installed")
    out = tmp_path / "results" / "sync.json"
    plan = Plan("tiny", device="cpu", running=4, rounds=2)
    results = harness.run(plan, out, quiet=True)
    assert json.loads(capsys.readouterr().out) == results == json.loads(out.read_text())
    figures = results["shapes"]["tiny"]
    assert figures["errors"] == {}
    assert figures.keys() >= KEYS
    assert (figures["nbytes"], figures["tensors"]) == (SHAPES["tiny"].nbytes, 46)
    for path in PATHS:
        assert figures[f"{path}_ms"] > 0
        assert figures[f"{path}_gb_s"] == pytest.approx(figures["nbytes"] / figures[f"{path}_ms"] / 1e6, abs=0.01)
    assert {len(found) for found in figures["rounds"].values()} == {2}
    # Nothing is faster than the wire, and the whole way is longer than a part of it.
    assert (
        min(min(found) for key, found in figures["rounds"].items() if not key.startswith("raw")) > figures["raw_ms"] / 2
    )
    assert figures["ours_details"]["ours:staged"]["staged"]
    assert figures["ours_details"]["ours:staged"]["readback"]
    assert not figures["ours_details"]["ours_unverified:staged"]["readback"]
    assert figures["stall_ms"] is None  # a CPU always stages
    for key in ("stall_overlapped_ms", "stall_resume_ms", "stall_stock_ms"):
        assert figures[key] >= 0
        assert len(figures["stalls"][key]["rounds"]) == 3
    for key in ("ours_publish_ms", "first_sync_ms", "regroup_ms", "late_join_ms"):
        assert 0 < figures[key] < 60_000
    assert results["device"] == "cpu"
    assert results["host"]["packages"].keys() >= {"torch", "sglang"}


async def test_a_child_tells_why_a_call_failed_and_that_it_is_gone() -> None:
    child = Child("benchmarks.sync.trainer", "trainer")
    await child.start()
    try:
        with pytest.raises(ChildFailed, match="KeyError: 'huge'"):
            await child.call("open", 60, shape="huge", device="cpu")
        assert child._process is not None
        asked = child.call("open", 60, shape="8b", device="cpu")
        child._process.kill()
        with pytest.raises(ChildFailed, match="trainer ended"):
            await asked
    finally:
        await child.close()
    with pytest.raises(ChildFailed, match="not running"):
        await child.call("open", 60, shape="tiny", device="cpu")


async def test_a_cause_is_told_before_its_consequences() -> None:
    async def fail(text: str) -> None:
        raise ChildFailed(text)

    with pytest.raises(ChildFailed, match="out of memory"):
        await together(fail("trainer ended"), fail("receiver 0: out of memory"))
    with pytest.raises(ChildFailed, match="trainer ended"):
        await together(fail("trainer ended"))


def test_spans_and_rates() -> None:
    assert span_ms([(10.0, 10.5), (9.9, 10.2), (10.1, 10.6)]) == pytest.approx(700)
    assert gb_s(16_400_000_000, 44.0) == pytest.approx(372.7, abs=0.1)


def test_a_stall_is_the_longest_silence_around_the_update_less_a_step() -> None:
    stream = [0.00, 0.01, 0.02, 0.03, 0.11, 0.12, 0.13]
    other = [moment + 0.001 for moment in stream]
    assert steps([stream, other]) == pytest.approx(0.01)
    assert stall_ms([stream, other], (0.032, 0.105), 0.01) == pytest.approx((0.11 - 0.031 - 0.01) * 1e3)
    # An update between two tokens that came on time stalled nothing; a silence elsewhere is not the update's.
    assert stall_ms([stream], (0.0101, 0.0102), 0.01) == pytest.approx(0, abs=1e-6)
    assert stall_ms([stream], (0.121, 0.122), 0.01) == pytest.approx(0, abs=1e-6)
    # Tokens that are still on their way when the update says it is over are waited for within the slack.
    assert stall_ms([[0.0, 0.01, 0.02, 0.09]], (0.005, 0.015), 0.01, slack_s=0.01) == pytest.approx(60)


@pytest.mark.parametrize("update", [(-0.5, 0.015), (0.025, 0.5)])
def test_without_tokens_on_both_sides_there_is_no_stall_to_tell(update: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="no token"):
        stall_ms([[0.0, 0.01, 0.02, 0.03]], update, 0.01)


def test_the_best_variant_counts_and_what_failed_is_no_number() -> None:
    rounds = {"raw:1": [3.0, 1.0, 2.0], "raw:16": [1.5, 1.4, 9.0], "stock_tensor": [8.0], "ours:direct": []}
    assert best(rounds, "raw") == ("16", 1.5)
    assert best(rounds, "ours") is None
    figures = summary(3_000_000, rounds, ["raw", "stock_tensor", "ours"])
    assert figures["raw_gb_s"] == 2.0
    assert (figures["stock_tensor_ms"], figures["stock_tensor_variant"]) == (8.0, None)
    assert figures["ours_ms"] is figures["ours_gb_s"] is None
    assert ratios(figures) == {"ours_of_raw": None, "ours_over_stock": None, "verification_cost": None}
    good = {"raw_ms": 9.0, "ours_ms": 10.0, "ours_unverified_ms": 8.0, "stock_tensor_ms": 40.0, "stock_bucket_ms": 20.0}
    assert ratios(good) == {"ours_of_raw": 0.9, "ours_over_stock": 2.0, "verification_cost": 0.25}


@pytest.mark.parametrize("name", ["tiny", "0.6b", "4b", "8b"])
def test_a_checkpoint_of_transformers_has_the_same_tensors(name: str) -> None:
    from rolloutmq.worker.cpu_support import prepare_transformers  # noqa: PLC0415

    prepare_transformers()
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    shape = SHAPES[name]
    settings = shape.config()
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if shape.tied:
        expected.pop("lm_head.weight", None)
    assert dict(shape.tensors()) == expected


def test_the_command_line_is_checked() -> None:
    assert settled(Plan("8b, tiny", device="cpu")).shapes == "8b,tiny"
    with pytest.raises(ConfigError, match="7b"):
        settled(Plan("7b", device="cpu"))
    with pytest.raises(ConfigError, match="some of raw"):
        settled(Plan("tiny", "raw,fast", device="cpu"))
    with pytest.raises(ConfigError, match="--device"):
        settled(Plan("tiny", device="tpu"))
    with pytest.raises(ConfigError, match="takes 65 GPUs"):
        settled(Plan("tiny", receivers=64, device="cuda"))
    with pytest.raises(ConfigError, match="on the trainer's GPU"):
        settled(Plan("tiny", receivers=2, device="same"))
    plan = settled(Plan(paths="ours,raw,stall", device="cpu"))
    assert (plan.wanted(PATHS), plan.wanted(EXTRAS)) == (("raw", "ours"), ("stall",))
    assert (plan.shapes, plan.running) == ("tiny", 16)
