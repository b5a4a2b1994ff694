"""The small convolutional network that PyTorch's DDP articles train on MNIST."""

import torch.nn.functional as F
from torch import Tensor, nn


class MnistCnn(nn.Module):
    """Two convolutions with BatchNorm and max-pooling, then two linear layers; 225,226 parameters.

    Made for one-channel images of 28x28 and the negative log-likelihood loss. After "Distributed
    training with PyTorch's DistributedDataParallel and torchrun": 3x3 convolutions without padding,
    so that 28 pixels become 26, 13, 11 and 5, and 64 x 5 x 5 = 1600 features are left.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(inplace=True), nn.Linear(128, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images, float (N, 1, 28, 28): log-probabilities (N, 10)."""
        return F.log_softmax(self.classifier(self.features(images)), dim=1)
