"""The host's evidence from recorded outputs of both systems, and of this machine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.probes import base, host
from runtime.probes.child import Outcome

RECORDED = Path(__file__).resolve().parent / "recorded"
ABSENT = Outcome(status="absent", seconds=0.0, exit=None, reason="not there")


def _printed(path: Path) -> Outcome:
    return Outcome(status="ok", seconds=0.1, exit=0, reason="", stdout=path.read_text(encoding="utf-8"))


def test_windows_with_nvidia() -> None:
    found = host.read_windows(
        _printed(RECORDED / "windows-nvidia.json"), _printed(RECORDED / "windows-nvidia.smi.csv")
    )
    assert [(item.driver_version, item.memory_gib) for item in found.adapters] == [
        ("32.0.12011.1036", None),
        ("566.36", 7.996),
    ]


@pytest.mark.parametrize("reason", ["timeout", "failed", "absent"])
def test_a_powershell_that_does_not_answer_is_a_finding(reason: Any) -> None:
    asked = Outcome(status=reason, seconds=30.0, exit=None, reason="no answer")
    found = host.read_windows(asked, ABSENT)
    assert found.adapters == () and found.long_paths is None
    assert found.probes["powershell"].status == reason


def test_a_powershell_that_prints_something_else_is_a_finding() -> None:
    asked = Outcome(status="ok", seconds=1.0, exit=0, reason="", stdout="script execution is disabled")
    probe = host.read_windows(asked, ABSENT).probes["powershell"]
    assert probe.status == "failed" and "not JSON" in probe.reason


LINUX = {
    "lunar-lake": ([("8086:64a0", "integrated", "xe")], 15.5),
    "a770": ([("8086:a780", "integrated", "i915"), ("8086:56a0", "card", "i915")], 31.25),
    "h200": ([("10de:2335", "card", "nvidia")], None),
    "none": ([("1af4:1050", "card", "virtio-pci")], None),
}


@pytest.mark.parametrize("name", LINUX)
def test_linux(name: str) -> None:
    expected, limit = LINUX[name]
    root = RECORDED / f"linux-{name}"
    found = host.read_linux(root, _printed(root / "lspci.txt"), _printed(root / "nvidia-smi.csv"))
    assert [(item.pci, item.kind, item.driver) for item in found.adapters] == expected
    assert found.kernel_limit_gib == limit


def test_linux_without_lspci() -> None:
    found = host.read_linux(RECORDED / "linux-a770", ABSENT, ABSENT)
    assert [item.name for item in found.adapters] == ["intel GPU a780", "intel GPU 56a0"]


def test_linux_in_a_container_with_nvidia_smi_only(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("8589934592\n", encoding="utf-8")
    found = host.read_linux(tmp_path, ABSENT, _printed(RECORDED / "linux-h200" / "nvidia-smi.csv"))
    assert [(item.vendor, item.pci, item.name) for item in found.adapters] == [
        ("nvidia", None, "NVIDIA H200")
    ]
    assert found.ram_limit_gib == 8.0


def test_places_of_one_volume_share_a_letter(tmp_path: Path) -> None:
    rows = host.disk({"workspace": tmp_path, "model cache": tmp_path / "not" / "yet"})
    assert [row["volume"] for row in rows] == ["a", "a"]
    assert all(row["free_gib"] > 0 for row in rows)


def test_this_interpreter() -> None:
    assert host.python()["minor"] == f"{sys.version_info.major}.{sys.version_info.minor}"


def test_a_base_that_is_not_here_has_the_published_size() -> None:
    found = base.published("Qwen/Qwen-Image-Edit")
    assert not found.local
    assert sum(item.disk_gib for item in found.components.values()) == pytest.approx(53.7, abs=0.1)


def test_a_base_that_is_here_is_measured(base_folder: Path) -> None:
    found = base.measured("external:model", base_folder)
    assert set(found.components) == {"transformer", "text_encoder", "vae"}
    assert found.components["transformer"].parameters > 1_000_000


def test_a_base_whose_shards_are_dropped_is_as_large_as_before(base_folder: Path, tmp_path: Path) -> None:
    whole = base.measured("some/base", base_folder).components["transformer"]
    shard = {"size": round(whole.disk_gib * 2**30), "tensors": {"w": {"shape": [whole.parameters // 2, 2]}}}
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "fetched.json").write_text(
        json.dumps({"shards": {"one": shard}}), encoding="utf-8"
    )
    assert base.measured("some/base", tmp_path).components == {"transformer": whole}


@pytest.fixture
def base_folder() -> Path:
    from runtime import demo

    return Path(demo.__file__).parent / "base"


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, Path("/c")),
        ({"HF_HOME": "/h"}, Path("/h/hub")),
        ({}, Path.home() / ".cache/huggingface/hub"),
    ],
)
def test_where_the_hub_keeps_models(
    variables: dict[str, str], expected: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert base.hub_cache() == expected
