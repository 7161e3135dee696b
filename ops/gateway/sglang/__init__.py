"""SGLang's HTTP, for trainers that drive an SGLang server: slime, miles, AReaL."""

from .door import SGLangDoor

__all__ = ["SGLangDoor"]
