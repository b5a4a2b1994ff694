"""`python -m paceline.launch.monitor`: the process that `beside.watched` starts."""

import sys

from paceline.launch.monitor.node import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
