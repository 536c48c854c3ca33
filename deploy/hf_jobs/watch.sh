#!/bin/sh
# Shows a run's Jobs and price, then follows the trainer's log until it ends.
#
#   RUN=first deploy/hf_jobs/watch.sh
set -eu

rollmux deploy hf status --run "${RUN:?the name of the run}"
exec rollmux deploy hf logs --run "$RUN" --follow
