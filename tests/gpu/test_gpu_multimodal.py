"""Pictures in prompts: what real SGLang says to them is what transformers says, and a job brings them all the way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.specimens.tiny_vision import write_tiny_vision

from rolloutmq.messages import GenerateJob, SamplingParams, encode
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.producer.data import chat_job
from rolloutmq.worker.engine.protocol import EngineOutput
from rolloutmq.worker.jobs.intake import admit
from rolloutmq.worker.sglang.engine import SGLangConfig, SGLangEngine
from rolloutmq.worker.text.tokenizer import ModelTokenizer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]
TOLERANCE = 0.05
"""Of a log-probability: the engine computes in bfloat16, the reference in float32 on the same bfloat16 weights."""
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def pictures() -> list[Any]:
    from PIL import Image  # noqa: PLC0415

    noise = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    return [Image.new("RGB", (84, 84), "red"), Image.new("RGB", (84, 84), "blue"), Image.fromarray(noise)]


def job(*images: Any) -> GenerateJob:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return chat_job(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], sampling=GREEDY, reply_to="c"
    )


def first_token(model: Any, path: Path, images: list[Any]) -> np.ndarray:
    """(vocabulary,): transformers' log-probabilities of the first token of the answer."""
    from transformers import AutoProcessor  # noqa: PLC0415

    processor = AutoProcessor.from_pretrained(path)
    places = "<|vision_start|><|image_pad|><|vision_end|>" * len(images)
    text = f"<|im_start|>user\n{places}What is it?<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=[text], images=images, return_tensors="pt")
    with torch.no_grad():
        answer = model.generate(
            **inputs, max_new_tokens=1, do_sample=False, output_scores=True, return_dict_in_generate=True
        )
    found: np.ndarray = torch.log_softmax(answer.scores[0][0].float(), -1).numpy()
    return found


async def answer(engine: SGLangEngine, path: Path, asked: GenerateJob) -> EngineOutput:
    """As a worker does it: from the payload."""
    held = admit(Claim(asked.id, 1, 1, 0.0, None, encode(asked)), engine.info, ModelTokenizer(str(path)))
    sample: Any = held.samples[0]
    return await engine.generate(sample.next_request(0))


async def _run(path: Path) -> None:
    model = write_tiny_vision(path)
    red, blue, noise = pictures()
    cases = [[red], [blue], [noise], [red, noise], [noise, red]]
    expected = [first_token(model, path, images) for images in cases]
    # A model that did not look could not pass.
    assert np.abs(expected[0] - expected[2]).max() > 4 * TOLERANCE
    engine = SGLangEngine(
        SGLangConfig(
            model=str(path),
            dtype="bfloat16",
            max_running=8,
            max_total_tokens=20_000,
            attention_backend="triton",
            sampling_backend="pytorch",
            prefill_cuda_graph=False,
            extra={"mm_attention_backend": "triton_attn"},
        )
    )
    await engine.start()
    try:
        assert "media" in engine.info.features
        outputs = await asyncio.gather(*(answer(engine, path, job(*images)) for images in cases))
        again = await answer(engine, path, job(red))  # its prefix, picture included, is cached by now
        for logprobs, output in zip([*expected, expected[0]], [*outputs, again], strict=True):
            assert len(output.token_ids) == 8
            token = int(output.token_ids[0])
            assert abs(float(output.logprobs[0]) - float(logprobs[token])) < TOLERANCE
            assert logprobs.max() - logprobs[token] < 2 * TOLERANCE
        broken = job(b"\x89PNG\r\n\x1a\n" + bytes(32))  # begins as a picture does, and is none
        with pytest.raises(RequestRefused):
            await answer(engine, path, broken)
        assert len((await answer(engine, path, job(blue))).token_ids) == 8  # and the engine lives
    finally:
        await engine.close()


def test_pictures_are_seen_as_transformers_sees_them(tmp_path: Path) -> None:
    asyncio.run(_run(tmp_path / "vision"))
