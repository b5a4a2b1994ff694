"""The small networks of the built-in recipes; everything else comes from torchvision."""
