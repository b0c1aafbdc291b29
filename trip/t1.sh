export PYTHONPATH=. XLA_PYTHON_CLIENT_MEM_FRACTION=.9 PYTHONUNBUFFERED=1
nproc; nvidia-smi --query-gpu=name,memory.total --format=csv | tail -1
export XLA_FLAGS="--xla_dump_to=/tmp/dump --xla_dump_hlo_module_re=.*step_.*_0_greedy.* --xla_dump_hlo_as_text"
t0=$(date +%s)
timeout 190 python3 benchmarks/decode.py --shape qwen3.5-0.8b --rows 1 64 --drafts 3 0 --draft-vocab 32768 --state-policy replay --profile --repeats 2 --compilation-cache /tmp/c --json $OUT/d08.json 2>$OUT/d08.err | cut -c1-1500
tail -5 $OUT/d08.err; echo took $(( $(date +%s) - t0 ))
t0=$(date +%s)
timeout 250 python3 benchmarks/decode.py --shape qwen3.5-9b --rows 64 1 --drafts 3 0 --draft-vocab 32768 --state-policy replay --profile --repeats 2 --copy-tb-per-s 4.24 --compilation-cache /tmp/c --json $OUT/d9.json 2>$OUT/d9.err | cut -c1-1500
tail -5 $OUT/d9.err; echo took $(( $(date +%s) - t0 ))
cd /tmp/dump; tar czf $OUT/hlo.tgz *gpu_after_optimizations.txt; cd - >/dev/null
unset XLA_FLAGS
timeout 100 python3 -m pytest -q -m gpu -p no:cacheprovider -x tests/pallas/test_gdn_qkv.py tests/pallas/test_conv_update.py 2>&1 | tail -5
