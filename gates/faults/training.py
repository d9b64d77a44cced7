"""What goes wrong in the loop, and where a process died without a word."""

from gates.faults import detectors
from gates.faults.model import Fault

FAULTS = (
    Fault(
        id="step-guard-missing",
        title="The run passed max_train_steps: its loop has no step guard",
        detect=detectors.beyond_limit,
        cause="The inner loop neither returns nor breaks at max_train_steps, so that all epochs run: 5 steps over "
        "35 samples with accumulation 2 become 90.",
        mend=(
            "finetune adapt --scan CHECKOUT, which names the loop",
            "return from the inner loop at max_train_steps, and break the loop over epochs",
        ),
        sources=("training step, 7.4",),
    ),
    Fault(
        id="epoch-break-missing",
        title="Several resumable checkpoints of one step: the loop over epochs does not break",
        detect=detectors.repeated_last,
        cause="The inner loop stops, and each further epoch saves again under its own number. The copies are equal: "
        "it costs disk and time, and the adapter is right.",
        mend=(
            "finetune adapt --scan CHECKOUT, which names the loop",
            "keep one of the folders (those of ours: finetune clean)",
        ),
        sources=("training step, 7.4",),
    ),
    Fault(
        id="no-checkpoint",
        title="No checkpoint was written",
        patterns=(
            r"no checkpoints? (was |were |is )?(written|saved|found)",
            r"checkpointing_steps \(?\d+\)? (is )?(>|greater than|larger than|beyond|above) ",
            r"checkpointing_steps.*(exceeds|beyond|is more than).*max_train_steps",
        ),
        cause="The run ended before its first boundary (a time limit, Ctrl-C, an earlier error), or "
        "checkpointing_steps is above max_train_steps.",
        mend=(
            "set train.checkpointing_steps to at most train.max_train_steps in config.yaml, then gate check 04",
            "finetune fit --detach, which no tool's time limit ends",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="died-while-loading",
        title="The process vanished while the model was being loaded",
        stages=("load",),
        silent=True,
        cause="Memory ran out, or quantizing on the device aborted in a Triton kernel that the driver refuses.",
        mend=(
            "finetune quantize, which works on the CPU, shard by shard",
            "finetune plan, which says whether loading fits",
            "finetune adapt, which tells which kernels the driver refuses",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="died-in-cache",
        title="The process vanished in the cache phase",
        stages=("encode",),
        silent=True,
        cause="Mostly memory: the text encoder in bf16 takes about 15 GiB. It is not the optimizer's fault.",
        mend=(
            "finetune cache, which keeps what is done",
            "set model.quantize_text_encoder: nf4, then finetune quantize; or cache.devices.text_encoder: cpu",
        ),
        sources=("training step, Troubleshooting",),
    ),
    Fault(
        id="died-in-training",
        title="The process vanished after steps were done",
        stages=("step",),
        silent=True,
        cause="Not the kernel of the first step, which has run: memory, the driver, a reboot, or someone who ended "
        "it.",
        mend=(
            "look into the system's log for the time at which the log ends",
            "finetune fit --resume latest",
            "install the newest driver of the device if it happens again",
        ),
        sources=("training step, Troubleshooting",),
    ),
)
