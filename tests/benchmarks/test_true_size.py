"""benchmarks/true_size.py as a command: what its options say is in the config, and in the cache that a fit opens."""

import functools
from pathlib import Path
from typing import Any

import pytest
import true_size

from runtime.cache import build
from runtime.config.load import load_config
from runtime.config.resolve import resolve
from runtime.demo.series import BASE
from runtime.workspace import Workspace


@pytest.mark.parametrize(
    ("words", "config", "entries"),
    [
        ((), {"model.quantize": "none", "data.processor.target_size": [64, 96]}, {(8, 12, 1, 24)}),
        (
            (
                "--controls",
                "2",
                "--quantize",
                "nf4",
                "--set",
                "train.compile=false",
                "--set",
                "data.batch_size=2",
            ),
            {"model.quantize": "nf4", "train.compile": False, "data.batch_size": 2},
            {(8, 12, 2, 24)},
        ),
        (
            ("--buckets", "2", "--tokens", "18", "33"),
            {"data.processor.enable_bucket": True},
            {(8, 12, 1, 18), (8, 12, 1, 33), (12, 8, 1, 18), (12, 8, 1, 33)},
        ),
    ],
)
def test_a_workspace_of_its_command_line(
    words: tuple[str, ...],
    config: dict[str, Any],
    entries: set[tuple[int, ...]],
    call: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Height and width of the latents, controls and tokens of each entry; `open_for_fit` refuses a wrong one."""
    workspace = Workspace(tmp_path.resolve() / "work")
    tokens = () if "--tokens" in words else ("--tokens", "24")
    call(
        true_size.main,
        str(BASE),
        str(workspace.root),
        "--size",
        "64",
        "96",
        "--device",
        "cpu",
        *tokens,
        *words,
    )
    assert capsys.readouterr().out.endswith(
        f"{workspace.root}: 4 samples; next: finetune fit --workspace {workspace.root}\n"
    )
    loaded = load_config(workspace.config_path)
    for key, value in {**config, "hardware.device": "cpu"}.items():
        assert functools.reduce(lambda found, name: found[name], key.split("."), loaded.raw) == value
    job = build.plan(workspace, resolve(workspace, loaded.config).config)
    build.open_for_fit(job)
    held = [job.store.read(want.folder) for want in job.wants]
    assert {
        (*each["target"].shape[1:], sum("control_" in name for name in each), each["prompt_embeds"].shape[0])
        for each in held
    } == entries
