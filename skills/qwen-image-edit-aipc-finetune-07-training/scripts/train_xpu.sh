#!/usr/bin/env bash
# train_xpu.sh <config.yaml> [--cache | options of finetune fit]
# The folder of the config is the workspace. Equal to `finetune cache` or `finetune fit` there.
# PYTHON names another interpreter than the `python` of the environment that is active.
python="${PYTHON:-python}"
setvars="${ONEAPI_ROOT:-/opt/intel/oneapi}/setvars.sh"
export PYTHONUTF8=1 SYCL_CACHE_PERSISTENT=1

# torch brings its own SYCL runtime: oneAPI is only for kernels that Triton compiles here.
if [ -f "$setvars" ] && [ -z "${SETVARS_COMPLETED:-}" ] &&
    "$python" -P -m runtime.launcher --needs-oneapi "$@" 2>/dev/null; then
    # shellcheck disable=SC1090  # where it lies is known only here
    . "$setvars" --force || exit
fi
exec "$python" -P -m runtime.launcher "$@"
