"""Takes a version bucket by bucket from whoever has it. Who stops, leaves or sends other bytes is replaced."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import torch

from ...messages.codec import decode
from ...messages.errors import DigestMismatch, MalformedMessage, MessageError, TransferTimeout
from ...messages.model import WeightManifest
from ..transfer import TransferOrder
from .frames import ANSWER, ASK, BUCKET, CONNECT_S, MOST_ANSWERED, STALL_S, WAIT, Talk, call

log = logging.getLogger(__name__)
AGAIN_S = 0.02
ROUNDS = 3
"""How often in a row every source may send other bytes than the version's."""


class SourceConnection:
    """A connection to one that has a version, or is getting it."""

    def __init__(self, address: str, token: str) -> None:
        """Raises TransferTimeout if nobody answers there."""
        self.address, self._token = address, token
        self._talk: Talk = call(address, CONNECT_S)
        self._asked: list[int] = []

    def manifest(self) -> tuple[bytes, str]:
        """Return the version's manifest, encoded, and the configuration of a LoRA adapter. Raises TransferTimeout."""
        try:
            self._talk.say(ASK, {"token": self._token})
            kind, told = self._talk.hear(MOST_ANSWERED, CONNECT_S)
        except (OSError, MalformedMessage) as error:
            raise TransferTimeout(f"no manifest from {self.address}: {error}") from None
        if kind != ANSWER or not isinstance(told, dict) or not isinstance(told.get("manifest"), bytes):
            raise TransferTimeout(f"no manifest from {self.address}: {told}")
        return bytes(told["manifest"]), str(told.get("config", ""))

    def ahead(self, index: int) -> None:
        """Ask for a bucket that `fetch` will be called for. Raises OSError."""
        self._asked.append(index)
        self._talk.say(ASK, {"token": self._token, "bucket": index})

    def fetch(self, index: int, into: memoryview, stall_s: float, deadline: float, broken: Callable[[], str]) -> None:
        """Receive a bucket into `into`, which has its size. Buckets come in the order in which they were asked for.

        Raises TransferTimeout if the source is silent for `stall_s`, refuses, or is gone, at `deadline`
        (time.monotonic), or as soon as `broken`.
        """
        try:
            if index not in self._asked:
                self.ahead(index)
            if self._asked.pop(0) != index:
                raise MalformedMessage("buckets are taken in the order in which they were asked for")
            while True:
                kind, size = self._talk.hear_head(stall_s)
                if kind == BUCKET and size == len(into):
                    break
                if kind != WAIT:
                    why = bytearray(min(size, 500))
                    self._talk.fill(memoryview(why), stall_s)
                    said = why.decode(errors="replace") if kind != BUCKET else f"a bucket of {size} bytes"
                    raise TransferTimeout(f"{self.address} does not send it: {said}")
                if why_not := broken():
                    raise TransferTimeout(why_not)
                if time.monotonic() >= deadline:
                    raise TimeoutError
            self._talk.fill(into, stall_s, deadline)
        except TimeoutError:
            raise TransferTimeout(f"{self.address} is silent") from None
        except (OSError, MalformedMessage) as error:
            raise TransferTimeout(f"{self.address} is gone: {error}") from None

    def close(self) -> None:
        """Leave it."""
        self._talk.close()


def fetch_manifest(order: TransferOrder) -> tuple[WeightManifest, str]:
    """Return what an order's version is, from its sender or the first of its holders that answers.

    The second value is the configuration of a LoRA adapter, "" for the weights. Raises TransferTimeout if none of them
    has it; also if one has other tensors under this number.
    """
    why = "nobody offers it"
    for address in (order.address, *order.holders) if order.address else order.holders:
        try:
            source = SourceConnection(address, order.token)
            try:
                raw, config = source.manifest()
            finally:
                source.close()
            manifest = decode(raw, WeightManifest)
        except (TransferTimeout, MessageError) as error:
            why = f"{error}"
            continue
        if manifest.version == order.version and order.digest in ("", manifest.fingerprint):
            return manifest, config
        why = f"{address} offers version {manifest.version} with other tensors"
    raise TransferTimeout(f"no manifest of version {order.version}: {why}")


class Pull:
    """One version on its way, bucket by bucket.

    ask(avoid): returns the address of a source. avoid: addresses that failed. Raises TransferTimeout if there is none.
    arrived(index): checks a bucket that has been filled. Raises DigestMismatch if it is not the version's.
    """

    def __init__(
        self,
        token: str,
        ask: Callable[[AbstractSet[str]], str],
        arrived: Callable[[int], None],
        broken: Callable[[], str],
    ) -> None:
        """token: who asks must know it. broken(): why nobody waits for the version any more; "" if somebody does."""
        self._token, self._ask, self._arrived, self._broken = token, ask, arrived, broken
        self._avoid: set[str] = set()
        self._source: SourceConnection | None = None
        self._address, self._stall_s, self._wrong = "", STALL_S, 0

    def run(self, buckets: Sequence[torch.Tensor], missing: Sequence[int], deadline: float) -> None:
        """Fill buckets, flat uint8 tensors in host memory. Blocks. missing: the numbers of those to fill, in order.

        Raises TransferTimeout at `deadline` (time.monotonic), or as soon as `broken` returns a reason, and
        DigestMismatch, which names the source, if every source sent something else.
        """
        left = list(missing)
        try:
            while left:
                if time.monotonic() >= deadline:
                    raise TransferTimeout(f"{len(left)} of {len(buckets)} buckets did not arrive from {self._address}")
                if why := self._broken():
                    raise TransferTimeout(f"transfer broken off: {why}")
                if self._source is None:
                    self._choose(deadline)
                if self._take(left[0], left[1] if len(left) > 1 else None, buckets[left[0]], deadline):
                    left.pop(0)
        finally:
            self._leave()

    def _choose(self, deadline: float) -> None:
        self._address = self._ask(frozenset(self._avoid))
        if self._address in self._avoid:  # there is no other one: each time it is given longer
            self._stall_s = min(2 * self._stall_s, max(STALL_S, deadline - time.monotonic()))
            self._avoid.clear()
            time.sleep(AGAIN_S)

    def _take(self, index: int, following: int | None, bucket: torch.Tensor, deadline: float) -> bool:
        """Fill one bucket. Returns False if the source failed. following: the next one, to be asked for ahead."""
        try:
            source = self._source = self._source or SourceConnection(self._address, self._token)
            source.fetch(index, memoryview(bucket.numpy()), self._stall_s, deadline, self._broken)
            if following is not None:
                source.ahead(following)
            self._arrived(index)
        except (TransferTimeout, OSError) as error:
            log.info("bucket %d: %s; another source is asked", index, error)
        except DigestMismatch as error:
            self._wrong += 1
            log.warning("%s sent other bytes than the version's: %s", self._address, error)
            if self._wrong >= ROUNDS:
                raise DigestMismatch(f"{error} (from {self._address})") from None
        else:
            return True
        self._avoid.add(self._address)
        self._leave()
        return False

    def _leave(self) -> None:
        source, self._source = self._source, None
        if source is not None:
            source.close()
