"""A replay in a process of its own: whatever the model's code does in it, the training has not.

A forward may append to a list, draw from a generator, take from a queue, print, or wait for what
never comes. In a fork of the process all of that is gone when the answer is there, and one that
does not answer is ended. Where a GPU is in use there can be no fork, and the replay runs here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hookline import _trees
from hookline.replays.calls import KeptCall
from hookline.replays.finding import find_origin
from hookline.replays.origins import Origin, not_reproduced

LEAST_SECONDS = 15.0
"""How long any replay may take in a process of its own."""

_MOST_SECONDS = 600.0
_TIMES = 30
"""How many times as long as what it repeats: it looks at every value, in a single thread."""

_AT_ONCE = 1 << 16


def find_origin_apart(calls: Sequence[KeptCall], *, backward: bool) -> Origin | None:
    """Find the origin as `find_origin` does, so that nothing of the replay stays behind."""
    if _can_fork(calls):
        return _find_in_a_fork(calls, backward=backward)
    with _silent(), _generators_restored(calls):
        return find_origin(calls, backward=backward)


def _can_fork(calls: Sequence[KeptCall]) -> bool:
    """Tell whether a fork can compute: a driver of a device does not survive one."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        return False
    if torch.cuda.is_initialized():
        return False
    return all(one.device.type == "cpu" for call in calls for one in _tensors_of(call))


def _tensors_of(call: KeptCall) -> Iterator[Tensor]:
    yield from call.module.parameters()
    yield from call.module.buffers()
    for _, tensor in _trees.leaves((call.args, call.kwargs)):
        yield tensor


def _find_in_a_fork(calls: Sequence[KeptCall], *, backward: bool) -> Origin | None:
    reading, writing = os.pipe()
    try:
        with warnings.catch_warnings():
            # Python warns of forks beside threads; this one starts nothing and soon ends.
            warnings.simplefilter("ignore")
            child = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        return not_reproduced(f"there was no room for a replay: {error}", is_backward=backward)
    if child == 0:
        _answer(calls, writing, backward=backward)
    os.close(writing)
    now = time.monotonic()
    passed = now - max([call.began for call in calls], default=now)
    seconds = min(LEAST_SECONDS + _TIMES * passed, _MOST_SECONDS)
    try:
        said = _listen(reading, until=now + seconds)
    finally:
        os.close(reading)
        _end(child)
    if said is None:
        why = f"the replay did not end within {seconds:.0f} seconds"
        return not_reproduced(why, is_backward=backward)
    if not said:
        return not_reproduced("the replay ended without an answer", is_backward=backward)
    facts = json.loads(said)
    return None if facts is None else Origin.from_dict(facts)


def _answer(calls: Sequence[KeptCall], writing: int, *, backward: bool) -> None:
    """Replay in the child, write the answer, and leave without any of the parent's endings."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        torch.set_num_threads(1)  # the threads of the parent are not here
        with _silent():
            origin = find_origin(calls, backward=backward)
        text = json.dumps(None if origin is None else origin.to_dict()).encode()
        while text:
            text = text[os.write(writing, text) :]
    finally:
        os._exit(0)


def _listen(reading: int, *, until: float) -> bytes | None:
    """Read all that the child says; None where it takes too long."""
    said = b""
    while (left := until - time.monotonic()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        part = os.read(reading, _AT_ONCE)
        if not part:
            return said
        said += part
    return None


def _end(child: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the script waits for all of its children
        os.waitpid(child, 0)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


@contextlib.contextmanager
def _generators_restored(calls: Sequence[KeptCall]) -> Iterator[None]:
    """Put generators that models hold back to where they were."""
    found = [one for call in calls for one in _generators_of(call.module)]
    states = [one.get_state() for one in found]
    try:
        yield
    finally:
        for one, state in zip(found, states, strict=True):
            one.set_state(state)


def _generators_of(module: nn.Module) -> Iterator[torch.Generator]:
    for one in module.modules():
        for value in vars(one).values():
            if isinstance(value, torch.Generator):
                yield value
