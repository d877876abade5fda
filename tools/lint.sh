#!/usr/bin/env bash
# lint.sh WHAT BIN: BIN is the folder of clang-format, ruff and mypy, WHAT one of
#   format   checks format and simple mistakes
#   types    checks types of the installed package, where the generated stubs of the extension are, and of benchmarks
#   fix      formats, and mends what ruff can mend
set -euo pipefail
what=$1
bin=$(realpath "$2")
cd "$(dirname "$0")/.."

cxx() {
  find cpp python/bindings tests bench -type f \
    \( -name '*.cpp' -o -name '*.hpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 2>/dev/null
}

status=0
case $what in
  format)
    cxx | xargs -0 "$bin/clang-format" --dry-run -Werror || status=1
    "$bin/ruff" check . || status=1
    "$bin/ruff" format --check . || status=1
    ;;
  types)
    "$bin/mypy" --python-executable "$bin/python" -p echo || status=1
    MYPYPATH=bench:tests:models/tiny_dsa "$bin/mypy" --python-executable "$bin/python" --explicit-package-bases \
      --follow-imports=silent bench || status=1
    ;;
  fix)
    cxx | xargs -0 "$bin/clang-format" -i
    "$bin/ruff" format .
    "$bin/ruff" check --fix .
    ;;
  *)
    echo "error: unknown check '$what'" >&2
    status=2
    ;;
esac
exit "$status"
