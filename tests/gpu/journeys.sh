# The memory journey and the ways to sync, on one GPU: `bash tests/gpu/journeys.sh FOLDER`, some six minutes.
# What has ended is not run again: start it with the same folder to go on.
set -u
folder=${1:?name a folder for the Recordings, tables and pictures}
mkdir -p "$folder"
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader | tee "$folder/gpu.txt"
configuration=examples/memory_journey/gpu.yaml
python3 -m rltrace_reference.journey "$configuration" --out "$folder/journey" --force > "$folder/journey.txt" 2> "$folder/journey.err"
tail -n 5 "$folder/journey.err"
cat "$folder/journey.txt"
sed 's/^  gpu_memory_utilization: .*/  gpu_memory_utilization: 0.3/' "$configuration" > "$folder/sync.yaml"
timeout 240 python3 -m rltrace_reference.compare_sync "$folder/sync.yaml" --rounds 6 --force > "$folder/sync.txt" 2> "$folder/sync.err"
tail -n 20 "$folder/sync.err"
cat "$folder/sync.txt"
python3 -m rltrace_reference.journey "$configuration" --out "$folder/journey" --json > "$folder/journey.json" 2>> "$folder/journey.err"
for name in v0_naive v1_relaunch v2_sleep v3_staged; do
  python3 -m rltrace summary --all "$folder/journey/$name" > "$folder/$name.txt" 2>&1
done
tar cJf "$folder/recordings.tar.xz" -C "$folder" journey
