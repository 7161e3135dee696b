"""An agent as agent-lightning's controller starts it: two turns, and a reward."""

from __future__ import annotations

import json
import os

import httpx
from openai import OpenAI


class Agent:
    def run(self) -> None:
        talk = json.loads(os.environ["TALK"])
        with OpenAI(base_url=os.environ["AGL_OPENAI_BASE_URL"], api_key="none") as client:
            for question in ("And back?", None):
                answer = client.chat.completions.create(model="any", messages=talk, max_tokens=24)
                talk += [
                    {"role": "assistant", "content": answer.choices[0].message.content},
                    {"role": "user", "content": question},
                ]
        reward = {"event_type": "reward", "data": {"value": 0.5}}
        httpx.post(os.environ["AGL_EVENT_URL"], json=reward).raise_for_status()
