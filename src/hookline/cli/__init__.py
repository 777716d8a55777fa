"""The command `hookline`: each command is a file that reads its arguments, calls, and prints.

    group.py        the command itself, to which the others are added
    run.py          hookline run
    check.py        hookline check
    report.py       hookline report
    show.py         hookline show
    record.py       hookline record
    diff.py         hookline diff
    extract.py      hookline extract; extract_options.py what it is told
    verify.py       hookline verify
    ls.py           hookline ls
    sites.py        hookline sites
    completion.py   hookline completion
    starting.py     a script is started once the command line is left
    run_folders.py  which run is meant
    sparklines.py   numbers over steps as one short line
    loading.py      `package.module:name` and `file.py:name`, from text to the object
    failing.py      errors as a person at a terminal wants them

Data goes to stdout, all else to stderr. torch is imported by what a command does, not to show help.
"""

from __future__ import annotations

from hookline.cli.group import main

__all__ = ["main"]
