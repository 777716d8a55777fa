"""The run folder: what was watched, on disk, written by many ranks and read by anybody.

    records.py       what is written: sites, steps, blocks
    writing.py       the writer
    database.py      its database
    schema.py        the files and the tables
    encoding.py      blocks as bytes
    run.py           the reader
    ranks.py         one rank's database, whatever state it is in
    history.py       series, tables and maps
    recent.py        the last steps in memory, read the same way

Knows no models and no modules.
"""

from __future__ import annotations

from hookline.runs.dump_files import DumpFile
from hookline.runs.dumps import Dump
from hookline.runs.environment import describe_environment
from hookline.runs.history import OF_STEPS, History
from hookline.runs.measures import MEASURES
from hookline.runs.recent import RecentSteps
from hookline.runs.records import SITE_KINDS, Block, SiteFacts, StepRecord
from hookline.runs.run import Run, open_run
from hookline.runs.series import Series, StatMap
from hookline.runs.writing import RunWriter, name_ending

__all__ = [
    "MEASURES",
    "OF_STEPS",
    "SITE_KINDS",
    "Block",
    "Dump",
    "DumpFile",
    "History",
    "RecentSteps",
    "Run",
    "RunWriter",
    "Series",
    "SiteFacts",
    "StatMap",
    "StepRecord",
    "describe_environment",
    "name_ending",
    "open_run",
]
