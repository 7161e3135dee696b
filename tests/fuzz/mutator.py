"""Breaks what Redis holds the way somebody would who knows its structure: depth, keys, types, sizes, and loose bytes.

A value is a tree of maps, lists and atoms. `Raw` stands for bytes of msgpack that no packer would write.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgpack

Tree = Any
Path = tuple[Any, ...]


class Raw(bytes):
    """Encoded as it is, and allowed as a key."""

    __slots__ = ()


def pack(tree: Tree) -> bytes:
    """The tree as msgpack, with whatever is `Raw` in it."""
    packer = msgpack.Packer(use_bin_type=True, autoreset=True)
    if isinstance(tree, Raw):
        return bytes(tree)
    if isinstance(tree, dict):
        parts = [packer.pack_map_header(len(tree))]
        parts += [pack(part) for item in tree.items() for part in item]
        return b"".join(parts)
    if isinstance(tree, list | tuple):
        return b"".join([packer.pack_array_header(len(tree)), *map(pack, tree)])
    fits = not isinstance(tree, int) or -(1 << 63) <= tree < 1 << 64
    return bytes(packer.pack(tree if fits else float(tree)))


def unpack(data: bytes) -> Tree:
    """The tree of a message that was encoded properly."""
    return msgpack.unpackb(data, strict_map_key=False)


ATOMS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 127, 128, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, -(1 << 63)),
    *(0.5, -0.0, math.nan, math.inf, -math.inf, 1e308, "", "x", "é", "\0", "x" * 70, "9" * 5000, "a/../b", "NaN"),
    *(b"", b"\0", b"\xff\xfe", b"1", b"-1", b"k0.x", bytes(3), bytes(4), b"\xff" * 8, [], {}, [[]], {"": {}}, [None]),
)
DEPTHS = (2, 63, 64, 65, 300, 500, 1000, 1100)
SIZES = (*[65, 129] * 10, 1025, 1025, 20_000)


def _hostile(rng: Random) -> Tree:
    """A value that is wrong nearly everywhere."""
    size = rng.choice(SIZES)
    return rng.choice(
        (
            lambda: rng.choice(ATOMS),
            lambda: Raw(b"\x91" * rng.choice(DEPTHS) + b"\xc0"),
            lambda: Raw(b"\x81\xa1a" * rng.choice(DEPTHS) + b"\xc0"),
            lambda: [rng.choice(ATOMS)] * size,
            lambda: {str(i): rng.choice(ATOMS) for i in range(size)},
            lambda: dict.fromkeys(range(size), 1.0),
            lambda: "x" * size,
            lambda: rng.randbytes(size),
            lambda: {Raw(pack([i, i << 40])): 1 for i in range(rng.choice((1, 300)))},  # arrays as keys
            lambda: {Raw(pack(rng.choice(ATOMS))): 1, "a": 2},
            lambda: Raw(b"\xdd" + struct.pack(">I", rng.choice((1 << 17, (1 << 17) + 1, (1 << 32) - 1)))),
            lambda: Raw(b"\xdf" + struct.pack(">I", rng.choice((1 << 14, (1 << 14) + 1, (1 << 32) - 1)))),
            lambda: Raw(b"\xc6" + struct.pack(">I", (1 << 32) - 1)),
            lambda: Raw(rng.choice((b"\xc1", b"\xd4\x05x", b"\xd6\xff\0\0\0\0", b"\xa2\xff\xfe", b"\xa3\xed\xa0\x80"))),
        )
    )()


def _paths(tree: Tree, at: Path = ()) -> Iterator[Path]:
    yield at
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list | tuple) else ()
    for key, value in items:
        yield from _paths(value, (*at, key))


def _changed(tree: Tree, path: Path, change: Callable[[Tree], Tree]) -> Tree:
    """A copy of the tree in which the value at `path` is another."""
    if not path:
        return change(tree)
    if isinstance(tree, dict):
        return {
            key: _changed(one, path[1:], change) if key is path[0] or key == path[0] else one
            for key, one in tree.items()
        }
    return [_changed(one, path[1:], change) if place == path[0] else one for place, one in enumerate(tree)]


def _other_type(value: Tree, rng: Random) -> Tree:
    """The value as another type that looks like it."""
    if isinstance(value, str):
        others: tuple[Tree, ...] = (value.encode(errors="replace"), [value], {value: value}, value + "\n")
    elif isinstance(value, bytes):
        others = (value.decode("latin-1"), list(value[:50]), value[:-1], value + b"\0", value * 3)
    elif isinstance(value, bool) or value is None:
        others = (0, "true", [value], {})
    elif isinstance(value, int):
        others = (bool(value), float(value), str(value), -value, value + 1, value << 20, [value])
    elif isinstance(value, float):
        others = (str(value), math.nan, -value, [value], 1 << 62)
    elif isinstance(value, dict):
        others = (list(value.items()), list(value), {"": value}, [value])
    else:
        others = (dict(enumerate(value)), [value], {"": value}, list(value) * 2, "x")
    return rng.choice(others)


def _other_keys(value: Tree, rng: Random) -> Tree:
    """A map with a key more, less, or of another type or name."""
    if not isinstance(value, dict) or not value:
        return {rng.choice(("n", "id", "", "x" * 300)): _hostile(rng)}
    key = rng.choice(list(value))
    rest = {name: one for name, one in value.items() if name != key}
    return rng.choice(
        (
            lambda: rest,
            lambda: rest | {rng.choice(("", "unknown", "x" * 300, 5, b"id", None, True, 1.5)): value[key]},
            lambda: value | {Raw(pack([1, [2]])): 1},
            lambda: value | {Raw(pack(key)): _hostile(rng)},  # the same key twice
            lambda: dict(zip(value, rng.sample(list(value.values()), len(value)), strict=True)),
        )
    )()


def mutated(tree: Tree, rng: Random) -> Tree:
    """The tree with one to three things wrong."""
    for _ in range(rng.randint(1, 3)):
        path = rng.choice(list(_paths(tree)))
        how = rng.choice((lambda _: _hostile(rng), lambda it: _other_type(it, rng), lambda it: _other_keys(it, rng)))
        tree = _changed(tree, path, how)
    return tree


def mutated_bytes(data: bytes, rng: Random) -> bytes:
    """The bytes with one to four places cut, changed, repeated or filled with something else."""
    broken = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(broken))
        broken[at : at + rng.choice((0, 1, 1, 2, 9, 1 << 20))] = rng.choice(
            (
                b"",
                rng.randbytes(rng.randint(1, 9)),
                bytes(broken[: rng.randint(0, 40)]),
                pack(_hostile(rng))[:5000],
                b"\x91" * rng.choice(DEPTHS),
            )
        )
    return bytes(broken)
