#!/bin/bash
# Create a TPU slice and run a job on it, from a machine with gcloud; with
# SLICES=4, a queued resource of four slices for one job:
#
#   export NAME=vit ZONE=us-west4-a TYPE=v5litepod-16 VERSION=v2-alpha-tpuv5-lite
#   docs/jobs/tpu_vm.sh create        # 4 hosts with 4 chips each
#   docs/jobs/tpu_vm.sh install       # the committed code, on all hosts
#   docs/jobs/tpu_vm.sh start --config=configs/pretrain_paper.py:imagenet21k,L/16 \
#     --workdir=gs://BUCKET/l16
#   docs/jobs/tpu_vm.sh log
#   docs/jobs/tpu_vm.sh stop          # saves; `start` resumes
#   docs/jobs/tpu_vm.sh delete
set -euo pipefail

: "${NAME:?}" "${ZONE:?}" "${TYPE:=v5litepod-16}"
: "${VERSION:=v2-alpha-tpuv5-lite}" "${SLICES:=1}"
NODES=("$NAME")
if ((SLICES > 1)); then
  mapfile -t NODES < <(seq -f "$NAME-%g" 0 $((SLICES - 1)))
fi

tpu() {
  gcloud compute tpus tpu-vm "$@" --zone="$ZONE"
}

on_all() { # command
  for node in "${NODES[@]}"; do
    tpu ssh "$node" --worker=all --command="$1"
  done
}

on_first() { # command
  tpu ssh "${NODES[0]}" --worker=0 --command="$1"
}

queued() { # create or delete, options
  gcloud compute tpus queued-resources "$1" "$NAME" --zone="$ZONE" "${@:2}"
}

command=${1:?create, install, start, log, stop or delete}
shift
case $command in
  create)
    # "$@": --spot, --network=..., or a --service-account=... that may write
    # to the workdir's bucket.
    if ((SLICES > 1)); then
      queued create --node-count="$SLICES" --node-prefix="$NAME" \
        --accelerator-type="$TYPE" --runtime-version="$VERSION" "$@"
    else
      tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION" "$@"
    fi
    ;;
  install)
    git archive --prefix=vit_jax/ --output=/tmp/vit_jax.tar.gz HEAD
    for node in "${NODES[@]}"; do
      tpu scp /tmp/vit_jax.tar.gz "$node:" --worker=all
    done
    # uv installs a Python, because the image's may be too old.
    on_all 'set -e
      curl -LsSf https://astral.sh/uv/install.sh | sh
      tar xzf vit_jax.tar.gz && cd vit_jax
      ~/.local/bin/uv venv --allow-existing --python 3.12
      ~/.local/bin/uv pip install -e ".[tpu,gcs]"'
    ;;
  start)
    # nohup: the job outlives the connection. Each host writes its own run.log.
    # Host 0 logs metrics; each host logs its own errors.
    on_all "cd vit_jax || exit; nohup .venv/bin/python -m vit_jax.main \
      --distributed $(printf '%q ' "$@") >> ~/run.log 2>&1 < /dev/null &"
    ;;
  log)
    on_first 'tail -n 100 -f run.log'
    ;;
  stop)
    # One signal is enough: all hosts save and stop after the same step.
    on_first "pkill -TERM -f '[v]it_jax.main'"
    ;;
  delete)
    if ((SLICES > 1)); then
      queued delete --force
    else
      tpu delete "$NAME"
    fi
    ;;
  *)
    echo "$command? create, install, start, log, stop or delete" >&2
    exit 1
    ;;
esac
