#!/usr/bin/env bash
# The files of cpp/reference/simd are compiled for several instruction sets. An inline function of another
# namespace (std::, echo::) that is emitted there, too, could be the copy that the linker keeps for the whole
# library, and older CPUs would meet AVX-512 in it. So those objects may define no such function outside
# their own namespace. The argument is the folder of a fresh, optimised build.
set -euo pipefail
mapfile -t objects < <(find "$1" -path '*echo_simd_avx*' -name '*.o')
if ((${#objects[@]} == 0)); then
  [[ $(uname -m) == x86_64 ]] || exit 0
  echo "error: no objects of echo_simd_avx* under $1" >&2
  exit 1
fi
# Type W: weak functions.
leaks=$(nm --demangle --defined-only "${objects[@]}" | grep ' W ' | grep -v 'simd_avx' | sort -u || true)
if [[ -n $leaks ]]; then
  echo "error: defined outside the namespace of the instruction set:" >&2
  echo "$leaks" >&2
  exit 1
fi
echo "${#objects[@]} objects, nothing leaks"
