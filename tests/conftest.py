"""How the tests are shared out among workers, and the base that most of them work with."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runtime import demo

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

BASE = Path(demo.__file__).parent / "base"
TOGETHER = ("tests/test_series.py", "tests/skills/test_wine.py")  # what they share takes long to make


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadScopeScheduling":
    """Each test for itself, the files of TOGETHER whole. Groups of pytest-xdist 3.8 are lost under pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((file for file in TOGETHER if nodeid.startswith(file)), nodeid)

    return Scheduling(config, log)


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded base with the first two blocks of its denoiser: a step takes a few milliseconds."""
    from safetensors.torch import load_file, save_file

    root = tmp_path_factory.mktemp("nano") / "base"
    shutil.copytree(BASE, root)
    config = json.loads((root / "transformer" / "config.json").read_text(encoding="utf-8"))
    (root / "transformer" / "config.json").write_text(
        json.dumps({**config, "num_layers": 2}), encoding="utf-8"
    )
    weights = root / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    kept = ("transformer_blocks.0.", "transformer_blocks.1.")
    save_file(
        {n: t for n, t in tensors.items() if not n.startswith("transformer_blocks.") or n.startswith(kept)},
        weights,
        metadata={"format": "pt"},
    )
    return root
