"""Versions that a process has, offered to others: bucket by bucket, each as soon as it is here and verified."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable

import torch

from ...messages.codec import encode
from ...messages.errors import MalformedMessage, TransferTimeout, WeightSyncError
from ...messages.model import WeightManifest
from ..tensors import side_stream
from ..transfer import address_of
from .frames import ANSWER, ASK, BEAT_S, BUFFERED, MOST_ASKED, REFUSE, SEND_S, SLICE, WAIT, Map, Talk

log = logging.getLogger(__name__)
BACKLOG = 1024
STRANGERS, STRANGE_S = 256, 0.25
"""Most connections that have named no version on offer. If there are more, the oldest is closed once it has had so many
seconds: anybody may connect, and a version's token is told in Redis alone."""
Serve = Callable[[Map, Talk], bool]
"""Answers a question that is not about an offer. Returns False if it knows no such question."""


class Offer:
    """One version. Any thread may call its methods.

    token: who asks must know it. manifest(): returns the version's; it is encoded when somebody asks first.
    bucket(index): returns flat uint8 on any device. It is called for buckets that are here, by several threads. config:
    of a LoRA adapter, as JSON. Both functions may raise WeightSyncError, whose text is the answer then.
    """

    def __init__(
        self,
        token: str,
        manifest: Callable[[], WeightManifest],
        count: int,
        bucket: Callable[[int], torch.Tensor],
        config: str = "",
    ) -> None:
        self.token, self.count, self.config = token, count, config
        self._manifest, self._encoded = manifest, b""
        self._bucket = bucket
        self._here = [False] * count
        self._over = ""
        self._changed = threading.Condition()
        self._readers: list[Talk] = []
        self.sent_bytes = 0

    def arrived(self, index: int | None = None) -> None:
        """Offer one bucket, or all. They do not change from now on, until `withdraw`."""
        with self._changed:
            for each in range(self.count) if index is None else (index,):
                self._here[each] = True
            self._changed.notify_all()

    def withdraw(self, why: str) -> None:
        """Offer it no more. When this returns nobody reads the buckets. Who does is cut off, and asks elsewhere."""
        with self._changed:
            self._over = self._over or why
            self._changed.notify_all()
            for talk in self._readers:
                talk.close()
            self._changed.wait_for(lambda: not self._readers)

    @property
    def manifest(self) -> bytes:
        """The version's manifest, encoded. Raises WeightSyncError if there is none after all."""
        self._encoded = self._encoded or encode(self._manifest())
        return self._encoded

    @property
    def over(self) -> str:
        """Why it is offered no more; "" if it is."""
        return self._over

    def send(self, index: int, talk: Talk) -> None:
        """Send a bucket, as soon as it is here. Raises OSError if the other end is gone, WeightSyncError if `over`."""
        if not 0 <= index < self.count:
            raise MalformedMessage(f"bucket {index} of a version of {self.count}")
        while True:
            with self._changed:
                here = self._changed.wait_for(lambda: self._here[index] or self._over, BEAT_S)
                if self._over:
                    raise WeightSyncError(self._over)
                if here:
                    self._readers.append(talk)
                    break
            talk.say(WAIT)
        try:
            raw = self._bucket(index)
            with side_stream(raw.device):
                talk.say_bucket(raw.numel(), map(self._given, raw.split(SLICE)))
        finally:
            with self._changed:
                self._readers.remove(talk)
                self._changed.notify_all()

    def _given(self, piece: torch.Tensor) -> memoryview:
        """The bytes of what is sent next. They count before: who has received them may ask how many were sent."""
        with self._changed:
            self.sent_bytes += piece.numel()
        return memoryview(piece.cpu().numpy())


class Shelf:
    """The versions that a process offers, and the port where it does. Each connection has a thread.

    A question is a map. `manifest` and `bucket` are answered here, by the offer whose `token` it has.
    """

    def __init__(self, host: str, port: int = 0, serve: Serve | None = None) -> None:
        """host: under which others reach this host. port: 0 for a free one. serve: answers all other questions.

        Raises WeightSyncError if nothing can listen there.
        """
        self._serve, self._offers, self._closed = serve, dict[str, Offer](), False
        self._strangers: dict[Talk, float] = {}  # since when, the oldest first
        self._fewer = threading.Condition()
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise WeightSyncError(f"nothing can listen on {host}:{port}: {error}") from None
        self.address = address_of(host, self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="rolloutmq-shelf", daemon=True).start()

    def put(self, offer: Offer) -> Offer:
        """Offer a version."""
        self._offers[offer.token] = offer
        return offer

    def take(self, offer: Offer | None, why: str) -> None:
        """Offer it no more; see Offer.withdraw."""
        if offer is not None:
            if self._offers.get(offer.token) is offer:
                del self._offers[offer.token]
            offer.withdraw(why)

    def close(self) -> None:
        """Listen no more, and offer nothing."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for offer in list(self._offers.values()):
            self.take(offer, "its holder leaves")

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a connection could not be accepted: %s", error)  # no file descriptors left, for example
                time.sleep(BEAT_S)
                continue
            talk = Talk(sock)
            self._admit(talk)
            threading.Thread(target=self._attend, args=(sock, talk), name="rolloutmq-shelf", daemon=True).start()

    def _admit(self, talk: Talk) -> None:
        with self._fewer:
            if len(self._strangers) >= STRANGERS:
                left_s = next(iter(self._strangers.values())) + STRANGE_S - time.monotonic()
                if not self._fewer.wait_for(lambda: len(self._strangers) < STRANGERS, max(BEAT_S, left_s)):
                    oldest = next(iter(self._strangers))
                    del self._strangers[oldest]
                    oldest.close()
            self._strangers[talk] = time.monotonic()

    def _is_known(self, talk: Talk) -> None:
        with self._fewer:
            self._strangers.pop(talk, None)
            self._fewer.notify()

    def _attend(self, sock: socket.socket, talk: Talk) -> None:
        # What a stopped receiver does not take ends here, and never a receiver that is only idle: so not settimeout.
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S), 0))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFERED)
        try:
            with contextlib.suppress(OSError, MalformedMessage):
                while True:
                    kind, told = talk.hear(MOST_ASKED)
                    if kind == ASK and isinstance(told, dict):
                        if talk in self._strangers and str(told.get("token")) in self._offers:
                            self._is_known(talk)
                        self._answer(told, talk)
                    elif self._serve is not None:
                        self._serve({"said": kind.decode(errors="replace")}, talk)
        finally:
            self._is_known(talk)
            if self._serve is not None:
                self._serve({"gone": True}, talk)
            talk.close()

    def _answer(self, told: Map, talk: Talk) -> None:
        if self._serve is not None and "do" in told:
            if not self._serve(told, talk):
                talk.say(REFUSE, f"nobody answers {str(told['do'])[:80]!r} here")
            return
        offer = self._offers.get(str(told.get("token")))
        if offer is None:
            talk.say(REFUSE, "this version is not offered here")
            return
        try:
            if "bucket" not in told:
                talk.say(ANSWER, {"manifest": offer.manifest, "config": offer.config})
                return
            index = told["bucket"]
            if isinstance(index, bool) or not isinstance(index, int):
                raise MalformedMessage(f"bucket {str(index)[:80]!r}: a number is expected")
            offer.send(index, talk)
        except (WeightSyncError, TransferTimeout) as error:
            talk.say(REFUSE, str(error))
