"""What is done around the steps of a training, one file each; `base.py` has the interface."""
