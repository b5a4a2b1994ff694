"""Start one process per worker, watch them, restart them. Imports no torch at import time."""
