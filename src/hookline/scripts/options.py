"""What is asked of a script that is run under watch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What `hookline run` and `hookline check` are told."""

    sites: tuple[str, ...] = ()
    """The patterns of what to watch; none for everything."""

    every: int = 1
    """One step in so many is watched."""

    budget: float | None = None
    """The share of the training's time that watching may take after the first steps; None for
    whatever it takes."""

    has_local_gradients: bool = False
    """Whether each rank's own gradients of parameters are measured before they are reduced."""

    on_finding: str = "continue"
    """What an error finding does: raise, dump or continue."""

    is_replayed: bool = True
    """Whether a step that goes wrong is run again to find the operation."""

    rules: tuple[str, ...] = ()
    """The rules that judge, by name; none for all."""

    without: tuple[str, ...] = ()
    """The rules that do not."""

    folder: Path | None = None
    """Where the run goes; None where it is only kept in memory."""

    is_claimed: bool = False
    """Whether the run may go to another folder beside that one where it is taken."""

    has_page: bool = False
    """Whether an HTML report is written."""

    page: Path | None = None
    """Where that goes; None for inside of the run."""

    steps: int | None = None
    """After how many steps the script is stopped; None for never."""

    recorded: int | None = None
    """How many steps are recorded, where the script is run for that; None for all."""

    tensors: tuple[str, ...] = ()
    """The patterns of the modules and parameters whose whole tensors are recorded."""

    fail_on: str = "error"
    """The severity from which a finding makes the exit code 1: error, warning or never."""

    is_quiet: bool = False
    """Whether nothing is said but a verdict that is bad."""

    has_progress: bool | None = None
    """Whether a line shows how far it is; None where that is a terminal."""

    is_strict: bool = False
    """Whether an error of hookline's own ends the script."""
