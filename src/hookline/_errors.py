"""Every error and warning hookline raises, as one tree.

HooklineError
├── AddressError        (ValueError)    an address that does not parse; the position is marked
├── NoSuchSite          (LookupError)   an address or pattern that matches nothing in this model
├── UnsupportedModel    (TypeError)     a model or module hookline cannot attach to
├── UnsupportedTensor   (TypeError)     a tensor whose statistics hookline cannot measure
├── SessionError        (RuntimeError)  a session entered twice, or used after it was closed
├── NotCaptured         (LookupError)   a value that does not exist (yet), or of no such visit
├── AmbiguousRead       (LookupError)   one address, several visits or calls: say which
├── Overwritten         (RuntimeError)  the value was changed in place after it flowed
├── OutOfBudget         (MemoryError)   the next value would pass `max_bytes`
├── OutOfMemory         (MemoryError)   no memory is left for a value that is captured
├── EditError           (ValueError)    an edit returned something that does not fit its site
├── GradientError       (RuntimeError)  a gradient that hookline cannot deliver truthfully
├── NoSuchRun           (FileNotFoundError)  a path that holds no run
├── RunExists           (FileExistsError)    a folder that holds a run already
├── RunWriteError       (OSError)       a run that cannot be written any more
├── NewerRun            (RuntimeError)  a run that a newer hookline wrote
├── NotRecorded         (LookupError)   a statistic, step, rank or tensor that a run does not hold
├── NotComparable       (ValueError)    two runs or models that have nothing to compare
├── StoreError          (ValueError)    a tensor store that does not fit what is asked of it
│   └── CorruptShard                    a file of it that does not hold what was written
└── BadTraining         (RuntimeError)  a finding that a watch was asked to raise

HooklineWarning         (UserWarning)   what a report would say, said at the end of a session
"""

from __future__ import annotations


class HooklineError(Exception):
    """The base of everything hookline raises on purpose."""


class AddressError(HooklineError, ValueError):
    """Say where an address does not follow the grammar."""

    def __init__(self, message: str, text: str = "", position: int | None = None) -> None:
        self.text = text
        self.position = position
        if position is not None:
            message = f"{message}\n    {text}\n    {' ' * position}^"
        super().__init__(message)


class NoSuchSite(HooklineError, LookupError):
    """Say that an address or pattern names nothing in this model, and what is near."""


class UnsupportedModel(HooklineError, TypeError):
    """Say why hookline cannot attach to this model or module."""


class UnsupportedTensor(HooklineError, TypeError):
    """Say why a tensor cannot be measured, and what to measure instead."""


class SessionError(HooklineError, RuntimeError):
    """Say that a session was used in a state that does not allow it."""


class NotCaptured(HooklineError, LookupError):
    """Say that a value is not there, and why."""


class AmbiguousRead(HooklineError, LookupError):
    """Say that an address names several captured values, and how to choose one."""


class Overwritten(HooklineError, RuntimeError):
    """Say that a captured value was changed in place after it flowed."""


class OutOfBudget(HooklineError, MemoryError):
    """Say that the next captured value would pass the byte budget."""


class OutOfMemory(HooklineError, MemoryError):
    """Say that a device or the host had no memory left for a captured value."""


class EditError(HooklineError, ValueError):
    """Say how an edit's result does not fit its site."""


class GradientError(HooklineError, RuntimeError):
    """Say which gradient cannot be delivered truthfully, and what to do."""


class NoSuchRun(HooklineError, FileNotFoundError):
    """Say that a path holds no run, and which folders nearby do."""


class RunExists(HooklineError, FileExistsError):
    """Say that a folder holds a run already, and how to go on."""


class RunWriteError(HooklineError, OSError):
    """Say why a run cannot be written, and that what is there stays readable."""


class NewerRun(HooklineError, RuntimeError):
    """Say that a run was written by a newer hookline than this one."""


class NotRecorded(HooklineError, LookupError):
    """Say that a run holds no such statistic, step, rank or tensor, and what it does hold."""


class NotComparable(HooklineError, ValueError):
    """Say why two runs or models cannot be compared, and what to do."""


class StoreError(HooklineError, ValueError):
    """Say what a tensor store cannot hold, or does not hold, and what to do."""


class CorruptShard(StoreError):
    """Say which file of a store is damaged, and how it is made anew."""

    reason: str = ""
    """What is wrong with it, in short."""


class BadTraining(HooklineError, RuntimeError):
    """Say what is wrong with a training, where a watch was asked to stop it then."""

    def __init__(self, message: str, finding: object = None) -> None:
        super().__init__(message)
        self.finding = finding
        """The finding that is the reason."""


class HooklineWarning(UserWarning):
    """What a session could not do, said when it ends."""
