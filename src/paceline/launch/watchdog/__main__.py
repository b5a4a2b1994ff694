"""`python -m paceline.launch.watchdog`: the process that `sidecar.watched` starts."""

import sys

from paceline.launch.watchdog.sidecar_main import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
