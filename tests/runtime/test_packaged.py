"""Skills lie in the wheel, or beside the packages in a checkout."""

from pathlib import Path

import pytest

from runtime import packaged


def test_in_a_checkout() -> None:
    assert packaged.skills_dir() == Path(__file__).parents[2] / "skills"


def test_in_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = tmp_path / "gates" / "_data" / "skills"
    carried.mkdir(parents=True)
    monkeypatch.setattr(packaged, "__file__", str(tmp_path / "runtime" / "packaged.py"))
    assert packaged.skills_dir() == carried
