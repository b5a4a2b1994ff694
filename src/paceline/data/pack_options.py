"""Options of packing. Imports no torch."""

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How an image folder is packed."""

    size: int = 256
    """Height and width of the packed images, in pixels: the shorter side is scaled to it and the
    middle is cut out. An image takes 3 x size x size bytes."""

    jobs: int | None = None
    """Processes that decode. The default is one a core."""

    on_broken: Literal["error", "skip"] = "error"
    """What becomes of broken images: error names them all and packs nothing, skip names them and
    leaves them out."""

    verify: bool = True
    """Read everything back when it is written, and compare its checksums."""

    def __post_init__(self) -> None:
        for name in ("size", "jobs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}: it must be at least 1")
