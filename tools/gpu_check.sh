#!/usr/bin/env bash
# Builds echo with CUDA and runs one part of what needs a GPU. Results go to bench/results, or to $ECHO_RESULTS.
#   tests          the tests that need a GPU (Python and, where GoogleTest is found, C++); ARGS goes to pytest
#   sanitize       the C++ CUDA tests under the four tools of compute-sanitizer -> sanitize.json
#   demo           echo-kv demo with a text of 32K tokens -> demo.json, demo.png
#   doctor         echo-kv doctor
#   bench-NAME     bench/NAME.py -> NAME.json, for example bench-worker
# The machine needs nvcc, a GPU, and a Python with torch, nanobind and scikit-build-core.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/build/gpu-site${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$PWD/build/gpu-site/bin:$PATH"
export ECHO_CUDA=ON ECHO_RESULTS="${ECHO_RESULTS:-$PWD/bench/results}" PYTHONUNBUFFERED=1
export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
PYTHON="${PYTHON:-python3}"
mkdir -p "$ECHO_RESULTS"

build() {
  "$PYTHON" -m pip install --quiet --no-build-isolation --no-deps --no-compile --upgrade \
    --target build/gpu-site --config-settings=build-dir=build/gpu-wheel .
}

# C++ tests; GoogleTest may be named by GTEST_ROOT.
build_cpp() {
  cmake -S . -B build/gpu-cpp -DCMAKE_BUILD_TYPE=Release -DECHO_BUILD_TESTS=ON >/dev/null
  cmake --build build/gpu-cpp
}

sanitize() {
  build_cpp
  local rows=() tool status
  for tool in memcheck racecheck initcheck synccheck; do
    status=clean
    compute-sanitizer --tool "$tool" --error-exitcode 99 build/gpu-cpp/echo_tests \
      --gtest_filter="${FILTER:-*Cuda*}" >"$ECHO_RESULTS/sanitize-$tool.log" 2>&1 || status="exit status $?"
    tail -n 4 "$ECHO_RESULTS/sanitize-$tool.log"
    rows+=("$tool=$status")
  done
  "$PYTHON" - "${rows[@]}" <<'PY'
import sys
sys.path.insert(0, "bench")
import record
cases = [{"case": {"tool": tool}, "status": status} for tool, status in (row.split("=", 1) for row in sys.argv[1:])]
sys.argv = ["tools/gpu_check.sh", "sanitize"]
record.write("sanitize", cases)
sys.exit(any(case["status"] != "clean" for case in cases))
PY
}

part="${1:-}"
shift || true
case "$part" in
  tests)
    build
    "$PYTHON" -m pytest -q -m gpu ${ARGS:-} "$@"
    if build_cpp; then build/gpu-cpp/echo_tests --gtest_brief=1 --gtest_filter="${FILTER:-*Cuda*}"; fi
    ;;
  sanitize) sanitize ;;
  demo)
    build
    "$PYTHON" -m echo.cli demo --json "$ECHO_RESULTS/demo.json" --plot "$ECHO_RESULTS/demo.png" "$@"
    ;;
  doctor)
    build
    "$PYTHON" -m echo.cli doctor
    ;;
  bench-*)
    build
    "$PYTHON" "bench/${part#bench-}.py" "$@"
    ;;
  *)
    sed -n '2,8p' "$0"
    exit 2
    ;;
esac
