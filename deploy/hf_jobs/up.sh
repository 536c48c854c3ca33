#!/bin/sh
# Starts a run on Hugging Face Jobs; COMMAND is what follows. Everything else is set here or in the
# environment. `rollmux deploy hf up --help` lists the rest; EXTRA takes it.
#
#   RUN=first MODEL=Qwen/Qwen3-8B deploy/hf_jobs/up.sh python3 /lora/train.py --output_dir /lora/out
#   EXTRA=--dry-run RUN=first MODEL=Qwen/Qwen3-8B deploy/hf_jobs/up.sh python3 /lora/train.py
set -euf # f: words of EXTRA are no patterns

if [ $# -eq 0 ]; then
  echo "usage: RUN=NAME MODEL=MODEL $0 COMMAND..." >&2
  exit 2
fi

# EXTRA is several words on purpose.
# shellcheck disable=SC2086
exec rollmux deploy hf up \
  --run "${RUN:?the name of the run}" \
  --model "${MODEL:?the base model}" \
  --replicas "${REPLICAS:-2}" \
  --replica-flavor "${REPLICA_FLAVOR:-h200}" \
  --trainer-flavor "${TRAINER_FLAVOR:-h200}" \
  --transport "${TRANSPORT:-expose}" \
  --max-staleness "${MAX_STALENESS:-4}" \
  --max-lora-rank "${MAX_LORA_RANK:-32}" \
  --max-model-len "${MAX_MODEL_LEN:-8192}" \
  --timeout "${TIMEOUT:-6h}" \
  ${EXTRA:-} -- "$@"
