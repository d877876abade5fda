#!/usr/bin/env bash
# Builds echo with CUDA and runs one part of what needs a GPU. Results go to bench/results, or to $ECHO_RESULTS.
#   all            everything below that checks or measures, as far as it can be at the same time: tools/gpu_all.py
#                  (arguments: --only PARTS, --skip PARTS, --limit SECONDS, --update-baseline) -> check.json
#   build          the package, the C++ tests and what the benchmarks time; every part does, unless ECHO_BUILT is set
#   tests          cpp-tests, then py-tests, then py-tests-alone
#   cpp-tests      the C++ tests of the CUDA backend, with $ECHO_OPERATIONS random calls (a million), by eight processes
#   py-tests       the Python tests marked gpu that others may run beside, by twelve processes where pytest-xdist is
#                  there (arguments go to pytest), with generic kernels where ECHO_KERNELS=generic
#   py-tests-alone those that count memory or time of the whole GPU
#   sanitize       most C++ CUDA tests under the four tools of compute-sanitizer, side by side -> sanitize.json; two
#                  minutes ($FILTER chooses others)
#   demo           echo-kv demo with as long a text as its model takes -> demo.json, demo.png
#   doctor         echo-kv doctor
#   profile        echo-kv profile --synthetic (arguments go to it) -> profile.json, profile-trace.json, profile.png
#   bench-recall   bench/test_recall.py -> recall.json (arguments go to pytest: -k, --update-baseline)
#   bench-score    bench/test_score.py -> score.json, bench-attention -> attention.json, bench-select -> select.json,
#                  bench-layer -> layer.json, bench-steady -> steady.json, bench-indexer -> prefetch.json, prefetch.png
#   bench-recall_stalls  bench/recall_stalls.py -> recall_stalls.json, with Nsight Compute (arguments: --only NUMBERS of
#                  cases, beside which the others stay as they are)
#   bench-NAME     bench/NAME.py -> NAME.json, for example bench-worker
# The machine needs nvcc, a GPU, a Python with torch, nanobind and scikit-build-core, and for the C++ tests GoogleTest.
# With ECHO_BUILT=1 nothing is built: ECHO_SITE (the installed package), ECHO_CPP_TESTS and ECHO_BENCH_LIBRARY may say
# where things are. ECHO_WORKERS is the number of processes; several share the GPU through CUDA's MPS where it is there.
# Then a fault in a kernel ends all of them: ECHO_WORKERS=1 says whose it was.
set -euo pipefail
cd "$(dirname "$0")/.."
SITE="${ECHO_SITE:-$PWD/build/gpu-site}"
export PYTHONPATH="$SITE${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$SITE/bin:$PATH"
export ECHO_COMMAND="${FILTER:+FILTER='$FILTER' }tools/gpu_check.sh $*"
export ECHO_CUDA=ON ECHO_RESULTS="${ECHO_RESULTS:-$PWD/bench/results}" PYTHONUNBUFFERED=1
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$ECHO_RESULTS" build

# GTest_ROOT may say where GoogleTest is.
CPP_TESTS="${ECHO_CPP_TESTS:-build/gpu-wheel/echo_tests}"
export ECHO_BENCH_LIBRARY="${ECHO_BENCH_LIBRARY:-$PWD/build/gpu-wheel/libecho_bench.so}"

# The package; then, from the same objects, the targets that are named.
build() {
  [[ -z "${ECHO_BUILT:-}" ]] || return 0
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-compile --upgrade \
    --target build/gpu-site --config-settings=build-dir=build/gpu-wheel .
  local target
  for target in "$@"; do
    cmake -S . -B build/gpu-wheel "-DECHO_BUILD_${target^^}=ON" >/dev/null
    cmake --build build/gpu-wheel --target "echo_$target"
  done
}

# PROCESSES: that many will use the GPU until this script ends. Without MPS they would take turns on it.
share_gpu() {
  if [[ "$1" -gt 1 && -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]] && command -v nvidia-cuda-mps-control >/dev/null; then
    MPS="$(mktemp -d)"
    export CUDA_MPS_PIPE_DIRECTORY="$MPS" CUDA_MPS_LOG_DIRECTORY="$MPS"
    trap 'echo quit | nvidia-cuda-mps-control >/dev/null 2>&1; rm -rf "$MPS"' EXIT
    nvidia-cuda-mps-control -d >/dev/null 2>&1 || unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
}

# Each process has some of the tests; lines begin with its number.
cpp_tests() {
  build tests
  local shards="${ECHO_WORKERS:-8}" shard status=0 running=()
  share_gpu "$shards"
  for ((shard = 0; shard < shards; shard++)); do
    GTEST_TOTAL_SHARDS="$shards" GTEST_SHARD_INDEX="$shard" ECHO_OPERATIONS="${ECHO_OPERATIONS:-1000000}" \
      "$CPP_TESTS" --gtest_brief=1 --gtest_filter="${FILTER:-*Cuda*}" 2>&1 | sed -u "s/^/$shard: /" &
    running+=($!)
  done
  for shard in "${running[@]}"; do
    wait "$shard" || status=1
  done
  return "$status"
}

# py_tests MARK WORKERS ARGUMENTS... Names every test as it ends: those that failed are known even if the time runs out.
py_tests() {
  build
  local mark="$1" workers=()
  if [[ "$2" -gt 1 ]] && "$PYTHON" -c 'import xdist' 2>/dev/null; then
    workers=(-n "$2" --dist worksteal)
    share_gpu "$2"
  fi
  shift 2
  "$PYTHON" -m pytest -v --tb=short -p no:cacheprovider -m "$mark" "${workers[@]}" "$@"
}

# Under the tools these only take longer: large pools, long rows, many rounds. Small ones run the same code.
SLOW='LargePools*:*ALargePool*:*RowsFarApart*:*LongRows*:*OneVeryLong*:*RandomPasses*:*RandomSteps*:*ForALongTime*'
SLOW+=':*RowsThatMany*:*RowsOfASession:*StepAfterStep*:*SelectsLikeTheCpu:*TheSameBits*:*BitsDepend*:*BitsDoNot*'
SLOW+=':*BesideOtherWork*:*ScoresKeepTheirBits*:*WhateverIsPredicted*:*IntoARoomyPool*:*OfSharedPrefixes*:*ForSpeculation*'
SLOW+=':*DoesWhatTheCpuDoes*'
# racecheck loses the order of a block once a part of its threads has met at a barrier of their own (docs/tools.md,
# "Checking on a GPU"), so it is of no use for select, what finds forecasts, and score and attention for Hopper.
RACES='CudaAppend.*:CudaBackendTest.*:CudaRecall.*:CudaScore.*:Pools/Cuda*:TooSmall/*-*AReplayedGraph*'

# TOOL: what compute-sanitizer says goes to a log, which names every test as it ends; its last line says how it went.
# Some tests make CUDA calls fail on purpose: those are their business, not findings.
sanitize_with() {
  local log="$ECHO_RESULTS/sanitize-$1.log" filter="*Cuda*-$SLOW" status=0
  [[ "$1" != racecheck ]] || filter="$RACES:$SLOW"
  ECHO_OPERATIONS="${ECHO_OPERATIONS:-420}" timeout -k 5 "${ECHO_SANITIZE_SECONDS:-120}" \
    compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 99 \
    "$CPP_TESTS" --gtest_filter="${FILTER:-$filter}" >"$log" 2>&1 || status=$?
  case "$status" in
    0) status=clean ;;
    124 | 137) status="out of time" ;;
    *) status="exit status $status" ;;
  esac
  echo "$status, $(grep -c '^\[       OK' "$log") tests passed; $(grep -o '[A-Z]* SUMMARY: .*' "$log" | tail -n 1)" >>"$log"
}

sanitize() {
  build tests
  local tool tools=(memcheck racecheck initcheck synccheck)
  for tool in "${tools[@]}"; do
    sanitize_with "$tool" &
  done
  wait
  for tool in "${tools[@]}"; do
    echo "$tool: $(tail -n 1 "$ECHO_RESULTS/sanitize-$tool.log")"
    grep -m 5 -E '^\[  FAILED|^========= (.*Error:|Invalid|Uninit|Barrier)' "$ECHO_RESULTS/sanitize-$tool.log" || true
  done
  "$PYTHON" - "$ECHO_RESULTS" "${tools[@]}" >build/sanitize.json <<'END'
import json, pathlib, sys
folder, *tools = sys.argv[1:]
logs = {tool: pathlib.Path(folder, f"sanitize-{tool}.log").read_text(errors="replace") for tool in tools}
print(json.dumps([{"case": {"tool": tool}, "status": log.splitlines()[-1]} for tool, log in logs.items()]))
END
  "$PYTHON" bench/record.py sanitize build/sanitize.json
  [[ "$(grep -o '"status": "clean' build/sanitize.json | wc -l)" -eq "${#tools[@]}" ]]
}

part="${1:-}"
shift || true
case "$part" in
  all) "$PYTHON" tools/gpu_all.py "$@" ;;
  build)
    unset ECHO_BUILT
    build tests bench
    ;;
  tests)
    tools/gpu_check.sh cpp-tests
    export ECHO_BUILT=1
    tools/gpu_check.sh py-tests "$@"
    tools/gpu_check.sh py-tests-alone "$@"
    ;;
  cpp-tests) cpp_tests ;;
  py-tests) py_tests "gpu and not alone" "${ECHO_WORKERS:-12}" "$@" ;;
  py-tests-alone) py_tests "gpu and alone" 1 "$@" ;;
  sanitize) sanitize ;;
  demo)
    build
    "$PYTHON" -m echo.cli demo --json build/demo.json --plot "$ECHO_RESULTS/demo.png" "$@"
    "$PYTHON" bench/record.py demo build/demo.json
    ;;
  doctor)
    build
    "$PYTHON" -m echo.cli doctor
    ;;
  profile)
    build
    "$PYTHON" -m echo.cli profile --synthetic --json build/profile.json --trace "$ECHO_RESULTS/profile-trace.json" \
      --plot "$ECHO_RESULTS/profile.png" "$@"
    "$PYTHON" bench/record.py profile build/profile.json
    ;;
  bench-recall | bench-score | bench-attention | bench-select | bench-layer | bench-steady | bench-indexer)
    build bench
    "$PYTHON" -m pytest -p no:cacheprovider --benchmark-only --benchmark-columns=min,median,max \
      "bench/test_${part#bench-}.py" "$@"
    ;;
  bench-recall_stalls)
    build bench
    "$PYTHON" bench/recall_stalls.py "$@"
    ;;
  bench-*)
    build
    "$PYTHON" "bench/${part#bench-}.py" "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/p}' tools/gpu_check.sh
    exit 2
    ;;
esac
