"""The samples of a bucket, as a list of numbers that stays an array.

A list of a million numbers takes 36 MB and 20 ms to make; the array takes 8 MB, and a range nothing. Code that was
written for lists needs the list's behaviour, not its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class RowNumbers(MutableSequence[int]):
    """Numbers of samples that behave as a list of ``int``. Changing them makes a real list first.

    >>> numbers = RowNumbers(range(3))
    >>> numbers + [7], numbers[1:], numbers == [0, 1, 2], bool(numbers)
    ([0, 1, 2, 7], [1, 2], True, True)

    ``numbers[1:]``, ``+`` and ``copy`` give lists. numpy takes the numbers without a loop.

    Args:
        numbers: The numbers in order. They are not copied.
    """

    __hash__ = None  # type: ignore[assignment]  # as a list

    def __init__(self, numbers: range | npt.NDArray[np.int64] | list[int]) -> None:
        self._numbers = numbers

    # ---- as a list ----------------------------------------------------------------------------

    def tolist(self) -> list[int]:
        """A list of ``int``."""
        return self._numbers.tolist() if isinstance(self._numbers, np.ndarray) else list(self._numbers)

    copy = tolist

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return RowNumbers(self._numbers[index]).tolist()
        return int(self._numbers[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers.tolist() if isinstance(self._numbers, np.ndarray) else self._numbers)

    def __contains__(self, value: object) -> bool:
        if isinstance(self._numbers, np.ndarray):
            return isinstance(value, (int, np.integer)) and bool((self._numbers == value).any())
        return value in self._numbers

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RowNumbers):
            return np.array_equal(self, other)
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __add__(self, other: Iterable[int]) -> list[int]:
        return self.tolist() + list(other) if isinstance(other, (list, RowNumbers)) else NotImplemented

    def __radd__(self, other: Iterable[int]) -> list[int]:
        return list(other) + self.tolist() if isinstance(other, list) else NotImplemented

    def __mul__(self, count: int) -> list[int]:
        return self.tolist() * count

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return repr(self.tolist())

    # ---- changes ------------------------------------------------------------------------------

    def _as_list(self) -> list[int]:
        if not isinstance(self._numbers, list):
            self._numbers = self.tolist()
        return self._numbers

    def __setitem__(self, index: Any, value: Any) -> None:
        self._as_list()[index] = value

    def __delitem__(self, index: int | slice) -> None:
        del self._as_list()[index]

    def insert(self, index: int, value: int) -> None:
        """Insert a number before this position.

        Args:
            index: The position.
            value: The number.
        """
        self._as_list().insert(index, value)

    def sort(self, *, key: Any = None, reverse: bool = False) -> None:
        """Sort in place, as a list does.

        Args:
            key: A function of a number to sort by.
            reverse: Whether the largest comes first.
        """
        self._as_list().sort(key=key, reverse=reverse)

    # ---- as an array --------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self._numbers, dtype=dtype or np.int64) if copy else np.asarray(self._numbers, dtype)

    def look_up(self, positions: npt.NDArray[Any]) -> list[int]:
        """``[numbers[p] for p in positions]``, without a loop.

        Args:
            positions: Positions of the numbers.
        """
        numbers = self._numbers
        if isinstance(numbers, range):
            found: npt.NDArray[Any] = numbers.start + positions * numbers.step
            return [int(number) for number in found]
        if isinstance(numbers, np.ndarray):
            return [int(number) for number in numbers[positions]]
        return [numbers[position] for position in positions]
