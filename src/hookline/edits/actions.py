"""What an edit does to a tensor: set, add, scale, zero, clip, noise, mask, patch, swap rows.

An action is a value: it can be printed, kept and used at many sites. It says what happens to one
tensor; a condition (`action.where(...)`) says when and to which rows and positions.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookline._errors import EditError, HooklineError
from hookline.captures.captured import Captured
from hookline.edits.changes import change, hold
from hookline.edits.places import Choice, Places, choose, explain, limit
from hookline.hooks.functions import Which, check_which
from hookline.hooks.visits import At

Number = int | float
Find = Callable[[Tensor, str, int | None, int], tuple[Tensor, ...]]
"""What gives the operands for a tensor, by the address, the visit and the call it is in."""
Check = Callable[[Sequence[int]], str]
"""What says why an action cannot be done to a tensor of some shape; empty where it can."""


@dataclass(frozen=True, slots=True)
class Action:
    """One declared change of a tensor, and the condition under which it is made."""

    name: str
    """How it prints."""

    kind: str = field(repr=False)
    """What is computed: a name in `changes.CHANGES`."""

    operands: tuple[Tensor, ...] = field(default=(), repr=False)
    """The tensors it is computed with."""

    numbers: tuple[Tensor, ...] = field(default=(), repr=False)
    """The numbers it is computed with, as `changes.hold` gives them."""

    settings: tuple[Any, ...] = field(default=(), repr=False)
    """What else says how: a dimension."""

    find: Find | None = field(default=None, repr=False)
    """What gives the operands where they differ from value to value; None where they do not."""

    fix: Callable[[str], tuple[Tensor, ...] | None] | None = field(default=None, repr=False)
    """What gives such operands once and for all for an address, or None where that cannot be."""

    is_of_one_visit: bool = field(default=False, repr=False)
    """Whether operands that are fixed are those of the first visit only."""

    check: Check | None = field(default=None, repr=False)
    """What tells whether a shape will do; None where any will."""

    visits: Which = None
    """The executions within one call it applies to; None for all."""

    calls: Which = None
    """The calls of the model it applies to; None for all."""

    rows: Places = None
    """The indexes along `row_dim` it applies to; None for all."""

    positions: Places = None
    """The indexes along `position_dim` it applies to; None for all."""

    row_dim: int = 0
    """The dimension of rows: the batch."""

    position_dim: int = 1
    """The dimension of positions: the tokens."""

    depends_on_place: bool = field(default=False, repr=False)
    """Whether it does another thing for each visit, assignment and call of an operation."""

    def __repr__(self) -> str:
        conditions = [
            f"{name}={value!r}"
            for name in ("visits", "calls", "rows", "positions")
            if (value := getattr(self, name)) is not None
        ]
        return f"{self.name}.where({', '.join(conditions)})" if conditions else self.name

    def where(
        self,
        *,
        visits: Which = None,
        calls: Which = None,
        rows: Places = None,
        positions: Places = None,
        row_dim: int | None = None,
        position_dim: int | None = None,
    ) -> Action:
        """Give the same action under a condition; what is not given stays as it was.

        hl.add(vector).where(rows=[0, 2], positions=-1)
        """
        given = {
            "visits": check_which("visits", visits),
            "calls": check_which("calls", calls),
            "rows": rows,
            "positions": positions,
            "row_dim": row_dim,
            "position_dim": position_dim,
        }
        changes: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
        return replace(self, **changes)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Give what it is limited to, dimension by dimension."""
        pairs = ((self.rows, self.row_dim), (self.positions, self.position_dim))
        return tuple(choose(places, dim) for places, dim in pairs if places is not None)

    def explain(self, shape: Sequence[int], address: str) -> str:
        """Say why it cannot be done to a tensor of this shape; empty where it can."""
        problem = "" if self.check is None else self.check(shape)
        if problem:
            return f"{self.name.partition('(')[0]} at `{address}`: {problem}"
        for places, dim in ((self.rows, self.row_dim), (self.positions, self.position_dim)):
            problem = "" if places is None else explain(shape, places, dim, address)
            if problem:
                return problem
        return ""

    def apply(self, value: Tensor, at: At) -> Tensor:
        """Change one tensor where the condition holds."""
        problem = self.explain(value.shape, at.address) if self._has_limits else ""
        if problem:
            raise EditError(problem)
        operands = self.operands
        if self.find is not None:
            operands = self.find(value, at.address, at.visit, at.call)
        try:
            new = change(value, self.kind, (*operands, *self.numbers), self.settings)
        except RuntimeError as error:
            if isinstance(error, HooklineError):
                raise
            raise EditError(f"{self.name} does not fit `{at.address}`: {error}") from error
        if self.rows is None and self.positions is None:
            return new
        if new.shape != value.shape:
            raise EditError(
                f"{self.name} at `{at.address}` gave shape {tuple(new.shape)} for "
                f"{tuple(value.shape)}, so rows and positions cannot be told apart."
            )
        return limit(value, new, self.choices)

    @property
    def _has_limits(self) -> bool:
        return any(one is not None for one in (self.check, self.rows, self.positions))


def _number_or_tensor(given: Any, what: str) -> Number | Tensor:
    if isinstance(given, (int, float, Tensor)):
        return given
    raise TypeError(f"hl.{what} takes a number or a tensor, not {type(given).__qualname__}")


def _show(given: Any) -> str:
    return f"tensor{tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)


def set(value: Number | Tensor) -> Action:
    """Replace the value by a number, or by a tensor of the same shape and type."""
    new = _number_or_tensor(value, "set")
    if isinstance(new, Tensor):
        return Action(f"set({_show(new)})", "replace", (new,))
    return Action(f"set({_show(new)})", "fill", numbers=(hold(new),))


def add(value: Number | Tensor) -> Action:
    """Add a number or a tensor that broadcasts to the value: steering.

    A tensor takes the type of the value: a vector in float32 steers a bfloat16 model.
    """
    more = _number_or_tensor(value, "add")
    if isinstance(more, Tensor):
        return Action(f"add({_show(more)})", "add", (more,))
    return Action(f"add({_show(more)})", "add number", numbers=(hold(more),))


def scale(factor: Number | Tensor) -> Action:
    """Multiply the value."""
    by = _number_or_tensor(factor, "scale")
    if isinstance(by, Tensor):
        return Action(f"scale({_show(by)})", "scale", (by,))
    return Action(f"scale({_show(by)})", "scale by number", numbers=(hold(by),))


def zero() -> Action:
    """Replace the value by zeros: ablation."""
    return Action("zero()", "fill", numbers=(hold(0),))


def clip(
    low: Number | None = None,
    high: Number | None = None,
    *,
    norm: Number | None = None,
    dim: int | tuple[int, ...] | None = None,
) -> Action:
    """Clip by value, `clip(1.0)` for -1 to 1, `clip(low, high)`; or by norm, `clip(norm=1.0)`.

    By norm the whole tensor is scaled down if its L2 norm is above; with `dim` each vector is.
    """
    if norm is not None:
        if low is not None or high is not None:
            raise TypeError("hl.clip takes either limits or a norm")
        return Action(f"clip(norm={norm})", "clip norm", numbers=(hold(norm),), settings=(dim,))
    if low is None:
        raise TypeError("hl.clip needs a limit: hl.clip(1.0), hl.clip(0, 6) or hl.clip(norm=1.0)")
    least, most = (-abs(low), abs(low)) if high is None else (low, high)
    if least > most:
        raise ValueError(f"hl.clip({low}, {high}): the lower limit is above the upper one")
    return Action(f"clip({least}, {most})", "clip", numbers=(hold(least), hold(most)))


def noise(std: Number, *, seed: int = 0) -> Action:
    """Add Gaussian noise; the same seed gives the same noise at a site, visit and call.

    The model's own random numbers are not touched, and a recompute sees the same noise.
    """

    def find(old: Tensor, address: str, visit: int | None, call: int) -> tuple[Tensor, ...]:
        key = f"{seed}/{address}/{call}/{visit}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        generator = torch.Generator(old.device).manual_seed(number)
        more = torch.randn(old.shape, generator=generator, device=old.device, dtype=torch.float32)
        return (more * std,)

    return Action(f"noise({std}, seed={seed})", "add", find=find, depends_on_place=True)


def mask(keep: Tensor, *, fill: Number = 0.0) -> Action:
    """Keep the value where `keep` is true and put `fill` elsewhere; `keep` broadcasts."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError("hl.mask takes a bool tensor: true where the value stays")
    return Action(f"mask({_show(keep)}, fill={fill})", "mask", (keep,), (hold(fill),))


def swap_rows(first: int | Sequence[int], second: int | None = None, *, dim: int = 0) -> Action:
    """Swap two rows of the batch, `swap_rows(0, 1)`, or order all, `swap_rows([2, 0, 1])`."""

    def check(shape: Sequence[int]) -> str:
        size = shape[dim]
        if second is not None:
            is_order = isinstance(first, int) and -size <= first < size and -size <= second < size
        else:
            order = list(first) if isinstance(first, Sequence) else []
            is_order = sorted(order) == list(range(size))
        what = f"there are {size} rows in dimension {dim}; {first!r}, {second!r} is no order"
        return "" if is_order else f"{what} of them."

    name = f"swap_rows({first}, {second})"
    if second is None or not isinstance(first, int):
        order = torch.tensor(list(first) if isinstance(first, Sequence) else [], dtype=torch.int64)
        return Action(name, "order", (order,), settings=(dim,), check=check)
    numbers = (hold(first), hold(second))
    return Action(name, "swap", numbers=numbers, settings=(dim,), check=check)


def patch(
    source: Captured,
    address: str | None = None,
    *,
    call: int | None = None,
    visit: int | None = None,
) -> Action:
    """Put in the value that a capture of another run has at this site (or at `address`).

    The visit is the one being edited unless given; `call` chooses among several captured calls.
    """
    if not isinstance(source, Captured):
        raise TypeError(
            f"hl.patch takes what a capture gave (`with hl.capture(...) as got`), not "
            f"{type(source).__qualname__}. For a tensor there is hl.set."
        )

    def find(_: Tensor | None, site: str, current: int | None, __: int) -> tuple[Tensor, ...]:
        reader: Any = source
        if call is not None:
            count = len(source.calls)
            if not -count <= call < count:
                raise EditError(
                    f"patch at `{site}`: there is no call {call}; {count} were captured."
                )
            reader = source.calls[call]
        name = address or site
        new = _read(reader, name, current if visit is None else visit)
        if not isinstance(new, Tensor):
            raise EditError(
                f"patch at `{site}`: `{name}` is no single tensor; name a leaf in `address`."
            )
        return (new,)

    def fix(site: str) -> tuple[Tensor, ...] | None:
        found = find(None, site, 0, 0)
        if visit is None and address is None:
            reader: Any = source if call is None else source.calls[call]
            with contextlib.suppress(HooklineError):
                _read(reader, site, 1)
                return None  # each visit has a value of its own
        return found

    return Action(
        f"patch({address or 'same site'})",
        "replace",
        find=find,
        fix=fix,
        is_of_one_visit=visit is None and address is None,
        depends_on_place=address is None,
    )


def _read(reader: Any, name: str, visit: int | None) -> Any:
    return reader[name] if visit is None else reader[name, visit]
