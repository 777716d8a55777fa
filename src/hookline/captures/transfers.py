"""Values on their way from a CUDA device to the host, while the model goes on.

A value is copied on the device first, by the stream that made it, so that nothing computed later
can overwrite it; a second stream carries that copy to page-locked memory. The host waits for
neither: who reads a value waits for it, and for no other. The copies on the device lie in a ring
of limited size; when it is full, the model's stream waits for the transfer, which is the limit
then, and the host still does not. Knows nothing of sites.
"""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from hookline._torch import is_functorch_active
from hookline.captures.pinning import Emptying, PinnedShare, default_limit
from hookline.captures.rings import ALIGNMENT, Ring
from hookline.captures.shortage import is_out_of_memory

_FIRST_RING = 4 * 2**20
_LEAST_LIMIT = 32 * 2**20
_MOST_LIMIT = 2**30
_SHARE_OF_DEVICE = 256
_PIECES = 4
"""How many of the largest pieces a ring holds, so that one is filled while others travel."""

pinned_share = PinnedShare(default_limit())
_emptying = Emptying()
_lanes: weakref.WeakValueDictionary[int, Lane] = weakref.WeakValueDictionary()
"""By device; a capture that is open holds its own, and with the last of them its memory goes."""
_streams: dict[int, torch.cuda.Stream] = {}
_reached: dict[int, int] = {}
"""How large the rings have grown, so that a capture in a loop begins with what it will need."""
_lock = threading.Lock()


class Transfer:
    """One value on its way to the host."""

    __slots__ = ("_arrived", "_jobs")

    def __init__(self, arrived: torch.cuda.Event, jobs: list[Future[None]]) -> None:
        self._arrived = arrived
        self._jobs = jobs

    def wait(self) -> None:
        """Wait until the value is there."""
        for job in self._jobs:
            job.result()
        self._arrived.synchronize()


class Transfers:
    """Bring the values of one capture to the host, each by the lane of its device."""

    def __init__(self) -> None:
        self._held: dict[int, Lane] = {}

    def bring(self, value: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Transfer | None]:
        """Give the value's tensor on the host, and what to wait for before it is read."""
        dtype = dtype or value.dtype
        try:
            with torch.inference_mode(False), torch.no_grad():
                return self._lane(value.device).carry(value, dtype)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        # Without memory to pass through, or none that can be page-locked, it goes the slow way.
        with torch.inference_mode(False), torch.no_grad():
            return value.to(device="cpu", dtype=dtype), None

    def rest(self) -> None:
        """Give back the memory on the devices; what travels arrives all the same."""
        self._held.clear()

    def _lane(self, device: torch.device) -> Lane:
        index = device.index
        lane = self._held.get(index)
        if lane is None:
            with _lock:
                lane = _lanes.get(index)
                if lane is None:
                    lane = _lanes[index] = Lane(device)
                self._held[index] = lane
        return lane


def can_travel(value: Tensor) -> bool:
    """Tell whether a value is on a CUDA device, in plain memory that can be carried as it lies."""
    return (
        value.is_cuda
        and type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not is_functorch_active()
    )


class Lane:
    """The way from one device to the host: a stream beside the model's, and its memory."""

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)
        self._staging = Staging(device, self._stream)
        # Forward and backward come from different threads, and the ring has one order.
        self._lock = threading.Lock()

    def carry(self, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Transfer | None]:
        """Send a value off, as the type asked for."""
        host = pinned_share.allocate_like(value, dtype)
        is_pinned = host is not None
        if host is None:
            host = torch.empty_like(value, dtype=dtype, device="cpu")
        if not host.numel():
            return host, None
        if value.stride() != host.stride():
            value = value.clone()  # dense, in the same order as `host`
        source, target = _flatten(value), _flatten(host)
        jobs: list[Future[None]] = []
        start = 0
        with self._lock:
            while start < source.numel():
                arrived = torch.cuda.Event()
                count = self._staging.fit(source.numel() - start, dtype.itemsize)
                end = start + count
                piece = self._staging.take(count * dtype.itemsize, arrived).view(dtype)
                piece.copy_(source[start:end])
                landing = target[start:end]
                if not is_pinned:
                    landing = torch.empty(count, dtype=dtype, pin_memory=True)
                # The stream that is current here made the value; in backward it is autograd's.
                self._stream.wait_stream(torch.cuda.current_stream(value.device))
                with torch.cuda.stream(self._stream):
                    landing.copy_(piece, non_blocking=True)
                    arrived.record(self._stream)
                if not is_pinned:
                    jobs.append(_emptying.submit(landing, target[start:end], arrived))
                start = end
        return host, Transfer(arrived, jobs)


class Staging:
    """Memory on a device that values pass through: a ring that grows up to a limit."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        self._device = device
        self._stream = stream
        total = torch.cuda.get_device_properties(device).total_memory
        self._limit = min(max(total // _SHARE_OF_DEVICE, _LEAST_LIMIT), _MOST_LIMIT)
        self._memory: Tensor | None = None
        self._ring: Ring[torch.cuda.Event] = Ring(0)
        self._made = torch.cuda.Event()

    def fit(self, count: int, itemsize: int) -> int:
        """Give how many of the elements that are left go at once."""
        if count * itemsize * _PIECES > self._ring.size:
            self._grow(count * itemsize)
        return min(count, self._ring.size // _PIECES // itemsize)

    def take(self, size: int, free: torch.cuda.Event) -> Tensor:
        """Lend memory that the current stream may write to; `free` will tell when it has gone."""
        start, before = self._ring.take(size, free)
        if before is not None and not before.query() and self._grow(size):
            start, before = self._ring.take(size, free)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._made)  # another stream may have taken the memory
        if before is not None:
            stream.wait_event(before)
        assert self._memory is not None
        return self._memory[start : start + size]

    def _grow(self, wanted: int) -> bool:
        """Take a larger ring, if the limit and the device allow; the old one empties by itself."""
        index = self._device.index
        size = max(_FIRST_RING, _reached.get(index, 0), self._ring.size * 4, wanted * _PIECES)
        step = ALIGNMENT * _PIECES
        size = min(-(-size // step), self._limit // step) * step
        if size <= self._ring.size:
            return False
        try:
            memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            if self._memory is None:
                raise
            self._limit = self._ring.size
            return False
        # The second stream is the last to read it: whenever it is freed, torch waits for that one
        # before it gives the memory to others.
        memory.record_stream(self._stream)
        self._made.record(torch.cuda.current_stream(self._device))
        self._memory, self._ring = memory, Ring(size)
        _reached[index] = size
        return True


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Give the one stream for copies from a device: torch has few, and hands them out in turn."""
    stream = _streams.get(device.index)
    if stream is None:
        stream = _streams[device.index] = torch.cuda.Stream(device)
    return stream


def _flatten(dense: Tensor) -> Tensor:
    return dense.as_strided((dense.numel(),), (1,))
