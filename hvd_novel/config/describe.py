"""Every key of the configuration with its type, default and meaning, from the schema itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from rich.markup import escape
from rich.table import Table

from hvd_novel.config.schema import Config


def describe() -> Iterator[Table]:
    """A table for each section."""
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        table = Table(title=f"{name}: {_first_line(section.__doc__)}", title_justify="left", title_style="bold")
        for column in ("key", "type", "default", "meaning"):
            table.add_column(column, overflow="fold")
        for key, described in section.model_fields.items():
            table.add_row(
                f"{name}.{key}", escape(_type(described.annotation)), _default(described), described.description or ""
            )
        if section.model_config.get("extra") == "allow":
            table.add_row(f"{name}.*", "", "", "Options of what is chosen above.")
        yield table


def _first_line(docstring: str | None) -> str:
    return (docstring or "").strip().splitlines()[0]


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (tuple, list):
        return f"[{', '.join(map(_type, arguments))}]"
    if origin is dict:
        return "{name: " + _type(arguments[1]) + "}"
    if arguments:
        return " | ".join(map(_type, arguments))
    return "null" if annotation is type(None) else str(annotation.__name__)


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "(required)"
    return "null" if field.default is None else str(field.default)
