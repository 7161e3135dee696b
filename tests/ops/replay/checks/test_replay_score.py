"""Recorded log-probabilities computed again, with transformers alone; the judge here goes token by token."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages import GenerateJob, LogitProcessor, RolloutResult, SamplingParams, Segment
from rolloutmq.ops.replay import Recorded, Settings, Verdict
from rolloutmq.ops.replay.checks import gaps_of, score
from rolloutmq.sync.disk import SnapshotStore, folder_name
from rolloutmq.sync.packing import PackedWeights

VERSIONS = (0, 1, 2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[int, Path]:
    """The model as version 0, and two more versions of it; of these only the tensors are on disk."""
    import torch  # noqa: PLC0415
    from transformers import Qwen2ForCausalLM  # noqa: PLC0415

    found, snapshots = {0: tiny_model}, tmp_path_factory.mktemp("weights")
    for version in VERSIONS[1:]:
        torch.manual_seed(version)
        model = Qwen2ForCausalLM.from_pretrained(tiny_model, dtype="float32")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * parameter.std().nan_to_num(1.0) * torch.randn_like(parameter))
        found[version] = snapshots / folder_name(version)
        model.save_pretrained(found[version])
        for name in ("config.json", "generation_config.json"):
            (found[version] / name).unlink()
    return found


@pytest.fixture(scope="module")
def models(folders: dict[int, Path]) -> dict[int, Any]:
    from transformers import AutoConfig, GenerationConfig, Qwen2ForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(folders[0])
    return {
        version: Qwen2ForCausalLM.from_pretrained(
            path, config=config, dtype="float32", generation_config=GenerationConfig()
        ).eval()
        for version, path in folders.items()
    }


def sampled(
    models: dict[int, Any],
    seed: int,
    *versions: tuple[int, int],
    in_place: tuple[int, ...] = (),
    legs: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
    **more: Any,
) -> Recorded:
    """Tokens drawn at random, with what the weights say about each: one token through the model after the other."""
    import torch  # noqa: PLC0415

    sampling, rng = sampling or SamplingParams(), np.random.default_rng(seed)
    prompt = rng.integers(1, 500, int(rng.integers(3, 40))).tolist()
    tokens = rng.integers(1, 30, sum(count for _, count in versions)).tolist()
    logprobs, cache, place = [], None, 0
    scaled = more.pop("logprob_kind", "raw")
    for version, count in versions:
        for token in range(place, place + count):
            if token in legs or not token:
                cache, fed = None, [*prompt, *tokens[:token]]
            else:
                fed = tokens[token - 1 : token]
            with torch.no_grad():
                told = models[version](torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache, logits = told.past_key_values, told.logits[0, -1]
            for other in set(tokens[:token]):
                logits[other] -= sampling.frequency_penalty * tokens[:token].count(other) + sampling.presence_penalty
                by = sampling.repetition_penalty
                logits[other] *= by if logits[other] < 0 else 1 / by
            for other, bias in sampling.logit_bias.items():
                logits[other] += bias
            if scaled == "scaled":
                logits /= sampling.temperature
            logprobs.append(float(torch.log_softmax(logits, -1)[tokens[token]]))
        place += count
    job = GenerateJob(id=f"{seed:032x}", token_ids=prompt, sampling=sampling, **more.pop("job", {}))
    result = RolloutResult(
        job_id=job.id, sample=0, n=1, group_id="g", token_ids=tokens, logprobs=logprobs, finish_reason="length",
        segments=[Segment(*one) for one in versions], legs=legs, in_place=in_place, prompt_ids=prompt,
        logprob_kind=scaled, **({"worker_id": "w1", "attempt": 1, "fingerprint": {"dtype": "float32"}} | more),
    )  # fmt: skip
    return Recorded(result, job, 1.0)


def scored(
    samples: list[Recorded], folders: dict[int, Path], adapters: Path | None = None, **more: Any
) -> list[Verdict]:
    return score(samples, Settings(model=str(folders[0]), snapshots=folders[1].parent, adapters=adapters, **more))


def states(verdicts: list[Verdict]) -> list[str]:
    return [verdict.state for verdict in verdicts]


def test_every_token_is_computed_with_the_weights_and_the_cache_it_was_sampled_on(
    folders: dict[int, Path], models: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [
        *(sampled(models, seed, (seed % 3, 5 + seed)) for seed in range(6)),
        sampled(models, 6, (0, 4), (2, 5), legs=(4,)),
        sampled(models, 7, (0, 4), (1, 3), (2, 5), in_place=(4, 7)),
        sampled(models, 8, (0, 4), (1, 6), (2, 5), in_place=(4,), legs=(7, 10)),
    ]
    moved: list[int] = []
    verdicts = scored(samples, folders, moved=moved.append)
    assert states(verdicts) == ["same"] * len(samples)
    assert sum(moved) == sum(len(one.result.token_ids) for one in samples), "a bar of it gets to its end"
    assert max(verdict.largest_gap for verdict in verdicts) < 1e-5
    assert [verdict.recorded for verdict in verdicts] == samples
    # However much goes through at once.
    from rolloutmq.ops.replay.checks import forward  # noqa: PLC0415

    monkeypatch.setattr(forward, "LOGITS_BYTES", 4 * 512 * 3)
    monkeypatch.setattr(import_module("rolloutmq.ops.replay.checks.score"), "BATCH_TOKENS", 30)
    assert states(scored(samples, folders)) == ["same"] * len(samples)
    # Another cache gives other log-probabilities: this test would see it.
    wrong = samples[7].result.model_copy(update={"in_place": (), "legs": (4, 7)})
    (other,) = scored([Recorded(wrong, samples[7].job, 1.0)], folders)
    assert (other.state, other.first, other.version) == ("differs", 4, 1)


def test_bias_penalties_and_temperature_are_applied(folders: dict[int, Path], models: dict[int, Any]) -> None:
    penalties = SamplingParams(frequency_penalty=0.5, presence_penalty=-0.3, repetition_penalty=1.4)
    biased = SamplingParams(logit_bias={5: 2.0, 7: -3.0}, temperature=0.7, repetition_penalty=0.8)
    samples = [
        sampled(models, 11, (1, 12), sampling=penalties),
        sampled(models, 12, (1, 5), (2, 7), legs=(5,), sampling=biased),
        sampled(models, 13, (1, 12), sampling=biased, logprob_kind="scaled"),
    ]
    assert states(scored(samples, folders)) == ["same"] * 3
    plain = [Recorded(one.result, GenerateJob(token_ids=[1], id=one.result.job_id), 1.0) for one in samples]
    assert states(scored(plain, folders)) == ["differs"] * 3


def test_what_cannot_be_computed_is_unverified_and_says_why(folders: dict[int, Path], models: dict[int, Any]) -> None:
    plain = sampled(models, 20, (0, 4), (1, 4), legs=(4,))
    told = {
        "its job is not in the journal": Recorded(plain.result, None, 1.0),
        "no log-probabilities": Recorded(plain.result.model_copy(update={"logprobs": None}), plain.job, 1.0),
        "sampling.regex": sampled(models, 21, (0, 4), sampling=SamplingParams(regex="a+")),
        "sampling.min_new_tokens": sampled(models, 22, (0, 4), sampling=SamplingParams(min_new_tokens=2)),
        "logit processor": sampled(models, 23, (0, 4), job={"logit_processors": (LogitProcessor(name="x"),)}),
        "no folder of adapters was given": sampled(models, 24, (0, 4), adapter="a", adapter_version=1),
        "version 9: there is no snapshot": Recorded(
            plain.result.model_copy(update={"segments": (Segment(0, 4), Segment(9, 4))}), plain.job, 1.0
        ),
        "which KV cache token 4": Recorded(plain.result.model_copy(update={"legs": ()}), plain.job, 1.0),
        "which KV cache token 0": Recorded(plain.result.model_copy(update={"in_place": (0,)}), plain.job, 1.0),
    }
    verdicts = scored(list(told.values()), folders)
    assert states(verdicts) == ["unverified"] * len(told)
    for why, verdict in zip(told, verdicts, strict=True):
        assert why in " ".join(verdict.reasons)
    # What was computed counts all the same.
    assert np.isnan(verdicts[6].logprobs).tolist() == [False] * 4 + [True] * 4
    assert np.isnan(verdicts[8].logprobs).tolist() == [True] * 4 + [False] * 4
    assert gaps_of(verdicts, Settings()).states == {"unverified": len(told)}


def test_a_folder_without_all_tensors_is_no_version(
    folders: dict[int, Path], models: dict[int, Any], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    tensors = load_file(folders[1] / "model.safetensors")
    del tensors["model.norm.weight"]
    folder = tmp_path / folder_name(1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (verdict,) = scored([sampled(models, 30, (1, 3))], folders | {1: folder})
    assert verdict.state == "unverified"
    assert "model.norm.weight" in verdict.reasons[0]


def test_a_corrupt_snapshot_is_named_and_nobody_is_blamed_for_it(
    folders: dict[int, Path], models: dict[int, Any], tmp_path: Path
) -> None:
    """One byte of one tensor, so that the forward pass of what is there would differ a little."""
    tensors = dict(models[1].state_dict())
    SnapshotStore(tmp_path).save(PackedWeights(1, tensors.items(), 1 << 20).snapshot())
    sample, there = sampled(models, 60, (1, 6)), folders | {1: tmp_path / folder_name(1)}
    assert states(scored([sample], there)) == ["same"]
    file = next(there[1].glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    (verdict,) = verdicts = scored([sample], there)
    assert verdict.state == "unverified"
    assert "version 1: " in verdict.reasons[0]
    assert "digest" in verdict.reasons[0]
    assert not gaps_of(verdicts, Settings()).findings


def test_an_adapter_is_applied_through_peft(folders: dict[int, Path], models: dict[int, Any], tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import AutoConfig, GenerationConfig, Qwen2ForCausalLM  # noqa: PLC0415

    config = AutoConfig.from_pretrained(folders[0])
    model = Qwen2ForCausalLM.from_pretrained(
        folders[1], config=config, dtype="float32", generation_config=GenerationConfig()
    ).eval()
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "a@3")
    more: dict[str, Any] = {"adapter": "a", "adapter_version": 3, "job": {"lora": "a"}}
    samples = [sampled({1: adapted}, 40, (1, 6), **more), sampled(models, 41, (1, 6))]
    assert states(scored(samples, folders, adapters=tmp_path)) == ["same", "same"]
    assert states(scored([sampled(models, 42, (1, 6), **more)], folders, adapters=tmp_path)) == ["differs"]


def test_half_precision_is_judged_by_means(folders: dict[int, Path], models: dict[int, Any]) -> None:
    rounded = sampled(models, 50, (1, 20), fingerprint={"dtype": "bfloat16"})
    off = rounded.result.logprobs + np.float32(0.01)  # type: ignore[operator]
    one = Recorded(rounded.result.model_copy(update={"logprobs": off}), rounded.job, 1.0)
    assert states(scored([one], folders)) == ["same"]
    assert states(scored([one], folders, mean_limit=0.005)) == ["differs"]
