"""A script as it is, watched; and a model checked with one batch.

    running.py      a script from its first line to the report
    options.py      what is asked of that
    launching.py    a script as `__main__`
    awaiting.py     the moment at which it imports torch
    tapping.py      the outermost calls of modules
    discovering.py  which of them are of models that are trained
    owners.py       whose a module is, and what it is called
    watching.py     the watch of what was found
    recording.py    a script that is recorded, from its first line to the last
    tracing.py      the recording of what was found
    losses.py       the script's own operations between a model and its backward
    choosing.py     rules by name
    folders.py      where a run goes
    endings.py      how a script ended
    speaking.py     what is said meanwhile
    checking.py     hl.check: a few steps that change nothing
    checkups.py     what that gives

Nothing here is in the way of the script: what fails is said once, and it goes on.
"""
