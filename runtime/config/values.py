"""What the sections of the config are made of: their base, and types that no plain annotation gives."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from runtime.config.targets import PRESETS


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


def as_tuple(value: Any) -> Any:
    """YAML and JSON have lists only; the frozen model keeps tuples."""
    return tuple(value) if isinstance(value, list) else value


Text = Annotated[str, Field(min_length=1)]
Pixels = Annotated[int, Field(gt=0, le=16384)]
Size = Annotated[tuple[Pixels, Pixels], BeforeValidator(as_tuple)]
Byte = Annotated[int, Field(ge=0, le=255)]
Colour = Annotated[tuple[Byte, Byte, Byte], BeforeValidator(as_tuple)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(as_tuple)]
Number = Annotated[float, Field(allow_inf_nan=False)]


def _argument(value: Any) -> bool | int | float | tuple[int | float | None, ...] | None:
    """Optimizers take flags, numbers, null and lists of these; text would be a number gone wrong."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list | tuple) and all(item is None or type(item) in (int, float) for item in value):
        return tuple(value)
    raise ValueError("expected a number, true or false, null, or a list of numbers")


def _warmup(value: Any) -> int | float | None:
    """Steps, or a share of the run; a float of 1.0 or more would be one of the two gone wrong."""
    if value is None or (type(value) is int and value >= 0) or (type(value) is float and 0 < value < 1):
        return value
    raise ValueError("expected a whole number of steps, or a fraction of the run between 0 and 1")


def _targets(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in PRESETS:
        return value
    named = isinstance(value, list | tuple) and all(isinstance(item, str) and item for item in value)
    if not named or not value:
        raise ValueError(f"expected a list of module names or patterns, or one of {', '.join(PRESETS)}")
    if len(set(value)) != len(value):
        raise ValueError("expected each module once")
    return tuple(value)


Argument = Annotated[
    Any,
    PlainValidator(_argument),
    WithJsonSchema(
        {"type": ["boolean", "number", "array", "null"], "items": {"type": ["number", "null"]}},
    ),
]
Warmup = Annotated[
    Any,
    PlainValidator(_warmup),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                {"type": "null"},
            ]
        }
    ),
]
Targets = Annotated[
    Any,
    PlainValidator(_targets),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(PRESETS)},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "uniqueItems": True,
                },
            ]
        }
    ),
]
