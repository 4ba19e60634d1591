#!/usr/bin/env bash
# Runs what needs a GPU from a checkout that is not installed, and keeps output and JSON with date, GPU and versions.
#
#   tests/benchmarks/gpu.sh FOLDER PART...
#
# Parts: examples (6 minutes: max-autotune compiles resnet50 for four), cuda (the tests marked so, 6 minutes),
# sweep (rounding of models, 9 minutes at most), all (the whole suite, in parallel). Run nothing beside them.
set -u
cd "$(dirname "$0")/../.."
out=${1:?a folder for the results}
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The entry point of an installed package, so that inner runs of pytest find the plugin too.
info=$scratch/site/pytest_dynamo-0.1.0.dist-info
mkdir -p "$info" "$out"
printf 'Metadata-Version: 2.1\nName: pytest-dynamo\nVersion: 0.1.0\n' > "$info/METADATA"
printf '[pytest11]\ndynamo = pytest_dynamo.plugin\n' > "$info/entry_points.txt"
export PYTHONPATH=$PWD:$scratch/site PYTHONUNBUFFERED=1 COLUMNS=120

about() {
    date -u +'date: %Y-%m-%d %H:%M UTC'
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c "import torch, triton, torchvision, pytest; print('torch', torch.__version__, 'triton', triton.__version__, \
'torchvision', torchvision.__version__, 'pytest', pytest.__version__)"
}

run() {  # NAME, then what to give to pytest
    local file=$out/h200_$1.txt
    { about; echo "\$ python -m pytest ${*:2} --dynamo-json=h200_$1.json"; } > "$file"
    TORCHINDUCTOR_CACHE_DIR=$scratch/$1 python3 -m pytest "${@:2}" -p no:cacheprovider \
        --dynamo-json="$out/h200_$1.json" > "$scratch/log" 2>&1
    local status=$?
    # Without the paths of the machine.
    sed -e 's# -- /.*python3##' -e '/^rootdir:/d' -e '/^plugins:/d' -e 's#[^ ]*/site-packages/#.../#g' "$scratch/log" >> "$file"
    tail -25 "$file"
    return $status
}

status=0
for part in "$@"; do
    case $part in
        examples) run examples tests/examples -v ;;
        cuda) run cuda tests -m cuda -v ;;
        all) run all tests -n 9 -q -rf ;;
        sweep)
            TORCHINDUCTOR_CACHE_DIR=$scratch/sweep python3 tests/benchmarks/rounding_sweep.py --device cuda \
                --out "$out/h200_rounding" --seconds 500 > "$scratch/log" 2>&1
            tail -40 "$scratch/log" ;;
        *) echo "unknown part: $part" >&2; false ;;
    esac || status=1
done
exit $status
