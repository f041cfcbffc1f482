# shellcheck shell=bash
# Shared set-up, sourced by the other scripts of this folder and usable from your own:
#
#   source launch/common.sh
#   dapo_setup [EXTRA,... [PYTHON_VERSION]]   # dapo_setup | dapo_setup test | dapo_setup tpu 3.12
#   "$DAPO_PYTHON" -m dapo_jax.train ...
#
# It makes a virtual environment in the repository, `.venv` (or `.venv-3.12` when a version is
# asked for), and installs dapo_jax into it, editable, at the versions of requirements.txt.
# A second call finds nothing to do and returns at once. Runs under bash 3.2 (macOS) and later.

[[ -n "${HOME+set}" ]] || HOME=~  # of the password file, where the caller has none
DAPO_ROOT="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
# shellcheck source=launch/flags.sh
source "$DAPO_ROOT/launch/flags.sh"
# The Python that worker.sh installs on a TPU's hosts and in the Dockerfile's image. It decides which
# jax and libtpu requirements.txt gives; docs/ and configs/ report compiles made with these.
DAPO_TPU_PYTHON="${DAPO_TPU_PYTHON:-3.11}"
DAPO_NO_PYTHON=69  # exit status when no interpreter can be had, so that callers may skip

dapo_venv() { printf '%s' "$DAPO_ROOT/.venv${1:+-$1}"; }  # dapo_venv [VERSION]

# Fail unless nvidia-smi lists so many GPUs here.
dapo_gpus() {  # dapo_gpus NUMBER
    local found
    command -v nvidia-smi >/dev/null || dapo_fail "no nvidia-smi here: install NVIDIA's driver first"
    found="$(nvidia-smi --list-gpus 2>&1)" || dapo_fail "nvidia-smi failed: $found"
    found="$(grep -c '^GPU ' <<<"$found" || true)"
    ((found >= $1)) || dapo_fail "--gpus=$1: nvidia-smi lists $found on this machine" 2
}

# Sets `environment` for a process of several with a GPU each. The caller's values stay, but for
# JAX_PLATFORMS, without which jax would go on without a GPU. jax takes nine tenths of the memory (its
# default: three quarters; docs.nvidia.com/jax-toolbox, GPU performance), and NCCL prints warnings.
dapo_gpu_environment() {
    # shellcheck disable=SC2034  # the caller's
    environment=("JAX_PLATFORMS=cuda,cpu"
        "XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-.9}"
        "NCCL_DEBUG=${NCCL_DEBUG:-WARN}" "TF_CPP_MIN_LOG_LEVEL=${TF_CPP_MIN_LOG_LEVEL:-2}")
}

dapo_say() { printf '[set-up] %s\n' "$(dapo_plain "$*")" >&2; }

# Supported: Python 3.11 to 3.14. The packages have no wheels for 3.15 at their tested versions.
# Whether COMMAND is a Python that runs (a pyenv shim may be on PATH and only print an error), is of
# VERSION (any supported one if empty), and can make a virtual environment.
dapo_python_works() {  # dapo_python_works COMMAND VERSION
    "$1" - "$2" >/dev/null 2>&1 <<'PYTHON' || return 1
import sys
found = sys.version_info[:2]
raise SystemExit(not (3, 11) <= found < (3, 15) or sys.argv[1] not in ("", "%d.%d" % found))
PYTHON
    # Debian's python3 has no ensurepip without python3-venv; uv does not need it.
    command -v uv >/dev/null || "$1" -c 'import ensurepip' >/dev/null 2>&1
}

# Print the path of an interpreter of VERSION; without VERSION, of `python3` where that is a
# supported one, else of the newest on PATH, else of one that pyenv has. Silent if there is none.
dapo_find_python() {  # dapo_find_python [VERSION]
    local version="${1:-}" candidate pyenv_root=""
    local -a candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    [[ -z "$version" ]] || candidates=("python$version" python3 python)
    if command -v pyenv >/dev/null && pyenv_root="$(pyenv root 2>/dev/null)"; then
        # Installed but not activated: the shim on PATH fails, the interpreter itself works.
        for candidate in "$pyenv_root/versions/${version:-3.1}"*/bin/python; do
            candidates+=("$candidate")
        done
    fi
    for candidate in "${candidates[@]}"; do
        if dapo_python_works "$candidate" "$version"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

dapo_make_venv() {  # dapo_make_venv VENV VERSION
    local venv="$1" version="$2" base
    if base="$(dapo_find_python "$version")"; then
        dapo_say "making $venv with $base"
        if command -v uv >/dev/null; then
            uv venv --quiet --python "$base" "$venv"
        else
            "$base" -m venv "$venv"
        fi
    elif command -v uv >/dev/null; then
        dapo_say "no working Python ${version:-3.11-3.14} found: asking uv to download one"
        uv venv --quiet --python "${version:-3.12}" "$venv" || dapo_fail \
            "no Python ${version:-3.11-3.14} here, and uv could not fetch one" "$DAPO_NO_PYTHON"
    else
        dapo_fail "no Python ${version:-3.11-3.14} found on PATH: install one, or uv \
(https://docs.astral.sh/uv)" "$DAPO_NO_PYTHON"
    fi
}

# What pip installs, by uv where there is one.
dapo_install() {  # dapo_install PYTHON ARGUMENT...
    local command=(uv pip install --python "$1")
    if ! command -v uv >/dev/null; then
        "$1" -m pip --version >/dev/null 2>&1 || "$1" -m ensurepip
        command=("$1" -m pip install --disable-pip-version-check)
    fi
    "${command[@]}" "${@:2}"
}

dapo_setup() {  # dapo_setup [EXTRA,... [VERSION]]; sets DAPO_PYTHON
    local extra="${1:-}" version="${2:-}" venv next=$']\n['
    [[ -z "$version" ]] || dapo_want python "--python" "$version"
    dapo_want word0 "--extra" "$extra"
    venv="$(dapo_venv "$version")"
    DAPO_PYTHON="$venv/bin/python"

    # What is installed is a function of these two files and of the place (the install is
    # editable). The stamp's name is their checksum, its lines are the extras installed so far.
    local sum stamp
    sum="$(cd "$DAPO_ROOT" && { pwd; cat requirements.txt setup.py; } | cksum)"
    stamp="$venv/.dapo_jax-${sum// /-}"
    if [[ -x "$DAPO_PYTHON" && -f "$stamp" ]] && grep -qFx -- "[$extra]" "$stamp"; then
        return 0
    fi

    [[ -e "$venv" ]] || dapo_make_venv "$venv" "$version"
    dapo_python_works "$DAPO_PYTHON" "$version" || dapo_fail \
        "$venv has no working Python ${version:-3.11-3.14}: remove that folder and run this again"

    # Not after the install: if that breaks off, no stamp may say what the folder holds.
    [[ -f "$stamp" ]] || rm -f -- "$venv"/.dapo_jax-*

    dapo_say "installing dapo_jax${extra:+[$extra]} into $venv (the first time: some minutes)"
    (
        # From the root and by relative names: a checkout's path may hold spaces or brackets.
        cd "$DAPO_ROOT"
        dapo_install "$DAPO_PYTHON" -c requirements.txt -e ".${extra:+[$extra]}"
    ) >&2 || dapo_fail "the install failed (see above); nothing was started"

    printf '[]\n[%s]\n' "$extra" "${extra//,/$next}" >>"$stamp"
    dapo_say "done"
}
