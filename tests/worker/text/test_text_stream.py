"""What of a running sample may be shown: whole characters, and nothing that a stop may take off it again."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.specimens.byte_tokenizer import END, START, Bytes

from rolloutmq.messages import GenerateJob, RequestRefused, SamplingParams
from rolloutmq.worker.text.chat import after_context
from rolloutmq.worker.text.stream import PATIENCE, SampleStream, TextStream, hold_back

DECODE = Bytes().decode
TEXT = "größer 漢字 🎉 naïve 👩‍👩‍👧 end"


@pytest.mark.parametrize("size", [1, 2, 3, 5, *range(PATIENCE + 1, PATIENCE + 9), 3 * PATIENCE + 2, 1000])
def test_every_character_comes_whole_and_once(size: int) -> None:
    text = TEXT * (1 if size < PATIENCE else 16)  # much may come at once, and be cut in a character
    stream, ids = TextStream(DECODE), list(text.encode())
    shown = ""
    for start in range(0, len(ids), size):
        stream.push(ids[start : start + size])
        assert stream.text.startswith(shown)
        shown = stream.text
        assert "\ufffd" not in shown
        assert text.startswith(shown)
        assert len(text.encode()[: start + size].decode(errors="ignore")) == len(shown), "no character is kept waiting"
    assert shown == text


def test_it_does_not_decode_everything_again() -> None:
    decoded = 0

    def decode(ids: np.ndarray) -> str:  # type: ignore[type-arg]
        nonlocal decoded
        decoded += len(ids)
        return DECODE(ids)

    stream = TextStream(decode)
    for byte in TEXT.encode() * 50:
        stream.push([byte])
    assert decoded < 12 * len(TEXT.encode()) * 50


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    stream, ids = TextStream(DECODE), [0xFF] * (2 * PATIENCE) + [65]
    for token in ids:
        stream.push([token])
    assert stream.text == DECODE(np.array(ids))


def test_any_bytes_in_any_cuts_are_the_text_of_all_of_them() -> None:
    pick = random.Random(0)
    for _ in range(200):
        ids = [*pick.choice([TEXT, "ab", "é\x80"]).encode(), 65]
        stream, place = TextStream(DECODE), 0
        while place < len(ids):
            step = pick.randint(1, 4)
            stream.push(ids[place : place + step])
            place += step
        assert stream.text == DECODE(np.array(ids))


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, 0),
        ({"stop": ("</a>",)}, 0),
        ({"include_stop": False}, 0),
        ({"include_stop": False, "stop_token_ids": (7,)}, 0),
        ({"include_stop": False, "stop": ("</a>", "é!")}, 3),
        ({"include_stop": False, "stop_token_sequences": ((1, 2, 3), (4,))}, 2),
        ({"include_stop": False, "stop_regex": ("[0-9]{3}x",)}, 15),
        ({"include_stop": False, "stop_regex": ("a+",)}, None),
    ],
)
def test_a_stop_that_is_taken_off_is_not_shown(fields: dict[str, object], held: int | None) -> None:
    sampling = SamplingParams(max_new_tokens=100, **fields)
    assert hold_back(sampling) == held
    stream = SampleStream(GenerateJob(token_ids=[1], sampling=sampling), None)
    assert stream.shown(50) == (0 if held is None else 50 - held)
    assert stream.shown(100) <= 99, "the last possible token waits for the result"
    assert stream.shown(1) == max(0, 1 - held if held is not None else 0)


def test_pieces_have_the_text_of_their_tokens_however_they_are_cut() -> None:
    stream = SampleStream(GenerateJob(text="x"), DECODE)
    ids = np.frombuffer(TEXT.encode(), np.uint8).astype(np.int32)
    first = stream.text(0, ids[:3])
    assert stream.text(0, ids[:3]) == first, "offered again"
    longer = stream.text(0, ids[:9])
    assert stream.text(0, ids[:3]) == first, "and only what was offered at first"
    assert stream.text(0, ids[:9]) == longer
    assert longer is not None
    rest = stream.text(9, ids[9:])
    assert rest is not None
    assert longer + rest == TEXT
    assert stream.text(0, ids) == TEXT, "saved anew"
    stream.restart()
    assert stream.text(0, ids[:9]) == longer


def test_a_tokenizer_that_breaks_costs_the_text_and_no_more() -> None:
    def breaks(ids: np.ndarray) -> str:  # type: ignore[type-arg]
        raise KeyError("a tokenizer may raise anything")

    stream = SampleStream(GenerateJob(text="x"), breaks)
    assert stream.text(0, np.array([65], np.int32)) is None
    assert stream.text(1, np.array([65], np.int32)) is None


# --- turns behind a context ------------------------------------------------------------------------------------------


def chat(*messages: tuple[str, str], answer: bool = True) -> list[int]:
    return Bytes().encode_chat([{"role": r, "content": c} for r, c in messages], answer=answer).tolist()


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_the_next_turn_goes_behind_the_tokens_as_they_are(kept: int) -> None:
    """Whether the stop was kept or not, and whatever was generated: nothing of it is encoded again."""
    generated = [200, 201, 300, 301]
    context = np.array(chat(("user", "hi")) + generated + [END, 10][:kept], np.int32)
    found = after_context(Bytes(), context, messages=[{"role": "user", "content": "more"}]).tolist()
    assert found == chat(("user", "hi")) + generated + [END, 10] + chat(("user", "more"))


def test_text_goes_behind_the_tokens_as_it_is() -> None:
    assert after_context(Bytes(), np.array([300], np.int32), text="ab").tolist() == [300, 97, 98]


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    class Counting(Bytes):
        def encode_chat(self, messages: list[dict[str, object]], **more: object) -> np.ndarray:  # type: ignore[type-arg,override]
            return np.array([START, len(messages), *super().encode_chat(messages)], np.int32)

    with pytest.raises(RequestRefused, match="does not render turns one after the other"):
        after_context(Counting(), np.array([1], np.int32), messages=[{"role": "user", "content": "a"}])


def test_a_template_that_shows_the_last_answer_differently_is_taken() -> None:
    """Qwen3's shows it with an empty thought, which it leaves out as soon as a turn follows."""

    class LastWithThought(Bytes):
        def encode_chat(self, messages: list[dict[str, str]], **more: object) -> np.ndarray:  # type: ignore[type-arg,override]
            if messages[-1]["role"] == "assistant":
                messages = [
                    *messages[:-1],
                    {"role": "assistant", "content": "<think></think>" + messages[-1]["content"]},
                ]
            return super().encode_chat(messages, **more)  # type: ignore[arg-type]

    context = np.array([*chat(("user", "hi")), 200], np.int32)
    found = after_context(LastWithThought(), context, messages=[{"role": "user", "content": "more"}]).tolist()
    assert found == [*context, END, 10, *chat(("user", "more"))]


def test_a_template_that_puts_a_message_in_front_is_refused() -> None:
    """Behind the context nothing would be left of it."""

    class SystemFirst(Bytes):
        def encode_chat(self, messages: list[dict[str, str]], **more: object) -> np.ndarray:  # type: ignore[type-arg,override]
            return super().encode_chat(sorted(messages, key=lambda it: it["role"] != "system"), **more)  # type: ignore[arg-type]

    with pytest.raises(RequestRefused, match="does not render turns one after the other"):
        after_context(SystemFirst(), np.array([1], np.int32), messages=[{"role": "system", "content": "x"}])
