"""Leave the command line before a script runs, so that the script does not run inside of it."""

from __future__ import annotations

from collections.abc import Callable


class StartScript(BaseException):
    """Carry what is to be done once the command line is left; it gives the exit code.

    A script may be a click command itself, which must not find the one of hookline around it.
    """

    def __init__(self, run: Callable[[], int]) -> None:
        super().__init__()
        self.run = run


def start(run: Callable[[], int]) -> int:
    """Do it; a module that is not there is said as everything else is."""
    from hookline.cli.failing import Failure
    from hookline.scripts.launching import NoSuchScript

    try:
        return run()
    except NoSuchScript as error:
        Failure(str(error), error.hint or None).show()
        return Failure.exit_code
