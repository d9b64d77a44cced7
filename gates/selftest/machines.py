"""What probes and one step record on a healthy machine: evidence 01, 03 and 05 of a device."""

from typing import Any

PACKAGES = {
    "python": "3.11.9", "torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.24.0", "peft": "0.21.2",
    "accelerate": "1.15.0", "bitsandbytes": "0.50.2", "safetensors": "0.8.0", "numpy": "2.4.6",
}  # fmt: skip
FINDING = {"status": "ok", "seconds": 1.0, "exit": 0, "reason": ""}
PYTHON = {
    "version": "3.11.9", "minor": "3.11", "implementation": "CPython", "bits": 64, "environment": True
}  # fmt: skip
BOUNDS = {
    "torch": ">=2.9,<3", "diffusers": ">=0.42,<0.43", "transformers": ">=5.17,<6", "peft": ">=0.21,<0.22",
    "accelerate": ">=1.13,<2", "bitsandbytes": ">=0.48.2,<0.51", "safetensors": ">=0.5",
}  # fmt: skip
BUILDS = {"cpu": "2.13.0+cpu", "xpu": "2.13.0+xpu", "cuda": "2.13.0+cu128"}
SEEN = {
    "xpu": {
        "name": "Intel(R) Arc(TM) 140V GPU (16GB)", "total_gib": 16.48, "driver": "1.6.34666",
        "integrated": True, "device_id": "64a0",
    },
    "cuda": {
        "name": "NVIDIA H200", "total_gib": 139.8, "driver": None, "integrated": False, "device_id": None
    },
}  # fmt: skip
ADAPTERS = {
    "xpu": {
        "name": "Intel(R) Arc(TM) 140V GPU (16GB)", "vendor": "intel", "kind": "integrated",
        "xpu_family": True, "pci": "8086:64a0", "driver": "display driver",
        "driver_version": "32.0.101.6987", "memory_gib": None, "problem": 0,
    },
    "cuda": {
        "name": "NVIDIA H200", "vendor": "nvidia", "kind": "card", "xpu_family": False, "pci": "10de:2335",
        "driver": "nvidia", "driver_version": "570.86.15", "memory_gib": 140.4, "problem": None,
    },
}  # fmt: skip


def torch_data(device: str) -> dict[str, Any]:
    seen = {
        kind: {"available": kind == device, "devices": [SEEN[kind]] if kind == device else []}
        for kind in SEEN
    }
    built = {"xpu": "20260000" if device == "xpu" else None, "cuda": "12.8" if device == "cuda" else None}
    return {**FINDING, "version": BUILDS[device], "built": {**built, "hip": None}, **seen}


def host_data(device: str) -> dict[str, Any]:
    """A 32 GB AI PC for xpu, a Linux server for the others."""
    windows = device == "xpu"
    return {
        "system": {
            "name": "Windows" if windows else "Linux", "release": "11" if windows else "6.8.0",
            "build": 26100 if windows else None, "machine": "AMD64" if windows else "x86_64",
        },
        "python": PYTHON, "ram_gib": 31.6, "ram_limit_gib": None,
        "adapters": [ADAPTERS[device]] if device in ADAPTERS else [],
        "memory": {"share_percent": 57 if windows else None, "kernel_limit_gib": None},
        "torch": torch_data(device),
        "base": {
            "reference": "models/base", "local": True, "source": "the folder's weights",
            "components": {"transformer": {"parameters": 256, "disk_gib": 0.000001}},
        },
        "disk": [
            {"place": "workspace", "free_gib": 50.0, "volume": "a"},
            {"place": "model cache", "free_gib": 50.0, "volume": "a"},
        ],
        "long_paths": True if windows else None,
        "probes": {"powershell" if windows else "lspci": FINDING},
    }  # fmt: skip


def environment_data(device: str) -> dict[str, Any]:
    installed = {**PACKAGES, "torch": BUILDS[device]}
    tritons = {
        "xpu": [{"name": "triton-xpu", "version": "3.7.1"}],
        "cuda": [{"name": "triton", "version": "3.7.0"}],
    }
    return {
        "device": device, "python": PYTHON,
        "packages": [{"name": name, "bounds": b, "version": installed[name]} for name, b in BOUNDS.items()],
        "torch": torch_data(device), "tritons": tritons.get(device, []),
        "quantizer": {
            **FINDING, "device": device, "dequantize_error": 0.0916,
            "quantize_error": None if device == "cpu" else 0.0916,
        },
        "imports": {**FINDING, "modules": dict.fromkeys(BOUNDS, "")},
        "names": {
            **FINDING, "packages": [{"name": n, "ours": True, "where": ""} for n in ("gates", "runtime")],
            "distributions": [], "scripts": [],
        },
        "ipex": None,
    }  # fmt: skip


ADAPTED_FROM = {
    "hardware.device": "auto", "optimizer.class_path": "auto", "train.gradient_checkpointing": True,
    "train.mixed_precision": "auto",
}  # fmt: skip


def adaptation_data(device: str) -> dict[str, Any]:
    """All probes ok; on the CPU one step in fp32, elsewhere two in bf16."""
    probes = ("bf16-kernel", "adam8bit-step", "nf4-layer", "masked-sdpa", "attention-backends", "compile")
    bases = ("embedded base",) if device == "cpu" else ("embedded base", "block of true width")
    devices = torch_data(device).get(device, {}).get("devices", [])
    return {
        "device": {"type": device, "name": "a device", "driver": devices[0]["driver"] if devices else None},
        "probes": [
            {
                "name": name, "status": "ok", "seconds": 0.1, "reason": "", "error": 0.003, "tolerance": 0.03,
                "facts": {}, "fallback": None,
            }
            for name in probes
        ],
        "choices": {
            "train.mixed_precision": {
                "value": "no" if device == "cpu" else "bf16", "reason": "it works", "probe": "bf16-kernel",
            },
            "optimizer.class_path": {
                "value": "torch.optim.AdamW", "reason": "small", "probe": "adam8bit-step"
            },
        },
        "step_parity": [parity_step(what, device) for what in bases],
        "versions": {**PACKAGES, "torch": BUILDS[device]},
    }  # fmt: skip


def parity_step(what: str, device: str) -> dict[str, Any]:
    compute, error = ("float32", 0.0) if device == "cpu" else ("bfloat16", 0.01)
    names = ("base", "adapter", "activations", "gradients", "optimizer_state")
    return {
        "what": what, "status": "ok", "reason": "", "seconds": 1.0, "samples": 2, "masked": True,
        "checkpointing": True, "optimizer": "torch.optim.AdamW", "compute": compute,
        "loss_device": 2.0 * (1 + error), "loss_reference": 2.0, "loss_error": error, "gradient_norm": 1.5,
        "gradient_error": error, "update_norm": 0.3, "update_error": error,
        "devices": {name: [device] for name in names},
        "dtypes": {
            "base": [compute], "adapter": ["float32"], "optimizer_state": ["float32"], "attention": [[compute]]
        },
        "memory": {
            "base_gib": 0.01, "alloc_gib": 0.0 if device == "cpu" else 0.02,
            "peak_gib": 0.0 if device == "cpu" else 0.03,
        },
    }  # fmt: skip
