#!/bin/sh
# Ends every Job of a run, by its label.
#
#   RUN=first deploy/hf_jobs/down.sh
set -eu

exec rollmux deploy hf down --run "${RUN:?the name of the run}"
