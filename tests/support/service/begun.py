"""Operations that a test begins together, as a batch does."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from halfway.coordinator.operations import Operation, results_of

R = TypeVar("R")


@dataclass(eq=False)
class Begun(Generic[R]):
    """A list of operations, and their answers in the same order."""

    operations: Sequence[Operation[R]]

    @property
    def left(self) -> int:
        """The number of operations that have no answer, whether or not a caller waits for it."""
        return sum(one.result is None for one in self.operations)

    @property
    def results(self) -> list[R | Exception | None]:
        """The answers as far as they have come, whether or not a caller waits for them."""
        return [one.result for one in self.operations]

    async def all(self) -> list[R | Exception]:
        return await results_of(self.operations)

    def abandon(self) -> None:
        """Wait for no more answers."""
        for one in self.operations:
            one.cancel()
