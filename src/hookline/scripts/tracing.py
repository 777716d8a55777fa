"""Record the models of a script as they are found, and let nothing of it reach the script."""

from __future__ import annotations

from typing import Any

from hookline.recordings.record import open_recording
from hookline.recordings.storing import check_tensors
from hookline.scripts.discovering import Found
from hookline.scripts.options import RunOptions
from hookline.scripts.watching import ScriptWatch
from hookline.watchers import Watch


class ScriptTrace(ScriptWatch):
    """The recording of a script, from its first model to its end."""

    def __init__(self, options: RunOptions, *, is_speaking: bool) -> None:
        super().__init__(options, is_speaking=is_speaking)
        self._unmatched = dict.fromkeys(options.tensors, "")
        """The patterns of whole tensors that name nothing so far, with the words for that."""

    def _add(self, found: Found) -> None:
        if self.watch is not None and not self.watch.is_open:
            return  # as many steps as were wanted are recorded
        super()._add(found)
        model = {f"{found.name}." if found.name else "": found.model}
        for pattern, known in list(self._unmatched.items()):
            notes = check_tensors(pattern, model)
            if notes:
                self._unmatched[pattern] = known or notes[0]
            else:
                del self._unmatched[pattern]

    def close(self, status: str) -> None:
        # Only now: what a pattern names may be in a model that comes late.
        for note in filter(None, self._unmatched.values()):
            self._note(note)
        super().close(status)

    def _make(self, model: Any, *, has_sites: bool = True) -> Watch:
        options = self._options
        if self.folder is not None:
            self._prepare_folder(self.folder)
        sites: Any = list(options.sites) or "**"
        return open_recording(
            model,
            self.folder,
            sites=sites if has_sites else None,
            tensors=list(options.tensors) or False,
            steps=options.recorded,
            every=options.every,
            strict=options.is_strict,
            progress=self._has_line,
        )
