"""Small pictures for notebooks: a line as SVG, a map as PNG, both inside the HTML of a cell.

They take the colour of the text around them, so that they show on light and on dark. Plain numbers
in, text out; larger figures are `run.plot`.
"""

from __future__ import annotations

import base64
import html
import math
import struct
import zlib

import numpy as np

from hookline._tables import format_number
from hookline.runs.step_sources import Array, Floats, Integers

_WIDTH, _HEIGHT = 360, 80
_MOST_POINTS = 360
_MOST_ROWS, _MOST_COLUMNS = 200, 400
_LINE = "#2f6fc4"
_BAD = (224, 17, 95)
_RAMP = np.array(
    [(241, 243, 240), (140, 197, 194), (74, 151, 174), (47, 103, 149), (35, 27, 70)], np.float64
)
_WIDE_RANGE = 100
"""Where the largest is so many times the smallest, a line is drawn in logarithms."""


def draw_line(steps: Integers, values: Floats, *, title: str) -> str:
    """Draw one number over steps as an SVG with a caption; what is not finite is a red tick."""
    steps, values = _thin(steps, values)
    is_there = np.isfinite(values)
    shown = values[is_there]
    caption = f"{title}: no finite value in {len(steps)} steps"
    marks = ""
    if len(shown):
        is_log = shown.min() > 0 and shown.max() > _WIDE_RANGE * shown.min()
        heights = np.log(shown) if is_log else shown
        low, high = float(heights.min()), float(heights.max())
        down = _HEIGHT - 6 - (heights - low) / ((high - low) or 1.0) * (_HEIGHT - 16)
        points = zip(_place(steps)[is_there], down, strict=True)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        marks = f'<polyline fill="none" stroke="{_LINE}" stroke-width="1.5" points="{path}"/>'
        least, most = format_number(float(shown.min())), format_number(float(shown.max()))
        caption = f"{title}: {least} to {most}{', log scale' if is_log else ''}"
    bad = "#{:02x}{:02x}{:02x}".format(*_BAD)
    marks += "".join(
        f'<rect x="{x - 1:.1f}" y="0" width="2" height="5" fill="{bad}"/>'
        for x in _place(steps)[np.isinf(values)]
    )
    reach = f"step {steps[0]} to {steps[-1]}" if len(steps) else "no steps"
    return (
        f'<figure style="margin: 4px 0"><svg width="{_WIDTH}" height="{_HEIGHT}" role="img" '
        f'aria-label="{html.escape(caption)}">{marks}<line x1="0" x2="{_WIDTH}" '
        f'y1="{_HEIGHT - 1}" y2="{_HEIGHT - 1}" stroke="currentColor" stroke-opacity="0.25"/></svg>'
        f'<figcaption style="font-size: 85%">{html.escape(caption)}; {reach}</figcaption></figure>'
    )


def draw_map(values: Floats, *, title: str) -> str:
    """Draw a table of numbers as a picture: rows are sites, columns are steps, colours logarithms.

    Where it has more cells than the picture, a pixel shows the largest.
    """
    if not values.size:
        return f"<div>{html.escape(title)}: nothing</div>"
    cells = _shrink(_shrink(np.abs(values), _MOST_ROWS).T, _MOST_COLUMNS).T
    is_there = np.isfinite(cells) & (cells > 0)
    sizes = np.log(cells, where=is_there, out=np.zeros(cells.shape))
    low, high = (sizes[is_there].min(), sizes[is_there].max()) if is_there.any() else (0.0, 1.0)
    place = (sizes - low) / ((high - low) or 1.0) * (len(_RAMP) - 1)
    colours = np.stack(
        [np.interp(place, np.arange(len(_RAMP)), _RAMP[:, one]) for one in range(3)], axis=-1
    )
    colours[cells == 0] = _RAMP[0]
    colours[np.isinf(cells)] = _BAD
    pixels = np.concatenate([colours, np.where(np.isnan(cells), 0, 255)[..., None]], axis=-1)
    data = base64.b64encode(_encode_png(pixels.astype(np.uint8))).decode()
    height = max(24, min(240, 10 * len(cells)))
    ends = f"{format_number(math.exp(low))} to {format_number(math.exp(high))}, log scale"
    caption = html.escape(f"{title}: {ends if is_there.any() else 'no value above zero'}")
    return (
        f'<figure style="margin: 4px 0"><img alt="{caption}" src="data:image/png;base64,{data}" '
        f'style="width: {_WIDTH}px; height: {height}px; image-rendering: pixelated">'
        f'<figcaption style="font-size: 85%">{caption}</figcaption></figure>'
    )


def _thin(steps: Integers, values: Floats) -> tuple[Integers, Floats]:
    """Keep the extremes of many points."""
    group = math.ceil(2 * len(steps) / _MOST_POINTS)
    if group < 2:
        return steps, values
    kept = []
    for start in range(0, len(steps), group):
        part = values[start : start + group]
        bad = np.flatnonzero(np.isinf(part))
        if np.isnan(part).all():
            continue
        kept += sorted({start + int(np.nanargmin(part)), start + int(np.nanargmax(part))})
        kept += [start + int(one) for one in bad[:1]]
    order = np.unique(np.array(kept, np.int64))
    return steps[order], values[order]


def _place(steps: Integers) -> Floats:
    if not len(steps):
        return np.zeros(0)
    span = max(1, int(steps[-1] - steps[0]))
    return np.asarray(4 + (steps - steps[0]) / span * (_WIDTH - 8))


def _shrink(values: Floats, most: int) -> Floats:
    """Make fewer rows, each the largest of those it stands for; NaN where there is none."""
    group = math.ceil(len(values) / most)
    starts = range(0, len(values), group)
    return np.array([np.fmax.reduce(values[start : start + group]) for start in starts])


def _encode_png(pixels: Array) -> bytes:
    """Write pixels [rows, columns, 4] as a PNG."""
    rows, columns = pixels.shape[:2]
    lines = b"".join(b"\0" + pixels[row].tobytes() for row in range(rows))
    header = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
