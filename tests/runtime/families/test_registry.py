"""Which family a folder is, and where a model lies."""

import subprocess
import sys
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
    ("pipeline", "name", "controls"),
    [
        ("QwenImageEditPipeline", "qwen-image-edit", (0, 1)),
        ("QwenImageEditPlusPipeline", "qwen-image-edit-plus", (0, 8)),
    ],
)
def test_detected_from_model_index(
    tmp_path: Path, pipeline: str, name: str, controls: tuple[int, int]
) -> None:
    model = folder(tmp_path, f'{{"_class_name": "{pipeline}"}}')
    facts = registry.facts(model)
    assert (facts.name, facts.min_controls, facts.max_controls) == (name, *controls)
    assert registry.load_family(model).facts is registry.facts(model)


def test_facts_cost_no_torch(tmp_path: Path) -> None:
    """`finetune plan`, and `finetune cache` with nothing to do, start without the seconds that it takes."""
    model = folder(tmp_path, '{"_class_name": "QwenImageEditPlusPipeline"}')
    code = (
        "import sys, pathlib, runtime.planning.architecture, runtime.families.registry as registry\n"
        "print(registry.facts(pathlib.Path(sys.argv[1])).name)\n"
        "print(sorted({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["qwen-image-edit-plus", "[]"]


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
        registry.facts(folder(tmp_path, text))
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
