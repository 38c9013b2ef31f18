"""Parsing of JSON bodies into pydantic models, with errors that name the parameter and the value.

`unsupported_fields.py` lists the fields of OpenAI and vLLM that Trinity does not
support; any other unknown field is refused with the name of the nearest known one.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from runtime.errors import InvalidRequest, TrinityError
from runtime.serving.http.unsupported_fields import supported_fields

_CUSTOM = "trinity"
_TYPE_ERRORS = {"model_type": "must be an object", "dict_type": "must be an object", "list_type": "must be an array"}
"""Messages in place of pydantic's, which name Python's types."""

Body = TypeVar("Body", bound=BaseModel)


class StrictModel(BaseModel):
    """Base of bodies: no conversion between types, no NaN, and a null field counts as absent."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: object) -> object:
        return without_null(value) if isinstance(value, dict) else value


def parse(model: type[Body], body: bytes) -> Body:
    """Parse a JSON body into a model. Raises InvalidRequest that names the parameter."""
    return validate(model, parse_fields(model, body))


def parse_fields(model: type[BaseModel], body: bytes) -> dict[str, Any]:
    """Parse a JSON body into the fields of a model. Raises InvalidRequest for others, unless they have no effect."""
    supported = supported_fields(parse_object(body), model.model_fields)
    for name in supported:
        if name not in model.model_fields:
            raise InvalidRequest(f"unknown field {name[:64]!r}{suggestion(name, model.model_fields)}", name[:64])
    return supported


def without_null(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an object that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


def check_bytes(size: int, limit: int, param: str) -> None:
    """Raise InvalidRequest for a text of more than `limit` bytes."""
    if size > limit:
        raise InvalidRequest(f"{param} has {size} bytes, the limit is {limit}", param)


@contextmanager
def params_named(names: Mapping[str, str]) -> Iterator[None]:
    """Give errors of what several routes share the names that these parameters have in the route's own bodies."""
    try:
        yield
    except TrinityError as error:
        error.param = error.param and names.get(error.param, error.param)
        raise


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises InvalidRequest for anything else."""
    try:
        data = from_json(body)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {json_name(data)}")
    return data


def validate(model: type[Body], fields: dict[str, Any]) -> Body:
    """Validate fields as a model. Raises InvalidRequest that names the parameter."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        param = _param(first["loc"])
        if first["type"] == "extra_forbidden":
            near = suggestion(str(first["loc"][-1]), _fields_at(model, first["loc"][:-1]))
            raise InvalidRequest(f"unknown field {param[:128]}{near}", param) from None
        raise InvalidRequest(_error_message(first["type"], first["msg"], first["input"], param), param) from None


def suggestion(name: str, fields: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, fields, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> Iterable[str]:
    """Return the fields of the object at a location in a body."""
    for name in location:
        if isinstance(name, str):  # a number is a place in the array before it
            model = next(_models(model.model_fields[name].annotation))
    return model.model_fields


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation, such as that of `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _param(location: tuple[int | str, ...]) -> str:
    """Format a location: `("messages", 0, "content")` → `messages[0].content`."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:64]}" for step in location)
    return path.removeprefix(".")


def _error_message(error_type: str, message: str, value: object, param: str) -> str:
    if error_type == _CUSTOM:
        return message
    if error_type == "missing":
        return f"{param} is missing"
    if error_type in ("too_short", "string_too_short"):
        return f"{param} is empty"
    _, should, wanted = message.partition(" should ")  # pydantic's messages begin with Input, String, List
    message = _TYPE_ERRORS.get(error_type, f"should {wanted}" if should else message)
    if error_type == "too_long":  # with the length
        return f"{param} {message.replace(' after validation', '')}"
    if error_type == "string_too_long":
        return f"{param} {message}, not {len(str(value))}"
    return f"{param} {message}, not {given(value)}"


def given(value: object) -> str:
    """Format a value for an error message: a string, a number or a boolean itself, any other by its JSON type."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        return json_name(value)
    given = repr(value)
    return given if len(given) <= 64 else given[:61] + "..."


def json_name(value: object) -> str:
    """Return the name of a value's JSON type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def field_error(message: str) -> PydanticCustomError:
    """Return an error for validators to raise, with a custom message."""
    # pydantic takes the message for a template: braces in it must not be interpreted.
    return PydanticCustomError(_CUSTOM, "{message}", {"message": message})
