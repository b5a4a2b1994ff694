"""`paceline pack DIR OUT`: decodes an image folder once, to be read at memory speed."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.data.options import PackOptions
from paceline.errors import ExitCode
from paceline.options.command_line import read_command
from paceline.options.fields import option_fields
from paceline.options.text import printable

_OPTIONS = option_fields(PackOptions, "Pack")
_ABOUT = (
    "Pack the image folder DIR/{train,val,test}/CLASS/IMAGE into the directory OUT: raw images of "
    "one size and an index. Run it again to resume after an interruption."
)
_REPORT_EVERY_S = 5.0


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    (source, out), given = read_command(
        "paceline pack DIR OUT",
        _ABOUT,
        tokens,
        _OPTIONS,
        "the image folder",
        "the directory to make",
    )
    options = PackOptions(**given)  # type: ignore[arg-type]  # checked by the parser
    from paceline.data.packed import list_broken, pack_images

    index = pack_images(
        Path(source), Path(out), options, report=_print_line, progress=_progress(time.monotonic)
    )
    counts = ", ".join(f"{packed.num_images:,} {name}" for name, packed in index.splits.items())
    size = sum(packed.num_images for packed in index.splits.values()) * index.image_bytes
    left_out = len(list_broken(index))
    print(
        f"{out}: {counts} images of {index.size}x{index.size} in {len(index.class_names)} classes, "
        f"{size / 1e9:.2f} GB" + (f"; {left_out} broken ones left out" if left_out else "")
    )
    return ExitCode.DONE


def _print_line(text: str) -> None:
    print(printable(text), flush=True)


def _progress(clock: Callable[[], float]) -> Callable[[int, int], None]:
    """Make what prints a line every few seconds: images done, of how many, and the rate."""
    started = last = clock()
    first: int | None = None

    def show(done: int, total: int) -> None:
        """Print, where it is time; images of an earlier call don't count for the rate."""
        nonlocal last, first
        first = done if first is None else first
        now = clock()
        if now - last >= _REPORT_EVERY_S and done < total:
            last = now
            rate = (done - first) / (now - started)
            _print_line(f"{done:,} of {total:,} images, {rate:,.0f} images/s")

    return show
