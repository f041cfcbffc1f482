#!/usr/bin/env bash
# Set up with the test tools, then run the fast tests (minutes on two cores).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/common.sh"

usage() {
    cat <<'TEXT'
usage: launch/test.sh [--python=X.Y] [PYTEST ARGUMENT ...]

Runs pytest on the tests not marked slow, whose programs XLA compiles with few optimisations (--soon).
Arguments go to pytest and win over the defaults; with -m of one's own XLA compiles as it does for users:

  launch/test.sh tests/test_verifier.py -k nested
  launch/test.sh -m slow                the others (five seconds to minutes each)
  launch/test.sh -n 0 --pdb             in one process, with a debugger
  launch/test.sh --python=3.12          with that Python, in .venv-3.12

DAPO_JAX_ASSETS=DIR lets the tests run that need real data; they are skipped where it is unset.
TEXT
}

version="" arguments=() fast=(-m "not slow" --soon)
for arg in "$@"; do
    case "$arg" in
        --python=*) version="${arg#*=}"; dapo_want python --python "$version" ;;
        --help) usage; exit 0 ;;
        -m*) fast=(); arguments+=("$arg") ;;
        *) arguments+=("$arg") ;;
    esac
done

dapo_setup test "$version"
cores="$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)"
# One file stays in one worker, where its tests share compiled programs; the order of the files is
# that of tests/conftest.py.
cd -- "$DAPO_ROOT"
unset PYTHONDONTWRITEBYTECODE  # else each of many processes compiles all that it imports: 3 s
exec "$DAPO_PYTHON" -m pytest -n "$((cores < 8 ? cores : 8))" --dist=loadfile \
    --no-loadscope-reorder --max-worker-restart=2 ${fast[@]+"${fast[@]}"} ${arguments[@]+"${arguments[@]}"}
