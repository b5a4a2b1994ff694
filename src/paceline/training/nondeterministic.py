"""Finds layers whose backward pass on CUDA is nondeterministic, before training starts."""

from torch import nn

from paceline.errors import UsageError

_ALWAYS = (
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AvgPool3d,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.LPPool3d,
    nn.MaxPool3d,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    nn.ReflectionPad1d,
    nn.ReflectionPad3d,
)
_ADAPTIVE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
"""Unless the output is of one element: that is a mean."""


def refuse_nondeterministic(model: nn.Module) -> None:
    """Refuse a model with such a layer behind one that is trained. For CUDA alone.

    torch refuses them as well, in the first backward pass; and what isn't a module, only it finds
    (https://docs.pytorch.org/docs/stable/generated/torch.use_deterministic_algorithms.html).

    Raises:
        UsageError: There is one; names all.
    """
    found, is_trained = [], False
    # Modules are registered in the order in which they are used, as a rule.
    for name, module in model.named_modules():
        is_trained |= any(p.requires_grad for p in module.parameters(recurse=False))
        if is_trained and _is_nondeterministic(module):
            found.append(f"{name or 'the model'} ({type(module).__name__})")
    if found:
        raise UsageError(
            "the same bits every time (--shards, --deterministic) can't be had on CUDA with "
            f"{', '.join(found)}: it has no deterministic backward pass. Take another layer, such "
            "as adaptive average pooling to size 1, strided convolution, or nn.Identity where "
            "pooling changes nothing; or leave the option out"
        )


def _is_nondeterministic(module: nn.Module) -> bool:
    if isinstance(module, nn.Upsample):
        return module.mode == "linear"
    if isinstance(module, nn.EmbeddingBag):
        return module.mode == "max"
    if isinstance(module, _ADAPTIVE):
        sizes = module.output_size
        return any(size != 1 for size in (sizes if isinstance(sizes, tuple) else (sizes,)))
    return isinstance(module, _ALWAYS)
