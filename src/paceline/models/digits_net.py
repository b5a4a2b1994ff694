"""The network of the built-in digits recipe: small enough that a step takes about a millisecond."""

from torch import Tensor, nn


class DigitsNet(nn.Module):
    """Two 3x3 convolutions with BatchNorm, one max-pooling, Dropout and two linear layers.

    Made for one-channel images of 8x8 and the cross-entropy loss. It has BatchNorm and Dropout on
    purpose: both hold state that an exact resume has to bring back.
    """

    def __init__(self, dropout: float = 0.2) -> None:
        """Create the digits net.

        Args:
            dropout: Share of features left out in training, before each linear layer.
        """
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(512, 64),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images, float (N, 1, 8, 8): logits (N, 10)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits
