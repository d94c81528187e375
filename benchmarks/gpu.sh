#!/usr/bin/env bash
# Run all GPU benchmarks of docs/benchmark.md, in about 25 minutes:
#
#   benchmarks/gpu.sh FOLDER [ratio|infer|choices|alone ...]
#
# Each part writes FOLDER/PART_*.csv and .json after every case, so that an
# interruption keeps the finished cases. Without names of parts, all of them
# run, in this order. It needs jax, flax and optax, and torch and timm for the
# ratios, but no network and no packages for data. PYTHON=... names another
# interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?name the folder for results}
parts=("${@:2}")
((${#parts[@]})) || parts=(ratio infer choices alone)
python=${PYTHON:-python3}
mkdir -p "$out"
"$python" -c 'import flax, jax, optax
print(jax.__version__, jax.devices())' | tee "$out/versions.txt" || exit 1
nvidia-smi | tee "$out/machine.txt"

# bench SECONDS NAME ARGUMENTS: try the batch sizes from the left until one fits.
# A case that takes longer is stopped, so that the others can run.
bench() {
  echo "== $2: ${*:3}"
  timeout --kill-after=20 "$1" "$python" -m vit_jax.tools.benchmark \
    --precision=bfloat16 --first_fit --steps=30 --rounds=6 --warmup=5 \
    --csv="$out/$2.csv" --json="$out/$2.json" "${@:3}" ||
    echo "$2 ended with status $?; finished cases are in $out/$2.csv"
}

ratio() {  # training against timm: torch.compile, autocast, SDPA, fused AdamW
  bench 170 ratio_b16 --models=B/16 --batch_sizes=256,128,64 --peer=timm
  bench 170 ratio_l16 --models=L/16 --batch_sizes=128,64,32 --peer=timm
  bench 200 ratio_h14 --models=H/14 --batch_sizes=64,32,16 --peer=timm
}

infer() {
  bench 180 infer --mode=infer --models=B/16,L/16,H/14 \
    --batch_sizes=256,128,64 --peer=timm
}

choices() {  # attention implementations and remat policies, without a peer
  bench 150 choices_b16 --models=B/16 --batch_sizes=256,128,64 \
    --attention=auto,xla,einsum
  bench 150 choices_l16 --models=L/16 --batch_sizes=128,64,32 \
    --attention=auto,xla --remat=none,dots
  bench 120 choices_h14 --models=H/14 --batch_sizes=128,64,32 \
    --remat=dots,full
}

alone() {  # the largest batch, with the whole memory of the device
  export XLA_PYTHON_CLIENT_MEM_FRACTION=.95
  bench 100 alone_b16 --models=B/16 --batch_sizes=1024,512,256
  bench 120 alone_l16 --models=L/16 --batch_sizes=256,128,64
  bench 140 alone_h14 --models=H/14 --batch_sizes=128,64,32
  unset XLA_PYTHON_CLIENT_MEM_FRACTION
}

for part in "${parts[@]}"; do
  case $part in
    ratio | infer | choices | alone) "$part" ;;
    *) echo "$part must be ratio, infer, choices or alone" >&2; exit 2 ;;
  esac
done
