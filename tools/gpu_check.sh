#!/usr/bin/env bash
# Builds echo with CUDA and runs one part of what needs a GPU. Results go to bench/results, or to $ECHO_RESULTS.
#   tests          the C++ tests of the CUDA backend, with $ECHO_OPERATIONS random calls (a million), then the Python tests
#                  marked gpu (arguments go to pytest), with generic kernels where ECHO_KERNELS=generic
#   sanitize       the C++ CUDA tests under the four tools of compute-sanitizer -> sanitize.json
#   demo           echo-kv demo with as long a text as its model takes -> demo.json, demo.png
#   doctor         echo-kv doctor
#   profile        echo-kv profile --synthetic (arguments go to it) -> profile.json, profile-trace.json, profile.png
#   bench-recall   bench/test_recall.py -> recall.json (arguments go to pytest: -k, --update-baseline)
#   bench-score    bench/test_score.py -> score.json, bench-attention -> attention.json, bench-select -> select.json,
#                  bench-layer -> layer.json, bench-indexer -> prefetch.json and prefetch.png, likewise
#   bench-NAME     bench/NAME.py -> NAME.json, for example bench-worker
# The machine needs nvcc, a GPU, a Python with torch, nanobind and scikit-build-core, and for the C++ tests GoogleTest.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PWD/build/gpu-site/bin:$PATH"
export ECHO_COMMAND="tools/gpu_check.sh $*"
export ECHO_CUDA=ON ECHO_RESULTS="${ECHO_RESULTS:-$PWD/bench/results}" PYTHONUNBUFFERED=1
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$ECHO_RESULTS"

build() {
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-compile --upgrade \
    --target build/gpu-site --config-settings=build-dir=build/gpu-wheel .
}

# The C++ tests, from the same objects; GTest_ROOT may say where GoogleTest is.
CPP_TESTS=build/gpu-wheel/echo_tests
build_cpp() {
  build
  cmake -S . -B build/gpu-wheel -DECHO_BUILD_TESTS=ON >/dev/null
  cmake --build build/gpu-wheel --target echo_tests
}

# What the benchmarks time, likewise.
build_bench() {
  build
  cmake -S . -B build/gpu-wheel -DECHO_BUILD_BENCH=ON >/dev/null
  cmake --build build/gpu-wheel --target echo_bench
  export ECHO_BENCH_LIBRARY="$PWD/build/gpu-wheel/libecho_bench.so"
}

sanitize() {
  build_cpp
  local rows=() tool status
  for tool in memcheck racecheck initcheck synccheck; do
    status=clean
    # Large pools and long rows only take longer under the tools; small shapes run the same code.
    # Some tests make CUDA calls fail on purpose: those are their business, not findings.
    timeout 150 compute-sanitizer --tool "$tool" --report-api-errors no --error-exitcode 99 "$CPP_TESTS" --gtest_brief=1 \
      --gtest_filter="${FILTER:-*Cuda*-*LongRows:*RowsFarApart*:*ALargePool*:*Cluster.BitsDoNot*}" \
      >"$ECHO_RESULTS/sanitize-$tool.log" 2>&1 || status="exit status $?"
    tail -n 4 "$ECHO_RESULTS/sanitize-$tool.log"
    rows+=("$tool=$status")
  done
  printf '%s\n' "${rows[@]}" | "$PYTHON" -c '
import json, sys
rows = (line.strip().split("=", 1) for line in sys.stdin)
print(json.dumps([{"case": {"tool": tool}, "status": status} for tool, status in rows]))' >build/sanitize.json
  "$PYTHON" bench/record.py sanitize build/sanitize.json
  [[ "${rows[*]}" != *exit* ]]
}

part="${1:-}"
shift || true
case "$part" in
  tests)
    build_cpp
    ECHO_OPERATIONS="${ECHO_OPERATIONS:-1000000}" "$CPP_TESTS" --gtest_brief=1 --gtest_filter="${FILTER:-*Cuda*}"
    "$PYTHON" -m pytest -q -m gpu "$@"
    ;;
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
  bench-recall | bench-score | bench-attention | bench-select | bench-layer | bench-indexer)
    build_bench
    "$PYTHON" -m pytest -p no:cacheprovider --benchmark-only --benchmark-columns=min,median,max \
      "bench/test_${part#bench-}.py" "$@"
    ;;
  bench-*)
    build
    "$PYTHON" "bench/${part#bench-}.py" "$@"
    ;;
  *)
    sed -n '2,13p' "$0"
    exit 2
    ;;
esac
