"""`python -m paceline.checkpoint.remote`: the process that `runtime/copying.py` starts."""

import sys

from paceline.checkpoint.remote.process import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
