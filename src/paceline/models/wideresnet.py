"""The wide residual network that a course on data-parallel training has for small images."""

from torch import Tensor, nn


class WideBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm and ReLU, added to the block's input.

    Where the number of channels changes, the input goes through a 1x1 convolution with a bias.
    Nothing follows the sum.
    """

    def __init__(self, channels_in: int, channels_out: int, dropout: float) -> None:
        """Create the wide block.

        Args:
            channels_in: Channels of the input.
            channels_out: Channels of the output.
            dropout: Share of features left out in training, between the two convolutions.
        """
        super().__init__()
        self.residual = nn.Sequential(
            *_convolution(channels_in, channels_out),
            nn.Dropout(dropout),
            *_convolution(channels_out, channels_out),
        )
        same = channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(N, channels_in, H, W) to (N, channels_out, H, W)."""
        total: Tensor = self.residual(images) + self.shortcut(images)
        return total


class WideResNet(nn.Module):
    """A convolution to 16 channels, six blocks and a linear layer; two max-poolings in between.

    Made for images of 28x28, of which 7x7 are left for the last pooling; of 32x32 there are 8x8,
    and that pooling, 7x7 as well, leaves the last row and column out. 17,117,466 parameters at
    width 10 with one channel.
    """

    def __init__(
        self, channels: int = 1, *, width: int = 10, dropout: float = 0.01, num_classes: int = 10
    ) -> None:
        """Create the wide res net.

        Args:
            channels: Channels of the images.
            width: Multiplies 16, 32 and 64 channels: 160, 320 and 640 with 10.
            dropout: Share of features left out in training, in each block.
            num_classes: Number of classes.
        """
        super().__init__()
        first, second, third = (width * base for base in (16, 32, 64))
        self.features = nn.Sequential(
            *_convolution(channels, 16),
            WideBlock(16, first, dropout),
            WideBlock(first, first, dropout),
            nn.MaxPool2d(2),
            WideBlock(first, second, dropout),
            WideBlock(second, second, dropout),
            nn.MaxPool2d(2),
            WideBlock(second, third, dropout),
            WideBlock(third, third, dropout),
            nn.AvgPool2d(7),
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(third, num_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Classify images, float (N, channels, H, W), H and W 28 to 55: logits (N, num_classes)."""
        logits: Tensor = self.classifier(self.features(images))
        return logits


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(inplace=True),
    )
