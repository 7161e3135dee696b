"""Images, videos and audio: read where the job is made, checked, and fetched only from where it is allowed."""

from __future__ import annotations

import base64
import contextlib
import io
import threading
import wave
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolloutmq.messages import GenerateJob, decode, encode, new_id
from rolloutmq.messages.errors import InvalidField, RequestRefused
from rolloutmq.messages.fetch import fetch
from rolloutmq.messages.model.chat import ChatMessage
from rolloutmq.messages.model.media import MAX_MEDIUM_BYTES, Medium
from rolloutmq.producer.calls import History, prompt_fields
from rolloutmq.producer.data import chat_job, from_openai, medium
from rolloutmq.worker.engine.protocol import EngineOutput
from rolloutmq.worker.jobs.media import with_media_here
from rolloutmq.worker.jobs.sample import SampleRun

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
MP4 = b"\0\0\0\x18ftypmp42" + bytes(12)


def wav() -> bytes:
    out = io.BytesIO()
    with wave.open(out, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(bytes(32))
    return out.getvalue()


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


@pytest.fixture
def server() -> Iterator[str]:
    """On this host, so a private address: an image, a redirect to it, something huge, and a page."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = {"/image.png": PNG, "/page": b"<html>", "/huge": bytes(70_000)}.get(self.path)
            if self.path == "/moved":
                self.send_response(302)
                self.send_header("Location", "/image.png")
                self.end_headers()
            elif self.path == "/outside":
                self.send_response(302)
                self.send_header("Location", "http://elsewhere.invalid/image.png")
                self.end_headers()
            elif body is None:
                self.send_error(404)
            else:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_an_image_may_be_bytes_a_path_a_data_url_or_of_pil(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    file = tmp_path / "a b.png"
    file.write_bytes(PNG)
    for source in (PNG, bytearray(PNG), file, str(file), file.as_uri(), data_url(PNG), Medium(kind="image", data=PNG)):
        assert medium("image", source).data == PNG
    assert medium("image", PNG).mime == "image/png"
    drawn = medium("image", image.new("RGB", (3, 2), "red"))
    assert image.open(io.BytesIO(drawn.data or b"")).size == (3, 2)
    assert medium("audio", wav()).mime == "audio/wav"
    assert medium("video", MP4).mime == "video/mp4"


def test_a_text_may_be_base64(tmp_path: Path) -> None:
    """As SGLang and SkyRL take it. A JPEG's begins with /9j/, like a path."""
    jpeg = b"\xff\xd8\xff\xe0" + bytes(5000)
    for kind, data in (("image", PNG), ("image", jpeg), ("video", MP4), ("audio", wav())):
        text = base64.b64encode(data).decode()
        assert medium(kind, text).data == data  # type: ignore[arg-type]
        part = {"type": kind, kind: text}
        _, (found,) = from_openai([{"role": "user", "content": [part]}])  # no path, so `files` need not allow it
        assert found.data == data
    file = tmp_path / "Qk12"  # base64, too: of two bytes that a bitmap begins with
    file.write_bytes(PNG)
    with contextlib.chdir(tmp_path):
        assert medium("image", "Qk12").data == PNG
    with pytest.raises(InvalidField, match=f"at most {MAX_MEDIUM_BYTES} bytes"):
        medium("image", base64.b64encode(PNG + bytes(MAX_MEDIUM_BYTES)).decode())
    with pytest.raises(InvalidField, match=f"path='/dev/zero': at most {MAX_MEDIUM_BYTES} bytes"):
        medium("image", Path("/dev/zero"))
    with pytest.raises(InvalidField, match="base64"):
        medium("image", base64.b64encode(jpeg).decode() + "?")


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("image", b"<html>", "a file of image/bmp.*begins with b'<html>'"),
        ("video", PNG, "a file of .*video/mp4"),
        ("audio", b"", "1 to "),
        ("image", PNG + bytes(MAX_MEDIUM_BYTES), "1 to "),
        ("image", "/nowhere/at/all.png", "can be read"),
        ("image", "data:image/png,abc", "base64"),
        ("image", "data:image/png;base64,%%%", "base64"),
        ("image", 5, "bytes, a path"),
        ("audio", object(), "bytes, a path"),
    ],
)
def test_what_is_no_such_file_is_refused_with_the_reason(kind: Any, source: Any, why: str) -> None:
    with pytest.raises(InvalidField, match=why):
        medium(kind, source)


def test_frames_and_samples_stay_as_they_are() -> None:
    frames = np.random.default_rng(0).integers(0, 255, (4, 28, 56, 3), dtype=np.uint8)
    about = {"fps": 30.0, "frames_indices": [0, 15, 30, 45], "total_num_frames": 60}
    for source, fps in ((frames, 24.0), (np.moveaxis(frames, -1, 1).astype(np.float32), 24.0), ((frames, about), 2.0)):
        video = medium("video", source)
        assert (video.fps, video.mime) == (fps, "application/x-npy")
        assert np.array_equal(np.load(io.BytesIO(video.data or b"")), frames)
    samples = np.random.default_rng(0).normal(0, 0.3, 100).astype(np.float32)
    soundfile = pytest.importorskip("soundfile")
    for source, rate in ((samples, 16_000), ((samples, 8000), 8000)):
        read, known = soundfile.read(io.BytesIO(medium("audio", source).data or b""), dtype="float32")
        assert known == rate
        assert np.array_equal(read, samples)


@pytest.mark.parametrize(
    ("kind", "source", "why"),
    [
        ("video", np.full((2, 28, 28, 3), 0.5), "other numbers"),
        ("video", np.full((2, 28, 28, 3), 256), "other numbers"),
        ("video", np.zeros((28, 28, 3), np.uint8), "shape"),
        ("video", np.zeros((2, 28, 28, 4), np.uint8), "shape"),
        ("video", np.zeros((30, 448, 448, 3), np.uint8), "1 to "),
        ("video", (np.zeros((2, 28, 28, 3), np.uint8), {"fps": 0.0}), "fps"),
        ("audio", np.zeros((2, 100)), "shape"),
        ("audio", (np.zeros(100), "fast"), "samples of one channel"),
        ("image", np.zeros((28, 28, 3), np.uint8), "an image of PIL"),
    ],
)
def test_an_array_that_would_change_is_refused(kind: Any, source: Any, why: str) -> None:
    with pytest.raises(InvalidField, match=why):
        medium(kind, source)


def test_media_of_tokens_before_the_messages_come_first() -> None:
    message, picture, sound = ChatMessage(role="user", content=[{"type": "audio"}]), medium("image", PNG), wav()
    before = {"context_ids": [1, 2], "messages": [message]}
    GenerateJob.build(**before, media=[picture, medium("audio", sound)])
    for media in ([], [medium("audio", sound), picture]):
        with pytest.raises(InvalidField, match=r"for places of \['audio'\]"):
            GenerateJob.build(**before, media=media)


def test_a_prompt_may_bring_its_media() -> None:
    said = ChatMessage(role="assistant", content="What?")
    fields = prompt_fields([said, {"role": "user", "content": [{"type": "image", "image": PNG}]}])
    assert fields["messages"][0] is said
    assert [one.data for one in fields["media"]] == [PNG]
    with pytest.raises(InvalidField, match="no path"):  # of anybody's message
        prompt_fields([{"role": "user", "content": [{"type": "image_url", "image_url": "/etc/passwd"}]}])
    assert "media" not in prompt_fields([{"role": "user", "content": [{"type": "text", "text": "a"}]}])


def test_a_history_keeps_media_with_their_tokens() -> None:
    picture, sound = medium("image", PNG), medium("audio", wav())
    ids = np.arange(3, dtype=np.int32)
    history = History().given(ids, [picture]).given(ids).given(ids, [sound])
    assert history.media == (picture, sound)
    assert [history.upto(end).media for end in (0, 3, 5, 6, 9)] == [(), *[(picture,)] * 3, (picture, sound)]
    for end in (1, 8):
        with pytest.raises(InvalidField, match="where the place of"):
            history.upto(end)


def test_openai_messages_become_places_and_media_in_order(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(MP4)
    messages = [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "What is"},
                {"type": "image_url", "image_url": {"url": data_url(PNG), "detail": "low"}},
                {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav()).decode(), "format": "wav"}},
                {"type": "video_url", "video_url": {"url": "clip.mp4"}},
                {"type": "image", "image": PNG},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "f"}}], "refusal": None},
        {"role": "tool", "content": "4", "tool_call_id": "c"},
    ]
    chat, media = from_openai(messages, files=tmp_path)
    assert [one.kind for one in media] == ["image", "audio", "video", "image"]
    assert media[2].data == MP4
    assert chat[1].rendered()["content"] == [
        {"type": "text", "text": "What is"},
        {"type": "image"},
        {"type": "audio"},
        {"type": "video"},
        {"type": "image"},
    ]
    assert chat[3].rendered() == {"role": "tool", "content": "4", "tool_call_id": "c"}
    job = chat_job(messages, files=tmp_path, n=2)
    assert (job.media, job.n) == (media, 2)
    assert decode(encode(job), GenerateJob) == job
    assert job.features_used() == ["media"]


@pytest.mark.parametrize(
    ("content", "where", "why"),
    [
        ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "messages.0.content.0", "`files`"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "messages.0.content.0", "`files`"),
        ([{"type": "image", "image": "/etc/passwd"}], "messages.0.content.0", "`files`"),
        ([{"type": "text", "text": "a"}, {"type": "smell"}], "messages.0.content.1", "a part of type"),
        ([{"type": "image_url", "image_url": {"url": data_url(b"<html>")}}], "messages.0.content.0.image", "a file"),
        (5, "messages.0.content", "string"),
    ],
)
def test_a_part_that_cannot_be_taken_is_named(content: Any, where: str, why: str) -> None:
    with pytest.raises(InvalidField, match=why) as refused:
        from_openai([{"role": "user", "content": content}])
    assert refused.value.field.startswith(where)


def test_sounds_and_pictures_that_no_file_can_hold() -> None:
    Image = pytest.importorskip("PIL.Image")
    tone = np.zeros(8, np.float32)
    for sound in ((tone, 0), (tone, -1), tone[:0], np.full(8, np.nan)):
        with pytest.raises(InvalidField, match="samples of one channel, or"):
            medium("audio", sound)
    with pytest.raises(InvalidField, match="an image that PNG can hold"):
        medium("image", Image.new("F", (4, 4)))
    assert medium("image", Image.new("CMYK", (4, 4))).mime == "image/png"


def test_a_path_in_a_message_stays_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(PNG)
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link.png").symlink_to(tmp_path / "secret.png")
    for url in ("../secret.png", str(tmp_path / "secret.png"), "link.png"):
        with pytest.raises(InvalidField, match="a path in"):
            from_openai(
                [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}], files=tmp_path / "open"
            )


@pytest.mark.parametrize("kinds", [[], ["video"], ["image", "image"]])
def test_media_and_places_must_agree(kinds: list[Any]) -> None:
    message = ChatMessage(role="user", content=[{"type": "image"}])
    with pytest.raises(InvalidField, match=r"for places of \['image'\]"):
        GenerateJob.build(messages=[message], media=[Medium(kind=kind, data=b"x") for kind in kinds])


@pytest.mark.parametrize(
    "fields",
    [{}, {"data": b"x", "url": "http://a/b"}, {"url": "file:///etc/passwd"}, {"url": "http:///x"}, {"data": "x"}],
)
def test_a_medium_has_one_source_and_no_path(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidField):
        GenerateJob.build(text="a", media=[{"kind": "image", **fields}])


def test_a_url_is_fetched_from_hosts_that_are_public_or_named(server: str) -> None:
    image, here = f"{server}/image.png", frozenset({"127.0.0.1"})
    for url in (image, image.replace("127.0.0.1", "localhost")):
        with pytest.raises(InvalidField, match="a public host"):
            fetch(url, max_bytes=1000)
    assert medium("image", image, hosts=here).data == PNG
    assert fetch(f"{server}/moved", max_bytes=1000, hosts=here) == PNG
    for url, why in (
        (f"{server}/outside", "a host among 127.0.0.1"),
        (f"{server}/huge", "at most 1000 bytes"),
        (f"{server}/none", "not 404"),
        ("ftp://127.0.0.1/x", "http://HOST"),
        ("http://127.0.0.1:99999/", "http://HOST"),
        ("http://127.0.0.1:1/", "can be fetched"),
    ):
        with pytest.raises(InvalidField, match=why):
            fetch(url, max_bytes=1000, hosts=here, timeout_s=5)
    with pytest.raises(InvalidField, match="begins with b'<html>'"):
        medium("image", f"{server}/page", hosts=here)


@pytest.fixture
def dripping() -> Iterator[str]:
    """A server whose headers have no end."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            with contextlib.suppress(OSError):
                while not over.wait(0.05):
                    self.wfile.write(b"x")

        def log_message(self, *_: Any) -> None: ...

    over = threading.Event()
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{serving.server_port}/"
    over.set()
    serving.shutdown()
    thread.join()
    serving.server_close()


def test_a_server_that_drips_does_not_outlast_the_deadline(dripping: str) -> None:
    with pytest.raises(InvalidField, match="can be fetched"):
        fetch(dripping, max_bytes=1000, hosts={"127.0.0.1"}, timeout_s=0.3)


@pytest.mark.parametrize("url", ["http://[::1", "http://[x]/", "http://\u2100.example/", "http://a b/", "http://a:x/"])
def test_what_is_no_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidField, match="url"):
        fetch(url, max_bytes=1, timeout_s=1)
    for urls in ("client", "worker"):
        with pytest.raises(InvalidField):
            medium("image", url + "x" * 5000, urls=urls, timeout=1)


def test_a_worker_fetches_only_from_hosts_that_its_operator_names(server: str) -> None:
    job = GenerateJob(text="a", media=[medium("image", f"{server}/image.png", urls="worker"), medium("audio", wav())])
    with pytest.raises(RequestRefused, match=r"media\.0\.url=.*--media-host"):
        with_media_here(job, frozenset())
    with pytest.raises(RequestRefused, match=r"a host among images\.example"):
        with_media_here(job, frozenset({"images.example"}))
    assert with_media_here(job, frozenset({"127.0.0.1"})).media[0].data == PNG
    named = GenerateJob(
        text="a", media=[Medium(kind="image", url=f"{server}/image.png".replace("127.0.0.1", "localhost"))]
    )
    assert with_media_here(named, frozenset({"LocalHost"})).media[0].data == PNG
    plain = GenerateJob(text="a", media=[medium("image", PNG)])
    assert with_media_here(plain, frozenset()) is plain


def test_all_urls_of_a_job_have_one_deadline(dripping: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rolloutmq.worker.jobs.media.FETCH_S", 0.3)
    job = GenerateJob(text="a", media=[Medium(kind="image", url=dripping)] * 20)
    with pytest.raises(RequestRefused, match=r"media\.0: .*can be fetched"):
        with_media_here(job, frozenset({"127.0.0.1"}))


@pytest.mark.parametrize("playlist", [b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", b"ffconcat version 1.0\nfile /x\n"])
def test_a_worker_takes_nothing_for_a_video_that_names_other_files(playlist: bytes) -> None:
    for kind in ("video", "audio"):
        job = GenerateJob(text="a", media=[Medium(kind=kind, data=playlist)])
        with pytest.raises(RequestRefused, match=r"media\.0: .*a file of"):
            with_media_here(job, frozenset())


def test_a_sample_with_media_that_is_interrupted_starts_over() -> None:
    job = GenerateJob(id=new_id(), token_ids=[1, 2], media=[medium("image", PNG)])
    sample = SampleRun(job, np.array([1, 2], np.int32), 0, 1, 0.0)
    for reason, kept in (("abort", 0), ("length", 3)):
        request = sample.next_request(4)
        assert (request.media, request.generated, request.token_ids.tolist()) == (job.media, 0, [1, 2])
        assert sample.leg is not None
        output = EngineOutput(np.array([5, 6, 7], np.int32), np.zeros(3, np.float32), reason)  # type: ignore[arg-type]
        sample.absorb(sample.leg, output, 0.1)
        assert len(sample.tokens) == kept
    assert sample.finish_reason == "length"
