"""config.yaml -> Config, or a ConfigError with one line for each thing that is wrong."""

import copy
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from runtime import files
from runtime.config.document import REMEDY, read_document
from runtime.config.model import Config
from runtime.errors import ConfigError

UNIONS = (Union, UnionType)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    raw: dict[str, Any]
    """The YAML document as parsed, JSON types only, before defaults."""
    digest: str
    """Document digest of `raw`."""
    config: Config


def load_config(path: Path) -> Loaded:
    try:
        source = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing", remedy="finetune recommend") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}", remedy="finetune recommend") from error
    raw, problems = read_document(source)
    if problems:
        flagged = [problem.key for problem in problems]
        rest = [line for key, line in _validate(raw)[1] if not any(name.startswith(key) for name in flagged)]
        raise _refusal([*map(str, problems), *rest])
    return Loaded(raw=raw, digest=files.document_digest(raw), config=parse(raw))


def apply_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `raw` with each dotted key set to its value."""
    result = copy.deepcopy(dict(raw))
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        section = result
        for name in parents:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        section[last] = value
    return result


def parse(raw: Mapping[str, Any]) -> Config:
    config, problems = _validate(raw)
    if config is None:
        raise _refusal([line for _, line in problems])
    return config


def _validate(raw: Mapping[str, Any]) -> tuple[Config | None, list[tuple[str, str]]]:
    """The config, or (dotted key, line) of each problem."""
    try:
        return Config.model_validate(dict(raw)), []
    except ValidationError as error:
        return None, _lines(error.errors(include_url=False))


def _lines(errors: list[ErrorDetails]) -> list[tuple[str, str]]:
    """Dotted key and line of each; of a key that takes several kinds of value, one that names them all."""
    found: list[tuple[str, str]] = []
    for item in errors:
        location = _without_kind(item["loc"])
        key, line = _dotted(location), _line({**item, "loc": location})
        if location != item["loc"] and found and found[-1][0] == key:
            line = f"{found.pop()[1]}, or {line.partition(', expected ')[2]}"
        found.append((key, line))
    return found


def _without_kind(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic puts the kind of value that it tried behind a key that takes several."""
    for end in range(1, len(location)):
        section = _section(location[: end - 1])
        field = section.model_fields.get(str(location[end - 1])) if section else None
        kinds = get_args(field.annotation) if field and get_origin(field.annotation) in UNIONS else ()
        if len([kind for kind in kinds if kind is not type(None)]) > 1:
            return location[:end]
    return location


def _refusal(lines: list[str]) -> ConfigError:
    return ConfigError("\n".join(["config.yaml", *dict.fromkeys(lines)]), remedy=REMEDY)


def _line(error: ErrorDetails) -> str:
    """One problem: dotted key, what was seen, what is expected."""
    key = _dotted(error["loc"])
    kind, message, value = error["type"], error["msg"], error["input"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key; {_nearest(error['loc'])}"
    if kind == "missing":
        return f"{key}: missing, expected {_describe(error['loc'])}"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        shown = "" if isinstance(value, Mapping | BaseModel) else f"saw {_show(value)}, "
        return f"{key or 'config.yaml'}: {shown}{text}"
    expected = message.removeprefix("Input should be ").replace("dictionary or instance of", "mapping for")
    return f"{key}: saw {_show(value)}, expected {expected}{_hint(kind, value)}"


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return (text if len(text) <= 60 else text[:57] + "...") + (" (text)" if isinstance(value, str) else "")


def _hint(kind: str, value: Any) -> str:
    if isinstance(value, str) and kind in ("float_type", "int_type"):
        try:
            return f"; without quotes, as in {float(value)!r}" if kind == "float_type" else "; without quotes"
        except ValueError:
            return ""
    return ""


def _nearest(location: tuple[int | str, ...]) -> str:
    """The same name in another section, else the known key that looks most alike, of this section if it can be."""
    name = str(location[-1])
    section = _section(location[:-1])
    own = list(section.model_fields) if section else []
    elsewhere = {key.rsplit(".", 1)[-1]: key for key in known_keys()}
    if name in elsewhere:
        return f"did you mean {elsewhere[name]}?"
    close = difflib.get_close_matches(name, own, n=1)
    if close:
        return f"did you mean {_dotted((*location[:-1], close[0]))}?"
    far = difflib.get_close_matches(name, list(elsewhere), n=1, cutoff=0.85)
    if far:
        return f"did you mean {elsewhere[far[0]]}?"
    return "known here: " + ", ".join(own)


def _section(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    model: type[BaseModel] = Config
    for part in location:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            return None
        model = inner
    return model


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for item in get_args(annotation) if (found := _model_of(item))), None)


def _describe(location: tuple[int | str, ...]) -> str:
    section = _section(location[:-1])
    field = section.model_fields.get(str(location[-1])) if section else None
    text = field.description if field and field.description else "a value"
    return text[0].lower() + text[1:].rstrip(".")


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted name of every accepted key, sections included."""
    for name, field in model.model_fields.items():
        yield prefix + name
        inner = _model_of(field.annotation)
        if inner:
            yield from known_keys(inner, f"{prefix}{name}.")
