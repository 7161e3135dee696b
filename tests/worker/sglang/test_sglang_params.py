"""A request in SGLang's form; and the registry of logit processors, which needs no engine either."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages.errors import ConfigError, RequestRefused
from rolloutmq.messages.model import Medium
from rolloutmq.messages.model.sampling import LogitProcessor, LogprobOptions, SamplingParams
from rolloutmq.worker.engine.protocol import NOTHING_MORE, EngineRequest, Wanted
from rolloutmq.worker.logit_processors import Registry, known_processors
from rolloutmq.worker.sglang.calls.request import generate_arguments

BUILT_IN = ["action_mask", "disallowed_tokens", "min_new_tokens", "temperature_schedule"]
MASK = LogitProcessor(name="action_mask", params={"token_ids": [1]})


def arguments(wanted: Wanted = NOTHING_MORE, *, deterministic: bool = False, **more: Any) -> dict[str, Any]:
    sampling = SamplingParams(**more.pop("sampling", {}))
    request = EngineRequest("r", np.array([5, 6, 7], np.int32), sampling, 9, "key", wanted=wanted, **more)
    return generate_arguments(request, marker=lambda: "told", deterministic=deterministic)


def test_who_asks_for_nothing_carries_nothing() -> None:
    assert arguments() == {
        "rid": "r",
        "input_ids": [5, 6, 7],
        "sampling_params": {
            "max_new_tokens": 9,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "ignore_eos": False,
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": False,
        "extra_key": "key",
        "lora_path": None,
    }


def test_what_is_wanted_is_asked_for() -> None:
    options = LogprobOptions(top=3, token_ids=(4, 2), prompt=True)
    wanted = Wanted(logprobs=options, hidden_states="all", routed_experts=True)
    first, later = (
        arguments(wanted),
        arguments(Wanted(logprobs=options, routed_experts=True, prompt=False), generated=2),
    )
    assert (first["top_logprobs_num"], first["token_ids_logprob"], first["logprob_start_len"]) == (3, [4, 2], 0)
    assert (first["return_hidden_states"], first["routed_experts_start_len"]) == ("last", 0)
    assert (later["logprob_start_len"], later["routed_experts_start_len"]) == (-1, 2)


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        (Wanted(logit_processors=(MASK,)), {"processors": [["action_mask", {"token_ids": [1]}]]}),
        (Wanted(logprobs=LogprobOptions(kind="scaled")), {"scaled": True}),
        (Wanted(hidden_states="all"), {"all_states": True}),
    ],
)
def test_what_the_scheduler_is_told(wanted: Wanted, told: dict[str, Any]) -> None:
    found = arguments(wanted, generated=2)
    [text] = found["sampling_params"]["custom_params"].values()
    assert json.loads(text) == {**told, "generated": 2}
    assert found["custom_logit_processor"] == "told"


def test_media_go_as_bytes_by_kind() -> None:
    media = [Medium(kind=kind, data=kind.encode()) for kind in ("image", "audio", "video", "image")]
    found = arguments(media=tuple(media))
    data = {name: found[name] for name in ("image_data", "audio_data", "video_data")}
    assert data == {"image_data": [b"image"] * 2, "audio_data": [b"audio"], "video_data": [b"video"]}


def test_greedy_sampling_has_no_logprobs_after_temperature() -> None:
    assert arguments(Wanted(logprobs=LogprobOptions(kind="scaled")), sampling={"temperature": 0.0}) == arguments(
        Wanted(), sampling={"temperature": 0.0}
    )


def test_seeds_are_for_deterministic_engines_where_everybody_has_one() -> None:
    assert "sampling_seed" not in arguments(Wanted(seed=3))["sampling_params"]
    assert arguments(Wanted(seed=3), deterministic=True)["sampling_params"]["sampling_seed"] == 3
    free = [arguments(deterministic=True)["sampling_params"]["sampling_seed"] for _ in range(3)]
    assert len(set(free)) == 3
    assert all(0 <= seed < 2**63 for seed in free)


def test_processors_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By configuration, and from an installed package."""
    (tmp_path / "ours.py").write_text(
        "from rolloutmq.worker.logit_processors import LogitProcessor\n"
        "class Mine(LogitProcessor): pass\n"
        "class Other: pass\n"
    )
    installed = tmp_path / "ours-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: ours\nVersion: 1.0\n")
    (installed / "entry_points.txt").write_text("[rolloutmq.logit_processors]\npackaged = ours:Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ours", raising=False)
    assert known_processors({"mine": "ours:Mine"}) == sorted([*BUILT_IN, "mine", "packaged"])
    registry = Registry({"mine": "ours:Mine"})
    registry.load_own()
    assert registry.names() == known_processors({"mine": "ours:Mine"})
    assert type(registry.get("mine")) is type(registry.get("packaged"))
    registry.check([LogitProcessor(name="mine", params={"any": 1}), MASK], 10)
    with pytest.raises(
        RequestRefused, match=r"logit_processors\[1\].name='yours': this worker has action_mask, .*, mine,"
    ):
        registry.check([MASK, LogitProcessor(name="yours")], 10)


def test_a_greedy_job_has_no_temperature_to_change() -> None:
    pytest.importorskip("torch")
    schedule = LogitProcessor(name="temperature_schedule", params={"points": [[0, 1.0]]})
    Registry().check([schedule, MASK], 10)
    Registry().check([MASK], 10, greedy=True)
    with pytest.raises(RequestRefused, match=r"logit_processors\[1\] temperature_schedule: sampling.temperature=0.0"):
        Registry().check([MASK, schedule], 10, greedy=True)


@pytest.mark.parametrize(
    ("own", "text"),
    [
        ({"action_mask": "ours:Mine"}, "logit_processors='action_mask': every worker has one of that name"),
        ({"mine": "nowhere:Mine"}, r"logit processor 'mine' \(nowhere:Mine\) cannot be loaded: ModuleNotFoundError"),
        ({"mine": "json"}, "cannot be loaded"),
        ({"mine": "json:JSONDecoder"}, "not a subclass of LogitProcessor"),
    ],
)
def test_mistakes_show_at_the_start(own: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Registry(own).load_own()
