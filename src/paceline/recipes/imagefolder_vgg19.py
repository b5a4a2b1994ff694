"""The training of a study of scaling on EC2: a pretrained VGG-19 on photographs in folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.errors import DataError, UsageError
from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from paceline.data.augment import Augment
    from paceline.data.imagefolder import ImageFolder
    from paceline.data.memory import TensorData
    from paceline.training.job import Job

VggName = Literal[
    "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn"
]
Weights = Literal["imagenet", "none"] | Path
OnBroken = Literal["error", "skip"]

_DATA = Path("data")
_HIDDEN = 4096
_SHRINKS_BY, _FEATURES_SIDE = 32, 7
_FEATURES = 512 * _FEATURES_SIDE**2
"""What a VGG's encoder gives to its classifier."""


@recipe(
    epochs=60,
    time_budget="2h",
    batch_per_worker=32,
    optimizer="sgd",
    momentum=0.9,
    lr=1e-4,
    lr_scaling="sqrt",
    base_batch=32,
    best_by="val_loss",
)
def imagefolder_vgg19(
    *,
    data_dir: Path = _DATA,
    weights: Weights = "imagenet",
    model: VggName = "vgg19",
    size: int = 224,
    augment: bool = False,
    on_broken: OnBroken = "error",
    hidden: int = _HIDDEN,
) -> "Job":
    """Any folder of images, as it is or packed: a pretrained VGG-19, all of it trained.

    Args:
        data_dir: Holds train/CLASS/IMAGE, val and, if there is one, test; or is what `paceline
            pack` made of them.
        weights: What to start from: imagenet (torchvision's, downloaded if need be), none (random),
            or the path of a state dict (.safetensors, .pt or .pth).
        model: Which of torchvision's VGG networks.
        size: Height and width of the images that the model sees, in pixels; folders should be
            packed with 8/7 of it.
        augment: Cut random boxes out of the training images and mirror half of them.
        on_broken: What becomes of broken images: error names them and ends, skip names them and
            leaves them out.
        hidden: Width of the classifier's two hidden layers; with another one than 4096 the
            classifier starts from random weights.
    """
    from paceline.training.job import Job

    for name, value in {"size": size, "hidden": hidden}.items():
        if value < 1:
            raise UsageError(f"{name} is {value}: it must be at least 1")
    splits = _load(data_dir, size, on_broken)
    train = splits["train"]
    evaluated = _middle(_side(train), size, data_dir)
    return Job(
        model=_build(model, weights, train.num_classes, hidden, size),
        channels_last=True,
        train=train,
        validation=splits["val"],
        test=splits.get("test"),
        num_classes=train.num_classes,
        augment=_random(_side(train), size) if augment else evaluated,
        evaluate_with=evaluated,
    )


def _load(
    data_dir: Path, size: int, on_broken: OnBroken
) -> "Mapping[str, TensorData] | Mapping[str, ImageFolder]":
    from paceline.data.imagefolder import load_image_folder, scan_tree
    from paceline.data.packed import INDEX, load_packed

    is_packed = (data_dir / INDEX).is_file() and not (data_dir / "train").is_dir()
    packed = load_packed(data_dir) if is_packed else {}
    # A folder is only listed for this: to find broken images, each one is decoded once.
    if "val" not in (packed if is_packed else scan_tree(data_dir).splits):
        raise DataError(
            f"{data_dir} has no validation images: put some of each class into "
            "val/CLASS, beside train (and pack the folder again, if it is packed)"
        )
    if not is_packed:
        return load_image_folder(data_dir, _read_at(size), on_broken, report=print)
    if on_broken == "skip":
        print(f"{data_dir} is packed: what was broken was dealt with then")
    return packed


def _read_at(size: int) -> int:
    """Leave a border that is cut off: 256 pixels for 224, as torchvision's ImageNet models have."""
    return round(size * 8 / 7)


def _side(images: "TensorData | ImageFolder") -> int:
    from paceline.data.memory import TensorData

    return images.images.shape[2] if isinstance(images, TensorData) else images.size


def _shrunk(stored: int, size: int) -> "tuple[Augment, ...]":
    from paceline.data.crop import Resize

    return (Resize(_read_at(size)),) if stored > _read_at(size) else ()


def _middle(stored: int, size: int, data_dir: Path) -> "tuple[Augment, ...]":
    from paceline.data.crop import CenterCrop

    if stored < size:
        raise DataError(
            f"{data_dir} is packed with {stored} pixels, and the model should see {size}: "
            f"pack it again with --size {_read_at(size)}, or train with --size {stored}"
        )
    return (*_shrunk(stored, size), CenterCrop(size))


def _random(stored: int, size: int) -> "tuple[Augment, ...]":
    from paceline.data.augment import RandomFlip
    from paceline.data.crop import RandomResizedCrop

    return (*_shrunk(stored, size), RandomResizedCrop(size), RandomFlip())


def _build(name: VggName, weights: Weights, classes: int, hidden: int, size: int) -> "nn.Module":
    import torchvision
    from torch import nn

    from paceline.recipes.weights import download_weights, read_weights, take_over

    model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=classes)
    if hidden != _HIDDEN:
        layers = model.get_submodule("classifier")
        assert isinstance(layers, nn.Sequential)
        layers[0] = nn.Linear(_FEATURES, hidden)
        layers[3] = nn.Linear(hidden, hidden)
        layers[6] = nn.Linear(hidden, classes)
    # Pooling to 7 x 7 leaves features of 7 x 7 as they are, and isn't deterministic on CUDA.
    if size // _SHRINKS_BY == _FEATURES_SIDE:
        model.avgpool = nn.Identity()
    if weights != "none":
        found = download_weights(name, print) if weights == "imagenet" else read_weights(weights)
        fresh = take_over(model, found, source=f"weights {weights}", own="classifier.")
        print(f"{name} starts from {weights}; random: {', '.join(fresh) or 'nothing'}")
    return model
