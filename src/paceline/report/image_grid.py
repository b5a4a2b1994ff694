"""Images with labels in rows, as one PNG: what a preview shows."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

_LEAST, _MOST = 96, 256  # pixels
_GAP, _HEADER, _LABEL = 8, 32, 20  # pixels
_TITLE_SIZE, _LABEL_SIZE = 15, 13
_PAPER, _INK, _MUTED = "#ffffff", "#1a1d21", "#5b646d"


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """One image and what stands under it."""

    pixels: NDArray[np.uint8]
    """RGB, (height, width, 3)."""
    label: str


@final
@dataclass(frozen=True, eq=False)
class Grid:
    """Where each tile goes. Small images are enlarged by a whole factor, pixel by pixel."""

    tiles: Sequence[Tile]
    """At least one; they may differ in size."""

    @property
    def columns(self) -> int:
        """As many as rows, or a few more."""
        return math.ceil(math.sqrt(len(self.tiles)))

    @cached_property
    def factor(self) -> int:
        """By how much all tiles are enlarged."""
        largest: int = max(max(tile.pixels.shape[:2]) for tile in self.tiles)
        return max(1, _LEAST // largest)

    @cached_property
    def cell(self) -> tuple[int, int]:
        """Height and width that the largest tile takes, in pixels."""
        sizes = [self._shown(tile).shape for tile in self.tiles]
        return max(size[0] for size in sizes), max(_LEAST, *(size[1] for size in sizes))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of the picture, in pixels."""
        rows = math.ceil(len(self.tiles) / self.columns)
        top, left = self.place(rows * self.columns)
        return top, self.place(self.columns - 1)[1] + self.cell[1] + _GAP if rows else left

    def place(self, number: int) -> tuple[int, int]:
        """Give the top and left pixel of a tile."""
        row, column = divmod(number, self.columns)
        height, width = self.cell
        return _HEADER + row * (height + _LABEL + _GAP), _GAP + column * (width + _GAP)

    def draw(self, title: str) -> bytes:
        """Draw the picture as PNG; the same tiles always give the same bytes."""
        from PIL import Image, ImageDraw, ImageFont

        picture = Image.new("RGB", (self.size[1], self.size[0]), _PAPER)
        pen = ImageDraw.Draw(picture)
        heading, font = ImageFont.load_default(_TITLE_SIZE), ImageFont.load_default(_LABEL_SIZE)
        text = _fitting(title, heading, self.size[1] - 2 * _GAP)
        pen.text((_GAP, _GAP), text, fill=_INK, font=heading)
        # Each tile, its label below it.
        for number, tile in enumerate(self.tiles):
            top, left = self.place(number)
            picture.paste(Image.fromarray(self._shown(tile)), (left, top))
            label = _fitting(tile.label, font, self.cell[1])
            pen.text((left, top + self.cell[0] + 2), label, fill=_MUTED, font=font)
        buffer = io.BytesIO()
        picture.save(buffer, format="png")
        return buffer.getvalue()

    def _shown(self, tile: Tile) -> NDArray[np.uint8]:
        pixels = tile.pixels
        largest = max(pixels.shape[:2])
        if largest <= _MOST:
            return pixels.repeat(self.factor, axis=0).repeat(self.factor, axis=1)
        from PIL import Image

        height, width = (max(1, side * _MOST // largest) for side in pixels.shape[:2])
        return np.asarray(Image.fromarray(pixels).resize((width, height)))


def _fitting(text: str, font: "FreeTypeFont | ImageFont", width: int) -> str:
    """Cut a text so that it is at most so many pixels wide; on one line."""
    line = " ".join(text.split())
    if font.getlength(line) <= width:
        return line
    while line and font.getlength(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"
