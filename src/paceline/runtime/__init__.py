"""What commands and scripts share: a training is placed, started, and its end is told."""
