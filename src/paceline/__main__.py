"""`python -m paceline` is the `paceline` command."""

import sys

from paceline.cli.app import main

sys.exit(main())
