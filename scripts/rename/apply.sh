#!/bin/bash
# Apply all tables to a clean checkout that has .venv: scripts/rename/apply.sh ROOT. Commits nothing.
# Run it from a copy of this folder outside ROOT: the moves rewrite whatever names a module.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$1" && pwd)
out=$root/build/rename
python=$root/.venv/bin/python
mkdir -p "$out"
"$python" "$here/move.py" "$root" "$here"/tables/*/moves.tsv "$here/tables/controller/test_moves.tsv" \
    "$here/tables/gateway/tests_moves.tsv" "$here/tables/local/e2e_benchmarks_moves.tsv" \
    "$here/tables/local/tests_moves.tsv" --tests --report "$out/move.report" --applied "$out/moves.tsv"
"$python" "$here/oracle.py" "$root" "$out/names.pickle"
"$python" "$here/rename.py" "$root" "$here"/tables/*/renames.tsv "$here/tables/records.tsv" \
    --moves "$out/moves.tsv" --oracle "$out/names.pickle" --out "$out"
