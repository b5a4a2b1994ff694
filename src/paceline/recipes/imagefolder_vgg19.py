"""The training of a study of scaling on EC2: a pretrained VGG-19 on photographs in folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError
from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from torch import nn

    from paceline.data.image_folder import Transform
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
    """Any folder of images: a pretrained VGG-19, all of it trained.

    Args:
        data_dir: Holds train/CLASS/IMAGE, val and, if there is one, test.
        weights: What to start from: imagenet (torchvision's, downloaded if need be), none (random),
            or the path of a state dict (.safetensors, .pt or .pth).
        model: Which of torchvision's VGG networks.
        size: Height and width of the images that the model sees, in pixels.
        augment: Crop training images at random (RandomResizedCrop) and mirror half of them.
        on_broken: What becomes of broken images: error ends the training at the first one, skip
            decodes all images before the training and leaves out those that are broken.
        hidden: Width of the classifier's two hidden layers; with another one than 4096 the
            classifier starts from random weights.
    """
    from paceline.data.image_folder import load_image_folder
    from paceline.training.job import Job

    for name, value in {"size": size, "hidden": hidden}.items():
        if value < 1:
            raise UsageError(f"{name} is {value}: it must be at least 1")
    evaluated = _transform(size, random=False)
    trained = _transform(size, random=True) if augment else evaluated
    transforms = {"train": trained, "val": evaluated, "test": evaluated}
    splits = load_image_folder(data_dir, transforms, on_broken)
    classes = len(splits["train"].classes)
    return Job(
        model=_build(model, weights, classes, hidden, size),
        channels_last=True,
        train=splits["train"],
        validation=splits["val"],
        test=splits.get("test"),
        num_classes=classes,
    )


def _transform(size: int, random: bool) -> "Transform":
    """Crop to `size`, normalised for ImageNet's weights; at random, or the middle of 8/7 of it."""
    import torch
    from torchvision.transforms import v2

    crop = (
        [v2.RandomResizedCrop(size), v2.RandomHorizontalFlip()]
        if random
        else [v2.Resize(round(size * 8 / 7)), v2.CenterCrop(size)]
    )
    floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    transform: Transform = v2.Compose(
        [*crop, *floats, v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    )
    return transform


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
