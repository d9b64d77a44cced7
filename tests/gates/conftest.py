"""Healthy workspaces, made once and copied for each test that spoils one."""

import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def load_workspaces() -> ModuleType:
    """tests/gates/workspaces.py, under one name whichever conftest asks: tests are no package."""
    load_module("synthetic_nf4", "nf4_folders.py")
    return load_module("synthetic_workspaces", "workspaces.py")


def load_module(name: str, file: str) -> ModuleType:
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "gates" / file
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def workspaces() -> ModuleType:
    return load_workspaces()


@pytest.fixture(scope="session")
def _templates(tmp_path_factory: pytest.TempPathFactory, workspaces: ModuleType) -> dict[str, Path]:
    roots = {device: tmp_path_factory.mktemp(device) / "ws" for device in ("cpu", "xpu", "cuda")}
    for device, root in roots.items():
        workspaces.healthy(root, device)
    return roots


@pytest.fixture
def make(_templates: dict[str, Path], tmp_path: Path, workspaces: ModuleType) -> Callable[..., Any]:
    """make(device="cpu") -> a fresh healthy workspace."""

    def copy(device: str = "cpu") -> Any:
        root = tmp_path / "ws"
        shutil.copytree(_templates[device], root)
        return workspaces.Made(root)

    return copy


@pytest.fixture
def made(make: Callable[..., Any]) -> Any:
    return make()
