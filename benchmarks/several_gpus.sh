#!/usr/bin/env bash
# Measures jaxspec on 2, 4 or 8 GPUs of one machine: docs/tensor-parallel.md has the order and the time.
# Run it in the root of the repository.
#
#   bash benchmarks/several_gpus.sh GPUS FOLDER PART ...
#
# FOLDER gets a JSON file per part; those of benchmarks/results/ are copied there first, and the A/B
# adds rounds to them. A part that fails does not stop the next one; the exit status is then 1.
set -u
gpus=$1 folder=$2
shift 2
case $gpus in
2) word=two group=2 ;;
4) word=four group=4 ;;
8) word=eight group=4 ;;
*) echo "GPUS must be 2, 4 or 8, got $gpus." >&2 && exit 2 ;;
esac
python=${PYTHON:-python3} cache=${CACHE:-/tmp/jaxspec-programs}
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}
mkdir -p "$folder" "$cache"
cp -n benchmarks/results/several_gpus_*.json "$folder" 2>/dev/null

module() { "$python" -m "benchmarks.$1" --json "$folder/several_gpus_$2.json" "${@:3}"; }

decode() { # FILE SHAPE option ...
  module engine.decode "$1" --shape "$2" --one-engine --repeats 2 --compilation-cache "$cache" "${@:3}"
}

ab() { # FILE option ...
  module engine.ab "$1" --shape "${SHAPE:-qwen3.5-27b}" --tensor-parallel-size $group --tokens 512 \
    --rows 256 --seconds "${AB_SECONDS:-420}" --compilation-cache "$cache" "${@:2}"
}

all() { # waits for the processes of a part; 1 if one failed
  local status=0 pid
  for pid in $(jobs -p); do wait "$pid" || status=1; done
  return $status
}

part() {
  case $1 in
  tokens) # in float32, as one GPU has them
    module acceptance tokens --parts "exact on $word devices" --processes 1 --seconds 400 \
      --only qwen3.5-9b qwen3.5-27b nemotron-3-nano-30b-a3b qwen3.5-35b-a3b
    ;;
  one) # the baselines, a GPU each
    local gpu=0 status=0 shape drafts
    for shape in qwen3.5-27b qwen3.5-35b-a3b; do
      for drafts in 0 3; do
        CUDA_VISIBLE_DEVICES=$gpu decode "one_${shape}_$drafts" "$shape" --rows 1 8 64 --drafts $drafts &
        gpu=$(((gpu + 1) % gpus))
        [ $gpu != 0 ] || all || status=1
      done
    done
    return $status
    ;;
  27b) decode group qwen3.5-27b --tensor-parallel-size "$gpus" --rows 1 8 64 --drafts 0 3 ;;
  35b) decode group qwen3.5-35b-a3b --tensor-parallel-size "$gpus" --rows 1 8 64 --drafts 0 3 ;;
  122b) decode group qwen3.5-122b-a10b --tensor-parallel-size "$gpus" --rows 1 8 64 --drafts 0 3 ;;
  122b-long) # the lengths of SGLang's published rows
    decode group qwen3.5-122b-a10b --tensor-parallel-size "$gpus" --rows 1 16 --drafts 3 \
      --prompt 8192 --tokens 1024
    ;;
  replicas)
    local count
    for count in 1 "$gpus"; do
      module engine.replicas replicas --replicas "$count" --times 1 --repeats 2 \
        --compilation-cache "$cache" || return
    done
    ;;
  ab) # 40 rounds in all calls together; with eight GPUs by two groups of four
    if [ "$gpus" = "$group" ]; then ab "ab_tp$group" --dtype bfloat16; return; fi
    CUDA_VISIBLE_DEVICES=0,1,2,3 ab ab_tp4_0 --dtype bfloat16 --share 0 2 &
    CUDA_VISIBLE_DEVICES=4,5,6,7 ab ab_tp4_1 --dtype bfloat16 --share 1 2 &
    all
    ;;
  ab-float32) ab "ab_float32_tp$group" --dtype float32 --rounds 3 --no-greedy ;;
  *) echo "There is no part $1." >&2 && return 2 ;;
  esac
}

failed=
for name in "$@"; do
  start=$SECONDS
  if part "$name"; then how=done; else how=failed failed="$failed $name"; fi
  echo "== $name: $how after $((SECONDS - start)) s"
done
[ -z "$failed" ] || { echo "Failed:$failed" >&2 && exit 1; }
