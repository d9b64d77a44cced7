"""Kernels that this driver, compiler or package can't run."""

from gates.faults.model import Fault

SPIRV = (
    r"SPV_KHR_bfloat16",
    r"Invalid SPIR-V module",
    r"uses (an )?(unknown )?extension 'SPV_",
)
NO_8BIT = r"torch\.optim\.|optimizer_type ?[:=] ?adamw\b|adamw_torch"

FAULTS = (
    Fault(
        id="bf16-spirv-first-step",
        title="The first 8-bit optimizer step aborts: the driver refuses the SPIR-V of a bf16 Triton kernel",
        patterns=SPIRV,
        stages=("adapter", "optimizer"),
        cause="bitsandbytes' 8-bit optimizers are Triton kernels. Triton 3.6 and newer emit SPV_KHR_bfloat16 for "
        "bf16 parameters, and an older driver's translator does not know it: the runtime aborts, so that no "
        "except catches it.",
        mend=(
            "set optimizer.class_path: torch.optim.AdamW in config.yaml",
            "keep the adapter in fp32 (ours is; in another trainer cast the parameters that need a "
            "gradient to float32 right after the adapter is added); the cache stays valid",
            "install the newest driver of the device, then finetune adapt",
        ),
        sources=("training step, Troubleshooting", "intel-xpu-backend-for-triton #5574, #5585"),
        covers=("bf16-spirv", "bf16-spirv-on-load"),
    ),
    Fault(
        id="died-at-first-step",
        title="The process vanished at the first optimizer step, most likely in an 8-bit optimizer's kernel",
        stages=("optimizer",),
        silent=True,
        needs_exit=False,
        unless=(NO_8BIT, r"use_?cpu ?[:=] ?true"),
        cause="Model, adapter and optimizer are there, and the log ends before the first loss. That is where an "
        "8-bit optimizer compiles its Triton kernel; a driver that refuses it aborts the process without a word.",
        mend=(
            "set optimizer.class_path: torch.optim.AdamW in config.yaml",
            "keep the adapter in fp32, then finetune fit --smoke",
            "install the newest driver of the device, then finetune adapt, which tries the kernel in a process "
            "of its own",
        ),
        sources=("training step, Troubleshooting", "unsloth #10021, #10213"),
    ),
    Fault(
        id="bf16-spirv-on-load",
        title="Quantizing the base on the device aborts: the driver refuses the SPIR-V of a bf16 Triton kernel",
        patterns=SPIRV,
        stages=("load", "encode"),
        cause="Without quantized weights on disk the base is quantized at each start, by a Triton kernel that emits "
        "SPV_KHR_bfloat16; an older driver refuses it and the process aborts.",
        mend=(
            "finetune quantize, which makes NF4 on the CPU (another trainer: quantize with --device cpu and set "
            "model.transformer_path, and model.text_encoder_path if that was what failed)",
            "set optimizer.class_path: torch.optim.AdamW too: its 8-bit kernels would abort at the first step",
            "rebuild the cache only if the text encoder was changed",
        ),
        sources=("training step, Troubleshooting", "intel-xpu-backend-for-triton #5574"),
        covers=("bf16-spirv",),
    ),
    Fault(
        id="bf16-spirv",
        title="The driver refuses the SPIR-V of a bf16 Triton kernel",
        patterns=SPIRV,
        cause="Triton 3.6 and newer emit SPV_KHR_bfloat16; a driver whose translator does not know it aborts.",
        mend=(
            "finetune adapt, which tells which kernels this driver refuses",
            "install the newest driver of the device; use no 8-bit optimizer; quantize on the CPU",
        ),
        sources=("intel-xpu-backend-for-triton #5574, #5585", "SPIRV-LLVM-Translator #3122"),
    ),
    Fault(
        id="level-zero-headers-missing",
        title="Triton can't compile: the Level Zero headers are not found",
        patterns=(
            r"ze_api\.h['\"]?:? ?(no such file|not found)",
            r"cannot open include file:? ['\"<]?(level_zero/)?ze_api\.h",
            r"LEVEL_ZERO_V1_SDK_PATH",
        ),
        cause="Triton builds its launcher against Level Zero, and ZE_PATH does not point to the SDK, or to a path "
        "with spaces.",
        mend=(
            "install the Level Zero SDK to a path without spaces and set ZE_PATH to it",
            "or need no Triton at all: finetune quantize, and optimizer.class_path: torch.optim.AdamW",
        ),
        sources=("one-file predecessor of the series, 10.11", "unsloth's guide for Intel"),
    ),
    Fault(
        id="wrong-triton",
        title="The triton that is installed is not the one of this torch",
        patterns=(
            r"0 active drivers \(\[\]\)",
            r"no module named 'triton(\.\w+)*'",
            r"(cannot|can't) find a working triton installation|triton(-windows)? .*is not compatible",
            r"more than one triton|triton and (pytorch-)?triton-xpu",
        ),
        cause="triton or triton-windows shadows triton-xpu, or none is installed: they share one folder.",
        mend=(
            "pip uninstall -y triton triton-windows triton-xpu pytorch-triton-xpu, then install the triton-xpu "
            "that torch asks for",
            "finetune probe --environment, then gate check 03",
        ),
        sources=("one-file predecessor of the series, 10.10",),
    ),
    Fault(
        id="stale-triton-cache",
        title="Kernels compiled by an earlier version are still cached",
        patterns=(
            r"[\\/]\.triton[\\/]cache.*(error|fail|invalid|denied|corrupt)",
            r"(error|fail\w*|invalid).*[\\/]\.triton[\\/]cache",
            r"torchinductor_\w+.*(error|fail|invalid|corrupt)",
            r"(zeModuleCreate|module build|binary).*(version mismatch|ZE_RESULT_ERROR_INVALID_NATIVE_BINARY)",
        ),
        cause="After an upgrade of oneAPI, torch or triton the old kernels are loaded: first-kernel errors, or "
        "steps that slow down without a pattern.",
        mend=(
            "close all Python processes",
            'Windows: rmdir /s /q "%USERPROFILE%\\.triton" and rmdir /s /q '
            '"%LOCALAPPDATA%\\Temp\\torchinductor_%USERNAME%"; Linux: rm -r ~/.triton /tmp/torchinductor_$USER',
        ),
        sources=("training step, Troubleshooting", "one-file predecessor of the series, 10.4"),
    ),
    Fault(
        id="bitsandbytes-without-xpu",
        title="This bitsandbytes has no backend for the device",
        patterns=(
            r"bitsandbytes was compiled without GPU support",
            r"none of the available devices .*are supported by the bitsandbytes",
            r"bitsandbytes.*(no (xpu|kernel)|not (supported|available) (on|for) xpu)",
        ),
        cause="bitsandbytes has an XPU backend from 0.48.2 on; before, NF4 and 8-bit optimizers are CUDA's.",
        mend=(
            'pip install -U "bitsandbytes>=0.48.2,<0.51"',
            "finetune probe --environment, then gate check 03",
        ),
        sources=("bitsandbytes' documentation", "reference 3.3"),
    ),
)
