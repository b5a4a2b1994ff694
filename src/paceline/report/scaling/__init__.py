"""A scaling study as one self-contained HTML file."""
