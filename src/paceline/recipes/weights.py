"""Weights that a model starts from: a file, or torchvision's download."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.errors import DataError
from paceline.files import locked
from paceline.options.text import clause

Report = Callable[[str], None]


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Read a state dict from a file; nothing in it is run.

    Args:
        path: `.safetensors`, or what `torch.save(model.state_dict(), path)` wrote.

    Returns:
        Tensors on the CPU by name, without the `module.` that DistributedDataParallel puts before.

    Raises:
        DataError: There is no such file, or it holds no state dict.
    """
    if not path.is_file():
        raise DataError(f"there is no weights file {path}. Give the path of a state dict")
    try:
        if path.suffix == ".safetensors":
            content: object = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own errors, and pickle's aren't to be imported
        raise DataError(
            f"{path} can't be read as weights ({type(error).__name__}). Expected is a .safetensors "
            "file, or what torch.save(model.state_dict(), path) wrote"
        ) from error
    return {n.removeprefix("module."): tensor for n, tensor in _tensors(path, content).items()}


def download_weights(model: str, report: Report = lambda text: None) -> Mapping[str, Tensor]:
    """Fetch torchvision's ImageNet weights of a model, once per node, into torch's cache.

    Every worker may call this at once: one of a node downloads, the others wait.

    Args:
        model: Name of a torchvision model.
        report: Told what is being downloaded.

    Raises:
        DataError: They aren't there and can't be downloaded; says where to put them by hand.
    """
    import torchvision

    url = str(torchvision.models.get_model_weights(model).DEFAULT.url)
    cache = Path(torch.hub.get_dir(), "checkpoints")
    path = cache / url.rpartition("/")[2]
    if not path.is_file():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with locked(cache):
                if not path.is_file():
                    report(f"downloading {url} to {path}")
                    # torchvision's names end in the first digits of the SHA-256.
                    digits = path.stem.rpartition("-")[2]
                    torch.hub.download_url_to_file(url, str(path), digits, progress=False)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"the ImageNet weights of {model} could not be downloaded ({clause(error)}). By "
                f"hand: download {url} and put it into {cache}, or name it with --weights "
                f"{path.name}; --weights none starts from random weights"
            ) from None
    return read_weights(path)


def take_over(
    model: nn.Module, weights: Mapping[str, Tensor], *, source: str, own: str
) -> tuple[str, ...]:
    """Give a model the weights that fit it.

    Args:
        model: Changed in place.
        weights: Tensors by name.
        source: What the weights are called in messages.
        own: Layers whose names begin with this may have other shapes; they keep what they have.

    Returns:
        The layers that weren't taken over.

    Raises:
        DataError: The weights are those of another model.
    """
    # All names and shapes must agree, except in layers that may have shapes of their own.
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [name for name in wanted if found.get(name) != wanted[name]]
    wrong = [name for name in differing if not name.startswith(own)]
    wrong += [name for name in found if name not in wanted]
    if wrong:
        name = wrong[0]
        raise DataError(
            f"{source} holds weights of another model: {name!r} has the shape "
            f"{found.get(name, 'of nothing')} there and {wanted.get(name, 'of nothing')} in the "
            f"model ({len(wrong)} such). Give --model as it was when they were trained"
        )
    # Such a layer keeps all its tensors, those that fit (a bias, say) as well.
    kept = {_layer(name) for name in differing}
    fitting = {n: tensor for n, tensor in weights.items() if _layer(n) not in kept}
    model.load_state_dict({**model.state_dict(), **fitting})
    return tuple(sorted(kept))


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def _tensors(path: Path, content: object) -> Mapping[str, Tensor]:
    if isinstance(content, Mapping):
        tensors = {n: t for n, t in content.items() if isinstance(n, str) and isinstance(t, Tensor)}
        if tensors and len(tensors) == len(content):
            return tensors
        found = f"a mapping with {', '.join(map(repr, list(content)[:5]))}"
    else:
        found = f"a {type(content).__name__}"
    raise DataError(
        f"{path} holds {found}; expected is a state dict, each name with its tensor. Save that "
        "part alone"
    )
