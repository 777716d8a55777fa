"""The thread that takes steps away: it waits for devices and disks so that training does not."""

from __future__ import annotations

import os
import queue
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable

from hookline._errors import HooklineWarning

_FLUSH_POLL = 0.5

_ENOUGH = 32
"""Jobs that wait and are not made to wait for more."""

_own = threading.local()


class Worker:
    """Run jobs one after the other in a thread of their own; a job that fails ends the work.

    Jobs may be let gather for a moment: whenever the thread wakes it takes Python's lock from who
    puts jobs, and each job is quicker right after one of its kind.
    """

    def __init__(
        self, name: str, on_failure: Callable[[BaseException], None], *, gathering: float = 0.0
    ) -> None:
        self._gathering = gathering
        """Seconds that the first of some jobs waits for more, unless somebody waits for it."""
        self._hurry = threading.Event()
        self._jobs: queue.SimpleQueue[Callable[[], None] | threading.Event | None]
        self._jobs = queue.SimpleQueue()
        self._on_failure = on_failure
        self._process = os.getpid()
        self.failure: BaseException | None = None
        """What ended the work before its time."""
        self.unsaid: deque[str] = deque()
        """What jobs had to say and nobody was told yet."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this process has the thread: a fork does not."""
        return self._process == os.getpid()

    @property
    def is_current(self) -> bool:
        """Whether it is the thread that asks."""
        return threading.current_thread() is self._thread

    @property
    def waiting(self) -> int:
        """How many jobs wait, about."""
        return self._jobs.qsize()

    def put(self, job: Callable[[], None]) -> None:
        """Add a job; returns at once."""
        self.speak()
        if self.is_here and self.failure is None:
            self._jobs.put(job)
            if self.waiting == _ENOUGH:
                self._hurry.set()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until every job so far is done; tell whether it is."""
        if not self.is_here or not self._thread.is_alive():
            self.speak()
            return self.failure is None
        done = threading.Event()
        self._jobs.put(done)
        self._hurry.set()
        waited = 0.0
        while not done.wait(_FLUSH_POLL):
            waited += _FLUSH_POLL
            if not self._thread.is_alive() or (timeout is not None and waited >= timeout):
                break
        self.speak()
        return done.is_set() and self.failure is None

    def stop(self) -> None:
        """Do what waits, then end the thread; from inside it, end after this job."""
        if self.is_here and self._thread.is_alive():
            self._jobs.put(None)
            self._hurry.set()
            if not self.is_current:
                self._thread.join()
        self.speak()

    def speak(self) -> None:
        """Say what jobs had to say, unless this is their thread: see `say`."""
        while self.unsaid and self.is_here and not self.is_current:
            say(self.unsaid.popleft())

    def _run(self) -> None:
        _own.worker = self
        while True:
            job = self._jobs.get()
            if self._gathering:
                self._hurry.wait(self._gathering)
                self._hurry.clear()  # whoever hurries has put the job already
            while True:
                if job is None:
                    return
                self._do(job)
                try:
                    job = self._jobs.get_nowait()
                except queue.Empty:
                    break

    def _do(self, job: Callable[[], None] | threading.Event) -> None:
        if isinstance(job, threading.Event):
            job.set()
        elif self.failure is None:  # what still waits after a failure would leave a gap
            try:
                job()
            except BaseException as error:
                self.failure = error
                self._on_failure(error)


def say(message: str) -> None:
    """Warn, in a way that cannot end a training run, also where warnings are errors.

    A job's words wait for the thread that trains. Which warnings are shown is a setting of the
    whole process, and what another thread ignores for a moment would be lost meanwhile.
    """
    worker: Worker | None = getattr(_own, "worker", None)
    if worker is not None:
        worker.unsaid.append(message)
        return
    try:
        warnings.warn(message, HooklineWarning, stacklevel=2)
    except HooklineWarning:
        print(f"hookline: {message}", file=sys.stderr)
