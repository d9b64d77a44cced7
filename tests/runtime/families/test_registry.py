"""Which family a folder is, and where a model lies."""

from pathlib import Path
from typing import Any

import pytest

from runtime import files
from runtime.errors import UserError
from runtime.families import registry


def folder(tmp_path: Path, text: str | None) -> Path:
    if text is not None:
        files.write_text(tmp_path / "model_index.json", text)
    return tmp_path


@pytest.mark.parametrize(
    ("pipeline", "name"),
    [
        ("QwenImageEditPipeline", "qwen-image-edit"),
        ("QwenImageEditPlusPipeline", "qwen-image-edit-plus"),
    ],
)
def test_detected_from_model_index(tmp_path: Path, pipeline: str, name: str) -> None:
    model = folder(tmp_path, f'{{"_class_name": "{pipeline}"}}')
    assert registry.family_name(model) == name
    assert registry.load_family(model).name == name


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "it has no model_index.json"),
        ('{"_class_name": "FluxPipeline"}', "names FluxPipeline, expected one of QwenImageEditPipeline"),
        ("{}", "names None"),
        ("", "can't be read"),
        ("[1]", "can't be read"),
    ],
)
def test_anything_else_is_refused(tmp_path: Path, text: str | None, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        registry.family_name(folder(tmp_path, text))
    assert caught.value.remedy


def test_families_have_what_a_family_must_offer(tmp_path: Path) -> None:
    from runtime.families.base import Family

    members = {name for name in (*Family.__annotations__, *vars(Family)) if not name.startswith("_")}
    for pipeline in registry.PIPELINES:
        family = registry.load_family(folder(tmp_path, f'{{"_class_name": "{pipeline}"}}'))
        assert not {name for name in members if not hasattr(family, name)}


def test_a_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *given: pytest.fail("asked the hub"))
    assert registry.locate("owner/name", tmp_path) == tmp_path


def test_a_name_that_is_nowhere_is_a_user_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(name: str, **named: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"owner/name is neither a folder here .* no network") as caught:
        registry.locate("owner/name", tmp_path / "absent")
    assert caught.value.remedy.startswith("finetune init --model")


def test_a_hub_name_is_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name: str(tmp_path / name))
    assert registry.locate("owner/name", tmp_path / "absent") == tmp_path / "owner" / "name"
