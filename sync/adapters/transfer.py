"""The transfer of a LoRA adapter. It is a `sync.transfer.Transfer`, as that of weights, but has no process group.

The trainer puts the manifest, the configuration and the bytes into its rendezvous store. Every worker reads them there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from redis.exceptions import RedisError

from ...messages.codec import encode
from ...messages.errors import DigestMismatch, InvalidField, MalformedMessage, TransferTimeout
from ...messages.model import WeightAnnouncement, WeightManifest
from ...messages.redis import Bell
from ..tensors import Snapshot, hex_of, look, unpack, values_of
from ..transfer import Join, Ledger, Patience, SyncSettings, Transfer, TransferResult, repeated
from ..wire import Broadcaster, EpochKeys, fetch, fetch_manifest, join_store, why_broken
from .format import MOST_BYTES, Adapter, check_config, check_tensors

CHUNK_BYTES = 4 << 20
"""Bytes of one value in the store, which takes 8 MiB at most (torch 2.11 to 2.13)."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One version that can be sent any number of times."""

    name: str
    config: dict[str, Any]
    snapshot: Snapshot

    @property
    def version(self) -> int:
        return self.snapshot.manifest.version


# --- the trainer's side -------------------------------------------------------------------------------------------


class AdapterSender:
    """Sends adapters. Keeps the newest committed version of each, for workers that join later."""

    def __init__(self, ledger: Ledger, bell: Bell, settings: SyncSettings, line: Broadcaster) -> None:
        # An adapter interrupts no request, whatever mode updates of the weights have.
        self._bell, self._settings, self._line = bell, settings.model_copy(update={"mode": "resume"}), line
        self._ledger = ledger
        self._retained: dict[str, Parcel] = {}
        self._patience = Patience()

    async def send(self, parcel: Parcel, only: frozenset[str] | None = None) -> TransferResult:
        """Send a version to every live worker, or to `only` these. It is retained if it is committed.

        Workers whose connection broke are sent it again.
        """
        return await repeated(self._ledger, lambda whom: self._transfer(parcel, whom), only)

    async def catch_up(self) -> TransferResult | None:
        """Send a retained version to the workers that ask for it. Returns None if nobody asks."""
        lacking = await self.lacking()
        if lacking is None:
            return None
        parcel, workers = lacking
        result = await self.send(parcel, workers)
        for worker in workers:
            self._patience.tried(f"{parcel.name}@{worker}", well=worker in result.workers)
        return result

    async def _transfer(self, parcel: Parcel, only: frozenset[str] | None) -> TransferResult:
        expected = await self._ledger.live_workers() if only is None else only
        source = _Source(parcel, self._line)
        transfer = Transfer(self._ledger, self._bell, self._settings, source, adapter=parcel.name)
        result = await transfer.run(expected, catch_up=only is not None)
        assert result is not None
        if result.committed:
            self._retained[parcel.name] = parcel
        return result

    async def lacking(self) -> tuple[Parcel, frozenset[str]] | None:
        """Return a retained adapter and the live workers that ask for it, or None if nobody asks for any."""
        if not self._retained:
            return None
        try:
            wanted = await self._ledger.wanted_adapters()
            alive = await self._ledger.live_workers() if wanted else set()
        except (RedisError, OSError):
            return None
        for name, parcel in self._retained.items():
            behind = {worker for worker, has in wanted.get(name, {}).items() if has < parcel.version}
            now = {worker for worker in behind & alive if self._patience.lasts(f"{name}@{worker}")}
            if now:
                return parcel, frozenset(now)
        return None


class _Source:
    """A parcel in the trainer's store: a `TransferSource` from which every receiver reads by itself."""

    absent: frozenset[int] = frozenset()

    def __init__(self, parcel: Parcel, line: Broadcaster) -> None:
        self.version, self.digest = parcel.version, ""
        self._parcel, self._line = parcel, line
        self._given_up = ""

    @property
    def address(self) -> tuple[str, int]:
        return self._line.host, self._line.store.port

    async def announce(self, ledger: Ledger, announcement: WeightAnnouncement) -> bool:
        await ledger.announce(announcement)
        return True

    def by_ipc(self, joins: Mapping[str, Join]) -> set[str]:
        """See TransferSource. Returns all of them, because an adapter's receivers have no rank."""
        return set(joins)

    def backend(self, joins: Mapping[str, Join]) -> Literal["gloo", "nccl"]:
        return "gloo"

    def name_group(self, epoch: int, members: Mapping[str, int], joins: Mapping[str, Join]) -> str:
        return ""

    async def send(self, announcement: WeightAnnouncement, timeout_s: float) -> None:
        await asyncio.to_thread(self._put, announcement.epoch)

    def _put(self, epoch: int) -> None:
        store = self._line.store
        store.set(_config_key(epoch), json.dumps(self._parcel.config).encode())
        for index, bucket in enumerate(self._parcel.snapshot.buckets):
            raw = memoryview(bucket.cpu().numpy())
            for offset in range(0, len(raw), CHUNK_BYTES):
                if self._given_up:
                    store.set(EpochKeys(epoch).broken, self._given_up)
                    raise TransferTimeout(f"transfer broken off: {self._given_up}")
                store.set(_chunk_key(epoch, index, offset), bytes(raw[offset : offset + CHUNK_BYTES]))
        store.set(EpochKeys(epoch).manifest, encode(self._parcel.snapshot.manifest))

    def give_up(self, why: str) -> None:
        self._given_up = why

    async def clean(self, announcement: WeightAnnouncement) -> None:
        await asyncio.to_thread(self._forget, announcement.epoch)

    def _forget(self, epoch: int) -> None:
        keys = [EpochKeys(epoch).manifest, EpochKeys(epoch).broken, _config_key(epoch)]
        for index, nbytes in enumerate(self._parcel.snapshot.manifest.bucket_nbytes):
            keys += [_chunk_key(epoch, index, offset) for offset in range(0, nbytes, CHUNK_BYTES)]
        for key in keys:
            self._line.store.delete_key(key)


def _config_key(epoch: int) -> str:
    return f"{EpochKeys(epoch).manifest}/config"


def _chunk_key(epoch: int, bucket: int, offset: int) -> str:
    return f"{EpochKeys(epoch).manifest}/{bucket}/{offset}"


# --- the worker's side --------------------------------------------------------------------------------------------


class Fetch:
    """Reads one version out of the trainer's store. phase: how far it is, for the report of a failure."""

    def __init__(self, announcement: WeightAnnouncement) -> None:
        self.phase: Literal["rendezvous", "receive", "verify"] = "rendezvous"
        self._told = announcement
        self._deadline = time.monotonic() + announcement.deadline_s

    def run(self) -> Adapter:
        """Read, check and return the adapter. Blocks until the announcement's deadline at most.

        Raises TransferTimeout, DigestMismatch with the tensor's name, InvalidField or MalformedMessage.
        """
        told = self._told
        store = join_store(told.host, told.port, max(0.1, self._deadline - time.monotonic()))
        manifest = fetch_manifest(store, told.epoch, told.version, self._deadline, why_broken(store, told.epoch))
        if sum(manifest.bucket_nbytes) > MOST_BYTES:
            raise InvalidField("bucket_nbytes", sum(manifest.bucket_nbytes), f"at most {MOST_BYTES} together")
        self.phase = "receive"
        config = self._config(store)
        buckets = [self._bucket(store, index, nbytes) for index, nbytes in enumerate(manifest.bucket_nbytes)]
        self.phase = "verify"
        views = list(unpack(manifest, buckets))
        check_tensors(config, {spec.name: (spec.shape, tensor.dtype) for spec, tensor in views})
        tensors = [tensor for _, tensor in views]
        if told.verify:
            _compare(manifest, tensors, finite=told.nonfinite == "refuse")
        return Adapter(told.adapter, told.version, config, {spec.name: tensor for spec, tensor in views})

    def _config(self, store: Any) -> dict[str, Any]:
        raw = self._get(store, _config_key(self._told.epoch))
        try:
            config = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise MalformedMessage(f"the adapter's configuration is not JSON: {error}") from None
        if not isinstance(config, dict):
            raise InvalidField("config", config, "a PEFT adapter_config")
        return check_config(config)

    def _bucket(self, store: Any, index: int, nbytes: int) -> torch.Tensor:
        bucket = torch.empty(nbytes, dtype=torch.uint8)
        for offset in range(0, nbytes, CHUNK_BYTES):
            raw = self._get(store, _chunk_key(self._told.epoch, index, offset))
            if len(raw) != min(CHUNK_BYTES, nbytes - offset):
                raise DigestMismatch(f"{len(raw)} bytes of bucket {index} arrived at {offset}")
            bucket[offset : offset + len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        return bucket

    def _get(self, store: Any, key: str) -> bytes:
        return fetch(store, key, self._deadline, why_broken(store, self._told.epoch), key)


def _compare(manifest: WeightManifest, tensors: list[torch.Tensor], *, finite: bool) -> None:
    found, nonfinite = look(tensors)
    wrong = (found != values_of([spec.digest for spec in manifest.tensors], "cpu")).nonzero().flatten().tolist()
    if wrong:
        spec, arrived = manifest.tensors[wrong[0]], hex_of(found[wrong[0] : wrong[0] + 1])[0]
        raise DigestMismatch(f"tensor {spec.name}: digest {arrived}, the trainer sent {spec.digest}")
    if finite and (bad := nonfinite.nonzero().flatten().tolist()):
        raise DigestMismatch(f"tensor {manifest.tensors[bad[0]].name}: has NaN or Inf in it")
