"""What an edit does to a tensor: set, add, scale, zero, clip, noise, mask, patch, swap rows.

An action is a value: it can be printed, kept and used at many sites. It says what happens to one
tensor; a condition (`action.where(...)`) says when and to which rows and positions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hookline._errors import EditError, HooklineError
from hookline.captures.captured import Captured
from hookline.hooks.functions import Which, check_which
from hookline.hooks.visits import At

Number = int | float
Change = Callable[[Tensor, At], Tensor]
Places = int | slice | Sequence[int] | None


@dataclass(frozen=True, slots=True)
class Action:
    """One declared change of a tensor, and the condition under which it is made."""

    name: str
    """How it prints."""

    change: Change = field(repr=False)
    """What it does to a tensor."""

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

    def apply(self, value: Tensor, at: At) -> Tensor:
        """Change one tensor where the condition holds."""
        try:
            new = self.change(value, at)
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
        mask = torch.ones((1,) * value.dim(), dtype=torch.bool, device=value.device)
        for places, dim in ((self.rows, self.row_dim), (self.positions, self.position_dim)):
            if places is not None:
                mask = mask & _mask(value, places, dim, at)
        return torch.where(mask, new, value)


def _mask(value: Tensor, places: Places, dim: int, at: At) -> Tensor:
    if not -value.dim() <= dim < value.dim():
        raise EditError(
            f"`{at.address}` has {value.dim()} dimensions, so there is no dimension {dim} to "
            "select rows or positions in. Give row_dim or position_dim."
        )
    chosen = torch.zeros(value.shape[dim], dtype=torch.bool, device=value.device)
    index = [places] if isinstance(places, int) else places
    try:
        chosen[index] = True
    except IndexError as error:
        raise EditError(
            f"`{at.address}` has {value.shape[dim]} entries in dimension {dim}; "
            f"{places!r} is outside."
        ) from error
    shape = [1] * value.dim()
    shape[dim] = value.shape[dim]
    return chosen.reshape(shape)


def _number_or_tensor(given: Any, what: str) -> Number | Tensor:
    if isinstance(given, (int, float, Tensor)):
        return given
    raise TypeError(f"hl.{what} takes a number or a tensor, not {type(given).__qualname__}")


def _show(given: Any) -> str:
    return f"tensor{tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)


def _like(given: Number | Tensor, value: Tensor) -> Number | Tensor:
    """Give a tensor the type of the value: a vector in float32 steers a bfloat16 model."""
    return given.to(value.dtype) if isinstance(given, Tensor) else given


def set(value: Number | Tensor) -> Action:
    """Replace the value by a number, or by a tensor of the same shape and type."""
    new = _number_or_tensor(value, "set")
    return Action(
        f"set({_show(new)})",
        lambda old, at: new if isinstance(new, Tensor) else torch.full_like(old, new),
    )


def add(value: Number | Tensor) -> Action:
    """Add a number or a tensor that broadcasts to the value: steering."""
    more = _number_or_tensor(value, "add")
    return Action(f"add({_show(more)})", lambda old, at: old + _like(more, old))


def scale(factor: Number | Tensor) -> Action:
    """Multiply the value."""
    by = _number_or_tensor(factor, "scale")
    return Action(f"scale({_show(by)})", lambda old, at: old * _like(by, old))


def zero() -> Action:
    """Replace the value by zeros: ablation."""
    return Action("zero()", lambda old, at: torch.zeros_like(old))


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
        return Action(f"clip(norm={norm})", lambda old, at: _clip_norm(old, norm, dim))
    if low is None:
        raise TypeError("hl.clip needs a limit: hl.clip(1.0), hl.clip(0, 6) or hl.clip(norm=1.0)")
    least, most = (-abs(low), abs(low)) if high is None else (low, high)
    if least > most:
        raise ValueError(f"hl.clip({low}, {high}): the lower limit is above the upper one")
    return Action(f"clip({least}, {most})", lambda old, at: old.clamp(least, most))


def _clip_norm(value: Tensor, norm: Number, dim: int | tuple[int, ...] | None) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(value, dim=dim, keepdim=True, dtype=torch.float32)
    factor = (norm / size.clamp(min=torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    clipped: Tensor = value * factor.to(value.dtype)
    return clipped


def noise(std: Number, *, seed: int = 0) -> Action:
    """Add Gaussian noise; the same seed gives the same noise at a site, visit and call.

    The model's own random numbers are not touched, and a recompute sees the same noise.
    """

    def change(old: Tensor, at: At) -> Tensor:
        key = f"{seed}/{at.address}/{at.call}/{at.visit}".encode()
        number = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "big")
        generator = torch.Generator(old.device).manual_seed(number)
        more = torch.randn(old.shape, generator=generator, device=old.device, dtype=torch.float32)
        return old + (more * std).to(old.dtype)

    return Action(f"noise({std}, seed={seed})", change, depends_on_place=True)


def mask(keep: Tensor, *, fill: Number = 0.0) -> Action:
    """Keep the value where `keep` is true and put `fill` elsewhere; `keep` broadcasts."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool:
        raise TypeError("hl.mask takes a bool tensor: true where the value stays")

    def change(old: Tensor, at: At) -> Tensor:
        return torch.where(keep.to(old.device), old, torch.full((), fill).to(old))

    return Action(f"mask({_show(keep)}, fill={fill})", change)


def swap_rows(first: int | Sequence[int], second: int | None = None, *, dim: int = 0) -> Action:
    """Swap two rows of the batch, `swap_rows(0, 1)`, or order all, `swap_rows([2, 0, 1])`."""

    def change(old: Tensor, at: At) -> Tensor:
        size = old.shape[dim]
        order = list(range(size))
        if second is None:
            order = list(first) if isinstance(first, Sequence) else []
        elif isinstance(first, int) and -size <= first < size and -size <= second < size:
            order[first], order[second] = order[second], order[first]
        else:
            order = []
        if sorted(order) != list(range(size)):
            raise EditError(
                f"swap_rows at `{at.address}`: there are {size} rows in dimension {dim}; "
                f"{first!r}, {second!r} is no order of them."
            )
        return old.index_select(dim, torch.tensor(order, device=old.device))

    return Action(f"swap_rows({first}, {second})", change)


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

    def change(old: Tensor, at: At) -> Tensor:
        reader: Any = source
        if call is not None:
            count = len(source.calls)
            if not -count <= call < count:
                raise EditError(
                    f"patch at `{at.address}`: there is no call {call}; {count} were captured."
                )
            reader = source.calls[call]
        name = address or at.address
        new = _read(reader, name, at.visit if visit is None else visit)
        if not isinstance(new, Tensor):
            raise EditError(
                f"patch at `{at.address}`: `{name}` is no single tensor; name a leaf in `address`."
            )
        return new

    name = f"patch({address or 'same site'})"
    return Action(name, change, depends_on_place=address is None)


def _read(reader: Any, name: str, visit: int | None) -> Any:
    return reader[name] if visit is None else reader[name, visit]
