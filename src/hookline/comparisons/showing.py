"""A difference that shows itself: as one HTML file, and in a notebook.

What was found knows nothing of how it is shown; this is the same with the views put to it.
"""

from __future__ import annotations

import dataclasses
import os

from hookline.diffs import difference as found
from hookline.views import diff_page_html, write_diff_html


class Difference(found.Difference):
    """Two models or runs compared: whether they are the same, and if not, where they part first.

    `str(difference)` is the answer in one sentence; `difference.table()` has every pair;
    `difference.to_html("diff.html")` writes the report.
    """

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML file."""
        write_diff_html(self, path)

    def _repr_html_(self) -> str:
        return diff_page_html(self)


def make_shown(difference: found.Difference) -> Difference:
    """Let a difference show itself."""
    fields = dataclasses.fields(difference)
    return Difference(**{one.name: getattr(difference, one.name) for one in fields})
