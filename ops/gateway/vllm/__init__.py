"""vLLM's HTTP beside OpenAI's, for trainers that drive a vLLM server: TRL, prime-rl, verifiers, SkyRL.

Few files: the rest of a door is what all doors share.
"""

from .door import VLLMDoor

__all__ = ["VLLMDoor"]
