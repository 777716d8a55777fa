"""Which operation inside an operation it was: what torch's own Python functions call.

A function mode is off inside of what it passes on, so this looks one level deeper, below autograd.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode

from hookline.addresses.inside import canonical_operation
from hookline.replays.explaining import explain
from hookline.replays.looking import is_floating, look_at
from hookline.replays.naming import FRESH, is_intended, tensors_in


class Inner(NamedTuple):
    """The operation inside another one that made a non-finite value."""

    name: str
    why: str


class InnerMode(TorchDispatchMode):
    """Note the first operation that gives something non-finite and was given nothing of it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch loads its compiler, which takes seconds

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Inner | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.found is None:
            self._judge(func, args, kwargs, result)
        return result

    def _judge(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        called = getattr(func, "overloadpacket", func).__name__
        name = canonical_operation(called).strip("_")
        arguments = (*args, *kwargs.values())
        if name in FRESH or is_intended(name, arguments):
            return
        looks = [look_at(one) for one in tensors_in(result) if is_floating(one)]
        if all(look.is_fine for look in looks):
            return
        given = [look_at(one) for one in tensors_in(list(arguments)) if is_floating(one)]
        if any(look.nan or look.posinf for look in given):
            return
        if any(look.neginf for look in given) and not any(look.nan for look in looks):
            return  # a mask on its way
        bound: dict[str | int, Any] = dict(enumerate(args))
        bound.update(kwargs)
        outputs = [one for one in tensors_in(result) if is_floating(one)]
        bad = next(one for one, look in zip(outputs, looks, strict=True) if not look.is_fine)
        self.found = Inner(name, explain(name, bound, bad))
