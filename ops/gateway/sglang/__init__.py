"""SGLang's HTTP, for trainers that drive an SGLang server: slime, miles, AReaL.

Few files: the rest of a door is what all doors share.
"""

from .door import SGLangDoor

__all__ = ["SGLangDoor"]
