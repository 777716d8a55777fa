"""Record the models of a script as they are found, and let nothing of it reach the script."""

from __future__ import annotations

from typing import Any

from hookline.recordings.record import open_recording
from hookline.scripts.discovering import Found
from hookline.scripts.watching import ScriptWatch
from hookline.watchers import Watch


class ScriptTrace(ScriptWatch):
    """The recording of a script, from its first model to its end."""

    def _add(self, found: Found) -> None:
        if self.watch is not None and not self.watch.is_open:
            return  # as many steps as were wanted are recorded
        super()._add(found)

    def _make(self, model: Any, *, is_compiled: bool) -> Watch:
        options = self._options
        if self.folder is not None:
            self._prepare_folder(self.folder)
        sites: Any = list(options.sites) or "**"
        return open_recording(
            model,
            self.folder,
            sites=None if is_compiled else sites,
            tensors=list(options.tensors) or False,
            steps=options.recorded,
            every=options.every,
            strict=options.is_strict,
            progress=self._has_line,
        )
