"""Pictures, videos and sounds in prompts: what real SGLang says to them is what transformers says."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.specimens.tiny_audio import write_tiny_audio
from support.specimens.tiny_vision import write_tiny_vision

from rolloutmq.messages import GenerateJob, SamplingParams, encode, new_id
from rolloutmq.messages.broker.lease import Claim
from rolloutmq.messages.errors import RequestRefused
from rolloutmq.messages.model import MediaKind
from rolloutmq.producer.data import chat_job, medium
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
PLACES = {
    "images": "<|vision_start|><|image_pad|><|vision_end|>",
    "videos": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}
"""By the name of the processor's argument."""
CLIP = Path(__file__).with_name("colours.mp4")
"""Four frames of 56 x 168 in two seconds, each of three squares of one colour."""
VIDEO = {"mm_process_config": {"video": {"min_pixels": 56 * 56, "max_pixels": 112 * 112}}}
"""SGLang resizes a file's frames before the model's processor does: not to the sizes that real models need."""
SECONDS = 30
"""Of a sound. SGLang pads shorter ones to that, and lets the encoder hear the padding, which transformers masks."""
PARTED = "a~b" * 200
"""Without "~": pairs of tokens that are encoded as one each."""
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


def pictures() -> list[Any]:
    from PIL import Image  # noqa: PLC0415

    noise = np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8)
    return [Image.new("RGB", (84, 84), "red"), Image.new("RGB", (84, 84), "blue"), Image.fromarray(noise)]


def job(*media: Any, kind: MediaKind = "image") -> GenerateJob:
    parts: list[dict[str, Any]] = [{"type": kind, kind: one} for one in media]
    return chat_job(
        [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}], sampling=GREEDY, reply_to="c"
    )


def text_of(places: str, question: str) -> str:
    return f"<|im_start|>user\n{places}{question}<|im_end|>\n<|im_start|>assistant\n"


def parted_job(path: Path, one: Any, kind: MediaKind) -> GenerateJob:
    """PARTED behind a medium, as tokens. Nobody's encoding of the text "ab" gives them."""
    from transformers import AutoTokenizer  # noqa: PLC0415

    places = PLACES["audio" if kind == "audio" else f"{kind}s"]
    ids = AutoTokenizer.from_pretrained(path)(text_of(places, PARTED))["input_ids"]
    tilde = AutoTokenizer.from_pretrained(path)("~")["input_ids"][0]
    return GenerateJob.build(
        id=new_id(),
        token_ids=[token for token in ids if token != tilde],
        media=[medium(kind, one)],
        sampling=GREEDY,
        reply_to="c",
    )


def first_token(model: Any, path: Path, question: str = "What is it?", **media: Any) -> np.ndarray:
    """(vocabulary,): transformers' log-probabilities of the first token of the answer.

    media: for its processor. A "~" of the question is left out of the tokens.
    """
    from transformers import AutoProcessor  # noqa: PLC0415

    processor = AutoProcessor.from_pretrained(path)
    places = "".join(PLACES[name] * len(media[name]) for name in PLACES if name in media)
    inputs = processor(text=[text_of(places, question)], return_tensors="pt", **media)
    kept = inputs["input_ids"][0] != processor.tokenizer("~")["input_ids"][0]
    for name in {"input_ids", "attention_mask", "mm_token_type_ids"} & set(inputs):
        inputs[name] = inputs[name][:, kept]
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


def engine_of(path: Path, **extra: Any) -> SGLangEngine:
    """Not started."""
    return SGLangEngine(
        SGLangConfig(
            model=str(path),
            dtype="bfloat16",
            max_running=8,
            max_total_tokens=20_000,
            attention_backend="triton",
            sampling_backend="pytorch",
            prefill_cuda_graph=False,
            extra=extra,
        )
    )


def check(output: EngineOutput, expected: np.ndarray) -> None:
    """It is what the reference would have said, and as likely as there."""
    assert len(output.token_ids) == 8
    token = int(output.token_ids[0])
    assert abs(float(output.logprobs[0]) - float(expected[token])) < TOLERANCE
    assert expected.max() - expected[token] < 2 * TOLERANCE


def check_distinct(*expected: np.ndarray) -> None:
    """A model that did not look, or did not listen, could not pass."""
    for place, one in enumerate(expected):
        for other in expected[place + 1 :]:
            assert np.abs(one - other).max() > 4 * TOLERANCE


async def look_at_pictures(path: Path) -> None:
    model = write_tiny_vision(path)
    red, blue, noise = pictures()
    cases = [[red], [blue], [noise], [red, noise], [noise, red]]
    expected = [first_token(model, path, images=images) for images in cases]
    check_distinct(expected[0], expected[2])
    engine = engine_of(path, mm_attention_backend="triton_attn")
    await engine.start()
    try:
        assert "media" in engine.info.features
        outputs = await asyncio.gather(*(answer(engine, path, job(*images)) for images in cases))
        again = await answer(engine, path, job(red))  # its prefix, picture included, is cached by now
        for logprobs, output in zip([*expected, expected[0]], [*outputs, again], strict=True):
            check(output, logprobs)
        broken = job(b"\x89PNG\r\n\x1a\n" + bytes(32))  # begins as a picture does, and is none
        with pytest.raises(RequestRefused):
            await answer(engine, path, broken)
        assert len((await answer(engine, path, job(blue))).token_ids) == 8  # and the engine lives
    finally:
        await engine.close()


def test_pictures_are_seen_as_transformers_sees_them(tmp_path: Path) -> None:
    asyncio.run(look_at_pictures(tmp_path / "vision"))


async def watch_videos(path: Path) -> None:
    from decord import VideoReader  # noqa: PLC0415 – what SGLang reads files with

    model = write_tiny_vision(path, ())
    clip = VideoReader(str(CLIP)).get_batch([0, 1, 2, 3]).asnumpy()
    noise = np.random.default_rng(0).integers(0, 255, clip.shape, dtype=np.uint8)
    timed = {"video_metadata": [{"fps": 2.0, "total_num_frames": 4, "frames_indices": [0, 1, 2, 3]}]}
    file = first_token(model, path, videos=[clip])  # SGLang does not tell this model how fast a file's frames follow
    shown = [first_token(model, path, videos=[one], do_sample_frames=False, **timed) for one in (clip, noise)]
    both = first_token(
        model, path, videos=[noise, clip], do_sample_frames=False, video_metadata=timed["video_metadata"] * 2
    )
    check_distinct(*shown, both)
    parted, joined = (
        first_token(model, path, question, videos=[clip]) for question in (PARTED, PARTED.replace("~", ""))
    )
    check_distinct(parted, joined)
    engine = engine_of(path, mm_attention_backend="triton_attn", **VIDEO)
    await engine.start()
    try:
        frames = [(one, {"fps": 2.0}) for one in (clip, noise)]
        for expected, videos in ((file, [CLIP]), (shown[0], frames[:1]), (shown[1], frames[1:]), (both, frames[::-1])):
            check(await answer(engine, path, job(*videos, kind="video")), expected)
        picture = pictures()[0]
        check(await answer(engine, path, job(picture)), first_token(model, path, images=[picture]))
        broken = job(b"\0\0\0\x18ftypmp42" + bytes(64), kind="video")
        with pytest.raises(RequestRefused):
            await answer(engine, path, broken)
        check(await answer(engine, path, job(CLIP, kind="video")), file)
        check(await answer(engine, path, parted_job(path, CLIP, "video")), parted)
    finally:
        await engine.close()


def test_videos_are_seen_as_transformers_sees_them(tmp_path: Path) -> None:
    asyncio.run(watch_videos(tmp_path / "video"))


def sounds() -> list[np.ndarray]:
    """A low tone and a high one: (n,) float32 at 16 kHz."""
    times = np.arange(16_000 * SECONDS) / 16_000
    return [np.sin(2 * np.pi * pitch * times).astype(np.float32) for pitch in (200, 3000)]


async def listen(path: Path) -> None:
    model = write_tiny_audio(path)
    low, high = sounds()
    cases = [[low], [high], [low, high], [high, low]]
    expected = [first_token(model, path, audio=case, sampling_rate=16_000) for case in cases]
    check_distinct(*expected)
    parted, joined = (
        first_token(model, path, question, audio=[low], sampling_rate=16_000)
        for question in (PARTED, PARTED.replace("~", ""))
    )
    check_distinct(parted, joined)
    engine = engine_of(path)
    await engine.start()
    try:
        for case, logprobs in zip(cases, expected, strict=True):
            check(await answer(engine, path, job(*case, kind="audio")), logprobs)
        broken = job(b"RIFF\x24\0\0\0WAVE" + bytes(32), kind="audio")
        with pytest.raises(RequestRefused):
            await answer(engine, path, broken)
        check(await answer(engine, path, job(low, kind="audio")), expected[0])
        check(await answer(engine, path, parted_job(path, low, "audio")), parted)
    finally:
        await engine.close()


def test_sounds_are_heard_as_transformers_hears_them(tmp_path: Path) -> None:
    asyncio.run(listen(tmp_path / "audio"))
