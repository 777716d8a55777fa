"""How a script ended, and what is shown of it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hookline.scripts import endings
from hookline.scripts.endings import (
    EnoughSteps,
    Terminated,
    ending_on_terminate,
    leave_out_own_frames,
    read_ending,
    unhurried,
)


@pytest.mark.parametrize(
    ("error", "code", "status", "is_shown"),
    [
        (None, 0, "finished", False),
        (SystemExit(), 0, "finished", False),
        (SystemExit(0), 0, "finished", False),
        (SystemExit(3), 3, "failed", False),
        (SystemExit(-1), 255, "failed", False),
        (SystemExit("words"), 1, "failed", True),
        (ValueError(), 1, "failed", True),
        (KeyboardInterrupt(), 130, "interrupted", True),
        (Terminated(143), 143, "interrupted", False),
        (EnoughSteps(0), 0, "finished", False),
    ],
)
def test_ending_is_what_python_makes_of_it(
    error: BaseException | None, code: int, status: str, is_shown: bool
) -> None:
    found = read_ending(error)
    assert (found.code, found.status, found.error is not None) == (code, status, is_shown)


def test_own_frames_are_left_out_of_all_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also out of what an error came from, and out of those of a group."""

    def fail(message: str) -> None:
        raise ValueError(message)

    try:
        try:
            fail("inner")
        except ValueError as inner:
            raise ExceptionGroup("both", [inner]) from inner
    except ExceptionGroup as raised:
        error = raised
    monkeypatch.setattr(endings, "_OWN_FOLDER", str(Path(__file__).parent))
    leave_out_own_frames(error)
    assert error.__traceback__ is None
    assert error.exceptions[0].__traceback__ is None
    monkeypatch.undo()
    with pytest.raises(ValueError, match="kept") as kept:
        fail("kept")
    leave_out_own_frames(kept.value)
    assert kept.value.__traceback__.tb_next.tb_frame.f_code.co_name == "fail"
    assert kept.value.__traceback__.tb_next.tb_next is None


def test_terminate_unwinds_and_a_fork_just_ends() -> None:
    with ending_on_terminate():
        process = os.fork()
        if process == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGTERM
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handler_of_the_script_stays() -> None:
    def own(number: int, frame: object) -> None:
        return None

    before = signal.signal(signal.SIGTERM, own)
    try:
        with ending_on_terminate():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_does_not_stop_the_closing(capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with unhurried() as hurry:
        os.kill(os.getpid(), signal.SIGINT)
        assert hurry.is_asked
    assert signal.getsignal(signal.SIGINT) is before
    assert "once more to leave at once" in capsys.readouterr().err


def test_second_ctrl_c_is_obeyed() -> None:
    process = os.fork()
    if process == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with unhurried():
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 130
