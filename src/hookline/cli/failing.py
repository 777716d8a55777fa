"""Errors as a person at a terminal wants them: what is wrong, a hint, and no traceback.

exit code 1   it could not be done: nothing there of that name, or the code that was run failed
exit code 2   the command line itself cannot be understood
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import click

_PACKAGE = Path(__file__).parent.parent


class Failure(click.ClickException):
    """Say why something could not be done, and what to do about it."""

    exit_code = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint

    def show(self, file: Any = None) -> None:
        """Print the error and the hint."""
        click.echo(f"error: {self.format_message()}", err=True)
        if self.hint:
            click.echo(f"hint: {self.hint}", err=True)


class Misused(Failure):
    """Say what on the command line cannot be understood."""

    exit_code = 2


@contextmanager
def explained_usage() -> Iterator[None]:
    """Say what click found wrong with a command line as everything else is said."""
    try:
        yield
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "hookline"
        hint = f"`{command} --help` shows how it is used"
        raise Misused(error.format_message(), hint) from error


@contextmanager
def running_code(
    doing: str, *, hint: str | None = None, reword: Callable[[str], str] = str
) -> Iterator[None]:
    """Run a user's code: what it prints goes to stderr, and its errors become one message.

    `hint` is what to do where hookline itself refuses; `reword` says for a terminal what an error
    says for Python.
    """
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (Failure, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        if click.get_current_context().find_root().params.get("traceback"):
            raise
        raise _explain(doing, error, hint, reword) from error


def _explain(
    doing: str, error: Exception, hint: str | None, reword: Callable[[str], str]
) -> Failure:
    from hookline import AddressError, HooklineError

    if isinstance(error, HooklineError):
        kind = Misused if isinstance(error, AddressError) else Failure
        return kind(reword(str(error)), hint)
    steps = traceback.extract_tb(error.__traceback__)
    if steps and _is_refusal(error, steps[-1]):
        return Failure(reword(str(error)), hint)
    place = f" ({Path(steps[-1].filename).name} line {steps[-1].lineno})" if steps else ""
    text = "".join(traceback.format_exception_only(error)).strip()
    return Failure(
        f"{doing} failed{place}: {reword(text)}",
        "`hookline --traceback ...` shows the whole way to the error",
    )


def _is_refusal(error: Exception, step: traceback.FrameSummary) -> bool:
    """Tell whether hookline itself raised it, on purpose: where that was helps nobody."""
    is_own = Path(step.filename).is_relative_to(_PACKAGE)
    kinds = (ValueError, FileNotFoundError, ImportError)
    return is_own and isinstance(error, kinds) and (step.line or "").startswith("raise ")
