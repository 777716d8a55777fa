"""Operations that a script calls outside of its models: the code between a forward and a backward.

Such code is in no module, so that no call of it can be kept and run again. A mode on the stack of
the thread notes what each operation gave, as a row of statistics that nobody waits for; only when
something went wrong are the rows read. It never disturbs: it keeps out of the way of other modes
and of tracing, and an error of its own ends it.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from hookline.hooks.operations import names_of
from hookline.replays.explaining import explain
from hookline.replays.looking import Look, describe, is_floating, look_at
from hookline.replays.naming import FRESH, is_intended, tensors_in
from hookline.replays.origins import Origin
from hookline.replays.places import SourceLine, find_line
from hookline.replays.rowwise import explain_row, explain_row_slope, facts_of
from hookline.replays.staging import is_replaying
from hookline.stats import Log, open_log
from hookline.stats.rows import NAN, NEGINF, POSINF

_MOST = 500
"""How many operations are noted until the next reset."""

_UNHEARD = frozenset(vars(torch._C.TensorBase)[name].__get__ for name in ("grad", "requires_grad"))
"""Questions that many ask of every parameter, and that show nothing new."""

_BAD, _LOW, _MASK, _CAME = "bad", "low", "mask", "came in"


class _Noted(NamedTuple):
    """One operation: what it is, where, and what it gave."""

    name: str
    line: SourceLine
    device: torch.device
    row: int
    """The number of its row in the log of the device."""
    dtype: torch.dtype
    shape: torch.Size
    given: tuple[int | weakref.ref[Tensor], ...]
    """Its floating arguments: the number of the operation each came from, or the tensor itself."""
    result: weakref.ref[Tensor]
    is_intended: bool
    """Whether an infinity was put in on purpose."""
    has_grad: bool
    exponent: float
    """A number among its arguments; NaN where there is none."""


class _Event:
    """A non-finite value that was not there before."""

    def __init__(self, level: str, noted: _Noted | None = None, number: int = -1) -> None:
        self.level = level
        self.noted = noted
        self.number = number
        """The number of the operation."""


class OutsideOperations(TorchFunctionMode):
    """Note the operations of a thread between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__()
        self._is_on = False
        self._thread: int | None = None
        """The thread on whose stack of modes it is."""
        self._noted: list[_Noted] = []
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """The number of the operation that gave a tensor, by the id of that."""
        self._logs: dict[torch.device, Log] = {}
        self._rows: dict[torch.device, list[Any]] = {}
        """The rows that were read already."""

    def start(self) -> None:
        """Note operations of this thread from now on, unless another mode does something there."""
        self._leave()
        if self._thread is not None or _is_tracing():
            return
        if _get_current_function_mode_stack():
            return
        self._thread = threading.get_ident()
        self._is_on = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """Note no more; off the stack at once where it is on top, else as soon as it is.

        A `loss.backward()` runs inside of what the mode passes on, where it cannot go: call this
        again when the optimizer steps.
        """
        self._is_on = False
        self._leave()

    def reset(self) -> None:
        """Forget what was noted."""
        if self._noted:
            for log in self._logs.values():
                log.take()
        self._noted.clear()
        self._known.clear()
        self._rows.clear()

    def _leave(self) -> None:
        if self._thread != threading.get_ident():
            return
        stack = _get_current_function_mode_stack()
        if stack and stack[-1] is self:
            self.__exit__(None, None, None)
            self._thread = None
        elif not stack and not _is_inside():
            self._thread = None  # somebody took it off

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        result = func(*args, **kwargs) if kwargs else func(*args)
        if result is None or func in _UNHEARD:
            return result  # by the hundred, where an optimizer forgets its gradients
        if self._is_on and len(self._noted) < _MOST and not is_replaying():
            try:
                self._note(func, args, kwargs or {}, result)
            except Exception:  # the script's own work goes on
                self._is_on = False
        return result

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [result] if isinstance(result, Tensor) else tensors_in(result)[:3]
        floats = [one for one in tensors if one.dtype.is_floating_point]
        names = names_of(func)
        if not floats:
            return
        arguments = (*args, *kwargs.values())
        given = tuple(self._find_given(one) for one in tensors_in(arguments) if is_floating(one))
        line: SourceLine | None = None
        for one in floats:
            if not names or one._is_view():
                # The same numbers, or some of them: they stand for what they show.
                numbers = [number for number in given if isinstance(number, int)]
                if numbers:
                    self._remember(one, numbers[0])
                continue
            if one.device.type == "meta" or type(one) not in (Tensor, torch.nn.Parameter):
                continue
            log = self._logs.get(one.device)
            if log is None:
                log = self._logs[one.device] = open_log(one.device)
            if line is None:
                line = find_line(sys._getframe(2))
            numbers_given = [x for x in arguments if isinstance(x, (int, float))]
            self._remember(one, len(self._noted))
            self._noted.append(
                _Noted(
                    names[-1],
                    line,
                    one.device,
                    len(self._rows.get(one.device, ())) + log.add(one),
                    one.dtype,
                    one.shape,
                    given,
                    weakref.ref(one),
                    is_intended(names[-1], arguments) or names[-1] in FRESH,
                    one.requires_grad,
                    float(numbers_given[0]) if numbers_given else math.nan,
                )
            )

    def _remember(self, tensor: Tensor, number: int) -> None:
        self._known[id(tensor)] = (weakref.ref(tensor), number)

    def _find_given(self, tensor: Tensor) -> int | weakref.ref[Tensor]:
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        return weakref.ref(tensor)

    def find(self) -> Origin | None:
        """Give the first operation noted that made a non-finite value, if the loss came of it.

        Where all values were finite: one whose slope was infinite. None where it was not the
        script's own code: the value came in from a model.
        """
        try:
            return self._find()
        except Exception:  # as above
            return None

    def _find(self) -> Origin | None:
        was_on, self._is_on = self._is_on, False
        try:
            return self._judge()
        finally:
            self._is_on = was_on

    def _judge(self) -> Origin | None:
        self._read_rows()
        events: list[_Event | None] = []
        found: _Event | None = None
        last: _Event | None = None
        is_all_fine = True
        for noted in self._noted:
            row = self._row(noted)
            look = Look(bool(row[NAN]), bool(row[POSINF]), bool(row[NEGINF]))
            event = None if look.is_fine else self._attribute(noted, look, events)
            events.append(event)
            # A single number is what a backward begins with; others may have been thrown away.
            is_number = noted.shape.numel() == 1
            if is_number and noted.has_grad:
                last = event
            if event is None or event.level == _MASK:
                continue
            is_all_fine = False
            if found is None and event.level == _BAD and is_number:
                found = event
        if found is None and last is not None and last.level == _LOW:
            found = last  # the loss itself is -inf
        if found is not None and found.noted is not None:
            return self._tell(found.noted)
        return self._find_slope() if is_all_fine else None

    def _attribute(self, noted: _Noted, look: Look, events: list[_Event | None]) -> _Event:
        carried = []
        for one in noted.given:
            if isinstance(one, int):
                known = events[one]
                if known is not None:
                    carried.append(known)
                continue
            tensor = one()
            if tensor is not None and not (now := look_at(tensor)).is_fine:
                is_mask = not (now.nan or now.posinf)
                carried.append(_Event(_MASK if is_mask else _CAME))
        carried.sort(key=lambda event: event.number)
        by_level = {event.level: event for event in reversed(carried)}
        for level in (_CAME, _BAD, _LOW):
            event = by_level.get(level)
            if event is not None:
                if level == _LOW and (look.nan or look.posinf):
                    event.level = _BAD
                return event
        if _MASK in by_level and not look.nan:
            return by_level[_MASK]
        if noted.is_intended and not look.nan:
            return _Event(_MASK, noted, len(events))
        return _Event(_BAD if look.nan or look.posinf else _LOW, noted, len(events))

    def _tell(self, noted: _Noted) -> Origin:
        row = self._row(noted)
        output = facts_of(row, noted.shape, noted.dtype)
        inputs, tensors = self._describe_given(noted)
        result = noted.result()
        why = ""
        if result is not None and tensors is not None:
            bound: dict[str | int, Any] = dict(enumerate(tensors))
            why = explain(noted.name, bound, result, line=noted.line.text)
        return Origin(
            site=f"{noted.line.place}/{noted.name}",
            operation=noted.name,
            source=noted.line.place,
            line=noted.line.text,
            kind="nan" if row[NAN] else "inf",
            why=why or explain_row(noted.name, inputs, output),
            inputs=inputs,
            output=output,
        )

    def _describe_given(self, noted: _Noted) -> tuple[list[dict[str, Any]], list[Tensor] | None]:
        """Describe the arguments, and give them where all are still there."""
        facts = []
        tensors: list[Tensor] | None = []
        for position, one in enumerate(noted.given):
            if isinstance(one, int):
                before = self._noted[one]
                tensor = before.result()
                found = facts_of(self._row(before), before.shape, before.dtype)
                facts.append({**found, "name": str(position)})
            else:
                tensor = one()
                if tensor is not None:
                    facts.append(describe(tensor, str(position)))
            if tensor is None:
                tensors = None
            elif tensors is not None:
                tensors.append(tensor)
        return facts, tensors

    def _find_slope(self) -> Origin | None:
        for noted in self._noted:
            if not noted.has_grad:
                continue
            output = facts_of(self._row(noted), noted.shape, noted.dtype)
            why = explain_row_slope(noted.name, output, noted.exponent)
            if why:
                return Origin(
                    site=f"{noted.line.place}/{noted.name}",
                    operation=noted.name,
                    is_backward=True,
                    source=noted.line.place,
                    line=noted.line.text,
                    kind="inf",
                    why=why,
                    output=output,
                )
        return None

    def _read_rows(self) -> None:
        """Wait for what was measured; the rows of earlier reads are kept."""
        for device, log in self._logs.items():
            self._rows.setdefault(device, []).extend(log.take().wait().rows)

    def _row(self, noted: _Noted) -> Any:
        return self._rows[noted.device][noted.row]


def _is_tracing() -> bool:
    """Tell whether code is compiled or traced, now or at times: a mode would change what is made.

    `torch.compile` makes code anew when it meets other modes than before.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    dynamo: Any = sys.modules.get("torch._dynamo.convert_frame")
    return dynamo is not None and bool(getattr(dynamo, "FRAME_COUNTER", 0))


def _is_inside() -> bool:
    """Tell whether this runs inside of what a mode passes on, where it is off the stack."""
    code = OutsideOperations.__torch_function__.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
