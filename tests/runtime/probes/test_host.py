"""The host's evidence from recorded outputs of both systems, and of this machine."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import UserError
from runtime.probes import base, host
from runtime.probes.child import Outcome
from runtime.workspace import Workspace

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
    """What is made of a shard stands for it; one that is not yet made has to be fetched, but for what is here."""
    whole = base.measured("some/base", base_folder).components["transformer"]
    size = round(whole.disk_gib * 2**30) // 2
    shard = {"size": size, "tensors": {"w": {"shape": [whole.parameters // 4, 2]}}}
    _write(tmp_path / "base/transformer/fetched.json", {"shards": {"one": shard, "two": shard}})
    for path, missing in (
        (None, 2 * size),
        ("base/transformer/one", size),
        ("base/transformer/.two.part", size - 2**20),
        ("nf4/transformer/two", 0),
    ):
        if path is not None:
            _write(tmp_path / path, None)
        found = base.measured("some/base", tmp_path / "base", nf4=tmp_path / "nf4")
        (transformer,) = found.components.values()
        assert (transformer.parameters, transformer.disk_gib) == (whole.parameters, whole.disk_gib)
        assert transformer.missing_gib == round(missing / 2**30, 6), path
        assert found.local is (missing == 0) and ("yet to be fetched" in found.source) is (missing > 0)


def _write(path: Path, document: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(2**20) if document is None else json.dumps(document).encode("utf-8"))


INDEX = "diffusion_pytorch_model.safetensors.index.json"
PUBLISHED = base.published("some/base").components


@pytest.fixture
def begun(base_folder: Path, tmp_path: Path) -> Path:
    """A denoiser in two shards, the second not here; a VAE, whole; and a text encoder that is only named."""
    folder = tmp_path / "begun"
    shutil.copytree(base_folder / "vae", folder / "vae")
    _write(
        folder / "model_index.json", dict.fromkeys(["_class_name", "scheduler", *PUBLISHED], "of this class")
    )
    (folder / "transformer").mkdir()
    first = base_folder / "transformer" / INDEX.removesuffix(".index.json")
    shutil.copyfile(first, folder / "transformer" / "one.safetensors")
    index = {"metadata": {"total_size": 3 * first.stat().st_size}}
    shards = {"a": "one.safetensors", "b": "two.safetensors"}
    _write(folder / "transformer" / INDEX, {**index, "weight_map": shards})
    return folder


def test_a_base_that_was_fetched_in_part(begun: Path, base_folder: Path) -> None:
    """Headers of shards that are here tell how wide its numbers are; without one it is bf16, as published."""
    found = base.measured("some/base", begun)
    one = base.measured("some/base", base_folder).components
    transformer = found.components["transformer"]
    assert not found.local
    assert (transformer.disk_gib, transformer.missing_gib) == pytest.approx(
        (3 * one["transformer"].disk_gib, 2 * one["transformer"].disk_gib), abs=2e-6
    )
    assert transformer.parameters == pytest.approx(3 * one["transformer"].parameters)
    assert found.components["vae"] == one["vae"] and one["vae"].missing_gib == 0
    assert found.components["text_encoder"] == PUBLISHED["text_encoder"]
    (begun / "transformer" / "one.safetensors").unlink()
    nothing = base.measured("some/base", begun).components["transformer"]
    assert nothing.missing_gib == nothing.disk_gib == transformer.disk_gib
    taken = base.measured("some/base", begun, whole=frozenset({"transformer"}))  # ready-made, by step 06
    assert taken.components["transformer"].missing_gib == 0 and not taken.local  # others are yet to come
    assert nothing.parameters == pytest.approx(nothing.disk_gib * 2**29, rel=1e-3)
    _write(begun / "transformer" / INDEX, {"weight_map": {"a": "one.safetensors"}})
    assert base.measured("some/base", begun).components["transformer"] == PUBLISHED["transformer"]


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_index_of_a_base_is_an_error(begun: Path, text: str) -> None:
    (begun / "model_index.json").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"model_index\.json (is not JSON|holds no object)"):
        base.measured("some/base", begun)


@pytest.mark.parametrize(
    ("where", "fresh", "rest_in", "from_hub"),
    [
        ("step 06", False, "workspace", True),
        ("workspace", False, "workspace", False),
        ("cache", False, "model cache", True),
        ("cache", True, "model cache", True),
    ],
)
def test_where_the_rest_of_a_base_comes_to(
    begun: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    fresh: bool,
    rest_in: str,
    from_hub: bool,
) -> None:
    workspace = Workspace(tmp_path / "work")
    reference = "some/base"
    if fresh:
        (begun / "model_index.json").unlink()
    if where == "step 06":
        _write(begun / "fetch.json", {})
    if where != "cache":
        shutil.move(begun, workspace.root / reference)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **named: str(begun))
    found = base.collect(workspace, reference)
    assert (found.local, found.rest_in, found.from_hub) == (False, rest_in, from_hub)
    assert (found == base.published(reference)) is fresh


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
