"""One step of a model, or the steps of a training, as a trace that can be compared.

record.py      hl.record: a training, or one step, into a run folder
tracing.py     trace_step: a step run here and now
live.py        the trace it gives, in memory
course.py      the values of a step in order, and the sites that they are
identities.py  which tensor is which
listening.py   what listens at each module
hearing.py     how a gradient is heard of without changing a bit
states.py      parameters and buffers around the step
facts.py       what is known of a model besides
floors.py      how far rounding alone moves each site
staging.py     a model that is afterwards what it was
unusual.py     tensors that cannot be measured, models without values
attaching.py   what a recording of a training listens at
weighing.py    its parameters, gradients and updates
storing.py     how a trace lies in a run folder
calls.py       the call that began a step, kept and made again
"""

from __future__ import annotations

from hookline.recordings.calls import read_call
from hookline.recordings.floors import calibrate_floors, perturb
from hookline.recordings.live import LiveTrace
from hookline.recordings.record import Recording, record
from hookline.recordings.tracing import Tracer, trace_step

__all__ = [
    "LiveTrace",
    "Recording",
    "Tracer",
    "calibrate_floors",
    "perturb",
    "read_call",
    "record",
    "trace_step",
]
