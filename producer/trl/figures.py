"""The pool's figures in the logs of TRL's trainers, and so wherever these report to."""

from __future__ import annotations

import logging
from typing import Any

from redis.exceptions import RedisError
from transformers import TrainerCallback

from ...messages.errors import RolloutMQError
from ..blocking import BlockingRolloutClient
from ..figures import figures
from .rollouts import PoolRollouts
from .worker import PoolRolloutWorker

log = logging.getLogger(__name__)


class PoolFigures(TrainerCallback):  # type: ignore[misc]  # transformers has no types
    """A callback that has TRL log `rollout/…` (see `figures`) with its own metrics, every `logging_steps`.

        AsyncGRPOTrainer(…, rollout_worker=worker, callbacks=[worker, PoolFigures(worker)])
        GRPOTrainer(…, rollout_func=rollouts, callbacks=[PoolFigures(rollouts)])

    They go to whatever `args.report_to` names. GRPOTrainer has no books. If Redis does not answer, the figures of queue
    and workers are left out, and a warning says so: training goes on.
    """

    def __init__(self, source: PoolRolloutWorker | PoolRollouts) -> None:
        self._source = source
        self._client: BlockingRolloutClient | None = None
        self._before: dict[str, Any] | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """TRL logs after this, if `control` says so."""
        if control.should_log and state.is_world_process_zero:
            books = self._source.report()
            self._source.log(figures(books, self._before, sync=self._source.weights.report, **self._of_the_pool()))
            self._before = books

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Disconnect."""
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _of_the_pool(self) -> dict[str, Any]:
        weights = self._source.weights
        try:
            self._client = self._client or BlockingRolloutClient(weights.redis_url, weights.pool)
            return {"load": self._client.load(), "workers": self._client.workers()}
        except (RolloutMQError, RedisError, OSError) as error:
            log.warning("no figures of queue and workers: %s", error)
            return {}
