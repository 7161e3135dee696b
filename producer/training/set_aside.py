"""What the functions of GroupRules raise: it reaches the feed's caller, and costs no sample."""

from __future__ import annotations

from asyncio import CancelledError

from ...messages.errors import RolloutMQError, shortly


class SetAside:
    """Prompts of which a function has raised. They stay in flight, and other prompts go on without them.

    A prompt's error is raised once, by the call of the feed that waits, or by the next one. Each later call tries the
    function again. What it raises then is raised only if the call has nothing else to give or to wait for.
    """

    def __init__(self) -> None:
        self._errors: dict[int, BaseException] = {}  # of the last try
        self._told: set[int] = set()  # prompts whose error was raised, until their functions succeed

    def __contains__(self, number: int) -> bool:
        return number in self._errors

    def put(self, number: int, function: str, raised: BaseException) -> None:
        """A function of GroupRules has raised this for a prompt."""
        error = raised
        if isinstance(raised, CancelledError | GeneratorExit | StopIteration | StopAsyncIteration):
            # Cancellation and the end of an iterator would end the caller's task or loop without a word.
            error = RolloutMQError(f"GroupRules.{function} raised {raised!r}")
            error.__cause__ = raised
        if not getattr(error, "__notes__", None):
            error.add_note(
                f"GroupRules.{function} raised this for prompt {number}. Its samples stay in flight, and each later "
                "call of the feed tries again."
            )
        self._errors[number] = error

    def over(self, number: int) -> None:
        """The functions have succeeded for this prompt."""
        self._told.discard(number)

    def raise_new(self) -> None:
        """Raise what no call has raised yet, if there is any: the first error, with a note about the others."""
        new = [number for number in self._errors if number not in self._told]
        if not new:
            return
        self._told.update(new)
        first, *others = (self._errors[number] for number in new)
        if others:
            first.add_note(f"{len(others)} more prompts are set aside, the next one by {shortly(others[0])}.")
        raise first

    def raise_again(self) -> None:
        """Raise the first error of those that there are, if there is any."""
        for error in self._errors.values():
            raise error

    def try_again(self) -> set[int]:
        """A call of the feed begins. Returns the prompts that are set aside no more."""
        before, self._errors = self._errors, {}
        return set(before)
