"""Run a script and record it, from its first line to the word where the recording is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hookline.scripts.running import ScriptRun, show_path

if TYPE_CHECKING:
    from hookline.scripts.watching import ScriptWatch

_NOTHING = (
    "nothing was recorded: no module with trainable parameters was called with grad. Where the "
    "script starts other processes, run hookline in those: torchrun ... -m hookline record train.py"
)


class ScriptRecord(ScriptRun):
    """One run of one script, recorded."""

    def _make_watch(self) -> ScriptWatch:
        from hookline.scripts.tracing import ScriptTrace

        return ScriptTrace(self.options, is_speaking=self._rank == 0)

    @property
    def code(self) -> int:
        """The exit code: the script's own."""
        return self.ending.code

    def _conclude(self) -> None:
        """Say where the recording is, and what to do with it."""
        if self._rank != 0:
            return
        watch = None if self._watched is None else self._watched.watch
        if watch is None or self.folder is None:
            self.silence = self._explain_silence()
            self._say(self.silence)
            return
        from hookline.runs import open_run

        for note in watch.notes:
            if note not in self.notes:  # those were said when they came
                self._say(note)
        run = open_run(self.folder)
        count = len(run.steps)
        if not count:
            self.silence = self._explain_silence()
            self._say(self.silence)
            return
        path = show_path(self.folder)
        steps = f"{count} step{'' if count == 1 else 's'}"
        self.verdict = f"recorded {steps} of {len(run.sites())} sites, {show_size(self.folder)}"
        self._say(f"{self.verdict}: {path}")
        self._say(f"compare it with another: hookline diff {path} OTHER")

    def _explain_silence(self) -> str:
        watched = self._watched
        why = None if watched is None else watched.unmatched or watched.failure
        if why is None and watched is not None and watched.watch is not None:
            why = watched.watch.failure
        if why is not None:
            return f"nothing was recorded: {why}"
        if watched is None or watched.watch is None or self.folder is None:
            return _NOTHING
        return f"nothing was kept: no step is in {show_path(self.folder)}"


def show_size(folder: Path) -> str:
    """Say how large a folder is."""
    size = float(sum(one.stat().st_size for one in folder.rglob("*") if one.is_file()))
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
