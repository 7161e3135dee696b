"""The trainer's weights on their way to the pool: TRL's WeightTransferProtocol over a WeightPublisher."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Unpack

import torch
from trl.experimental.async_grpo.async_grpo_trainer import _iter_vllm_named_params

from ...messages.errors import InvalidField, WeightSyncError
from ...sync.publish import PublishHandle, PublishReport, WeightPublisher
from ...sync.transfer import SyncOptions

log = logging.getLogger(__name__)
FAILED_IN_A_ROW = 3
"""So many versions that no worker took are an error. Fewer are not: the only worker may just have been replaced."""
COMMIT_S = 600.0
"""The longest wait for the first version."""
Pairs = Iterator[tuple[str, torch.Tensor]]


class PoolWeightTransfer:
    """Publishes TRL's weights to a pool: the `weight_transfer` of AsyncGRPOTrainer, and a part of `PoolRollouts`.

    Guarantees: every call publishes one version, numbered above all that the pool has. `send_weights` returns when the
    tensors are copied, and training goes on while they travel; the first version, and an adapter's base, it waits for.
    Nothing is paused: workers change the weights between two tokens.

    Names are the checkpoint's: TRL's own function strips what wrappers and PEFT added. A tied lm_head is not a
    parameter of its own and does not travel. PEFT's adapter is merged into the weights for the time of the copy, as
    TRL does it.

    Args:
        redis_url: the pool's Redis; by default $ROLLOUTMQ_REDIS, or the one on this host.
        pool: its name.
        adapter: a name under which PEFT's LoRA adapter travels alone, by `publish_adapter`; the base model is published
            once. The pool's workers must take adapters, which needs GPUs. By default adapters are merged.
        settings: fields of `SyncSettings`.
    """

    def __init__(
        self,
        redis_url: str | None = None,
        pool: str = "default",
        *,
        adapter: str | None = None,
        **settings: Unpack[SyncOptions],
    ) -> None:
        self.redis_url, self.pool, self.adapter = redis_url, pool, adapter
        self.model: Any = None
        """The trainer's model, for adapters. PoolRolloutWorker and PoolRollouts set it."""
        self.version = 0
        """The newest version sent: of the adapter, if there is one, else of the weights."""
        self.first_version = 0
        """The version that was sent first."""
        self.above = 0
        """Versions are numbered above this one: a trainer that is restored has been there already."""
        self._settings = settings
        self._publisher: WeightPublisher | None = None
        self._last: PublishHandle | None = None
        self._sent: deque[PublishHandle] = deque(maxlen=8)
        self._failed = 0

    @property
    def under_way(self) -> bool:
        """Whether the newest version is still on its way to the workers."""
        return self._last is not None and not self._last.done()

    @property
    def report(self) -> PublishReport | None:
        """Of the newest version of which it is known whether workers took it; None before. It waits for nothing."""
        for handle in reversed(self._sent):
            if handle.done():
                with contextlib.suppress(WeightSyncError):
                    if (report := handle.wait(0)).state != "superseded":
                        return report
        return None

    # --- TRL's protocol --------------------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Connect. Raises RedisUnavailable, and InvalidField for an unknown setting."""
        if self._publisher is None:
            self._publisher = WeightPublisher(self.redis_url, self.pool, leader=True, **self._settings)
            self._last, self.first_version = None, 0

    def pause(self) -> None:
        """Does nothing: workers interrupt themselves, and only when a version has arrived."""

    def resume(self) -> None:
        """Does nothing; see `pause`."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]], version: int | None = None) -> None:
        """Publish the next version.

        iterator: (name, tensor) pairs of the whole model. With an `adapter` they are not used. version: its number, in
        a reproducible run; the pool may have had it from a trainer that was killed.
        Raises WeightSyncError if the first version fails, the trainer's weights have NaN or Inf in them, or no worker
        took the last few versions.
        """
        publisher = self._open()
        self._look_at_last()
        if version is not None:
            after: Future[None] = Future()
            after.set_result(None)  # all that the version before had to sample is here
            handle = publisher.publish(version, iterator, after=after)
        elif self.adapter is None:
            version = max(publisher.last_version, self.above) + 1
            handle = publisher.publish(version, iterator)
        else:
            for _ in iterator:  # other ranks take part in its gathers
                pass
            version, handle = self._send_adapter(publisher, self.adapter)
        self.version, self._last = version, handle
        self._sent.append(handle)
        if not self.first_version:
            self.first_version = version
            handle.committed(COMMIT_S)

    def arrive(self) -> None:
        """Wait until the newest version is served, or is known to have failed. Raises WaitTimeout."""
        if self._last is not None:
            self._last.wait(COMMIT_S)

    def destroy(self) -> None:
        """Finish what was sent and disconnect. `init_weight_transfer` connects again."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _open(self) -> WeightPublisher:
        if self._publisher is None:
            raise WeightSyncError("the weight transfer is not open: init_weight_transfer opens it")
        return self._publisher

    def _send_adapter(self, publisher: WeightPublisher, name: str) -> tuple[int, PublishHandle]:
        from peft import get_peft_model_state_dict  # noqa: PLC0415 – only whoever trains adapters has it

        model = bare(self.model)
        if not hasattr(model, "peft_config"):
            raise InvalidField("adapter", name, "None, unless the trainer has a peft_config")
        active = model.active_adapters[0]
        if not self.first_version:  # before training the adapter is zero, and after a restart it is not merged here
            publisher.publish(publisher.last_version + 1, base_weights(model)).committed(COMMIT_S)
        version = max(publisher.last_adapter_version(name), self.above) + 1
        tensors = get_peft_model_state_dict(model, adapter_name=active)
        return version, publisher.publish_adapter(name, version, tensors, model.peft_config[active].to_dict())

    def _look_at_last(self) -> None:
        """Raises WeightSyncError for what became of the version before, if it is known and serious."""
        if self._last is None or not self._last.done():
            return
        report = self._last.wait(0)
        self._failed = self._failed + 1 if report.state == "failed" else 0
        if report.state == "failed":
            log.warning("no worker took version %d: %s", report.version, report.failures)
            if "trainer" in report.failures or self._failed >= FAILED_IN_A_ROW:
                raise WeightSyncError(f"version {report.version} was not taken: {report.failures}")


def bare(model: Any) -> Any:
    """The model inside DistributedDataParallel and torch.compile."""
    model = getattr(model, "module", model)
    return getattr(model, "_orig_mod", model)


def named_weights(model: Any) -> Pairs:
    """(name, tensor) of all weights under the checkpoint's names, gathered one by one; every rank has to iterate."""
    for name, parameter in _iter_vllm_named_params(model):
        yield name, (parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach())


def base_weights(model: Any) -> Pairs:
    """The same of a PEFT model without its adapter. It is merged while TRL sends; here it is not."""
    merged = any(getattr(layer, "merged_adapters", None) for layer in model.modules())
    if merged:
        model.unmerge_adapter()
    try:
        yield from named_weights(model)
    finally:
        if merged:
            model.merge_adapter()
