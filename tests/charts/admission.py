"""What an API server does with a custom resource before it keeps it, by the definition's own schema: defaults, bounds, and rules in CEL.

    admission = Admission(definition)
    admission.refusals(body)            a new object: what is wrong with it; nothing where it is kept
    admission.refusals(body, before)    a change of one that is kept

The rules are compiled as a server compiles them, against the schema's types: a name that no schema has, a comparison of a text with a number, or a rule that
is not true or false is an error of the definition. For that each object of the schema becomes a message of Protocol Buffers, whose fields may be absent.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

cel = pytest.importorskip("cel_expr_python.cel", reason="THE RULES OF THE CUSTOM RESOURCES ARE NOT TESTED: CEL's compiler has no wheel for this machine")

Object = dict[str, Any]

_RULES = "x-kubernetes-validations"
_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "integer": (_FIELD.TYPE_INT64, cel.Type.INT),
    "number": (_FIELD.TYPE_DOUBLE, cel.Type.DOUBLE),
    "string": (_FIELD.TYPE_STRING, cel.Type.STRING),
    "boolean": (_FIELD.TYPE_BOOL, cel.Type.BOOL),
}


class RuleError(ValueError):
    """A server would refuse the definition."""


@dataclass(frozen=True)
class Rule:
    """One rule at one place of the schema."""

    text: str
    message: str
    expression: Any

    @property
    def of_changes(self) -> bool:
        """Whether it compares with what there was: an object that is new is not asked."""
        return "oldSelf" in self.text


class Admission:
    """The schema of one version of a definition.

    Raises: RuleError.
    """

    def __init__(self, definition: Object) -> None:
        schema: Object = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        # Rules of the whole object may ask for its name, whatever the schema says of it.
        named = {"metadata": {"type": "object", "properties": {"name": {"type": "string"}, "generateName": {"type": "string"}}}}
        self._schema: Object = {**schema, "properties": {**schema["properties"], **named}}
        file = descriptor_pb2.FileDescriptorProto(name="schema.proto", package="schema", syntax="proto2")
        _add_message(file, "root", self._schema)
        self._pool = descriptor_pool.DescriptorPool()
        self._pool.Add(file)
        self.rules = {path: [self._compiled(path, schema, rule) for rule in schema.get(_RULES, ())] for path, schema in _places("root", self._schema)}

    def refusals(self, body: Object, before: Object | None = None) -> list[str]:
        """Why the object is not kept."""
        body, before = self.kept(body), None if before is None else self.kept(before)
        bounds = jsonschema.Draft202012Validator(self._schema)
        if wrong := [f"{'.'.join(map(str, error.path))}: {error.message}" for error in bounds.iter_errors(body)]:
            return wrong
        return list(self._broken("root", self._schema, body, before))

    def kept(self, body: Object) -> Object:
        """The object with the schema's defaults."""
        body = copy.deepcopy(body)
        _fill(self._schema, body)
        return body

    def _compiled(self, path: str, schema: Object, rule: Object) -> Rule:
        kind = self._type(path, schema)
        environment = cel.NewEnv(self._pool, variables={"self": kind, "oldSelf": kind})
        try:
            expression = environment.compile(rule["rule"])
        except RuntimeError as error:
            raise RuleError(f"{path}: {rule['rule']}: {error}") from error
        if expression.return_type() != cel.Type.BOOL:
            raise RuleError(f"{path}: {rule['rule']}: it gives {expression.return_type().name()}, not true or false")
        return Rule(rule["rule"], rule["message"], expression)

    def _type(self, path: str, schema: Object) -> Any:
        if schema["type"] == "array":
            return cel.Type.List(self._type(f"{path}_items", schema["items"]))
        return cel.Type(f"schema.{path}") if schema["type"] == "object" else _SCALARS[schema["type"]][1]

    def _broken(self, path: str, schema: Object, value: Any, before: Any) -> Iterator[str]:
        for rule in self.rules[path]:
            if not rule.of_changes:
                said = rule.expression.eval(data={"self": self._value(path, schema, value)})
            elif before is not None:
                said = rule.expression.eval(data={"self": self._value(path, schema, value), "oldSelf": self._value(path, schema, before)})
            else:
                continue
            if said.value() is not True:
                yield rule.message
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                yield from self._broken(f"{path}_{name}", inner, value[name], (before or {}).get(name))
        for one in value if schema["type"] == "array" else ():
            # What stood at a place of a list before is not what stands there now.
            yield from self._broken(f"{path}_items", schema["items"], one, None)

    def _value(self, path: str, schema: Object, value: Any) -> Any:
        if schema["type"] == "array":
            return [self._value(f"{path}_items", schema["items"], one) for one in value]
        if schema["type"] != "object":
            return float(value) if schema["type"] == "number" else value
        kind = message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"schema.{path}"))
        return json_format.ParseDict(value, kind(), ignore_unknown_fields=True)


def _places(path: str, schema: Object) -> Iterator[tuple[str, Object]]:
    """Every place of a schema with its path."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from _places(f"{path}_{name}", inner)
    if "items" in schema:
        yield from _places(f"{path}_items", schema["items"])


def _add_message(file: descriptor_pb2.FileDescriptorProto, path: str, schema: Object) -> None:
    """A message for an object of the schema, and for every one within."""
    message = file.message_type.add(name=path)
    for number, (name, inner) in enumerate(schema.get("properties", {}).items(), start=1):
        place, label = f"{path}_{name}", _FIELD.LABEL_OPTIONAL
        if inner["type"] == "array":
            place, inner, label = f"{place}_items", inner["items"], _FIELD.LABEL_REPEATED
        if inner["type"] != "object":
            message.field.add(name=name, number=number, label=label, type=_SCALARS[inner["type"]][0])
            continue
        _add_message(file, place, inner)
        message.field.add(name=name, number=number, label=label, type=_FIELD.TYPE_MESSAGE, type_name=f".schema.{place}")


def _fill(schema: Object, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if "default" in inner:
                value.setdefault(name, copy.deepcopy(inner["default"]))
            if name in value:
                _fill(inner, value[name])
    elif isinstance(value, list):
        for one in value:
            _fill(schema.get("items", {}), one)
