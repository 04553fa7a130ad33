"""The form that a request asks of its answers (`response_format`): any text, JSON, or JSON of a schema.

Answers are sampled freely. One without the form is drawn again, so an answer has the distribution of the model's
answers, given that they have the form.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from posttrain.verifier.calling import read_data

DRAWS = 16
"""The most draws of one answer. None is drawn after the first that has the form."""
DEEPEST = 16
"""The deepest nesting of a schema."""
MOST_NAMES = 64
"""Most fields of an object, because the refusal has a sentence for each unknown one."""
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
READ = frozenset(
    {"type", "properties", "required", "additionalProperties", "items", "enum", "const", "minimum", "maximum", "anyOf"}
)
"""Keywords of a schema that are checked."""
SAID = frozenset({"title", "description", "$schema", "default", "examples"})
"""Keywords of a schema that limit nothing."""


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """True where a schema allows a value of JSON.

    >>> score = {"type": "object", "properties": {"score": {"type": "integer", "maximum": 9}}, "required": ["score"]}
    >>> [conforms(x, score) for x in ({"score": 9}, {"score": 10}, {"score": True}, {}, 9)]
    [True, False, False, False, False]
    """
    # Every keyword that is there must hold. Those of another type of value limit nothing, as the standard has it.
    kinds = schema.get("type", list(TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        return False
    if "enum" in schema and not any(_same(value, x) for x in schema["enum"]):
        return False
    if "const" in schema and not _same(value, schema["const"]):
        return False
    if "anyOf" in schema and not any(conforms(value, x) for x in schema["anyOf"]):
        return False
    if _is(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return False
    if isinstance(value, list):
        return all(conforms(x, schema.get("items", {})) for x in value)
    if not isinstance(value, dict):
        return True
    properties = schema.get("properties", {})
    if any(name not in value for name in schema.get("required", ())):
        return False
    if schema.get("additionalProperties") is False and any(name not in properties for name in value):
        return False
    return all(conforms(x, properties.get(name, {})) for name, x in value.items())


def _is(value: Any, kind: str) -> bool:
    # In JSON 1.0 is the integer 1.
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    # bool is a subclass of int in Python, and no number in JSON.
    return isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    # 1 and 1.0 are one number in JSON as in Python, but True == 1 in Python alone.
    return one == other and isinstance(one, bool) is isinstance(other, bool)


def _readable(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema; ValueError where it says something that `conforms` does not read."""
    _check(schema, DEEPEST)
    return schema


def _check(schema: Any, deep: int) -> None:
    """ValueError if a schema is malformed, more than `deep` levels deep, or has keywords beside `READ` and `SAID`."""
    if not isinstance(schema, dict) or not deep:
        raise ValueError(f"a schema is an object, at most {DEEPEST} deep")
    # A keyword that is ignored would let answers through that the caller has ruled out, so it is refused.
    if strange := sorted(schema.keys() - READ - SAID):
        raise ValueError(f"{strange[0]} is not read here: a schema has {', '.join(sorted(READ))}")
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, list) or not kinds or any(not isinstance(k, str) or k not in TYPES for k in kinds):
        raise ValueError(f"type {schema['type']!r:.60}: a type is one of {', '.join(TYPES)}, or a list of some")
    # A list of no choices allows nothing, and a list of no required names is valid.
    choices = [schema[n] for n in ("enum", "anyOf") if n in schema]
    required = schema.get("required", [])
    numbers = [schema[n] for n in ("minimum", "maximum") if n in schema]
    inner = schema.get("properties", {})
    fits = all(isinstance(x, list) and x for x in choices) and all(_is(x, "number") for x in numbers)
    fits = fits and isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not fits or not isinstance(inner, dict) or not isinstance(schema.get("additionalProperties", True), bool):
        raise ValueError(
            "enum and anyOf are lists that are not empty, required is a list of names, minimum and maximum are"
            " numbers, properties is an object, and additionalProperties true or false"
        )
    for subschema in (*inner.values(), *schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])):
        _check(subschema, deep - 1)


class RequestPart(BaseModel):
    """A part of a request: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, given: Any) -> Any:
        # This is checked before pydantic, which makes an error for each unknown name.
        if isinstance(given, dict) and len(given) > MOST_NAMES:
            raise ValueError(f"{len(given)} fields, and there are {len(cls.model_fields)}")
        return given


class AnswerSchema(RequestPart):
    """A JSON schema with its name."""

    name: str = Field(max_length=64)
    description: str = ""
    strict: bool | None = None
    schema_: Annotated[dict[str, Any], AfterValidator(_readable)] = Field(alias="schema")


class ResponseFormat(RequestPart):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: AnswerSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.type == "json_schema") is not (self.json_schema is not None):
            raise ValueError("json_schema, with a name and a schema, belongs to the type json_schema, which needs it")
        return self

    def fits(self, text: str) -> bool:
        """True where a whole answer has the form."""
        if self.type == "text":
            return True
        try:
            value = read_data.json_value(text)
        except read_data.Unreadable:
            return False
        return isinstance(value, dict) if self.json_schema is None else conforms(value, self.json_schema.schema_)
