"""The half that runs inside SGLang's scheduler processes."""

__all__ = []
