"""Image folders, DIR/{train,val,test}/CLASS/..., read by torchvision's `ImageFolder`."""

import hashlib
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, final

from PIL import Image
from torchvision.datasets import ImageFolder

from paceline.errors import DataError
from paceline.files import locked, read_json_object, storing, write_json
from paceline.launch.worker_count import usable_cores
from paceline.options.figures import plural
from paceline.options.text import clause

OnBroken = Literal["error", "skip"]
Transform = Callable[[Image.Image], object]
SPLITS = ("train", "val", "test")
_SHOWN = 10
_MAX_BYTES = 1 << 30
_DECODING_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


@final
class ImageSplit(ImageFolder):  # type: ignore[misc]  # torchvision has no types
    """One split of an image folder."""

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, by class number."""
        return tuple(self.classes)


def load_image_folder(
    root: Path,
    transforms: Mapping[str, Transform],
    on_broken: OnBroken = "error",
) -> Mapping[str, ImageSplit]:
    """List the splits of an image folder.

    Every worker may call this at once, and gets the same.

    Args:
        root: Holds `train`, `val` and perhaps `test`; each holds the same folders, one a class.
        transforms: Of each split, given PIL images in RGB.
        on_broken: `skip` decodes every image first, and prints and leaves out those that can't be
            decoded; with `error` the first one that is read ends the training.

    Returns:
        The splits that are there, by name.

    Raises:
        DataError: There is no `train` or `val`, a class has no training image, or splits have
            other classes.
    """
    splits = {}
    for name in SPLITS:
        folder = root / name
        if folder.is_dir():
            try:
                splits[name] = ImageSplit(
                    str(folder), transforms[name], loader=load_rgb, allow_empty=name != "train"
                )
            except OSError as error:
                raise DataError(f"{folder}: {clause(error)}") from None
        elif name != "test":
            raise DataError(f"{folder} is missing: expected are {name}/CLASS/IMAGE files in {root}")
    train = splits["train"]
    for name, split in splits.items():
        if split.classes != train.classes:
            raise DataError(
                f"{root / name} has the classes {', '.join(split.classes)}, and train has "
                f"{', '.join(train.classes)}: each split needs the same folders, even if empty"
            )
    if on_broken == "skip":
        broken = find_broken([path for split in splits.values() for path, _ in split.samples])
        for split in splits.values():
            split.samples = split.imgs = [s for s in split.samples if s[0] not in broken]
            split.targets = [label for _, label in split.samples]
        if broken:
            shown = [f"  {path}: {reason}" for path, reason in list(broken.items())[:_SHOWN]]
            print("\n".join([f"{plural(len(broken), 'broken image')} left out:", *shown]))
    return splits


def load_rgb(path: str) -> Image.Image:
    """Read an image file.

    Raises:
        DataError: It can't be decoded; names the file.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except _DECODING_ERRORS as error:
        raise DataError(
            f"{path}: the image is broken: {clause(error)}. Remove it, or leave out broken images "
            "with --on-broken skip"
        ) from None


def find_broken(paths: Sequence[str]) -> Mapping[str, str]:
    """Decode every image once, on one worker of a node; the others wait for what it found.

    The result is kept in `~/.cache/paceline` for as long as no file changes.

    Returns:
        Path to reason, for those that can't be decoded.
    """
    folder = Path.home() / ".cache" / "paceline"
    with storing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for path in paths:
        status = Path(path).stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="replace"))
    kept = folder / f"broken-{digest.hexdigest()[:32]}.json"
    with locked(folder):
        if not kept.exists():
            with ThreadPoolExecutor(usable_cores()) as threads:
                reasons = zip(paths, threads.map(_reason, paths), strict=True)
                write_json(kept, {path: reason for path, reason in reasons if reason})
        found = read_json_object(kept, _MAX_BYTES)
    return {path: str(reason) for path, reason in found.items()}


def _reason(path: str) -> str:
    try:
        load_rgb(path)
    except DataError as error:
        return clause(error.__context__)
    return ""
