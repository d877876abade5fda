#!/usr/bin/env bash
# Builds echo with CUDA and runs one part of what needs a GPU. Results go to bench/results, or to $ECHO_RESULTS.
#   all            everything below that checks or measures, as far as it can be at the same time: tools/gpu_all.py
#                  (arguments: --only PARTS, --skip PARTS, --limit SECONDS, --update-baseline) -> check.json
#   build          the package, the C++ tests and what the benchmarks time; every part does, unless ECHO_BUILT is set
#   tests          cpp-tests, then py-tests, then py-tests-alone
#   cpp-tests      the C++ tests of the CUDA backend, with $ECHO_OPERATIONS random calls (a million)
#   py-tests       the Python tests marked gpu that others may run beside, by ten processes where pytest-xdist is there
#                  ($ECHO_WORKERS; arguments go to pytest), with generic kernels where ECHO_KERNELS=generic
#   py-tests-alone those that count memory or time of the whole GPU
#   sanitize       the C++ CUDA tests under the four tools of compute-sanitizer, side by side -> sanitize.json
#   demo           echo-kv demo with as long a text as its model takes -> demo.json, demo.png
#   doctor         echo-kv doctor
#   profile        echo-kv profile --synthetic (arguments go to it) -> profile.json, profile-trace.json, profile.png
#   bench-recall   bench/test_recall.py -> recall.json (arguments go to pytest: -k, --update-baseline)
#   bench-score    bench/test_score.py -> score.json, bench-attention -> attention.json, bench-select -> select.json,
#                  bench-layer -> layer.json, bench-steady -> steady.json, bench-indexer -> prefetch.json, prefetch.png
#   bench-NAME     bench/NAME.py -> NAME.json, for example bench-worker
# The machine needs nvcc, a GPU, a Python with torch, nanobind and scikit-build-core, and for the C++ tests GoogleTest.
# With ECHO_BUILT=1 nothing is built: ECHO_SITE (the installed package), ECHO_CPP_TESTS and ECHO_BENCH_LIBRARY may say
# where things are.
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

cpp_tests() {
  build tests
  ECHO_OPERATIONS="${ECHO_OPERATIONS:-1000000}" "$CPP_TESTS" --gtest_brief=1 --gtest_filter="${FILTER:-*Cuda*}"
}

# py_tests MARK ARGUMENTS... Names every test as it ends: those that failed are known even if the time runs out.
py_tests() {
  build
  local mark="$1"
  shift
  "$PYTHON" -m pytest -v --tb=short -p no:cacheprovider -m "$mark" "$@"
}

# Several processes where pytest can do that.
workers() {
  if "$PYTHON" -c 'import xdist' 2>/dev/null; then
    echo "-n ${ECHO_WORKERS:-10}"
  fi
}

# TOOL: what compute-sanitizer says goes to a log, how it ended is its last line. Large pools and long rows only take
# longer under the tools; small shapes run the same code. Some tests make CUDA calls fail on purpose: those are their
# business, not findings.
sanitize_with() {
  local status=clean
  timeout -k 5 "${ECHO_SANITIZE_SECONDS:-150}" compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 99 \
    "$CPP_TESTS" --gtest_brief=1 \
    --gtest_filter="${FILTER:-*Cuda*-*LongRows:*RowsFarApart*:*ALargePool*:*Cluster.BitsDoNot*}" || status="exit status $?"
  echo "$status"
}

sanitize() {
  build tests
  local tool tools=(memcheck racecheck initcheck synccheck)
  for tool in "${tools[@]}"; do
    sanitize_with "$tool" >"$ECHO_RESULTS/sanitize-$tool.log" 2>&1 &
  done
  wait
  for tool in "${tools[@]}"; do
    echo "$tool:"
    tail -n 4 "$ECHO_RESULTS/sanitize-$tool.log"
  done
  "$PYTHON" - "$ECHO_RESULTS" "${tools[@]}" >build/sanitize.json <<'END'
import json, pathlib, sys
folder, *tools = sys.argv[1:]
last = {tool: pathlib.Path(folder, f"sanitize-{tool}.log").read_text(errors="replace").split("\n")[-2] for tool in tools}
print(json.dumps([{"case": {"tool": tool}, "status": status} for tool, status in last.items()]))
END
  "$PYTHON" bench/record.py sanitize build/sanitize.json
  ! grep -q exit build/sanitize.json
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
    cpp_tests
    ECHO_BUILT=1
    # shellcheck disable=SC2046
    py_tests "gpu and not alone" $(workers) "$@"
    py_tests "gpu and alone" "$@"
    ;;
  cpp-tests) cpp_tests ;;
  # shellcheck disable=SC2046
  py-tests) py_tests "gpu and not alone" $(workers) "$@" ;;
  py-tests-alone) py_tests "gpu and alone" "$@" ;;
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
  bench-*)
    build
    "$PYTHON" "bench/${part#bench-}.py" "$@"
    ;;
  *)
    sed -n '2,/^set/{/^#/p}' "$0"
    exit 2
    ;;
esac
