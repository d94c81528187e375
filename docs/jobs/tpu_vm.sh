#!/bin/bash
# Train on a TPU slice, from a machine with gcloud. v5e and v6e, by a queued
# resource; with SLICES=4, four slices for one job:
#
#   export NAME=vit ZONE=us-west4-a TYPE=v5litepod-16 VERSION=v2-alpha-tpuv5-lite
#   export OPTIONS="--spot --service-account=ACCOUNT"
#   docs/jobs/tpu_vm.sh run --config=configs/pretrain_paper.py:imagenet21k,L/16 \
#     --config.data.source.data_dir=gs://BUCKET/data --workdir=gs://BUCKET/l16
#
# v5p, v6e and TPU7x, one slice on Compute Engine. TPU7x has another image,
# IMAGE=ubuntu-accel-2404-amd64-tpu-tpu7x:
#
#   export NAME=vit ZONE=europe-west4-a MACHINE=ct6e-standard-4t TOPOLOGY=4x4 HOSTS=4
#   export OPTIONS="--provisioning-model=SPOT --service-account=ACCOUNT"
#
# `run` creates the slice, installs the committed code, trains, does this again
# after each preemption, and at the end deletes the slice, which ends its cost.
# If it is interrupted, the slice trains on: repeat the command. Single steps:
#
#   create, wait, install, start FLAGS, log -f, delete
#   doctor   # one table of the hosts, and what is wrong with them
#   status   # of the slice, and of the processes: running, or an exit status
#   stop     # saves; `start` resumes. End `run` first.
set -eo pipefail
: "${NAME:?}" "${ZONE:?}" "${SLICES:=1}"
read -ra given <<< "$OPTIONS"

if [[ $MACHINE ]]; then # on Compute Engine: a group of instances
  : "${HOSTS:?}" "${IMAGE:=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e}"
  region=${ZONE%-*}

  group() { # command, flags
    gcloud compute instance-groups managed "$1" "$NAME" --zone="$ZONE" "${@:2}"
  }
  create() {
    local policy=() project
    project=$(gcloud config get project)
    if ((HOSTS > 1)); then
      gcloud compute resource-policies create workload-policy "$NAME" \
        --region="$region" --type=HIGH_THROUGHPUT \
        --accelerator-topology="${TOPOLOGY:?}"
      policy=(
        --workload-policy="projects/$project/regions/$region/resourcePolicies/$NAME"
      )
    fi
    gcloud compute instance-templates create "$NAME" --machine-type="$MACHINE" \
      --image-project=ubuntu-os-accelerator-images --image-family="$IMAGE" \
      --maintenance-policy=TERMINATE --boot-disk-size=200GB \
      --scopes=cloud-platform "${given[@]}"
    group create --template="$NAME" --size="$HOSTS" "${policy[@]}" \
      --target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing
  }
  state() {
    local found
    found=$(group list-instances --format='value(instanceStatus)') ||
      found=MISSING
    case $(sort -u <<< "$found" | xargs) in
      MISSING) echo MISSING ;;
      RUNNING) echo ACTIVE ;;
      *STOP* | *SUSPEND* | *TERMINATED*) echo SUSPENDED ;; # preempted
      *) echo WAITING ;;
    esac
  }
  on_hosts() { # gcloud compute's command, with HOST for the name of each
    group list-instances --format='value(instance.basename())' |
      xargs -P 64 -I HOST gcloud compute "$@" --zone="$ZONE" --quiet
  }
  on_all() { on_hosts ssh HOST --command="$1"; }
  copy() { on_hosts scp "$1" HOST:; }
  delete() {
    group delete --quiet
    gcloud compute instance-templates delete "$NAME" --quiet
    if ((HOSTS > 1)); then
      gcloud compute resource-policies delete "$NAME" --region="$region" --quiet
    fi
  }
else # by the Cloud TPU API: a queued resource
  queued() { # command, flags
    gcloud compute tpus queued-resources "$@" --zone="$ZONE"
  }
  create() {
    local nodes=(--node-id="$NAME")
    if ((SLICES > 1)); then
      nodes=(--node-count="$SLICES" --node-prefix="$NAME")
    fi
    queued create "$NAME" "${nodes[@]}" --accelerator-type="${TYPE:?}" \
      --runtime-version="${VERSION:?}" "${given[@]}"
  }
  state() { queued describe "$NAME" --format='value(state.state)' || echo MISSING; }
  on_all() { queued ssh "$NAME" --node=all --worker=all --command="$1"; }
  copy() { queued scp "$1" "$NAME:" --node=all --worker=all; }
  delete() { queued delete "$NAME" --force --quiet; }
fi

install() { # a clone, so that each run records its commit
  local folder
  folder=$(mktemp -d) &&
    git clone --quiet --depth=1 "file://$(git rev-parse --show-toplevel)" \
      "$folder/vit_jax" &&
    tar czf "$folder/vit_jax.tar.gz" -C "$folder" vit_jax &&
    copy "$folder/vit_jax.tar.gz" && rm -rf "$folder" &&
    on_all 'set -e
      test -x ~/.local/bin/uv || curl -LsSf https://astral.sh/uv/install.sh | sh
      rm -rf vit_jax && tar xzf vit_jax.tar.gz && cd vit_jax
      # The Python of the image may be older than 3.11.
      ~/.local/bin/uv venv --python=3.12
      ~/.local/bin/uv pip install -e ".[tpu,gcs]"'
}

# Firewalls of TPU VMs open 8476; JAX would use 8482. Variables of an earlier
# job would count more than the metadata of the VM.
# shellcheck disable=SC2016
settings='cd vit_jax && unset ${!MEGASCALE_@} ${!TPU_WORKER_@} &&
  export JAX_COORDINATOR_PORT=8476'

start() { # the flags of vit_jax.main; the job outlives the connection
  on_all "$settings || exit; trap '' HUP
    while pgrep -F ~/pid -f vit_jax.main; do sleep 5; done 2> /dev/null
    (.venv/bin/python -m vit_jax.main --distributed $(printf '%q ' "$@") &
     echo \$! > ~/pid; wait \$!; echo \$? > ~/status) >> ~/run.log 2>&1 < /dev/null &"
}

processes() { # what is known of each, once
  on_all '{ pgrep -F pid -f vit_jax.main > /dev/null && echo running ||
    cat status || echo none; } 2> /dev/null' | sort -u
}

log() { # flags of tail
  on_all "tail $* run.log | sed -u \"s/^/\$(hostname): /\""
}

run() {
  local found
  while true; do
    case $(state) in
      MISSING) create ;;
      SUSPENDED) delete && create ;;
      FAILED) break ;;
      ACTIVE)
        found=$(processes) || found=running # the connection failed
        if [[ $found == 0 ]]; then
          delete && return
        elif grep -qx 1 <<< "$found"; then # a mistake, which would repeat
          log -n 20 || true
          break
        elif grep -qx none <<< "$found"; then
          install && start "$@"
        elif ! grep -q running <<< "$found"; then
          start "$@" || true # a host was lost
        fi
        ;;
    esac
    sleep "${EVERY_S:-60}"
  done
  echo "$NAME failed, and costs until: $0 delete" >&2
  return 1
}

case ${1:-} in
  wait)
    until [[ $(state | tee /dev/stderr) =~ ACTIVE|FAILED|SUSPENDED|MISSING ]]; do
      sleep 60
    done
    ;;
  status) state && processes ;;
  doctor) on_all "$settings && .venv/bin/python -m vit_jax.tools.doctor --hosts" ;;
  stop) on_all 'pkill -TERM -F pid -f vit_jax.main' ;;
  create | install | start | log | delete | run)
    "$@"
    exit # whatever this file has become since
    ;;
  *)
    sed -nE '2,/^set/s/^# ?//p' "$0" >&2
    exit 1
    ;;
esac
