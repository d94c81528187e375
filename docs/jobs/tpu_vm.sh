#!/bin/bash
# Create a TPU slice and run a job on it, from a machine with gcloud:
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
: "${VERSION:=v2-alpha-tpuv5-lite}"

tpu() {
  gcloud compute tpus tpu-vm "$@" --zone="$ZONE"
}

on() { # worker, command
  tpu ssh "$NAME" --worker="$1" --command="$2"
}

command=${1:?create, install, start, log, stop or delete}
shift
case $command in
  create)
    # "$@": --spot, --network=..., or a --service-account=... that may write
    # to the workdir's bucket.
    tpu create "$NAME" --accelerator-type="$TYPE" --version="$VERSION" "$@"
    ;;
  install)
    git archive --prefix=vit_jax/ --output=/tmp/vit_jax.tar.gz HEAD
    tpu scp /tmp/vit_jax.tar.gz "$NAME:" --worker=all
    # uv installs a Python, because the image's may be too old.
    on all 'set -e
      curl -LsSf https://astral.sh/uv/install.sh | sh
      tar xzf vit_jax.tar.gz && cd vit_jax
      ~/.local/bin/uv venv --allow-existing --python 3.12
      ~/.local/bin/uv pip install -e ".[tpu,gcs]"'
    ;;
  start)
    # nohup: the job outlives the connection. Each host writes its own run.log.
    # Host 0 logs metrics; each host logs its own errors.
    on all "cd vit_jax || exit; nohup .venv/bin/python -m vit_jax.main \
      --distributed $(printf '%q ' "$@") >> ~/run.log 2>&1 < /dev/null &"
    ;;
  log)
    on 0 'tail -n 100 -f run.log'
    ;;
  stop)
    # One signal is enough: all hosts save and stop after the same step.
    on 0 "pkill -TERM -f '[v]it_jax.main'"
    ;;
  delete)
    tpu delete "$NAME"
    ;;
  *)
    echo "$command? create, install, start, log, stop or delete" >&2
    exit 1
    ;;
esac
