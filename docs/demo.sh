#!/bin/sh
# The main job on the trained checkpoints of this repository; `make demo` runs it.
set -eu
OUT=${OUT:-out}
rm -rf "$OUT"
exec 3>&1

# Shows a command as it can be pasted, wherever its own output goes, and runs it.
say() {
    line=
    for word; do
        case $word in *[!A-Za-z0-9_./,:=-]*) word="\"$word\"" ;; esac
        line="$line $word"
    done
    printf '\n$%s\n' "$line" >&3
    "$@"
}

imports=
for name in kjv-qkv kjv-q-kv kjv-q-mqa; do
    say edgeqkv import "checkpoints/$name.pt" -o "$OUT/models/$name" --tokenizer checkpoints/tokenizer.json &
    imports="$imports $!"
done
for job in $imports; do wait "$job"; done
say edgeqkv inspect "$OUT/models/kjv-q-mqa"

# One cache tensor per layer on all three backends; then what everyone else has, for comparison:
# two tensors per layer from the same Q-K=V weights, and the ordinary QKV model. Two at a time, and
# verified together below.
models=$OUT/models
(
    say edgeqkv export "$models/kjv-q-mqa" -b onnx,executorch,coreml --no-verify -o "$OUT/q-mqa"
    say edgeqkv export "$models/kjv-qkv" -b onnx --no-verify -o "$OUT/qkv"
) &
lane=$!
say edgeqkv export "$models/kjv-q-kv" -b onnx,executorch --no-verify -o "$OUT/q-kv"
say edgeqkv export "$models/kjv-q-kv" -b onnx,executorch --no-verify -o "$OUT/q-kv-separate" --cache-layout separate
wait "$lane"

bundles="$OUT/q-mqa/onnx $OUT/q-mqa/executorch $OUT/q-mqa/coreml $OUT/q-kv/onnx $OUT/q-kv/executorch
$OUT/q-kv-separate/onnx $OUT/q-kv-separate/executorch $OUT/qkv/onnx"
# shellcheck disable=SC2086  # a list of words on purpose
{
    say edgeqkv verify $bundles
    say edgeqkv generate "$OUT/q-mqa/onnx" --prompt "In the beginning" -n 40
    say edgeqkv bench $bundles -p 0 -n 0 -pg 128,32 -d 512 -r 3 --processes 3 -t 1 -o "$OUT/results.jsonl" >/dev/null
}
say edgeqkv compare "$OUT/results.jsonl"
