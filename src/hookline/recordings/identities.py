"""Which tensor is which: whether a value was met before in the step, at another site."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from hookline._torch import storage_number


class Identities:
    """Know the tensors of a step by where they lie in memory, and how often that was changed.

    An alias that shares memory and version with a tensor has its numbers, so it is the same. What
    is noted here of a memory keeps others from having its number, also once it was freed.
    """

    __slots__ = ("_held", "_known", "_overwritten")

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}
        self._held: dict[int, object] = {}
        self._overwritten: set[tuple[int, int]] = set()

    def clear(self) -> None:
        """Forget all of them: a step begins."""
        self._known.clear()
        self._held.clear()
        self._overwritten.clear()

    def meet(self, tensor: Tensor, site: int) -> int | None:
        """Give the site where this very tensor was met first, None where that is here."""
        key = self._key(tensor)
        if key is None:
            return None
        first = self._known.setdefault(key, site)
        return None if first == site else first

    def find(self, tensor: Tensor) -> int | None:
        """Give the site where this very tensor was met; None where it was not."""
        return self._known.get(self._key(tensor))

    def note_overwritten(self, tensor: Tensor) -> bool:
        """Tell whether that a memory was changed, up to its version of now, is news."""
        inner = getattr(tensor, "_local_tensor", tensor)
        try:
            key = (storage_number(inner, self._held), tensor._version)
        except (RuntimeError, NotImplementedError):
            return False
        is_new = key not in self._overwritten
        self._overwritten.add(key)
        return is_new

    def knows(self, tensor: Tensor) -> bool:
        """Tell whether this very tensor was met."""
        return self._key(tensor) in self._known

    def _key(self, tensor: Tensor) -> Hashable | None:
        """Tell one tensor from another; None where that cannot be told."""
        inner = tensor
        if type(tensor) is not Tensor:  # of a DTensor, what this rank has
            inner = getattr(tensor, "_local_tensor", tensor)
        try:
            return (
                storage_number(inner, self._held),
                inner.storage_offset(),
                inner.shape,
                inner.stride(),
                inner.dtype,
                inner.is_neg(),
                inner.is_conj(),
                tensor.shape,
                tensor._version,
            )
        except (RuntimeError, NotImplementedError):
            # One without memory of its own, as a sparse one is, or without a version, as all are
            # in inference mode: whether it was changed is not known.
            return None
