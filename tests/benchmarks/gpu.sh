#!/usr/bin/env bash
# Runs what needs a GPU from a checkout that is not installed, and keeps output and JSON with date, GPU and versions.
#
#   [SECONDS_EACH=540] tests/benchmarks/gpu.sh FOLDER PART...
#
# Parts, all started at once, each ended with a report after SECONDS_EACH: examples, cuda (the tests marked so), graphs
# (of those all but the long ones), sweep (rounding of models), cpu (the rest of the suite), and, each alone, since times
# are the result: timing (the tests of it), accuracy (beside other timers), speed (A/A and planted slow-downs) and
# speed_cost (what a benchmark costs). Other timings have scripts of their own and need a quiet machine too.
set -u
cd "$(dirname "$0")/../.."
out=${1:?a folder for the results}
shift
seconds=${SECONDS_EACH:-540}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The entry point of an installed package, so that inner runs of pytest find the plugin too.
info=$scratch/site/pytest_dynamo-0.1.0.dist-info
mkdir -p "$info" "$out"
printf 'Metadata-Version: 2.1\nName: pytest-dynamo\nVersion: 0.1.0\n' > "$info/METADATA"
printf '[pytest11]\ndynamo = pytest_dynamo.plugin\n' > "$info/entry_points.txt"
export PYTHONPATH=$PWD:$scratch/site PYTHONUNBUFFERED=1 COLUMNS=120

timed=(tests/test_timing.py tests/test_profiling.py tests/test_machine.py tests/test_cuda_benchmark.py)

about() {
    date -u +'date: %Y-%m-%d %H:%M UTC'
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
    python3 -c "import torch, triton, torchvision, pytest; print('torch', torch.__version__, 'triton', triton.__version__, \
'torchvision', torchvision.__version__, 'pytest', pytest.__version__)"
}

# Paths of the machine are left out of what is kept.
plain=(-E -e 's#(Python [0-9.]+) /[^ ]*python3#\1#' -e "s#$PWD/##g" -e 's#[^ "]*/site-packages/#.../#g' -e 's#/tmp/pytest-of-[^/]*/pytest-[0-9]+/(popen-gw[0-9]+/)?#.../#g')

run() {  # NAME, then what to give to pytest
    local file=$out/h200_$1.txt
    { about; echo "\$ python -m pytest ${*:2} --dynamo-json=h200_$1.json"; } > "$file"
    # The stack of a test that takes minutes says what it waits for.
    TORCHINDUCTOR_CACHE_DIR=$scratch/$1 timeout -s INT -k 40 "$seconds" python3 -m pytest "${@:2}" -p no:cacheprovider \
        --durations=12 --dynamo-json="$out/h200_$1.json" -o faulthandler_timeout=100 2> "$out/h200_$1.err" |
        sed -u "${plain[@]}" -e 's# -- /.*python3##' -e '/^rootdir:/d' -e '/^plugins:/d' >> "$file"
    local ended=${PIPESTATUS[0]}
    sed -i "${plain[@]}" "$out/h200_$1.json"
    return "$ended"
}

sweep() {  # each row that is not in the results in a process of its own, many at once
    local known=tests/benchmarks/results/h200_rounding.json sweep=(python3 tests/benchmarks/rounding_sweep.py)
    sweep+=(--device "${SWEEP_DEVICE:-cuda}")
    mkdir "$scratch/rows"
    "${sweep[@]}" --rows-of $known --missing > "$scratch/missing"
    # One thread compiles in each: there are as many processes as cores.
    TORCHINDUCTOR_COMPILE_THREADS=1 OMP_NUM_THREADS=1 TORCHINDUCTOR_CACHE_DIR=$scratch/sweep timeout "$seconds" \
        xargs -P "$(nproc)" -L 1 bash -c '"${@:2:4}" --models "$6" --dtypes "$7" --phases "$8" --out "$1/$6.$7.$8" \
        > "$1/$6.$7.$8.log" 2>&1' sweep "$scratch/rows" "${sweep[@]}" < "$scratch/missing"
    shopt -s nullglob
    "${sweep[@]}" --out "$out/h200_rounding" --seconds 0 --rows-of $known "$scratch"/rows/*.json > "$out/h200_sweep.txt"
    echo "$(ls "$scratch"/rows/*.json | wc -l) of $(wc -l < "$scratch/missing") rows"
}

study() {
    python3 tests/benchmarks/speed_study.py run --out "$out/h200_speed.json" --seconds $((seconds - 60)) \
        2> "$out/h200_speed.err" || return 1
    PYTHONPATH=$PYTHONPATH:$PWD/tests/benchmarks python3 tests/benchmarks/speed_study.py show \
        "$out/h200_speed.json" > "$out/h200_speed.txt"
}

part() {
    case $1 in
        examples) run examples tests/examples -v -n 5 ;;
        cuda) run cuda tests "${timed[@]/#/--ignore=}" -m cuda -v -n 6 ;;
        graphs) run graphs tests "${timed[@]/#/--ignore=}" -m cuda -v -n 6 -k "not resnet50" ;;
        cpu) run cpu tests -m "not cuda" --ignore=tests/examples -n 10 -q -rf ;;
        sweep) sweep ;;
        timing) run timing "${timed[@]}" -m cuda -v -n 0 ;;
        accuracy)
            PYTHONPATH=$PYTHONPATH:$PWD/tests/benchmarks python3 tests/benchmarks/accuracy.py --out "$out/h200_accuracy" > /dev/null ;;
        speed_cost)
            TORCHINDUCTOR_CACHE_DIR=$scratch/cost python3 tests/benchmarks/benchmark_cost.py --out "$out" \
                > "$out/h200_speed_cost.txt" 2>&1 ;;
        speed) study ;;
        *) echo "unknown part: $1" >&2; return 2 ;;
    esac
}

declare -A started
status=0
for name in "$@"; do
    part "$name" &
    started[$name]=$!
done
for name in "$@"; do
    wait "${started[$name]}"
    ended=$?
    [ $ended = 0 ] || { status=1; echo "$name: exit status $ended"; }
    tail -n 22 "$out/h200_$name.txt" | cut -c1-160
done
exit $status
