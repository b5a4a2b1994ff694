"""Random images for any torchvision model: for measuring, there is nothing to learn."""

from typing import TYPE_CHECKING

from paceline.errors import UsageError
from paceline.options.fields import unknown_name
from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.job import Job

_WITH_SIDE_OUTPUTS = ("googlenet", "inception_v3")


@recipe(epochs=1, global_batch=64, optimizer="sgd", lr=0.01, momentum=0.9)
def synthetic(
    *,
    model: str = "resnet18",
    samples: int = 1024,
    val_samples: int = 128,
    size: int = 224,
    channels: int = 3,
    classes: int = 1000,
) -> "Job":
    """Random images of any size for any torchvision model by name: for measuring.

    Args:
        model: Name of a torchvision classification model, built with random weights.
        samples: Training images.
        val_samples: Validation images.
        size: Height and width of the images.
        channels: Channels of the images; torchvision's models take 3.
        classes: Number of classes.
    """
    from paceline.data.memory import synthetic_images
    from paceline.training.job import Job

    given = {"samples": samples, "val_samples": val_samples, "size": size, "channels": channels}
    for name, value in (given | {"classes": classes}).items():
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    shape = {"channels": channels, "height": size, "width": size, "classes": classes}
    return Job(
        model=_torchvision_model(model, classes),
        channels_last=True,
        train=synthetic_images(samples, seed=1, **shape),
        validation=synthetic_images(val_samples, seed=2, **shape),
    )


def _torchvision_model(name: str, classes: int) -> "nn.Module":
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UsageError(unknown_name(name, known, "torchvision model"))
    options = {"aux_logits": False, "init_weights": True} if name in _WITH_SIDE_OUTPUTS else {}
    model: nn.Module = torchvision.models.get_model(
        name, weights=None, num_classes=classes, **options
    )
    return model
