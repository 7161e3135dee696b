"""What a worker needs from an inference engine: one small protocol, two implementations.

`SGLangEngine` is the real one. `ScriptedEngine` answers from a hash, for tests of everything around an engine. A
request is one leg of one sample: prompt in, tokens out. The worker takes care of groups, legs and versions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ...messages.model import GenerateJob, LogitProcessor, LogprobOptions, Medium, SamplingParams
from ...sync.transfer import TransferOrder, TransferReport
from .loaded_adapters import LoadedAdapters
from .tasks import TaskOutput, TaskRequest

if TYPE_CHECKING:
    from ...sync.adapters import Adapter  # torch

FinishReason = Literal["stop", "length", "abort"]
MatchedStop = int | str | tuple[int, ...]

_SAMPLED = LogprobOptions()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for beyond tokens and their logprobs. The defaults cost nothing.

    logprobs, hidden_states, routed_experts, logit_processors: as GenerateJob has them.
    prompt: whether the prompt's own arrays are wanted. After the first leg the sample has them already.
    seed: of this sample, the same in all its legs. None draws without a seed.
    stream: the engine keeps `progress` up to date with every token.
    """

    logprobs: LogprobOptions = _SAMPLED
    hidden_states: Literal["none", "last", "all"] = "none"
    routed_experts: bool = False
    logit_processors: tuple[LogitProcessor, ...] = ()
    prompt: bool = True
    seed: int | None = None
    stream: bool = False


NOTHING_MORE = Wanted()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate.

    request_id: unique among running requests, and of one fixed length because SGLang matches aborts by prefix.
    token_ids: (prompt_len,) int32, the prompt followed by the tokens that earlier legs of the sample generated.
    sampling: as the job has it. The max_new_tokens below replaces its own.
    max_new_tokens: most tokens that this leg may generate, >= 1.
    cache_key: the weights version as text, with an adapter followed by "/<name>@<version>". Prefixes are only reused
        between requests with the same key.
    priority: as GenerateJob.engine_priority.
    adapter, adapter_version: the LoRA adapter, "" and 0 for the model alone.
    generated: number of tokens at the end of token_ids that earlier legs generated. Stops, penalties, grammars and
        minimum lengths count them.
    wanted: what else it asks for.
    media: of the prompt, all with their bytes. `generated` is then 0: a sample with media starts over when it is
        interrupted, because SGLang reads such a prompt as text again, which could change the generated tokens.
    """

    request_id: str
    token_ids: npt.NDArray[np.int32]
    sampling: SamplingParams
    max_new_tokens: int
    cache_key: str
    adapter: str = ""
    adapter_version: int = 0
    generated: int = 0
    wanted: Wanted = NOTHING_MORE
    media: tuple[Medium, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one request generated before it finished or was aborted.

    token_ids: (n,) int32, only generated tokens, with the stop token if there was one.
    logprobs: (n,) float32, natural log of each token's probability under the weights that sampled it, with logit bias
        and penalties, before temperature and truncation.
    finish_reason: "abort" means that the tokens are a valid prefix of a sample that can be continued.
    matched_stop: what ended it, as in RolloutResult, or None.
    stop_tokens: number of the sample's last tokens, over all its legs, that have a part of the match; 0 without one.
    stop_text: their text from where the match begins; "" for a match that is no text.
    token_arrays, arrays: what was wanted, named as in RolloutResult. token_arrays have one row per token.
    retracted: the engine had no memory for it for a while, and computed the KV cache of what it had anew.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    finish_reason: FinishReason
    matched_stop: MatchedStop | None = None
    stop_tokens: int = 0
    stop_text: str = ""
    cached_tokens: int = 0
    retracted: bool = False
    token_arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Generated:
    """Tokens, of one leg or several: token_ids, (n,) int32, and logprobs, (n,) float32, as in EngineOutput.

    token_arrays: as there, all that were wanted, one row per token. An engine that only has them at the end reports no
    progress for a request that wants them.
    """

    token_ids: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    logprobs: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    token_arrays: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.token_ids)

    def then(self, more: Generated) -> Generated:
        """This and `more` after it. Both have the same arrays, unless one of them has no tokens."""
        if not len(self) or not len(more):
            return self if len(self) else more
        return Generated(
            np.concatenate([self.token_ids, more.token_ids]),
            np.concatenate([self.logprobs, more.logprobs]),
            {name: np.concatenate([rows, more.token_arrays[name]]) for name, rows in self.token_arrays.items()},
        )

    def cut(self, start: int = 0, end: int | None = None) -> Generated:
        """Tokens `start` to `end` (not included; None is the last one)."""
        arrays = {name: rows[start:end] for name, rows in self.token_arrays.items()}
        return Generated(self.token_ids[start:end], self.logprobs[start:end], arrays)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the engine is. A worker's size, the check of a job, and the replay of a result need it.

    context_length: most tokens of prompt and output together.
    kv_tokens: size of the KV cache in tokens, 0 if it is not known.
    gpu_model: what its GPUs are called, "" for none.
    features: optional job fields that this engine supports. A job that uses another one is refused by name.
    deterministic: whether it samples by seeds, and a token does not depend on its batch.
    adapters: the LoRA adapters in it. The worker keeps this up to date. Empty after a start.
    empty: its weights are random until a version is loaded. It must not generate before. random: they are after each
    start, because it is configured to read no checkpoint.
    startup: seconds that the start took inside the engine, by phase: model, graphs, engine.
    """

    name: str
    version: str
    model: str
    dtype: str
    device: str
    vocab_size: int
    context_length: int
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    kv_tokens: int = 0
    gpu_model: str = ""
    features: frozenset[str] = field(default_factory=frozenset)
    deterministic: bool = False
    adapters: LoadedAdapters = field(default_factory=LoadedAdapters, compare=False, repr=False)
    empty: bool = False
    random: bool = False
    startup: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    def __str__(self) -> str:
        what = f"{self.name} {self.version} with {self.model}, {self.dtype} on {self.device}"
        return f"{what}, at most {self.context_length:,} tokens of prompt and output"

    @property
    def kind(self) -> str:
        """A hex digest of what its speed depends on."""
        told = self.name, self.version, self.dtype, self.device, self.gpu_model, self.tp_size, self.ep_size
        return hashlib.sha1(repr(told).encode(), usedforsecurity=False).hexdigest()[:8]

    def starts_over(self, job: GenerateJob) -> bool:
        """Whether a sample of this job that was interrupted is generated anew here, though it could go on.

        So it is for a reproducible one on a GPU. Its prefill and decode kernels round differently: a sample that goes
        on has its own tokens' KV from a prefill, and what follows depends on where it was interrupted. A CPU's agree.
        """
        exact = job.exact_version is not None and job.seed is not None
        return exact and self.deterministic and self.device != "cpu"

    def fingerprint(self) -> Mapping[str, str]:
        """Return what a replay needs to know. It is small, because it travels with every result."""
        return {
            "engine": f"{self.name}-{self.version}",
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            **({"deterministic": "yes"} if self.deterministic else {}),
        }


class Engine(Protocol):
    """An inference engine. All methods are called from one event loop.

    Coroutines raise EngineDead if the engine dies meanwhile, and EngineError if it does not answer, or fails in a way
    that may not happen again. A transfer that fails raises nothing: the report says what happened, and whether the
    engine has a whole version.
    """

    @property
    def info(self) -> EngineInfo:
        """Valid after `start`."""
        ...

    async def start(self, *, empty: bool = False) -> None:
        """Start the engine with its base weights. It may be called again after `close` or `EngineDead`.

        empty: the base weights are not needed, because a whole version comes before the first request. An engine that
        then has not read them says so (`EngineInfo.empty`).
        It must not block the event loop, because the lease is renewed while an engine restarts. Raises EngineError.
        """
        ...

    async def generate(self, request: EngineRequest) -> EngineOutput:
        """Run one request to its end or its abort.

        Raises RequestRefused if this request can never run here.
        """
        ...

    async def perform(self, request: TaskRequest) -> TaskOutput:
        """Run one input of a job that generates nothing. After an abort the output is not finished.

        Raises RequestRefused as `generate` does, and for a task that is not among `info.features`.
        """
        ...

    def progress(self, request_id: str, start: int = 0) -> Generated | None:
        """Return what a running request has generated from token `start` on, or None if that is not known.

        It may lag behind a little. It costs only the copy, because the engine is not asked.
        """
        ...

    def abort(self, request_id: str) -> None:
        """Let one running request return what it has. Unknown ids are ignored."""
        ...

    def abort_all(self) -> None:
        """Let every running request return what it has."""
        ...

    async def prepare_weights(self, order: TransferOrder) -> TransferReport:
        """Run the first half of an update, while requests run: take part in the transfer `order`.

        The report's phase is "staged" if the version is here and verified, or "ready" if `commit_weights` will receive
        it. The old weights stay whole.
        """
        ...

    async def commit_weights(self, order: TransferOrder) -> TransferReport:
        """Run the second half: load and verify what was prepared. Unless order.mode is "in_place", no request may run.

        In place, `report.switched` has, for every request that was running, the number of tokens that the old weights
        sampled, and `report.anew` those of which there was no cache at the moment.
        """
        ...

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load one version of a LoRA adapter beside its other versions, while requests run."""
        ...

    async def unload_adapter(self, name: str, version: int) -> None:
        """Unload one version that no request uses. If one does, it raises EngineError at once: try again later."""
        ...

    async def operate(self, operation: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run one of an engine's operations. An engine may lack some of them. Parameters and result are plain data.

        "flush_cache": {} forgets cached prefixes. No request may run.
        "clear_storage": {} empties the storage of a hierarchical cache.
        "freeze", "thaw": {} stop before the next forward pass, with requests and KV as they are, and continue.
        "sleep", "wake": {tags}: see worker/sleep_states.py. No request may run, except for a sleep without tags, which
            only says whether the engine can sleep. Wake returns {intact} if weights wake.
        "audit": {version, names, only} compares the parameters; see docs/control.md. "parameter": {version, name,
            truncate_size, rank} shows the first values of one.
        "export": {path, version, max_size} writes them as a version of a SnapshotStore, "save_sharded": {path, version,
            pattern, max_size} in the engine's own format. None stands for the engine's own file names and sizes. The
            caller sees to it that no version is loaded meanwhile. Requests may run.
        "check_sharded", "load_sharded": {path} reads that format. For the latter no request may run, and an error of it
            leaves weights that are no version.
        "start_profile": {folder, activities, steps}, "stop_profile": {}.
        "kv_use": {} returns {tokens, used}: the size of the KV cache, and what requests hold of it. Prefixes that
            could be forgotten do not count. Requests may run.
        "generated": {} returns {requests}: ids of those that have a token and run. Requests may run.

        Raises RequestRefused, with the reason, for an operation that this engine does not support as configured.
        """
        ...

    async def healthy(self) -> bool:
        """Return False once the engine's processes are gone."""
        ...

    async def close(self) -> None:
        """Stop every process that the engine started. It may be called twice."""
        ...
