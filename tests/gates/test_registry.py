from pathlib import Path

import pytest

from gates import packaged, registry, schema
from gates.verdict import STATUSES

DESIGN = {
    "02": "layout-recognised samples-enough pairs-complete images-decode captions-usable sizes-usable "
    "holdout-reserved manifest-matches-files no-duplicates captions-varied",
    "04": "schema-valid no-placeholders paths-exist cache-mandatory checkpoint-within-steps size-multiple "
    "dataset-unchanged device-matches-host memory-plan-fits",
    "05": "probes-complete fallbacks-chosen step-on-device step-parity dtypes-consistent "
    "no-cuda-only-calls step-guard-present",
}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", ["07"]),
        ("07", ["07"]),
        ("training", ["07"]),
        ("07-training", ["07"]),
        ("qwen-image-edit-aipc-finetune-07-training", ["07"]),
        ("all", ["02", "04", "07"]),
        ("01..05", ["02", "04"]),
        ("2..7", ["02", "04", "07"]),
        ("04..04", ["04"]),
    ],
)
def test_resolve(text: str, expected: list[str]) -> None:
    found = [number for number in registry.resolve(text) if number in ("02", "04", "07")]
    assert found == expected


@pytest.mark.parametrize("text", ["0", "9", "70", "", "nope", "7..2", "1..", "..", "007", "-1"])
def test_unknown(text: str) -> None:
    with pytest.raises(registry.UnknownGateError, match="there are"):
        registry.resolve(text)


@pytest.mark.parametrize("number", registry.numbers())
def test_each_gate_is_what_its_folder_says(number: str) -> None:
    gate = registry.load(number)
    assert gate.number == number and gate.skill == registry.skill_of(number)
    assert gate.skill.endswith(f"{number}-{gate.name}")
    assert set(gate.next_commands) == {None, *gate.phases}
    for spec in gate.specs:
        assert spec.measures and spec.why and spec.remedy and spec.section.startswith(number[1]), spec.id
        assert spec.phase in (gate.phases or (None,))


@pytest.mark.parametrize("number", DESIGN)
def test_no_check_of_the_design_is_missing(number: str) -> None:
    assert sorted(spec.id for spec in registry.load(number).specs) == sorted(DESIGN[number].split())


def test_data_is_found_in_checkout_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (packaged.data_dir("schemas") / "verdict.schema.json").is_file()
    package = tmp_path / "site-packages" / "gates"
    package.mkdir(parents=True)
    (package.parent / "skills").mkdir()  # somebody else's
    monkeypatch.setattr(packaged, "__file__", str(package / "packaged.py"))
    assert packaged.data_dir("skills") == package / "_data" / "skills"


def test_every_schema_is_listed_and_is_one() -> None:
    from jsonschema import Draft202012Validator

    names = {
        path.name.removesuffix(".schema.json") for path in packaged.data_dir("schemas").glob("*.schema.json")
    }
    assert names == set(schema.NAMES)
    for name in schema.NAMES:
        Draft202012Validator.check_schema(schema.load(name))


def test_statuses_are_those_of_the_schema() -> None:
    checks = schema.load("verdict")["properties"]["checks"]["items"]["properties"]
    assert set(checks["status"]["enum"]) == set(STATUSES)
