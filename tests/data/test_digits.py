import numpy as np
import torch
from sklearn import datasets

from paceline.data.digits import holdout_mask, load_digits


def test_equal_to_scikit_learns() -> None:
    original = datasets.load_digits()
    train, test = load_digits()
    mask = holdout_mask(original.target)
    for data, chosen in ((train, ~mask), (test, mask)):
        assert np.array_equal(data.images[:, 0].numpy(), original.images[chosen])
        assert np.array_equal(data.labels.numpy(), original.target[chosen])


def test_the_split_is_fixed_and_stratified() -> None:
    train, test = load_digits()
    assert (train.num_samples, test.num_samples) == (1442, 355)
    for digit in range(10):
        held_out = int((test.labels == digit).sum())
        kept = int((train.labels == digit).sum())
        assert held_out == (held_out + kept) // 5


def test_mean_and_deviation_fit() -> None:
    train, _ = load_digits()
    values = train.images.double() / train.scale
    assert abs(values.mean() - train.mean[0]) < 0.002
    assert abs(values.std() - train.std[0]) < 0.002
    assert train.images.dtype == torch.uint8
    assert int(train.images.max()) == 16
