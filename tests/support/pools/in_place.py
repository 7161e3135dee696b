"""Weights replaced in a real SGLang engine while requests run, and transformers as the judge of every token.

The loader here is a stand-in for the package's own: it reads the new weights from a file. What is examined is what
happens between requests and weights in the scheduler (`rolloutmq.worker.sglang.inside.switches`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np

from rolloutmq.messages.model.sampling import SamplingParams
from rolloutmq.ops.tiny_model import write_tiny_model
from rolloutmq.worker.engine.protocol import EngineOutput, EngineRequest
from rolloutmq.worker.sglang.engine import SGLangEngine

DEADLINE_S = 60.0
_ids = itertools.count(1)


def receive(model: Any, named_tensors: Any) -> None:
    """SGLang's hook, in the scheduler process: load a file's weights, then `switch`; what came of it goes to a file."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    from rolloutmq.worker.sglang.inside.scheduler import current  # noqa: PLC0415
    from rolloutmq.worker.sglang.inside.switches import check, switch  # noqa: PLC0415

    [(text, _)] = named_tensors
    order = json.loads(text)
    answer: dict[str, Any] = {}

    def tell(counts: dict[str, int] | None) -> None:
        answer["counts"] = counts
        part = Path(order["answer"] + ".part")
        part.write_text(json.dumps(answer))
        os.replace(part, order["answer"])

    scheduler = current()
    try:
        check(scheduler, order["key"])
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
        tell(None)
        return
    answer["pending"] = len(scheduler.result_queue) if scheduler.enable_overlap else 0
    answer["waiting"] = [request.rid for request in scheduler.waiting_queue]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    model.load_weights(load_file(order["weights"]).items())
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    switch(scheduler, order["key"], lambda counts, _: tell(counts))


class InPlaceEngine(SGLangEngine):
    """An engine with the loader above."""

    _weight_loader = "support.pools.in_place.receive"

    async def replace(self, weights: Path, key: str) -> dict[str, Any]:
        """Load `weights` in one request, whatever runs; the loader's answer, once it has come."""
        import torch  # noqa: PLC0415
        from sglang.srt.managers import io_struct  # noqa: PLC0415
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads  # noqa: PLC0415

        answer = weights.with_name(f"answer-{next(_ids)}.json")
        text = json.dumps({"weights": str(weights), "key": key, "answer": str(answer)})
        request = io_struct.UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=normalize_serialized_named_tensor_payloads(
                [pickle.dumps([(text, torch.tensor([0]))])]
            ),
            load_format=self._weight_loader,
            flush_cache=False,
        )
        # Past the manager's lock, which would wait until no request runs.
        [said] = await self._current().manager.update_weights_from_tensor_communicator(request)
        assert said.success, said.message
        await until(answer.exists)
        return dict(json.loads(answer.read_text()))


async def until(condition: Any) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, condition
        await asyncio.sleep(0.002)  # between two looks, not instead of one


def greedy(prompt: list[int], count: int, key: str) -> EngineRequest:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    return EngineRequest(f"{next(_ids):044x}", np.array(prompt, np.int32), sampling, count, key)


def prompts(count: int, length: int = 70, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 259, length).tolist() for _ in range(count)]


def write_versions(folder: Path, count: int, dtype: str = "float32", model: Path | None = None) -> list[Path]:
    """The model that the engine starts with (a directory), and the weights of later versions (files).

    model: the one that it is, else one is written.
    """
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    if model is None:
        model = folder / "model"
        write_tiny_model(model, dtype=dtype)
    base = load_file(model / "model.safetensors")
    paths = [model]
    for version in range(1, count):
        torch.manual_seed(version)
        path = folder / f"version-{version}.safetensors"
        noise = {name: 0.5 * t.float().std().nan_to_num(1.0) * torch.randn_like(t.float()) for name, t in base.items()}
        save_file({name: (tensor + noise[name]).to(tensor.dtype) for name, tensor in base.items()}, path)
        paths.append(path)
    return paths


class Judge:
    """transformers with each version's weights, in float32."""

    def __init__(self, versions: list[Path], device: str = "cpu") -> None:
        from safetensors.torch import load_file  # noqa: PLC0415
        from transformers import AutoModelForCausalLM  # noqa: PLC0415

        self.device = device
        self.models = []
        for path in versions:
            model = AutoModelForCausalLM.from_pretrained(path if path.is_dir() else versions[0], dtype="float32").eval()
            if path.is_file():
                missing, unexpected = model.load_state_dict(load_file(path), strict=False)
                assert not unexpected
                assert set(missing) <= {"lm_head.weight"}
            self.models.append(model.to(self.device))

    def logprobs(
        self, prompt: list[int], tokens: np.ndarray, segments: list[tuple[int, int]], *, keep: bool = True
    ) -> np.ndarray:
        """(n, vocabulary): of each token, under the version that `segments` gives it.

        keep: a segment extends the KV that is there, whichever versions computed it, as an engine does that updates in
        place; else it computes everything before it anew, as one does that stops and goes on.
        """
        import torch  # noqa: PLC0415

        rows: list[Any] = []
        fed, cache = prompt, None
        with torch.no_grad():
            for version, count in segments:
                start = len(rows)
                if start:
                    fed = [*prompt, *tokens[:start].tolist()] if not keep else [int(tokens[start - 1])]
                    cache = cache if keep else None
                fed = [*fed, *tokens[start : start + count - 1].tolist()]
                out = self.models[version](
                    torch.tensor([fed], device=self.device), past_key_values=cache, use_cache=True
                )
                cache = out.past_key_values
                rows += torch.log_softmax(out.logits[0, -count:].float(), -1).cpu().numpy().tolist()
        assert len(rows) == len(tokens)
        return np.array(rows)

    def error(
        self, prompt: list[int], output: EngineOutput, segments: list[tuple[int, int]], *, keep: bool = True
    ) -> float:
        """How far the worst token is from greedy, or its log-probability from the reference's, under `segments`."""
        expected = self.logprobs(prompt, output.token_ids, segments, keep=keep)
        chosen = expected[np.arange(len(output.token_ids)), output.token_ids]
        return float(np.maximum(np.abs(output.logprobs - chosen), expected.max(-1) - chosen).max())


def check_crossing(
    judge: Judge, prompt: list[int], output: EngineOutput, segments: list[tuple[int, int]], tolerance: float
) -> bool:
    """The output is what these segments give when KV is kept; not what one version gives, nor KV computed anew.

    True if a switch one token earlier or later is ruled out too: by chance the versions can agree on one token.
    """
    assert sum(count for _, count in segments) == len(output.token_ids)
    assert judge.error(prompt, output, segments) < tolerance
    assert judge.error(prompt, output, segments, keep=False) > 3 * tolerance
    for version, _ in segments:
        assert judge.error(prompt, output, [(version, len(output.token_ids))]) > 3 * tolerance
    others = []
    for i in range(1, len(segments)):
        for off in (-1, 1):
            moved = list(segments)
            moved[i - 1] = (segments[i - 1][0], segments[i - 1][1] + off)
            moved[i] = (segments[i][0], segments[i][1] - off)
            others.append(judge.error(prompt, output, moved))
    return min(others) > 3 * tolerance
