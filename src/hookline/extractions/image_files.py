"""Samples of image files: tensors of bytes, channels first, red, green and blue.

Pillow is needed only to open them; importing this file needs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hookline._tables import import_optional
from hookline.extractions.finding_files import Files
from hookline.extractions.object_sources import Rows


def open_images(files: Files, name: str) -> Rows:
    """Open images, sorted by their path; each is decoded when it is taken."""
    images = import_optional("PIL.Image", extra="images")

    def read(number: int) -> Tensor:
        return _decode(images, files.root / files.paths[number])

    return Rows(read, len(files.paths), name=name, fingerprint=files.fingerprint())


def _decode(images: Any, path: Path) -> Tensor:
    """Decode an image; the error names its path."""
    try:
        with images.open(path) as image:
            if image.mode[0] in "IF":
                # Pillow would cut every value above 255, and leave a white image.
                raise ValueError(
                    f"it has more than 8 bits a channel (mode {image.mode}); give a data set of "
                    "your own that scales it"
                )
            if image.mode == "P" and "transparency" in image.info:
                image = image.convert("RGBA")
            pixels = np.array(image.convert("RGB"))
    except Exception as error:
        raise ValueError(f"the image `{path}` cannot be decoded: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
