"""The learning rate for a global batch, from the rate that was chosen for another one."""

import math

from paceline.optim.options import OptimOptions


def scaled_lr(options: OptimOptions, global_batch: int) -> tuple[float, str]:
    """Scale the learning rate to the global batch.

    Linear keeps the expected change per sample (Goyal et al. 2017, arXiv:1706.02677, §2.1), the
    square root keeps the variance of the gradient's noise (Krizhevsky 2014, arXiv:1404.5997, §5).

    Args:
        options: `lr`, `lr_scaling` and `base_batch` are read; they were checked when made.
        global_batch: Samples in one optimizer step over all workers together.

    Returns:
        The rate, and one line for the user such as
        `lr 0.4 = 0.1 x 256/64 (linear, base batch 64)`.
    """
    if options.base_batch is None:
        return options.lr, f"lr {options.lr:.6g} (not scaled with the batch)"
    base = options.base_batch
    ratio = global_batch / base
    if options.lr_scaling == "linear":
        lr, formula = options.lr * ratio, f"{global_batch}/{base}"
    else:
        lr, formula = options.lr * math.sqrt(ratio), f"sqrt({global_batch}/{base})"
    rule = f"({options.lr_scaling}, base batch {base})"
    return lr, f"lr {lr:.6g} = {options.lr:.6g} x {formula} {rule}"
