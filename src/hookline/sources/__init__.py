"""Python functions and their source: the variables one assigns, and a copy that shows them.

Knows nothing of torch, of models or of the rest of hookline, and runs nothing of what it reads.
"""

from hookline.sources.changing import changes_in_place, ways_back
from hookline.sources.reading import read
from hookline.sources.readings import Callee, NoSource, Point, Reading
from hookline.sources.rewriting import rewrite
from hookline.sources.taps import Taps
from hookline.sources.unwrapping import unwrap

__all__ = [
    "Callee",
    "NoSource",
    "Point",
    "Reading",
    "Taps",
    "changes_in_place",
    "read",
    "rewrite",
    "unwrap",
    "ways_back",
]
