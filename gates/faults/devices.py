"""The run is on another device than it should be, or the device does not hold."""

from gates.faults import detectors
from gates.faults.model import Fault

FAULTS = (
    Fault(
        id="torch-without-xpu",
        title="This torch knows no XPU: a CUDA or CPU build, or one too old",
        patterns=(
            r"module 'torch' has no attribute 'xpu'",
            r"module 'torch\.xpu' has no attribute 'memory_allocated'",
            r"torch not compiled with (xpu|cuda) enabled",
            r"\bXPU (is )?not available",
            r"no XPU devices? (are |is |were )?(available|found)",
            r"found no NVIDIA driver on your system",
        ),
        unless=(r"\b(using|on) (cuda|nvidia)",),
        cause="pip takes the CUDA or CPU build by default, and anything that pulls torch may put it in place of "
        "the XPU build.",
        mend=(
            "install torch with the index of XPU builds that README names for your device",
            "finetune probe --environment, then gate check 03",
            "another trainer's code that calls CUDA: finetune adapt --scan CHECKOUT",
        ),
        sources=("pytorch #189811", "reference 3.3"),
    ),
    Fault(
        id="accelerate-cuda-device",
        title="accelerate chose cuda:0 instead of xpu:0",
        patterns=(
            r"(accelerator\.)?device['\"]? ?(is|[:=]) ?['\"]?(device\(type=')?cuda(:0)?\b(?!.*is_available)",
            r"distributed_type['\"]?: ['\"]?MULTI_GPU",
        ),
        also=(r"accelerate_config_xpu|train_xpu|\bxpu:0|\bon xpu|\+xpu\b",),
        unless=(r"device(:| is)? +cuda, NVIDIA",),
        cause="accelerate's config for XPU was not passed to the launch, or says distributed_type: MULTI_GPU.",
        mend=(
            "accelerate launch --config_file accelerate_config_xpu.yaml, with distributed_type: NO and "
            "use_cpu: false in it",
            "or train with this package, which needs no such file",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="memory-reads-zero",
        title="The device's memory reads 0 while steps are done: the compute is on the CPU, or CUDA is asked",
        detect=detectors.zero_allocated,
        unless=(r"^device +cpu\b",),
        cause="Either torch.cuda.memory_allocated() was left in the code, or the model was moved to the CPU before "
        "the adapter was added and never moved back. Another process that asks always reads 0.",
        mend=(
            "finetune adapt --scan CHECKOUT, which lists the calls that know CUDA only",
            "look for .to('cpu') before get_peft_model or add_adapter, and move the model to the device after it",
            "read it inside of the training process: finetune monitor",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="nan-gradients",
        title="Loss or gradients are NaN",
        patterns=(
            r"\bgrad_?norm['\"]?[ :=]+\(?['\"]?nan\b",
            r"loss['\"]?[ :=]+\(?['\"]?(nan|inf)\b",
            r"(non-?finite|nan) (gradient|loss|grad)",
            r"(gradient|loss) (is|are|was) (nan|not finite|non-?finite)",
        ),
        cause="A kernel gives wrong gradients on this driver (causal attention on Arc A-series does), a learning "
        "rate is too high, or fp16 overflows.",
        mend=(
            "finetune adapt, which compares attention's gradients and a whole step with the CPU",
            "install the newest driver of the device",
            "set a lower optimizer.init_args.lr in config.yaml, then finetune fit --smoke",
        ),
        sources=("pytorch #160787",),
    ),
    Fault(
        id="mixed-dtypes-in-attention",
        title="Tensors of several types meet in the denoiser's attention",
        patterns=(
            r"expected (query, key,? and value|mat1 and mat2|scalar type|m1 and m2).*(dtype|scalar type|same)",
            r"mat1 and mat2 must have the same dtype",
            r"expected (scalar type )?(BFloat16|Half|Float) but (found|got)",
            r"query, key and value must have the same dtype",
        ),
        cause="An fp32 adapter beside a bf16 base: without autocast around the denoiser both reach attention.",
        mend=(
            "gate check 05, whose dtypes-consistent looks at ours",
            "in another trainer wrap the denoiser's forward in torch.autocast(device.type, torch.bfloat16)",
            "there is no type of the adapter to set: qflux refuses an unknown key",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="machine-rebooted",
        title="The machine rebooted, or its display driver was reset, during training",
        patterns=(
            r"(machine|system|windows|host) (has )?reboot(s|ed)( unexpectedly)?",
            r"display driver .*(stopped responding|has (successfully )?recovered)",
            r"unexpected shutdown|kernel-power.*41|LiveKernelEvent",
        ),
        cause="An older driver, or more memory in use than it bears.",
        mend=(
            "install the newest Intel graphics driver and reboot",
            "finetune probe --host, then gate check 01: an installation may reset the shared memory ceiling",
            "finetune fit --resume latest",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="ipex-retired",
        title="intel-extension-for-pytorch does not fit this torch",
        patterns=(
            r"extension for pytorch\*? needs to work with pytorch",
            r"intel_extension_for_pytorch.*(error|undefined symbol|cannot|failed)",
        ),
        cause="The extension ended with torch 2.8; torch has its own XPU backend.",
        mend=(
            "pip uninstall -y intel-extension-for-pytorch",
            "finetune probe --environment, then gate check 03",
        ),
        sources=("reference 3.3",),
    ),
)
