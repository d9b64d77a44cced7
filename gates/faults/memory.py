"""Memory: what does not fit, and what is refused though it would."""

from gates.faults import detectors
from gates.faults.model import KILLED, Fault

OOM = (
    r"\bout of memory\b(?!.*killed process)",
    r"OutOfMemoryError",
    r"UR_RESULT_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)\w*",
    r"DefaultCPUAllocator: (not enough|can't allocate) memory",
    r"^MemoryError\b",
)

FAULTS = (
    Fault(
        id="warmup-out-of-memory",
        title="The loader's warm-up asks for one block as large as the model, and is refused",
        patterns=(r"caching_allocator_warmup",),
        also=(r"out of memory|OutOfMemoryError|tried to allocate",),
        cause="transformers reserves one large block before it loads. Its bound by the free memory was missing on "
        "XPU, so the request fails though more is free than the block. More memory does not help.",
        mend=(
            "finetune quantize, which makes NF4 on the CPU (another trainer: quantize with --device cpu and set "
            "model.transformer_path, model.text_encoder_path)",
            "pip install -U transformers",
        ),
        sources=("training step, Troubleshooting", "transformers #39627, #37436"),
        covers=("out-of-memory", "allocation-near-ceiling", "cache-out-of-memory"),
    ),
    Fault(
        id="single-allocation-limit",
        title="One block above 4 GiB is refused",
        patterns=(
            r"can(no|')t allocate memory block with size larger than 4 ?G",
            r"can not allocate memory block with size larger than 4 ?G",
            r"(UR|PI|CL)_\w*INVALID_BUFFER_SIZE",
            r"exceeds? (the )?max(imum)?( memory)?[ _]alloc\w*[ _]size",
        ),
        cause="Without relaxed limits the driver refuses any single block above 4 GiB (Arc A-series).",
        mend=(
            "set the environment variable UR_L0_USE_RELAXED_ALLOCATION_LIMITS=1",
            "install the newest driver of the device",
        ),
        sources=("intel-extension-for-pytorch #846, #863",),
        covers=("out-of-memory", "allocation-near-ceiling", "cache-out-of-memory"),
    ),
    Fault(
        id="allocation-near-ceiling",
        title="A block is refused that would just fit",
        detect=detectors.refused_near_ceiling,
        cause="The driver keeps some memory back: a request for all that is called free fails.",
        mend=(
            "finetune plan, which stays below what the device bears (another trainer: below 90 % of the ceiling)",
            "or need less: model.quantize: nf4, a smaller data.processor.target_size",
        ),
        sources=("torch-xpu-ops #5046",),
        covers=("out-of-memory", "cache-out-of-memory"),
    ),
    Fault(
        id="cache-out-of-memory",
        title="The cache phase runs out of memory: the text encoder in bf16 takes about 15 GiB",
        patterns=OOM,
        stages=("encode",),
        cause="Text encoder, data and system together pass the memory; with 32 GiB that is on the edge.",
        mend=(
            "raise the shared memory ceiling of the GPU, then gate check 01",
            "set model.quantize_text_encoder: nf4 in config.yaml, then finetune quantize (about 8 GiB less)",
            "set cache.devices.text_encoder: cpu, then finetune cache (slow)",
            "try with fewer samples first",
        ),
        sources=("training step, Troubleshooting",),
        covers=("out-of-memory", "killed-by-system"),
    ),
    Fault(
        id="out-of-memory",
        title="The device or the machine is out of memory",
        patterns=OOM,
        cause="What the run holds at its peak is more than the device may use.",
        mend=(
            "finetune plan, which names the largest part and what makes it fit",
            "set model.quantize: nf4, train.gradient_checkpointing: true, a smaller data.processor.target_size",
            "never set cache.use_cache: false: the text encoder would stay beside the denoiser",
        ),
        sources=("training step, 7.1",),
    ),
    Fault(
        id="device-lost",
        title="The driver lost the device; it mostly means too much memory",
        patterns=(
            r"UR_RESULT_ERROR_DEVICE_LOST",
            r"ZE_RESULT_ERROR_DEVICE_LOST",
            r"\bdevice (is |was )?lost\b",
            r"PI_ERROR_DEVICE_LOST|DXGI_ERROR_DEVICE_(REMOVED|HUNG|RESET)",
        ),
        cause="Memory over-committed as far as the driver: it resets the device instead of refusing, and may hang "
        "or reboot the machine.",
        mend=(
            "finetune plan, which says how near to the ceiling the fit is",
            "raise the shared memory ceiling, then gate check 01",
            "install the newest driver of the device, then finetune fit --resume latest",
        ),
        sources=("torch-xpu-ops #3155", "one-file predecessor of the series, 9.2 and 10.12"),
        covers=("out-of-memory",),
    ),
    Fault(
        id="killed-by-system",
        title="The system killed the process: the machine was out of memory",
        patterns=(r"^killed$", r"out of memory: killed process", r"oom-kill", r"\bSIGKILL\b|exit code -9\b"),
        exit_codes=KILLED,
        cause="The system ended the process without giving it a word, mostly because memory ran out; a person or "
        "a tool with a time limit does the same.",
        mend=(
            "look into the system's log for the reason (Linux: journalctl -k; Windows: Event Viewer, System)",
            "finetune plan, then finetune fit --resume latest; with --detach it outlives a tool's time limit",
        ),
        sources=("training step, Troubleshooting (no checkpoint written)",),
    ),
    Fault(
        id="free-memory-unknown",
        title="The driver can't tell how much memory is free",
        patterns=(
            r"doesn't support querying the available free memory",
            r"mem_get_info.*(not support|fail|error)",
        ),
        cause="torch.xpu.mem_get_info needs Level Zero Sysman, which iGPUs and WSL2 often lack.",
        mend=(
            "pip install -U transformers accelerate, whose newer versions catch it",
            "in another trainer's code catch it and go on without the number; ours does",
        ),
        sources=("pytorch #194576, #194487", "transformers #48127, #48130"),
    ),
    Fault(
        id="free-memory-frozen",
        title="The free memory that the driver tells never moves",
        detect=detectors.frozen_free,
        cause="The driver reports a constant. The allocated memory, read inside of the process, is right.",
        mend=("judge memory by the allocated one: finetune monitor, gate check 07", "install a newer driver"),
        sources=("pytorch #161381",),
    ),
    Fault(
        id="memory-grows",
        title="The allocated memory grows at every step",
        detect=detectors.growing,
        cause="A tensor with its graph, or a gradient, is kept from step to step.",
        mend=("gate check 07 --phase full, check memory-stable", "keep loss.item(), never the loss itself"),
        sources=("training step, 7.5",),
    ),
)
