"""python -m runtime.config.schema [--check]: write schemas/config.schema.json from the typed config."""

import json
import sys
from pathlib import Path
from typing import Any

from runtime import files
from runtime.config.model import Config

ID = "https://aipc-finetune.invalid/schemas/config.schema.json"
PATH = Path(__file__).resolve().parents[2] / "schemas" / "config.schema.json"


def build_schema() -> dict[str, Any]:
    generated: dict[str, Any] = Config.model_json_schema()
    schema: dict[str, Any] = _without_titles(generated)
    return {**schema, "$id": ID, "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Config"}


def _without_titles(value: Any) -> Any:
    """Pydantic repeats each key as its title; that is no knowledge."""
    if isinstance(value, list):
        return [_without_titles(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(item)
        for key, item in value.items()
        if not (key == "title" and isinstance(item, str))
    }


def render() -> str:
    return json.dumps(build_schema(), sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def main(arguments: list[str]) -> int:
    text = render()
    if "--check" not in arguments:
        files.write_text(PATH, text)
        return 0
    if PATH.is_file() and PATH.read_bytes() == text.encode("utf-8"):
        return 0
    print(f"{PATH} is not what the typed config gives; run: python -m runtime.config.schema", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
