"""Every known fault has logs that it is named from, and healthy logs name nothing: recall and precision.

The logs are short and written for this table, in the words that the trainers, torch and the drivers use.
"""

import re
from typing import Any

import pytest

from gates import advice
from gates.faults import library, logs
from gates.faults.logs import Line, Log

LOAD = "Loading checkpoint shards: 100%|##########| 5/5 [00:41<00:00]\n"
ADAPTER = LOAD + "trainable params: 23,592,960 || all params: 20,454,000,640 || trainable%: 0.115\n"
OPTIMIZER = ADAPTER + "optimizer: bitsandbytes.optim.Adam8bit(lr=0.0001)\n"
STEPS = OPTIMIZER + "".join(
    f"epoch 0 step {n}: loss=0.{90 - n} lr=1e-4 xpu memory: 13.4{n} GB\n" for n in range(1, 4)
)
CACHE = "[train_xpu] cache-build mode\nLoading text encoder\ncaching 3/35\n"
SPIRV = (
    "InvalidModule: Invalid SPIR-V module: input SPIR-V module uses extension 'SPV_KHR_bfloat16' which were "
    "disabled by --spirv-ext option\n"
)
TRACE = "Traceback (most recent call last):\n"
OOM = (
    "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 2.00 GiB. Of 16.48 GiB, 1.02 GiB is free.\n"
)

# id, the log, the exit code where one is known
FAULTY: tuple[tuple[str, str, int | None], ...] = (
    ("bf16-spirv-first-step", OPTIMIZER + SPIRV, None),
    ("bf16-spirv-first-step", ADAPTER + "loc(unknown): error: uses unknown extension 'SPV_KHR_bfloat16'\n", 134),
    ("died-at-first-step", OPTIMIZER, None),
    ("died-at-first-step", OPTIMIZER, 0xC0000409),
    ("died-at-first-step", "create LoRA network. base dim: 16\nuse 8-bit AdamW optimizer | {}\nrunning training\n", -6),
    ("bf16-spirv-on-load", LOAD + "quantizing transformer to nf4\n" + SPIRV, 3),
    ("bf16-spirv-on-load", "Loading transformer\n" + SPIRV, None),
    ("bf16-spirv", STEPS + SPIRV, None),
    ("level-zero-headers-missing", OPTIMIZER + "a.c:3: fatal error: ze_api.h: No such file or directory\n", 1),
    ("level-zero-headers-missing", "fatal error C1083: Cannot open include file: 'level_zero/ze_api.h'\n", 1),
    ("wrong-triton", OPTIMIZER + TRACE + "RuntimeError: 0 active drivers ([]). There should only be one.\n", 1),
    ("wrong-triton", TRACE + "ModuleNotFoundError: No module named 'triton.backends'\n", 1),
    ("stale-triton-cache", STEPS + "OSError: failed to load C:\\Users\\a\\.triton\\cache\\ab12\\driver.pyd\n", 1),
    ("stale-triton-cache", "zeModuleCreate: module build: ZE_RESULT_ERROR_INVALID_NATIVE_BINARY\n", 1),
    ("bitsandbytes-without-xpu", "The installed version of bitsandbytes was compiled without GPU support.\n", 1),
    (
        "bitsandbytes-without-xpu",
        TRACE + "RuntimeError: None of the available devices `available_devices = {'xpu'}` are supported by the "
        "bitsandbytes version you have installed\n",
        1,
    ),
    (
        "warmup-out-of-memory",
        LOAD + TRACE + '  File "modeling_utils.py", line 5899, in caching_allocator_warmup\n'
        "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 14.20 GiB. GPU 0 has a total capacity of "
        "18.20 GiB of which 17.90 GiB is free.\n",
        1,
    ),
    (
        "single-allocation-limit",
        STEPS + "RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! Tried to "
        "allocate 6.32 GiB\n",
        1,
    ),
    ("single-allocation-limit", "RuntimeError: level_zero backend: UR_RESULT_ERROR_INVALID_BUFFER_SIZE\n", 1),
    (
        "allocation-near-ceiling",
        LOAD + "torch.OutOfMemoryError: XPU out of memory. Tried to allocate 16.00 GiB. GPU 0 has a total capacity "
        "of 16.48 GiB of which 16.07 GiB is free.\n",
        1,
    ),
    ("cache-out-of-memory", CACHE + TRACE + OOM, 1),
    ("cache-out-of-memory", CACHE + "Killed\nMemoryError\n", 137),
    ("out-of-memory", STEPS + TRACE + OOM, 1),
    ("out-of-memory", STEPS + "RuntimeError: level_zero backend failed: UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY\n", 1),
    ("device-lost", STEPS + "RuntimeError: level_zero backend failed: 20 (UR_RESULT_ERROR_DEVICE_LOST)\n", 1),
    ("killed-by-system", STEPS, 137),
    ("killed-by-system", STEPS + "Killed\n", None),
    ("killed-by-system", OPTIMIZER, -9),
    (
        "free-memory-unknown",
        LOAD + "RuntimeError: The device (Intel(R) Arc(TM) 140V GPU) doesn't support querying the available free "
        "memory.\n",
        1,
    ),
    (
        "free-memory-frozen",
        "".join(f"step {n}: loss=0.5 xpu memory: {9 + n / 10:.2f} GB free: 15.90 GiB\n" for n in (1, 3, 2, 4, 3, 5)),
        None,
    ),
    ("memory-grows", "".join(f"step {n}: loss=0.5 xpu memory: {9 + n / 10:.2f} GB\n" for n in range(30)), None),
    ("torch-without-xpu", TRACE + "AttributeError: module 'torch' has no attribute 'xpu'\n", 1),
    ("torch-without-xpu", TRACE + "AssertionError: Torch not compiled with CUDA enabled\n", 1),
    ("torch-without-xpu", "[monitor] XPU not available - nothing to monitor.\n", None),
    ("accelerate-cuda-device", "config: accelerate_config_xpu.yaml\naccelerator.device: cuda:0\n", None),
    ("accelerate-cuda-device", "train on xpu\ndistributed_type: MULTI_GPU\n", None),
    ("memory-reads-zero", LOAD + "".join(f"step {n} loss: 0.5 xpu memory: 0.00 GB\n" for n in range(1, 8)), None),
    ("nan-gradients", STEPS + "step 4 loss: 0.51 grad_norm: nan\n", None),
    ("nan-gradients", "steps:   2%|2 | 20/1000 [01:00<50:00, avr_loss=nan]\n", None),
    ("nan-gradients", "fit 30/200  loss nan (smooth 0.3)  lr 1e-4\n", None),
    (
        "mixed-dtypes-in-attention",
        OPTIMIZER + TRACE + "RuntimeError: Expected query, key, and value to have the same dtype, but got query.dtype: "
        "float key.dtype: float and value.dtype: c10::BFloat16 instead.\n",
        1,
    ),
    ("mixed-dtypes-in-attention", TRACE + "RuntimeError: expected scalar type BFloat16 but found Float\n", 1),
    (
        "mixed-dtypes-in-attention",
        TRACE + "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float\n",
        1,
    ),
    ("machine-rebooted", STEPS + "note: machine rebooted unexpectedly at 03:12\n", None),
    ("machine-rebooted", STEPS + "Display driver igfx stopped responding and has recovered.\n", None),
    (
        "ipex-retired",
        "ERROR! Intel(R) Extension for PyTorch* needs to work with PyTorch 2.8.*, but PyTorch 2.10.0 is found.\n",
        1,
    ),
    ("dataset-without-split", TRACE + 'KeyError: "Invalid key: 0. Please first select a split."\n', 1),
    ("dataset-without-split", TRACE + "KeyError: Invalid key: 0\n", 1),
    ("prompt-embed-key", CACHE + TRACE + "KeyError: 'prompt_embed'\n", 1),
    (
        "cache-of-another-resolution",
        OPTIMIZER + TRACE + '  File "transformer_qwenimage.py", line 90, in apply_rotary_emb_qwen\n'
        "RuntimeError: The size of tensor a (2016) must match the size of tensor b (4608)\n",
        1,
    ),
    (
        "cache-torn",
        TRACE + '  File "cache_manager.py", line 80, in load_cache\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n",
        1,
    ),
    ("cache-missing", "ValueError: cache directory outputs/a/cache is empty\n", 1),
    ("cache-missing", "error: no cache in outputs/a/cache: manifest.json is missing\nnext: finetune cache\n", 1),
    ("cache-missing", "ERROR no cached latents found for the dataset\n", 1),
    (
        "config-key-refused",
        TRACE + "pydantic_core._pydantic_core.ValidationError: 1 validation error for Config\nmodel.lora.dtype\n"
        "  Extra inputs are not permitted [type=extra_forbidden, input_value='float32']\n",
        1,
    ),
    ("step-guard-missing", "max_train_steps: 5\n" + "".join(f"global_step={n} loss=0.5\n" for n in range(1, 9)), None),
    (
        "epoch-break-missing",
        "".join(f"saved checkpoint-last-{n}-5-last\n" for n in range(3)),
        0,
    ),
    ("no-checkpoint", "warning: checkpointing_steps (500) is greater than max_train_steps (100)\n", 0),
    ("no-checkpoint", STEPS + "no checkpoint was written\n", 1),
    ("died-while-loading", LOAD, 1),
    ("died-in-cache", CACHE, 1),
    ("died-in-training", STEPS, 1),
    ("vars-bat-not-found", "'vars.bat' is not recognized as an internal or external command,\n", 1),
    ("checkout-invalid-path", "error: invalid path 'docs/a:b.png'\nfatal: unable to checkout working tree\n", 128),
    ("hub-sign-in", TRACE + "    login(os.environ['HF_TOKEN'])\nKeyError: 'HF_TOKEN'\n", 1),
)  # fmt: skip

OURS = (
    "run        outputs/demo/v1 (full), from step 0\ntrains     LoRA rank 16 on 40 linears\n"
    "device     xpu, Intel Arc 140V (as configured), compute bf16, adapter fp32\n"
    "memory     peak 12.1 GiB planned; 16.4 GiB may be filled, 90 % of the ceiling\n"
    "length     200 steps, 10 epochs; checkpoints at 50, 100, 150, 200\nsleep      held off while it trains\n"
    "fit 37/200  loss 0.4012 (smooth 0.4420)  lr 9.1e-05  1.07 s/step  ETA 180 s\n"
    "checkpoint checkpoint-2-50: probe 0.2897 training, 0.3820 held out\n"
)
QFLUX = (
    "max_train_steps: 5\ncheckpointing_steps: 5\naccelerator.device: xpu:0\n" + OPTIMIZER
    + "".join(f"global_step={n} loss={0.9 - n / 9:.4f} xpu memory: 13.4{n % 2} GB\n" for n in range(1, 6))
    + "saved outputs/a/v0/checkpoint-0-5\nsaved outputs/a/v0/checkpoint-last-0-5-last\n"
)  # fmt: skip
MUSUBI = (
    "Load VAE\nLoading DiT model\ncreate LoRA network. base dim (rank): 16\nuse AdamW optimizer | {}\n"
    "running training\nsteps:  10%|#         | 100/1000 [05:00<45:00,  3.00s/it, avr_loss=0.0912]\n"
    "saving checkpoint: output/a-000100.safetensors\nsteps: 100%|####| 1000/1000 [50:00<00:00]\nmodel saved.\n"
)
SIMPLETUNER = (
    "INFO:helpers.caching: Precomputing the VAE cache\nINFO Loading transformer\nINFO Creating LoRA adapter\n"
    "INFO Using optimizer_type: adamw_bf16\nINFO Running training\nStep 10/100 train_loss=0.0712 grad_norm=0.0423\n"
    "INFO Error correction of EMA is on; nothing infinite here\nINFO Training is complete\n"
)
# name: log, exit code
HEALTHY: dict[str, tuple[str, int | None]] = {
    "ours, at work": (OURS, None),
    "ours, done": (OURS + "outputs/demo/v1: completed, stopped at step 200 as planned\nnext: gate check 07\n", 0),
    "ours, loading": ("load the denoiser\n", None),
    "ours on a cpu reads no memory": ("device     cpu, x86_64\n" + "step 1 loss 0.3 alloc 0.0\n" * 9, None),
    "ours, cuda": ("device     cuda, NVIDIA H200\nxpu: absent\n" + OURS.partition("\n")[2].replace("xpu,", "cuda,"), 0),
    "ours, a cache": ("encode the samples\ncache 35/35  ETA 0 s\nbuilt 35\nnext: gate check 07 --phase cache\n", 0),
    "ours, stopped by Ctrl-C": (OURS + "stopping: a resumable checkpoint is written\n", 130),
    "qflux, done": (QFLUX, 0),
    "qflux, not a word of an end": (QFLUX, None),
    "qflux, cache": (CACHE + "caching 35/35\n", 0),
    "musubi-tuner, done": (MUSUBI, 0),
    "musubi-tuner, at work": (MUSUBI.partition("saving")[0], None),
    "SimpleTuner, done": (SIMPLETUNER, 0),
    "8-bit and at its first steps": (STEPS, None),
    "torch's AdamW at the first step": (OPTIMIZER.replace("bitsandbytes.optim.Adam8bit", "torch.optim.AdamW"), None),
    "words that only sound like it": (
        OURS + "caption: a robot out of paint; killed time; a nan bread; device found; rope bridge\n"
        "triton 3.6 found, spirv translator ok\nfree memory 12.00 GiB\ncache folder outputs/cache has 35 entries\n",
        None,
    ),
    "memory that wanders": ("".join(f"step {n} loss: 0.5 xpu memory: 9.{n % 3} GB\n" for n in range(1, 40)), None),
    "memory that settles": ("".join(f"step {n} loss: 0.5 alloc {9 + min(n, 4)}.0\n" for n in range(1, 40)), None),
    "reads zero before the first step": (LOAD + "xpu memory: 0.00 GB\n" * 8, None),
    "one checkpoint per step number": ("".join(f"saved checkpoint-last-{n}-{5 * n}-last\n" for n in range(4)), 0),
    "a CUDA machine without XPU": ("XPU is not available, using CUDA\n" + QFLUX.replace("xpu:0", "cuda:0"), 0),
    "nothing": ("", None),
}  # fmt: skip


def log_of(text: str, code: int | None) -> Log:
    return Log(lines=tuple(logs.numbered("train.log", text.splitlines())), exit_code=code)


def named(text: str, code: int | None) -> list[str]:
    return [match.fault.id for match in library.name(log_of(text, code))]


@pytest.mark.parametrize("index", range(len(FAULTY)), ids=lambda index: f"{index}-{FAULTY[index][0]}")
def test_a_faulty_log_names_its_fault_and_no_other(index: int) -> None:
    wanted, text, code = FAULTY[index]
    assert named(text, code) == [wanted]


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_log_names_nothing(name: str) -> None:
    assert named(*HEALTHY[name]) == []


def test_precision_and_recall() -> None:
    """Over all samples: each named right, nothing named in vain. 65 faulty logs of 40 faults, 22 healthy."""
    right = sum(wanted in named(text, code) for wanted, text, code in FAULTY)
    said = sum(len(named(text, code)) for _, text, code in FAULTY)
    vain = sum(len(named(*sample)) for sample in HEALTHY.values())
    assert (right, said, vain) == (len(FAULTY), len(FAULTY), 0)
    assert (len(FAULTY), len({wanted for wanted, _, _ in FAULTY}), len(HEALTHY)) == (65, 40, 22)


def test_every_fault_has_a_log() -> None:
    ids = [fault.id for fault in library.FAULTS]
    assert len(set(ids)) == len(ids)
    assert {wanted for wanted, _, _ in FAULTY} == set(ids)


@pytest.mark.parametrize("fault", library.FAULTS, ids=lambda fault: fault.id)
def test_a_row_is_whole(fault: Any) -> None:
    assert fault.title and fault.cause.endswith(".") and fault.mend and fault.sources
    assert fault.silent or fault.patterns or fault.detect
    assert set(fault.stages) <= set(logs.ORDER) and set(fault.covers) <= {item.id for item in library.FAULTS}
    for pattern in (*fault.patterns, *fault.also, *fault.unless):
        re.compile(pattern)
    text = " ".join((fault.title, fault.cause, *fault.mend))
    assert text.isascii()


def test_the_commands_that_mend_are_ours(parse_command: Any) -> None:
    for fault in library.FAULTS:
        for line in fault.mend:
            if (command := advice.command_in(line)) and "CHECKOUT" not in command:
                parse_command(re.split(" with ", command)[0])


# ---- a process that vanished, by where its log stops

STOPS = (
    ("start", "", [], []),
    ("load", LOAD, [], ["died-while-loading"]),
    ("encode", CACHE, [], ["died-in-cache"]),
    ("adapter", ADAPTER, [], []),
    ("optimizer", OPTIMIZER, ["died-at-first-step"], ["died-at-first-step"]),
    ("step", STEPS, [], ["died-in-training"]),
    ("done", MUSUBI, [], []),
)


@pytest.mark.parametrize(("stage", "text", "unknown", "failed"), STOPS, ids=[row[0] for row in STOPS])
def test_where_a_log_stops(stage: str, text: str, unknown: list[str], failed: list[str]) -> None:
    assert log_of(text, None).stage == stage
    assert (named(text, None), named(text, 0), named(text, 1), named(text, 130)) == (unknown, [], failed, [])


def test_a_traceback_is_no_silence() -> None:
    for text in (LOAD, CACHE, OPTIMIZER, STEPS):
        assert named(text + TRACE + "ValueError: odd\n", 1) == []


def test_the_last_line_that_shows_it_is_the_evidence() -> None:
    (match,) = library.name(log_of(STEPS + OOM + "retry\n" + OOM, 1))
    assert match.line == Line("train.log:9", OOM.strip()) and match.note == ""
