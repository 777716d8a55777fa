"""Watch the models of a script as they are found, and let nothing of it reach the script.

Whatever fails in here is said once, and the script goes on unwatched.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hookline._errors import BadTraining, HooklineError, NoSuchSite, UnsupportedModel
from hookline.rules import Finding
from hookline.scripts.choosing import choose_rules
from hookline.scripts.discovering import Discovery, Found
from hookline.scripts.endings import EnoughSteps
from hookline.scripts.folders import claim_folder
from hookline.scripts.losses import LossCode
from hookline.scripts.options import RunOptions
from hookline.scripts.speaking import Announcer, say
from hookline.scripts.tapping import CallTap
from hookline.watchers import Watch, watch

_REPORT = "please report it with the lines above"


_WATCHED_WHOLE = 100
"""Steps at the start that are watched whatever they cost: most of what is wrong shows in them."""


class ScriptWatch:
    """The watch of a script, from its first model to its end."""

    def __init__(self, options: RunOptions, *, is_speaking: bool) -> None:
        self.watch: Watch | None = None
        """The watch; None until a model is found, and where that failed."""
        self.notes: list[str] = []
        """What could not be watched, and why."""
        self.failure: BaseException | None = None
        """The error of hookline's own that ended it."""
        self.unmatched: NoSuchSite | None = None
        """Why what was asked for is in no model so far."""
        self.folder = options.folder
        """Where the run lies; None where it is in memory only."""
        self._options = options
        self._is_speaking = is_speaking
        self._has_line = is_speaking and not options.is_quiet and _wants_line(options)
        self._announcer = Announcer(
            is_quiet=options.is_quiet or not is_speaking, is_under_line=self._has_line
        )
        self._discovery = Discovery(
            on_model=self._add,
            on_part=self._note_part,
            on_call=self._on_call,
            on_return=self._on_return,
            note=self._note,
        )
        self._tap = CallTap(self)
        self._loss = LossCode()
        self._handle: Any = None
        self._process = os.getpid()
        self._is_running = False

    @property
    def findings(self) -> list[Finding]:
        """What was found so far; waits for what is still being judged."""
        return [] if self.watch is None else list(self.watch.findings)

    def start(self) -> None:
        """Look for models from now on."""
        self._is_running = True
        self._handle = register_optimizer_step_pre_hook(self._before_step)
        self._tap.start()

    def close(self, status: str) -> None:
        """End the watch, and leave torch as it was; does nothing the second time."""
        self._let_go()
        if self.watch is not None and self.watch.is_open and self._is_here:
            try:
                self.watch.close(status)
            except Exception as error:
                self._fail(error)
        if self.watch is not None and self.failure is None:
            self._note_stop(self.watch.failure)
        self._announcer.look(self.findings)

    # What the tap tells.

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take an outermost call that begins."""
        self._guard(self._discovery.begin, module, args, kwargs)

    def end(self, module: nn.Module, result: Any) -> None:
        """Take what an outermost call has returned."""
        self._guard(self._discovery.end, module, result)

    def begin_function(self) -> None:
        """Take a call of a compiled function."""
        self._guard(self._discovery.begin_function)

    def _guard(self, act: Callable[..., None], *args: Any) -> None:
        """Do something of hookline's own; an error in it ends the watch and not the script."""
        if not self._is_running or not self._is_here or self._is_replaying:
            return
        try:
            act(*args)
        except BadTraining:
            raise
        except Exception as error:
            self._fail(error)
            if self._options.is_strict:
                raise

    # What the discovery tells.

    def _add(self, found: Found) -> None:
        if self.watch is not None:
            self.watch.add_model(found.model, found.name)
            return
        model = {found.name: found.model} if found.name else found.model
        try:
            self.watch = self._make(model)
        except UnsupportedModel as error:
            self._note(f"of `{type(found.model).__name__}` only parameters are watched: {error}")
            self.watch = self._make(model, has_sites=False)
        except NoSuchSite as error:  # it may be in a model that comes later
            if self._options.is_strict:
                raise
            self._drop_folder()
            self.unmatched = self.unmatched or error
            self._note(f"nothing is watched of `{type(found.model).__name__}`: {error}")
            return
        for note in self.notes:
            self.watch.add_note(note)
        if self._options.is_replayed:
            self.watch.origin_seekers.append(self._loss.find)

    def _make(self, model: Any, *, has_sites: bool = True) -> Watch:
        options = self._options
        rules = choose_rules(options.rules, without=options.without)
        if self.folder is not None:
            self._prepare_folder(self.folder)
        sites: Any = list(options.sites) or "**"
        return watch(
            model,
            self.folder,
            sites=sites if has_sites else None,
            every=options.every,
            local_gradients=options.has_local_gradients,
            budget=options.budget,
            budget_from=_WATCHED_WHOLE,
            rules=rules,
            on_finding=self._choose_reaction(),
            replay=options.is_replayed,
            strict=options.is_strict,
            progress=self._has_line,
        )

    def _prepare_folder(self, folder: Path) -> None:
        """Make the folder of the run; where that cannot be, do without."""
        try:
            if self._options.is_claimed:
                self.folder = folder = claim_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".hookline-{os.getpid()}"
            probe.write_bytes(b"x")
            probe.unlink()
        except OSError as error:
            why = f"`{folder}` cannot be written: {error.strerror or error}"
            self._note(f"the run is not kept, only judged: {why}")
            self.folder = None

    def _drop_folder(self) -> None:
        """Leave no empty folder behind where nothing is watched."""
        if self.folder is not None:
            with contextlib.suppress(OSError):
                self.folder.rmdir()
            self.folder = self._options.folder

    def _choose_reaction(self) -> Any:
        choice = self._options.on_finding
        if choice == "dump" and self.folder is None:
            self._note("there is no run folder to dump a batch to: give --out")
            choice = "continue"
        return self._announcer.take if choice == "continue" else choice

    def _note_part(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str
    ) -> None:
        if self.watch is not None and self.watch.is_open:
            self.watch.note_call(module, args, kwargs, prefix=f"{path}.")

    def _on_call(self) -> None:
        self._loss.stop()
        if self.watch is None:
            return
        if self._options.on_finding == "dump":
            self._announcer.look(self.watch.current_findings)
        if self._options.steps is not None:
            self.watch.flush()
            if self.watch.step_number >= self._options.steps:
                raise EnoughSteps(0)

    def _on_return(self, result: Any) -> None:
        is_wanted = self._options.is_replayed and not self._tap.has_compiled
        if is_wanted and self.watch is not None and self.watch.is_open:
            # A step begins with a call, so by now the number is that of the step under way.
            self._loss.follow(result, step=self.watch.step_number)

    def _before_step(self, optimizer: object, args: object, kwargs: object) -> None:
        self._guard(self._loss.stop)
        if self.watch is None and self._tap.has_compiled:
            self._guard(self._discovery.look_around)  # it was called where no call is heard

    # When it goes wrong, and at the end.

    @property
    def _is_replaying(self) -> bool:
        """Whether the watch itself is calling modules now, to find an operation."""
        return self.watch is not None and self.watch.is_replaying

    @property
    def _is_here(self) -> bool:
        return os.getpid() == self._process

    def _note(self, text: str) -> None:
        if self.watch is not None:
            self.watch.add_note(text)
        if text not in self.notes:
            self.notes.append(text)
            if self._is_speaking and not self._options.is_quiet:
                say(f"hookline: {text}", is_under_line=self._has_line)

    def _fail(self, error: BaseException) -> None:
        """Say once what went wrong, and let the script go on."""
        self._let_go()
        if self.failure is not None:
            return
        self.failure = error
        if isinstance(error, HooklineError | ValueError):
            say(f"hookline: nothing is watched any more, and the script goes on: {error}")
        else:
            import traceback

            traceback.print_exception(error)
            say(
                f"hookline: an error of hookline's own ({type(error).__name__}: {error}); "
                f"the script goes on unwatched, {_REPORT}"
            )
        if self.watch is not None and self.watch.is_open:
            try:
                self.watch.abandon(error)
            except Exception as again:
                say(f"hookline: the run could not be closed: {again}")

    def _note_stop(self, failure: BaseException | None) -> None:
        """Say at the end that the watch has stopped before: the warning may have been ignored."""
        if failure is not None:
            self.failure = failure
            what = str(failure) or type(failure).__name__
            self._note(f"the watch stopped before the script did, and the script went on: {what}")

    def _let_go(self) -> None:
        self._is_running = False
        self._tap.stop()
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._loss.stop()


def _wants_line(options: RunOptions) -> bool:
    if options.has_progress is not None:
        return options.has_progress
    return sys.stderr is not None and sys.stderr.isatty()
