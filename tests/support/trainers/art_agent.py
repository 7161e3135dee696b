"""An agent with ART's client, and ART's tokens of what it did. In a process of its own: ART changes transformers.

    python -m support.trainers.art_agent URL MODEL TOKENIZER TALK SETTINGS

Prints {"token_ids", "mask", "logprobs", "talk"} of the trajectory as its last line.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from rolloutmq.worker.cpu_support import prepare_transformers


async def play(client: Any, name: str, talk: list[Any], settings: dict[str, Any]) -> None:
    """Two turns."""
    for question in ("And back?", None):
        answer = await client.chat.completions.create(model=name, messages=talk, **settings)
        if settings.get("stream"):
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
        else:
            text = answer.choices[0].message.content or ""
        talk += [{"role": "assistant", "content": text}, {"role": "user", "content": question}]


async def main(url: str, name: str, path: str, talk: list[Any], settings: dict[str, Any]) -> None:
    prepare_transformers()
    import art  # noqa: PLC0415
    from art.preprocessing.tokenize import tokenize_trajectory  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    model = art.TrainableModel(name=name, project="p", base_model=name)
    model.inference_base_url, model.inference_api_key = url, "none"
    trajectory = await art.capture_auto_trajectory(play(model.openai_client(), name, talk, settings))
    assert trajectory.additional_histories == [], "one conversation"
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    result = tokenize_trajectory(tokenizer, None, trajectory, 1.0, False, trajectory)  # type: ignore[arg-type]
    assert result is not None
    found = {"token_ids": result.token_ids, "mask": result.assistant_mask, "logprobs": result.logprobs, "talk": talk}
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(json.loads, sys.argv[4:])))
