#!/usr/bin/env bash
# The same under torchrun, which starts the workers instead of Paceline.
# Arguments are options of `paceline train`: examples/03_torchrun.sh --epochs 2
set -euo pipefail

exec torchrun --standalone --nproc-per-node 2 -m \
  paceline train "$(dirname "$0")/02_own_dataset.py:build" "$@"
