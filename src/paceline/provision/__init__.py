"""Creates and deletes machines to train on."""
