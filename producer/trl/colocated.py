"""A GPU that a trainer shares with the pool's workers: whoever computes has the memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from redis.exceptions import RedisError

from ...messages.errors import InvalidField, RedisUnavailable, RolloutMQError, WaitTimeout
from ...messages.model import MEMORY_TAGS, MemoryTag
from ..blocking import BlockingPoolControl
from ..control import Answers, CommandFailed
from .weights import bare

log = logging.getLogger(__name__)
COMMAND_S = 120.0
"""The longest wait until all workers sleep, or are awake: an engine that died asleep starts again within it."""
AGAIN_S = 0.2
REFUSED = ("RequestRefused", "InvalidField")
"""Errors of workers that would be the same the next time."""


class Colocated:
    """Puts all workers of the pool to sleep before the trainer's model computes, and wakes them to generate.

    Guarantees: while the model computes, every worker that was alive has given up `tags`; before jobs are sent, every
    one has its memory again, and the trainer has given the GPU back what its allocator kept. Jobs of others that come
    meanwhile stay queued. Every rank calls the methods.

    `sleep` and `wake` raise CommandFailed if a worker refuses, or one that is alive has not done it within COMMAND_S;
    a dead one has no memory, and its lease is all that is waited for.
    """

    def __init__(self, tags: Sequence[MemoryTag]) -> None:
        """tags: what workers give up; () for nothing, ever. Raises InvalidField."""
        if not isinstance(tags, list | tuple) or any(tag not in MEMORY_TAGS for tag in tags):
            raise InvalidField("colocated", tags, f"a list of {', '.join(MEMORY_TAGS)}")
        self.tags = tuple(tags)
        self._asleep: bool | None = None  # None: some may be, as a trainer that was killed may have left them
        self._hooks: list[Any] = []
        self._trainer: Any = None
        self._control: BlockingPoolControl | None = None

    def attach(self, trainer: Any, control: BlockingPoolControl) -> None:
        """From now on the trainer's models compute only while the workers sleep."""
        if not self.tags:
            return
        self._trainer, self._control = trainer, control
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            if model is not None:  # whatever a trainer calls to compute, it begins with the embeddings
                first = bare(trainer.accelerator.unwrap_model(model)).get_input_embeddings()
                self._hooks.append(first.register_forward_pre_hook(lambda *_: self.sleep()))

    def sleep(self) -> None:
        """Returns when all workers sleep."""
        if self.tags and not self._asleep:
            self._asleep = None
            self._all("sleep", self.tags)
            self._asleep = True

    def wake(self, *tags: MemoryTag) -> None:
        """Returns when all workers have this memory again; all of it, if none is named."""
        if self.tags and self._asleep is not False:
            self._all("wake", tags)
            self._asleep = bool(tags)

    def close(self, *, offered: bool = False) -> None:
        """Let go of the trainer, and leave no worker asleep; nor without weights, if they are `offered` to those that
        come late. Whatever hinders that is logged."""
        while self._hooks:
            self._hooks.pop().remove()
        trainer, self._trainer, deadline = self._trainer, None, time.monotonic() + COMMAND_S
        if trainer is not None and self._asleep is not False and trainer.accelerator.is_main_process:
            try:
                while stale := [name for name, it in self._until_all("wake", ()).results.items() if it["stale"]]:
                    if not offered or time.monotonic() > deadline:
                        raise WaitTimeout(f"no weights have come to {', '.join(stale)}")
                    time.sleep(AGAIN_S)
            except (RolloutMQError, RedisError, OSError) as error:
                log.warning("workers may still be asleep, or without weights (`rolloutmq doctor`): %s", error)
        self._asleep = None

    # --- inside -----------------------------------------------------------------------------------------------------

    def _all(self, action: str, tags: Sequence[MemoryTag]) -> None:
        torch.cuda.empty_cache()  # does nothing where there is no GPU in use
        ranks, began = self._trainer.accelerator, time.monotonic()
        ranks.wait_for_everyone()  # also for those that still generate
        if ranks.is_main_process:
            self._until_all(action, tags)
            name = "_".join([action, *(tags if action == "wake" else ())])
            self._trainer._metrics["train"][f"rollout/{name}_s"].append(time.monotonic() - began)
        ranks.wait_for_everyone()

    def _until_all(self, action: str, tags: Sequence[MemoryTag]) -> Answers:
        deadline = time.monotonic() + COMMAND_S
        while True:
            try:
                answers: Answers = getattr(self._control, action)(tags, timeout=max(1.0, deadline - time.monotonic()))
            except RedisUnavailable:
                if time.monotonic() > deadline:
                    raise
            else:
                if not answers.failed:
                    if not answers:
                        log.warning("%s: no worker is alive in this pool", action)
                    return answers
                if time.monotonic() > deadline or any(one.kind in REFUSED for one in answers.failed):
                    raise CommandFailed(answers)
                log.warning("%s, and again", answers.told())
            time.sleep(AGAIN_S)
