"""Media on real SGLang, turn by turn: each turn is shown all media so far, and the tokens stay as they were sampled."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.engines.remote import RemoteEngine
from support.specimens.tiny_vision import write_tiny_vision

from rolloutmq import EpisodeLimits, RolloutClient, SamplingParams
from rolloutmq.messages.errors import FeatureUnavailable, InvalidField, JobFailed
from rolloutmq.ops.redis.embedded import EmbeddedRedis
from rolloutmq.producer.data import ToolRegistry, medium
from rolloutmq.producer.episodes import ToolEnvironment
from rolloutmq.producer.skyrl import SkyRLEngine
from rolloutmq.producer.verl import PoolServer, PoolSettings
from rolloutmq.worker.sglang.engine import SGLangConfig

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]
TOLERANCE = 0.01
"""Of a log-probability: both compute in float32. Other media change one by 0.1 and more."""
START, PAD, END = 3, 5, 4
"""<|vision_start|>, <|image_pad|> and <|vision_end|>."""
VIDEO_PAD = 6
ROOT = Path(__file__).parents[4]
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (84, 112, 3), dtype=np.uint8))
GREEDY = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
LOGPROBS = GREEDY | {"logprobs": 0}


class Model:
    """The reference: the same checkpoint in transformers."""

    def __init__(self, path: Path) -> None:
        self.path, self._model = path, write_tiny_vision(path, ())
        from transformers import AutoProcessor  # noqa: PLC0415

        self.processor = AutoProcessor.from_pretrained(path)

    def expanded(self, ids: list[int], pictures: list[Any] = [], videos: list[Any] = []) -> dict[str, Any]:  # noqa: B006
        """The model's inputs for ids with one place for each medium; fps 2."""
        inputs: dict[str, Any] = {}
        if pictures:
            inputs |= self.processor.image_processor(images=pictures, return_tensors="pt")
        if videos:
            about = [{"fps": 2.0, "total_num_frames": len(one), "frames_indices": range(len(one))} for one in videos]
            inputs |= self.processor.video_processor(
                videos=videos, video_metadata=about, do_sample_frames=False, return_tensors="pt"
            )
            inputs.pop("video_metadata", None)
            inputs["second_per_grid_ts"] = torch.ones(len(videos))
        counts = {
            pad: iter(int(grid.prod()) // 4 for grid in inputs.get(name, ()))
            for pad, name in ((PAD, "image_grid_thw"), (VIDEO_PAD, "video_grid_thw"))
        }
        whole = [one for token in ids for one in [token] * (next(counts[token]) if token in counts else 1)]
        kinds = [{PAD: 1, VIDEO_PAD: 2}.get(token, 0) for token in whole]
        return inputs | {"input_ids": torch.tensor([whole]), "mm_token_type_ids": torch.tensor([kinds])}

    def next_token(self, ids: list[int], **media: Any) -> np.ndarray:
        """(vocabulary,): log-probabilities of the token behind the ids."""
        with torch.no_grad():
            logits = self._model(**self.expanded(ids, **media)).logits[0, -1]
        found: np.ndarray = torch.log_softmax(logits.float(), -1).numpy()
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def redis_url(model: Model) -> Iterator[str]:
    config = SGLangConfig(model=str(model.path), dtype="float32", max_running=8, max_total_tokens=32768)
    engine = RemoteEngine(config, model.path.with_name("engine.log"))
    try:
        with EmbeddedRedis() as server, engine.worker(server.url):
            yield server.url
    finally:
        engine.close()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[RolloutClient]:
    async with RolloutClient(redis_url) as opened:
        yield opened


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToolRegistry]:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "verl"))
    yield ToolRegistry.load(ROOT / "examples" / "verl" / "image_zoom.yaml")
    sys.modules.pop("image_zoom", None)


def among(logprobs: np.ndarray) -> Any:
    """What log-probabilities are divided by if there are only these."""
    return np.logaddexp.reduce(logprobs)


async def test_a_picture_that_a_tool_answers_with_is_seen_in_the_next_turn(
    client: RolloutClient, model: Model, registry: ToolRegistry
) -> None:
    """The call's label is sampled as "a" and "b", though all that is encoded has "ab" as one token."""
    arguments = r'\{"bbox_2d": \[0, 0, 56, [5-8]0\], "label": "ab"\}'
    call = rf'[A-Z]<tool_call>\n\{{"name": "image_zoom_in_tool", "arguments": {arguments}\}}\n</tool_call>'
    encode = model.processor.tokenizer
    ((joined,), letters) = encode("ab")["input_ids"], encode("ABCDEFGHIJKLMNOPQRSTUVWXYZ")["input_ids"]
    prompt = [{"role": "user", "content": [{"type": "image", "image": NOISE}, {"type": "text", "text": "Look"}]}]
    kwargs = {"image_zoom_in_tool": {"create_kwargs": {"image": NOISE}}}
    episodes = client.episodes(
        [0],
        lambda _: ToolEnvironment(prompt, registry, tools_kwargs=kwargs),
        limits=EpisodeLimits(turns=3),
        sampling=SamplingParams(max_new_tokens=200, regex=call, logit_bias={joined: -100.0}, temperature=0.0),
        tools=registry.tools,
        tool_parser="json",
    )
    (episode,) = [one async for one in episodes]
    assert (episode.stop, len(episode.turns), episode.error) == ("turns", 3, None)
    shown, history = [NOISE], list[int]()
    for turn in episode.turns:
        ids = turn.result.prompt_ids.tolist()
        assert ids[: len(history)] == history  # as they were sampled
        assert ids.count(PAD) == len(shown)  # one place for each picture
        blank = [*shown[:-1], Image.new("RGB", shown[-1].size)]
        seen, unseen = (model.next_token(ids, pictures=pictures)[letters] for pictures in (shown, blank))
        place = letters.index(int(turn.result.token_ids[0]))  # a letter, so logprobs are among letters
        found, expected, blind = turn.result.logprobs[0], seen[place] - among(seen), unseen[place] - among(unseen)
        assert abs(found - expected) < TOLERANCE < abs(found - blind)
        (outcome,) = turn.info["outcomes"]
        history = [*ids, *turn.result.token_ids.tolist()]
        assert joined not in turn.result.token_ids
        box = turn.result.tool_calls[0].arguments["bbox_2d"]
        shown.append(NOISE.crop(box))
        assert outcome.content == f"This is the part {box} with ab."
    assert [one.kind for one in episode.history.media] == ["image"] * 3


async def test_a_session_shows_all_media_so_far(client: RolloutClient, model: Model) -> None:
    red = Image.new("RGB", (84, 84), "red")
    async with client.session(sampling=SamplingParams(**GREEDY)) as session:
        shown: list[Any] = []
        for picture in (NOISE, red):
            shown.append(picture)
            said = await session.generate(
                [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "ab?"}]}]
            )
            expected = model.next_token(said.prompt_ids.tolist(), pictures=shown)
            assert abs(float(said.logprobs[0]) - float(expected[said.token_ids[0]])) < TOLERANCE
        before = len(session)
        await session.generate([1, 70, 2, 1])
        branch = session.branch(before)
        again = await branch.generate([1, 70, 2, 1])
        expected = model.next_token(branch.token_ids[: before + 4].tolist(), pictures=shown)
        assert abs(float(again.logprobs[0]) - float(expected[again.token_ids[0]])) < TOLERANCE


async def test_a_session_of_skyrls_engine_shows_them_too(redis_url: str, model: Model) -> None:
    engine = SkyRLEngine(redis_url, tokenizer=str(model.path))
    session, ids, shown, rid = await engine.open_session(), list[int](), list[Any](), None
    assert session is not None
    for pictures in ([NOISE], [], [NOISE.crop((0, 0, 56, 56))]):
        prompt = [1, 70, *[START, PAD, END] * len(pictures), 71]
        ids, shown = ids + prompt, shown + pictures
        given: Any = {"prompt_token_ids": [prompt]} | ({"image_data": [pictures]} if pictures else {})
        output = await engine.generate_with_session(session, {**given, "sampling_params": LOGPROBS}, rid=rid)
        expected = model.next_token(ids, pictures=shown)
        (sampled,), (logprobs,) = output["response_ids"], output["response_logprobs"]
        assert abs(logprobs[0] - float(expected[sampled[0]])) < TOLERANCE
        ids, rid = ids + sampled, output["request_ids"][0]
    with pytest.raises(InvalidField, match="where the places of media are"):
        await engine.generate_with_session(session, {"prompt_token_ids": [[9]]}, rid=rid, offset=4)
    await engine.teardown()


@pytest.fixture
async def server(redis_url: str) -> AsyncIterator[PoolServer]:
    made = PoolServer(PoolSettings(redis_url=redis_url), prompt_length=512, response_length=64)
    yield made
    await made.aclose()


PARAMS = {"temperature": 0.0, "max_tokens": 4, "logprobs": True}


@pytest.mark.parametrize("expanded", [False, True])
async def test_verls_pictures_and_frames_reach_the_model(server: PoolServer, model: Model, expanded: bool) -> None:
    """verl's agent loops give prompts in which a medium has as many tokens as the processor makes of it."""
    frames = np.random.default_rng(1).integers(0, 255, (4, 56, 168, 3), dtype=np.uint8)
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2).float()  # as qwen-vl-utils gives them
    about = {"fps": 30.0, "frames_indices": torch.tensor([0, 15, 30, 45]), "total_num_frames": 60}  # so 2 a second
    for pad, given, media in (
        (PAD, {"image_data": [NOISE, NOISE.crop((0, 0, 56, 56))]}, {"pictures": [NOISE, NOISE.crop((0, 0, 56, 56))]}),
        (VIDEO_PAD, {"video_data": [(tensor, about)], "mm_processor_kwargs": {}}, {"videos": [frames]}),
    ):
        ids = [1, 70, *[START, pad, END] * len(next(iter(media.values()))), 71, 2, 1]
        expected = model.next_token(ids, **media)
        sent = model.expanded(ids, **media)["input_ids"][0].tolist() if expanded else ids
        output = await server.generate(sent, PARAMS, "r", **given)
        assert abs(output["log_probs"][0] - float(expected[output["token_ids"][0]])) < TOLERANCE
        assert expected.max() - expected[output["token_ids"][0]] < TOLERANCE


async def test_media_without_a_place_and_places_without_media_are_refused(server: PoolServer) -> None:
    for prompt, pictures in (([1, START, PAD, END, START, PAD, END], [NOISE]), ([1, START, PAD, END], [NOISE] * 2)):
        with pytest.raises(JobFailed, match=r"media: \d of kind image for \d places"):
            await server.generate(prompt, PARAMS, "r", image_data=pictures)
    both = {"image_data": [NOISE], "video_data": [np.zeros((2, 56, 56, 3), np.uint8)]}
    with pytest.raises(JobFailed, match="cannot be beside files"):
        await server.generate([1, START, PAD, END, START, VIDEO_PAD, END], PARAMS, "r", **both)
    with pytest.raises(FeatureUnavailable, match="min_pixels"):
        await server.generate([1, PAD], PARAMS, "r", image_data=[NOISE], mm_processor_kwargs={"min_pixels": 3})


async def test_equal_frames_at_another_rate_are_another_video(client: RolloutClient) -> None:
    """SGLang's prefix cache tells them apart by what is seen alone."""
    frames = np.random.default_rng(2).integers(0, 255, (4, 56, 168, 3), dtype=np.uint8)
    said = []
    for fps in (2.0, 24.0, 2.0):
        video = medium("video", (frames, {"fps": fps}))
        prompt = [1, 70, START, VIDEO_PAD, END, 71]
        (group,) = await client.generate([prompt], sampling=SamplingParams(**GREEDY), media=[video])
        said.append(float(group.results[0].logprobs[0]))
    assert abs(said[0] - said[2]) < 1e-3 < abs(said[0] - said[1])
