#!/bin/sh
# Runs a silent command and says every half minute that it is still at work.
"$@" &
job=$!
(
  s=0
  while sleep 30 && kill -0 "$job" 2>/dev/null; do
    s=$((s + 30))
    echo "still installing (${s} s): compiling llama.cpp takes about 4 minutes on two cores" >&2
  done
) &
ticker=$!
trap 'kill "$job" "$ticker" 2>/dev/null' INT TERM
wait "$job"
rc=$?
kill "$ticker" 2>/dev/null
exit "$rc"
