"""Parts of a picture: boxes in thousandths of its sides, and their pixels at the size in which a policy sees them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from agentrl.core.images import Image

if TYPE_CHECKING:
    from PIL.Image import Image as PilImage

BOX_UNITS = 1000
"""Width and height of a picture in the units of boxes, whatever its pixels."""
LEAST_SIDE = 50
"""Least width and height of a box."""
MOST_RATIO = 4
"""Most that a box may be longer on one side than on the other: processors refuse narrow pictures."""


def box_fault(box: Sequence[int]) -> str:
    """Return why a picture has no such part to show; empty: it has.

    Args:
        box: left, top, right and bottom, integers from 0 to `BOX_UNITS`.
    """
    x, y, x_end, y_end = box
    width, height = x_end - x, y_end - y
    if min(width, height) < LEAST_SIDE:
        return f"box {[*box]}: left, top, right, bottom, with right and bottom greater by at least {LEAST_SIDE}"
    if max(width, height) > MOST_RATIO * min(width, height):
        return f"box {[*box]}: one side is more than {MOST_RATIO} times the other"
    return ""


def crop_picture(picture: PilImage, box: Sequence[int], view_px: int) -> PilImage:
    """Return a part of a picture, its longer side ``view_px`` pixels long.

    Pixels are repeated where it is enlarged, and their mean is taken where it is reduced. Edges of the box that are between
    two pixels are moved to the upper left.
    """
    x, y, x_end, y_end = (
        int(edge) * side // BOX_UNITS for edge, side in zip(box, (*picture.size, *picture.size), strict=True)
    )
    x_end, y_end = max(x_end, x + 1), max(y_end, y + 1)
    scale = view_px / max(x_end - x, y_end - y)
    size = (max(1, round((x_end - x) * scale)), max(1, round((y_end - y) * scale)))
    from PIL.Image import Resampling

    return picture.crop((x, y, x_end, y_end)).resize(size, Resampling.BOX)


def encode(picture: PilImage) -> Image:
    """Return a picture as a PNG, compressed fast."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", compress_level=1)
    return Image(buffer.getvalue())
