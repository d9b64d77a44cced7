"""Parsers on recorded outputs: recorded/README.md says where those are from."""

from pathlib import Path

import pytest

from runtime.probes import adapters
from runtime.probes.parsers import linux, nvidia, requirements, windows

RECORDED = Path(__file__).resolve().parent / "recorded"


def _read(name: str) -> str:
    return (RECORDED / name).read_text(encoding="utf-8")


# name of the recording: [(adapter, kind, offered XPU, own GiB)], share, long paths
WINDOWS = {
    "lunar-lake": ([("Intel(R) Arc(TM) 140V GPU (16GB)", "integrated", True, None)], 57, True),
    "meteor-lake": ([("Intel(R) Arc(TM) Graphics", "integrated", True, None)], None, False),
    "b580": (
        [
            ("Intel(R) UHD Graphics 770", "integrated", False, None),
            ("Intel(R) Arc(TM) B580 Graphics", "card", True, 12.0),
        ],
        None,
        True,
    ),
    "nvidia": (
        [
            ("AMD Radeon(TM) 780M", "card", False, None),
            ("NVIDIA GeForce RTX 4070 Laptop GPU", "card", False, 7.996),
        ],
        None,
        False,
    ),
    "none": ([], None, True),
    "no-driver": ([("Microsoft Basic Display Adapter", "integrated", True, None)], None, True),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str) -> None:
    expected, share, long_paths = WINDOWS[name]
    facts = windows.parse(_read(f"windows-{name}.json"))
    seen = [(item.name, item.kind, item.xpu_family, item.memory_gib) for item in facts.adapters]
    assert seen == expected
    assert (facts.share_percent, facts.long_paths) == (share, long_paths)
    assert all(item.problem == 0 and item.driver_version for item in facts.adapters)


def test_windows_with_a_byte_order_mark() -> None:
    assert windows.parse("\ufeff" + _read("windows-lunar-lake.json")).share_percent == 57


@pytest.mark.parametrize("text", ["", "Access is denied.", "[]", "{}", "null", '{"video": '])
def test_what_is_no_answer_of_powershell(text: str) -> None:
    with pytest.raises(ValueError):
        windows.parse(text)


def test_the_script_survives_as_one_argument() -> None:
    assert '"' not in windows.SCRIPT
    for name in (windows.SHARE_VALUE, windows.MEMORY_VALUE, "LongPathsEnabled", "ConfigManagerErrorCode"):
        assert name in windows.SCRIPT


def test_uevent() -> None:
    text = _read("linux-lunar-lake/sys/class/drm/card0/device/uevent")
    facts = linux.parse_uevent(text)
    assert (facts["DRIVER"], facts["PCI_ID"], facts["PCI_SLOT_NAME"]) == ("xe", "8086:64A0", "0000:00:02.0")
    assert linux.parse_uevent("MAJOR\n\n") == {}


LSPCI = {
    "lunar-lake": {
        "0000:00:02.0": ("8086:64a0", "Intel Corporation Lunar Lake [Intel Arc Graphics 130V / 140V]")
    },
    "a770": {
        "0000:00:02.0": ("8086:a780", "Intel Corporation Raptor Lake-S GT1 [UHD Graphics 770]"),
        "0000:03:00.0": ("8086:56a0", "Intel Corporation DG2 [Arc A770]"),
    },
    "h200": {"0000:19:00.0": ("10de:2335", "NVIDIA Corporation GH100 [H200 SXM 141GB]")},
    "none": {"0000:00:01.0": ("1af4:1050", "Red Hat, Inc. Virtio 1.0 GPU")},
}


@pytest.mark.parametrize("name", LSPCI)
def test_lspci_lists_display_controllers_only(name: str) -> None:
    assert linux.parse_lspci(_read(f"linux-{name}/lspci.txt")) == LSPCI[name]


def test_limits() -> None:
    assert linux.parse_pages_limit("4063232\n") == 15.5
    assert linux.parse_pages_limit("0\n") is linux.parse_pages_limit("") is None
    assert linux.parse_bytes_limit("8589934592\n") == 8.0
    assert linux.parse_bytes_limit("max\n") is None


def test_nvidia() -> None:
    (card,) = nvidia.parse(_read("linux-h200/nvidia-smi.csv"))
    assert (card.name, card.driver_version, card.slot) == ("NVIDIA H200", "570.86.15", "0000:19:00.0")
    assert card.memory_gib == pytest.approx(140.401)
    assert nvidia.parse("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n") == []
    assert nvidia.parse("A, B, [N/A], 00000000:01:00.0\n") == []


@pytest.mark.parametrize(
    ("pci", "kind", "offered"),
    [
        ("8086:64a0", "integrated", True),  # Lunar Lake
        ("8086:7d55", "integrated", True),  # Meteor Lake
        ("8086:7d51", "integrated", True),  # Arrow Lake
        ("8086:b080", "integrated", True),  # Panther Lake
        ("8086:e20b", "card", True),  # B580
        ("8086:56a0", "card", True),  # A770
        ("8086:0bd5", "card", True),  # Data Center Max
        ("8086:4905", "card", False),  # DG1
        ("8086:9a49", "integrated", False),  # Tiger Lake
        ("8086:a7a0", "integrated", False),  # Raptor Lake
        ("8086:46a6", "integrated", False),  # Alder Lake
        ("10de:2820", "card", False),
        ("1002:15bf", "card", False),
    ],
)
def test_pci_numbers(pci: str, kind: str, offered: bool) -> None:
    made = adapters.make(pci=pci)
    assert (made.kind, made.xpu_family) == (kind, offered)


def test_bounds() -> None:
    lines = [
        "click<9,>=8.1",
        "safetensors>=0.5",
        "torch<3,>=2.9; extra == 'train'",
        'bitsandbytes<0.51,>=0.48.2; extra == "train"',
        "intel_extension.for-pytorch<2.9; (sys_platform == 'linux') and extra == 'ipex'",
        "accelerate[fp8] (>=1.13) ; extra == 'train'",
        "@ nonsense",
    ]
    assert requirements.bounds(lines, "train") == {
        "click": ">=8.1,<9",
        "safetensors": ">=0.5",
        "torch": ">=2.9,<3",
        "bitsandbytes": ">=0.48.2,<0.51",
        "accelerate": ">=1.13",
    }
