"""What the compiler did to the code of a model while it was listened at: breaks, and giving up."""

from __future__ import annotations

from hookline._torch import count_recompile_limits, list_graph_breaks

_MOST_NAMED = 3

_LIMIT = (
    "torch.compile has made as many graphs of a function as it may and runs it eagerly where none "
    "fits, which is heard as well. What listens takes graphs of its own: "
    "torch._dynamo.config.recompile_limit says how many there may be"
)


class CompilerNotes:
    """Notice what the compiler does from now on."""

    def __init__(self) -> None:
        self._seen = len(list_graph_breaks())
        self._limits = count_recompile_limits()
        self._breaks: dict[tuple[str, str], None] = {}
        self._has_reached_limit = False

    def list(self) -> list[str]:
        """Say what it could not compile as one graph, or not at all."""
        breaks = list_graph_breaks()
        # Torch forgets all of them where it is told to begin anew.
        self._breaks.update(dict.fromkeys(breaks[self._seen :]))
        self._seen = len(breaks)
        limits = count_recompile_limits()
        self._has_reached_limit = self._has_reached_limit or limits > self._limits
        self._limits = limits
        notes = []
        if self._breaks:
            count = len(self._breaks)
            shown = [f"{where}: {why}" for where, why in self._breaks][:_MOST_NAMED]
            shown += [f"and {count - _MOST_NAMED} more"] if count > _MOST_NAMED else []
            places = "a place" if count == 1 else f"{count} places"
            notes.append(
                f"torch.compile broke its graph at {places}, which is heard as well: "
                f"{'; '.join(shown)}"
            )
        return [*notes, *([_LIMIT] if self._has_reached_limit else [])]
