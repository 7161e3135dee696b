"""The methods of SkyRLEngine beside generation and weights: sessions, scores, embeddings, saving, facts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...messages.errors import FeatureUnavailable
from .control import WorkerControl
from .core import EngineCore
from .outputs import InferenceEngineOutput
from .requests import InferenceEngineInput
from .sessions import Sessions
from .tasks import EMBED, REWARD, SCORE, Tasks


class Extras:
    """Base of SkyRLEngine, which has the parts that these methods call."""

    _core: EngineCore
    _control: WorkerControl
    _sessions: Sessions
    _tasks: Tasks

    def supports_sessions(self) -> bool:
        """True: any worker can continue any session."""
        return True

    async def open_session(self, capacity_of_str_len: int = 8192, session_id: str | None = None) -> str | None:
        """The id of a new session, None if that id is in use. A session is kept here, not on a worker."""
        return self._sessions.open(session_id, capacity_of_str_len)

    async def close_session(self, session_id: str) -> None:
        """Forget a session. Raises InvalidField if it is not open."""
        self._sessions.close(session_id)

    async def generate_with_session(  # noqa: PLR0917 – SkyRL's signature
        self,
        session_id: str,
        input_batch: InferenceEngineInput,
        rid: str | None = None,
        offset: int | None = None,
        replace: bool = False,
        drop_previous_output: bool = False,
    ) -> InferenceEngineOutput:
        """Continue a session. The prompt has only the new tokens.
        rid: the request to continue, from an earlier output's `request_ids`. None begins anew. offset: keep only so
        many of that request's tokens, prompt first; -1 or None keeps all. replace: forget the requests that continued
        it before; without rid, forget the whole session. drop_previous_output: leave out that request's output.
        Several prompts, or n > 1, become branches. Raises InvalidField for an unknown session or request, otherwise as
        `generate`."""
        return await self._sessions.generate(session_id, input_batch, rid, offset, replace, drop_previous_output)

    async def get_session_info(self, session_id: str) -> dict[str, Any] | None:
        """The session's requests and its number of tokens. None if it is not open."""
        tree = self._sessions.trees.get(session_id)
        return tree.info() if tree is not None else None

    async def list_sessions(self) -> list[str]:
        """Ids of the open sessions."""
        return list(self._sessions.trees)

    async def fork_session(self, source: str, target: str | None = None, offset: int = -1) -> str | None:
        """The id of a new session that begins as a copy of `source`. None if the id `target` is in use.
        offset: -1 copies all requests, under their ids. 0 or more copies so many tokens of the newest request, and
        every first turn (rid=None) continues them. Raises InvalidField if `source` is not open."""
        return self._sessions.fork(source, target, offset)

    def supports_scoring(self) -> bool:
        """Whether a worker of the pool has a reward model, or can compute log-probabilities of a given answer."""
        return self._core.has(REWARD) or self._core.has(SCORE)

    def supports_embeddings(self) -> bool:
        """Whether a worker of the pool has an embedding model."""
        return self._core.has(EMBED)

    async def score(
        self, input_ids: Sequence[Any], output_ids: Sequence[Any], return_hidden_states: bool = False
    ) -> dict[str, Any]:
        """{"scores": one float for each pair of prompt and answer, "kind": "reward" or "logprob"}.
        input_ids, output_ids: equally many lists of ids, or one list each. kind: "reward" in a pool with a reward
        model, for prompt and answer as one sequence; else "logprob", of the answer after its prompt. Raises
        InvalidField, JobFailed, WaitTimeout, and FeatureUnavailable in a pool without both and for hidden states."""
        return await self._tasks.score(input_ids, output_ids, return_hidden_states)

    async def encode(self, texts: Sequence[str] | str, dimensions: int | None = None) -> list[list[float]]:
        """An embedding of each text. dimensions: only its first components; the model must be trained for that.
        Raises InvalidField, FeatureUnavailable in a pool without an embedding model, JobFailed, WaitTimeout."""
        return await self._tasks.encode([texts] if isinstance(texts, str) else list(texts), dimensions)

    async def encode_single(self, text: str, dimensions: int | None = None) -> list[float]:
        """The embedding of one text; see `encode`."""
        return (await self.encode([text], dimensions))[0]

    async def compute_similarity(self, text1: str, text2: str, dimensions: int | None = None) -> float:
        """Cosine similarity of two texts' embeddings; see `encode`."""
        return await self._tasks.similarity(text1, text2, dimensions)

    async def decode(self, token_ids: Sequence[Any], skip_special_tokens: bool = True) -> list[str]:
        """The text of each list of ids, or of one list. Decoded in this process, with the model's tokenizer."""
        return await self._tasks.decode(token_ids, skip_special_tokens)

    async def save_sharded_model(self, save_path: str, pattern: str | None = None, max_size: int | None = None) -> bool:
        """One worker saves its weights into a folder of its host, in SGLang's sharded format. Returns True. Raises
        InvalidField for a pattern or max_size."""
        return await self._control.save_sharded(save_path, pattern, max_size)

    async def save_remote_model(self, remote_path: str, storage_type: str = "s3") -> bool:
        """One worker saves its weights as safetensors and copies them to a URL with fsspec. Returns True.
        remote_path: a URL, or its part after `storage_type`://. The files stay in the worker's /var/tmp."""
        return await self._control.save_remote(remote_path, storage_type)

    async def start_profile(self) -> bool:
        """Every worker starts its profiler. Returns True. Raises a worker's error if its profiler runs already."""
        return await self._control.start_profile()

    async def stop_profile(self) -> dict[str, Any] | None:
        """Worker -> folder of its traces. None for a pool without workers."""
        return await self._control.ask("stop_profile") or None

    async def get_server_info(self) -> dict[str, Any]:
        """The pool's name, its workers as of their last heartbeat, its load and the newest version."""
        return await self._control.server_info()

    def tp_size(self) -> int:
        """Tensor-parallel size of a worker's engine. Raises RolloutMQError if workers differ or there is none."""
        return self._control.size("tp_size")

    def pp_size(self) -> int:
        """Pipeline-parallel size; see `tp_size`."""
        return self._control.size("pp_size")

    def dp_size(self) -> int:
        """Data-parallel size of a worker's engine; `get_server_info` says how many workers there are."""
        return self._control.size("dp_size")

    def ep_size(self) -> int:
        """Expert-parallel size; see `tp_size`."""
        return self._control.size("ep_size")

    async def get_world_size(self) -> tuple[int, int]:
        """(ranks of all workers' engines, ranks of one). Raises RolloutMQError if they differ or there is none."""
        return await self._control.world_size()

    @property
    def model_name(self) -> str:
        """The model that the pool's workers serve. Raises RolloutMQError if they differ or there is none."""
        return self._core.model_now()

    def get_endpoint_url(self) -> str:
        """Raises FeatureUnavailable: this engine is called in its process, and has no HTTP endpoint."""
        raise FeatureUnavailable("get_endpoint_url", None, "chat_completion and completion, which take OpenAI's bodies")
