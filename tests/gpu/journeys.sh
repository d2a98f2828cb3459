# The memory journey and the ways to sync, on one GPU: `bash tests/gpu/journeys.sh FOLDER [VARIANT ... | sync]`.
# Without more words, everything: each variant takes two minutes, the ways to sync three. What has ended is not run again.
set -u
folder=${1:?name a folder for the Recordings and tables}
shift
mkdir -p "$folder"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee "$folder/gpu.txt"
configuration=examples/memory_journey/gpu.yaml
for name in "${@:-v0_naive v1_relaunch v2_sleep v3_staged v4_torch_memory_saver sync}"; do
  for one in $name; do
    if [ "$one" = sync ]; then
      sed 's/^  gpu_memory_utilization: .*/  gpu_memory_utilization: 0.3/' "$configuration" > "$folder/sync.yaml"
      timeout 280 python3 -m rltrace_reference.compare_sync "$folder/sync.yaml" --rounds 6 --force > "$folder/sync.txt" 2> "$folder/sync.err"
      tail -n 20 "$folder/sync.err"
      cat "$folder/sync.txt"
    else
      if [ "$one" = v4_torch_memory_saver ]; then  # SGLang's kernels, all at once, while the run starts
        [ -d /usr/local/cuda ] && export CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}"  # else it is where nvcc is found
        python3 tests/gpu/sglang_kernels.py > "$folder/sglang_kernels.txt" 2>&1 &
      fi
      python3 -m rltrace_reference.journey "$configuration" --out "$folder/journey" --only "$one" --force > "$folder/journey.txt" 2>> "$folder/journey.err"
      tail -n 1 "$folder/journey.err"
      wait; cat "$folder"/sglang_kernels.txt 2> /dev/null
      tar cJf "$folder/recordings.tar.xz" -C "$folder" journey
    fi
  done
done
cat "$folder/journey.txt"
