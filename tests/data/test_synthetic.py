import pytest
import torch

from paceline.data.synthetic import synthetic_images


def test_equal_arguments_give_equal_data() -> None:
    left, right = (synthetic_images(20, 3, 4, 5, 7, seed=9) for _ in range(2))
    other = synthetic_images(20, 3, 4, 5, 7, seed=10)
    assert left.images.shape == (20, 3, 4, 5)
    assert left.num_classes == 7
    assert torch.equal(left.images, right.images)
    assert torch.equal(left.labels, right.labels)
    assert not torch.equal(left.images, other.images)


def test_the_training_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    synthetic_images(20, 3, 4, 5, 7, seed=9)
    assert torch.equal(before, torch.get_rng_state())


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        synthetic_images(20, 3, 0, 5, 7, seed=9)
