"""The rollout worker of AsyncGRPOTrainer: TRL's loop in a thread, and the books of its samples."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer, GenerationConfig, TrainerCallback
from transformers.trainer_callback import ExportableState
from trl.chat_template_utils import add_response_schema

from ...messages.errors import ConfigError, InvalidField, RolloutMQError
from ...messages.ids import check_client_id
from ..core import ClientCore
from ..training import Books, Measured, Staleness
from .loop import PoolLoop
from .samples import PoolSample, SampleQueue
from .turns import Turns, sampling_of
from .weights import PoolWeightTransfer

log = logging.getLogger(__name__)
STOP_S = 15.0
AS_TEXT = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"\Z",
    "fields": {"content": {"content": "text"}},
}
"""A response template that takes all for text."""
METRICS = 4096


class PoolRolloutWorker(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Generates TRL's rollouts in a pool: the `rollout_worker` of AsyncGRPOTrainer, and one of its `callbacks`.

        weights = PoolWeightTransfer()
        worker = PoolRolloutWorker(weights, model, args, dataset, reward_funcs)
        trainer = AsyncGRPOTrainer(model, reward_funcs, args, dataset,
                                   rollout_worker=worker, weight_transfer=weights, callbacks=[worker])

    Reward functions, tools and environments work as with TRL's own worker, whose loop this runs with another
    generation. They run in threads of the trainer's process. A sample's version is that of its oldest token, by the
    pool's own tags.

    Guarantees: a worker of the pool that dies costs no sample. In `books` every sample of every accepted prompt is
    trained, dropped or in flight. A trainer that crashed and resumes from a checkpoint under the same `client_id` goes
    on with the books of that checkpoint. It trains no sample twice, skips none, and what was generated and not trained
    is not generated again. A sample that no worker can generate is left out of its group. If all samples of a group
    fail, training ends with JobFailed.

    weights: the trainer's weight transfer. Its Redis and its pool are the worker's, too.
    client_id: name of the reply stream, for a trainer that may be resumed. By default it is a new one, and jobs under
        way are cancelled when training ends.
    staleness: by default Staleness(args.max_staleness, samples of a version). With a `token_budget` there is none by
        default, because the number of samples is open: prompts are then accepted as TRL's own worker does it.

    The other arguments are those of AsyncGRPOTrainer. `model` is a name or a path; its tokenizer is the default of
    `processing_class`. If `args.token_budget` is not set it becomes 0, because TRL would ask a vLLM server; then a
    micro-batch is `per_device_train_batch_size` samples.

    Raises InvalidField.
    """

    def __init__(  # noqa: PLR0917 – in the order of AsyncGRPOTrainer's own
        self,
        weights: PoolWeightTransfer,
        model: str,
        args: Any,
        train_dataset: Any,
        reward_funcs: Callable[..., Any] | list[Callable[..., Any]] | None = None,
        processing_class: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        *,
        client_id: str | None = None,
        staleness: Staleness | None = None,
    ) -> None:
        if client_id is not None:
            check_client_id("client_id", client_id)
        if args.restore_callback_states_from_checkpoint:
            raise InvalidField("args.restore_callback_states_from_checkpoint", True, "False: the books are restored")
        if args.token_budget is None:
            args.token_budget = 0
        self._ahead = args.per_device_train_batch_size * args.world_size if args.token_budget <= 0 else 0
        batch = self._ahead * args.gradient_accumulation_steps * args.weight_sync_steps
        if staleness is None and batch:
            staleness = Staleness(args.max_staleness, batch)
        if staleness is not None and (staleness.on_stale == "wait" or staleness.eta > args.max_staleness):
            allowed = f'on_stale "drop" or "mark", and eta up to args.max_staleness, {args.max_staleness}'
            raise InvalidField("staleness", staleness, allowed)
        self.books = Books()
        """What became of each sample."""
        self.rollout_buffer = SampleQueue(self._take)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue(METRICS)
        self.staleness, self.client_id = staleness, client_id
        self.weights, self._args = weights, args
        self._run = secrets.token_hex(8)
        self._asked = SimpleNamespace(
            model=model, dataset=train_dataset, rewards=_as_list(reward_funcs), processing_class=processing_class,
            tools=tools, environments=environment_factory,
        )  # fmt: skip
        self._lock = threading.RLock()
        self._loop: PoolLoop | None = None
        self._thread: threading.Thread | None = None
        self._alive = SimpleNamespace(value=0.0)
        self._error: BaseException | None = None
        self._trl = SimpleNamespace(value=0)  # TRL's number of the newest version
        self._begin = 0  # the version that the run began with; a part of its jobs
        self._watching = self._resumed = self._told = False
        self._taken: dict[int, PoolSample] = {}  # by the identity of its ids: TRL hands the array on as it is
        self._batches: deque[list[PoolSample]] = deque()
        self._rows: dict[tuple[int, int], list[Any]] = {}  # conversation -> rows not trained yet, trained ones

    # --- TRL's protocol --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to generate. Raises ConfigError if the worker is not one of the trainer's callbacks."""
        if not self._watching:
            raise ConfigError("AsyncGRPOTrainer needs callbacks=[worker] beside rollout_worker=worker, for the books")
        if self._thread is not None:
            return
        self._error, self._alive.value = None, time.time()
        self._loop = self._make_loop()
        self._thread = threading.Thread(target=self._main, args=(self._loop,), name="rolloutmq-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End generation, within 15 seconds. With a `client_id` jobs go on, for a trainer that resumes."""
        thread, self._thread = self._thread, None
        if thread is None or self._loop is None:
            return
        self._loop.stop()
        thread.join(STOP_S)
        if thread.is_alive():
            log.warning("a tool or a reward function still runs %g s after the end of training", STOP_S)

    def update_model_version(self, model_version: int) -> None:
        """TRL's number of the version that was sent last. The first one is the weights that training begins with."""
        self._trl.value = int(model_version)
        with self._lock:
            (self.books.advance if self._told else self.books.renumber)(self.weights.version)
        self._told = True
        self._begin = self._begin or self.weights.first_version
        if self._loop is not None:
            self._loop.look_again()

    def check_health(self, stale_after_s: float) -> bool:
        """True. Raises RolloutMQError if the thread has died, or was busy with one thing for `stale_after_s` s."""
        if self._error is not None:
            raise RolloutMQError(f"the rollout worker has failed: {self._error!r}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise RolloutMQError("the rollout worker does not run")
        if (age := time.time() - self._alive.value) > stale_after_s:
            raise RolloutMQError(f"the rollout worker hangs: it has not come back to its loop for {age:.0f} s")
        return True

    # --- what PoolFigures asks --------------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What the books say now, see `Books.report`."""
        with self._lock:
            return self.books.report()

    def log(self, told: dict[str, float]) -> None:
        """Have TRL log these figures with its own, the next time that it logs."""
        self.metrics_queue.put(told)

    # --- what transformers calls -----------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For the checkpoint: the books, the name of the run, and the version that it began with."""
        with self._lock:
            books = self.books.state_dict()
        return {"args": {}, "attributes": {"run": self._run, "begin": self._begin, "books": books}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the books of the checkpoint, if training resumes from one."""
        saved = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        self._resumed = saved is not None
        if saved is not None:
            with self._lock:
                self._run, self._begin = saved["attributes"]["run"], saved["attributes"]["begin"]
                self.books.load_state_dict(saved["attributes"]["books"])
        elif state.global_step:
            log.warning("the checkpoint has no books: prompts begin again with the first one")
        self._told = False
        self._forget()
        self.weights.model, self.weights.above = kwargs.get("model"), self.books.version
        collator = getattr(kwargs.get("train_dataloader"), "collate_fn", None)
        if hasattr(collator, "torch_call"):
            self._watch(collator)
        self._watching = True

    def on_substep_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """A micro-batch has been trained on, and the step goes on."""
        self._trained(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """The last micro-batch of a step has been trained on."""
        self._trained(state.global_step)
        if str(getattr(args.save_strategy, "value", args.save_strategy)) == "no":
            self._settle()

    def on_save(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """A checkpoint holds the books: what has ended in them need not come again."""
        self._settle()

    # --- inside ----------------------------------------------------------------------------------------------------

    def _main(self, loop: PoolLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            self._error = error

    def _forget(self) -> None:
        """What an earlier `train` had under way comes again: its samples are still in flight in the books."""
        with contextlib.suppress(queue.Empty):
            while True:
                queue.Queue.get(self.rollout_buffer, False)  # without its judgement
        self._taken.clear()
        self._batches.clear()
        self._rows.clear()

    def _make_loop(self) -> PoolLoop:
        args, asked = self._args, self._asked
        tokenizer = asked.processing_class or AutoTokenizer.from_pretrained(asked.model)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        if not (asked.tools or asked.environments):
            _read_as_text(tokenizer)
        eos = eos_of(asked.model, tokenizer)
        per_step = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        inflight = args.max_inflight_tasks if args.max_inflight_tasks > 0 else max(args.max_staleness, 1) * per_step
        self.rollout_buffer.bound = args.queue_maxsize
        fields = sampling_of(args, eos) | {"lora": self.weights.adapter}
        core = ClientCore(
            self.weights.redis_url, self.weights.pool, client_id=self.client_id, max_outstanding=1 << 18, caps=None,
            before_ack=None,
        )  # fmt: skip
        mine: dict[str, Any] = {
            "turns": Turns(core, self._run if self.client_id else core.client_id, fields),
            "books": self.books,
            "lock": self._lock,
            "staleness": self.staleness,
            "slack": self._ahead or getattr(self.staleness, "batch_size", 0),
            "bounds": self._bounds,
            "trl_version": self._trl_version,
            "under_way": lambda: self.weights.under_way,
            "resumed": self._resumed,
            "keep": self.client_id is not None,
        }
        same = (
            "num_generations", "queue_maxsize", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
            "chat_template_kwargs", "max_tool_calling_iterations", "log_completions", "num_completions_to_print",
            "fork_threshold_tokens",
        )  # fmt: skip
        return PoolLoop(
            **mine,
            **{name: getattr(args, name) for name in same},
            dataset=asked.dataset,
            reward_funcs=asked.rewards,
            processing_class=tokenizer,
            eos_token_ids=eos,
            rollout_buffer=self.rollout_buffer,
            model_version_value=self._trl,
            heartbeat_value=self._alive,
            failed_event=threading.Event(),
            exception_info_queue=queue.Queue(),
            metrics_queue=self.metrics_queue,
            tools=asked.tools,
            environment_factory=asked.environments,
            max_inflight_tasks=inflight,
            max_tokens=args.max_completion_length,
        )

    def _bounds(self) -> dict[str, Any]:
        """What every job of the run asks of its worker: the weights that the run began with, or newer ones."""
        return {"min_version" if self.weights.adapter is None else "min_adapter_version": self._begin}

    def _trl_version(self, oldest: int | None) -> int:
        """TRL's number for the version of a sample's oldest token: as many updates ago as the books say."""
        with self._lock:
            return int(self._trl.value) - self.books.age(oldest)

    def _watch(self, collator: Any) -> None:
        """Write down which samples are in each micro-batch. TRL forms the next one before it trains on this one."""
        collate = collator.torch_call

        def torch_call(examples: list[Any]) -> Any:
            batch = [self._taken.pop(id(one["input_ids"])) for row in examples[0] for one in row.samples]
            self._batches.append(batch)
            return collate(examples)

        collator.torch_call = torch_call

    def _take(self, sample: PoolSample) -> bool:
        """Whether the trainer gets this sample, whose turn has come."""
        newest, args, rule = self._trl.value, self._args, self.staleness
        eta = args.max_staleness if rule is None else rule.eta
        sample.staleness = newest - sample.model_version
        stale = sample.staleness > eta
        too_long = 0 < args.token_budget < len(sample.input_ids)
        if too_long or (stale and (rule is None or rule.on_stale == "drop")):
            self._row_ended(sample, None, "filtered" if too_long else "stale")
            name = "sample/too_long_total" if too_long else "sample/dropped_stale_total"
            self.metrics_queue.put({name: 1.0})
            return False
        if stale:
            with self._lock:
                self.books.marks["marked"] += 1
            sample.model_version = newest - args.max_staleness  # TRL would drop it
        self._taken[id(sample.input_ids)] = sample
        return True

    def _trained(self, step: int) -> None:
        for sample in self._batches.popleft() if self._batches else ():
            self._row_ended(sample, step, "")

    def _row_ended(self, sample: PoolSample, step: int | None, why: Any) -> None:
        """A row was trained on at `step`, or dropped. A conversation ends with its last row.

        It counts as trained if one of its rows was.
        """
        number, place = sample.key
        with self._lock:
            left = self._rows.setdefault(sample.key, [sample.rows, None, 0])
            left[0] -= 1
            left[1] = step if step is not None else left[1]
            left[2] += sample.tokens
            if left[0]:
                return
            del self._rows[sample.key]
            known = {place: Measured(left[2], sample.metrics.get("reward"), sample.staleness)}
            if left[1] is not None:
                self.books.train(number, [place], left[1], known)
            else:
                self.books.drop(number, [place], why, known)
        if self._loop is not None:
            self._loop.look_again()

    def _settle(self) -> None:
        if self._loop is not None:
            self._loop.settle()


def eos_of(model: str, tokenizer: Any) -> list[int]:
    """The tokens that end a completion, as TRL's trainer finds them: the model's, and the tokenizer's own."""
    try:
        found = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:
        found = None
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    own = tokenizer.eos_token_id
    return ids if own is None or own in ids else [own, *ids]


def _read_as_text(tokenizer: Any) -> None:
    """Have TRL read completions as text where it does not know the chat template. Without tools that will do."""
    if getattr(tokenizer, "response_template", None) is None and getattr(tokenizer, "response_schema", None) is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:
            tokenizer.response_template = AS_TEXT


def _as_list(functions: Any) -> list[Any]:
    return [] if functions is None else list(functions) if isinstance(functions, list | tuple) else [functions]
