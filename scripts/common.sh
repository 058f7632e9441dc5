# Shared by the scripts beside it: finding a Python, making environments. Source it; the working folder becomes the
# root of the checkout.
# shellcheck shell=bash

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit

# BLAS takes every core by default; two ranks on two cores would then fight for them.
export OPENBLAS_NUM_THREADS=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Tests start many processes and are about the plain expressions; those of the accelerator switch it on themselves.
export MPITP_ACCELERATOR=${MPITP_ACCELERATOR:-off}

say() { # say TEXT...: one line, bold on a terminal
    if [ -t 1 ]; then printf '\033[1m%s\033[0m\n' "$*"; else printf '%s\n' "$*"; fi
}

die() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

find_python() { # print the first Python that is new enough and can make environments; PYTHON=... chooses one
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    die "needs Python 3.11 or newer with its venv module (Debian: apt-get install python3 python3-venv); set PYTHON=... to choose one"
}

make_env() { # make_env DIR EXTRAS: an environment with this checkout installed; kept while pyproject.toml is the same
    local dir=$1 extras=$2 python wanted
    python=$(find_python)
    wanted="$("$python" -VV) $extras $(cksum <pyproject.toml) $PWD"
    if [ -x "$dir/bin/python" ] && [ "$(cat "$dir/.made-from" 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    say "Making $dir with mpitp[$extras] (once; about half a minute)"
    "$python" -m venv --clear "$dir"
    "$dir/bin/python" -m pip install --quiet --editable ".[$extras]" || die "pip could not install mpitp[$extras] into $dir"
    printf '%s\n' "$wanted" >"$dir/.made-from"
}

allow_open_mpi() { # Open MPI refuses root and more ranks than cores unless told otherwise; MPICH ignores these
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe OMPI_MCA_osc=^ucx
}
