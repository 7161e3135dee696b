"""vLLM's HTTP beside OpenAI's, for trainers that drive a vLLM server: TRL, prime-rl, verifiers, SkyRL."""

from .door import VLLMDoor

__all__ = ["VLLMDoor"]
