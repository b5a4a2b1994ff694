"""A run as one self-contained HTML file, a confusion matrix as a picture."""
