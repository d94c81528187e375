#!/usr/bin/env bash
# Run all GPU benchmarks of docs/benchmark.md, in about 40 minutes:
#
#   benchmarks/gpu.sh FOLDER [ratio|infer|published|choices ...]
#
# Each part writes FOLDER/PART.txt, a line per case. Without names of parts, all
# of them run, in this order. It needs jax, flax, optax and orbax, and torch and
# timm for the ratios, but no network and no packages for data. PYTHON=... names
# another interpreter.
set -uo pipefail
out=$(realpath "${1:?name the folder for results}")
parts=("${@:2}")
((${#parts[@]})) || parts=(ratio infer published choices)
cd "$(dirname "$0")"
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH="$PWD/..:${PYTHONPATH:-}"
# Later rounds do not compile again.
export JAX_COMPILATION_CACHE_DIR="$out/jax" TORCHINDUCTOR_CACHE_DIR="$out/torch"
"$python" -c 'import flax, jax, optax
print(jax.__version__, jax.devices())' | tee "$out/versions.txt" || exit 1
nvidia-smi | tee "$out/machine.txt"

# first_fit SECONDS MODEL SIZES COMMAND...: run a command with the first batch
# size that fits. @ in its words becomes "MODEL --batch_size=SIZE". It is stopped
# after SECONDS, so that the others can run.
first_fit() {
  local size word words
  for size in $3; do
    words=()
    for word in "${@:4}"; do words+=("${word//@/$2 --batch_size=$size}"); done
    echo "== ${words[*]}"
    timeout --kill-after=20 "$1" "${words[@]}" 2>> "$out/errors.txt" && return
    echo "failed with status $?, see errors.txt"
  done
}

against_timm() {  # torch.compile, autocast, fused AdamW, the fastest SDPA
  first_fit 400 B/16 '256 128 64' "$python" compare.py \
    "step_ours.py @ --mode=$1" "step_timm.py @ --mode=$1"
  first_fit 400 L/16 '128 64 32' "$python" compare.py \
    "step_ours.py @ --mode=$1" "step_timm.py @ --mode=$1"
  first_fit 400 H/14 '64 32 16' "$python" compare.py \
    "step_ours.py @ --mode=$1" "step_timm.py @ --mode=$1"
}

ratio() { against_timm train; }

infer() { against_timm infer; }

published() {  # ViT-5-S: 8,003 images/s on an H100, compiled, by nvSubquadratic
  first_fit 120 ViT-5-S/16 256 "$python" step_ours.py @
}

choices() {  # attention implementations, remat policies, the largest batches
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.95
  local attention remat
  for attention in auto xla einsum; do
    first_fit 90 B/16 '1024 512 256' bash -c \
      "$python step_ours.py @ --attention=$attention"
  done
  for remat in none dots full; do
    first_fit 90 L/16 '256 128 64' bash -c \
      "$python step_ours.py @ --remat=$remat"
    first_fit 90 H/14 '128 64 32' bash -c \
      "$python step_ours.py @ --remat=$remat"
  done
}

for part in "${parts[@]}"; do
  case $part in
    ratio | infer | published | choices) "$part" | tee "$out/$part.txt" ;;
    *) echo "$part must be ratio, infer, published or choices" >&2; exit 2 ;;
  esac
done
