"""Reading and checking a configuration.

Every problem is reported at once, each with its place and, for a name that does not exist, the nearest one that does.
Precedence: defaults < file < command line.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from hvd_novel.config.schema import Config
from hvd_novel.errors import UserError

SectionCheck = Callable[[Any], list[tuple[str, str]]]
"""Takes a raw section and returns (key, problem) pairs: what only those who use the section can know."""


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (`1e-4` is a number), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be a plain name", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.nan$"),
    list("-+.0123456789"),
)
# The resolvers of a character are tried in order: integers must come before the wider float pattern.
for _resolvers in _Loader.yaml_implicit_resolvers.values():
    _resolvers.sort(key=lambda resolver: resolver[0].endswith(":float"))


def load(path: Path, overrides: list[str], checks: Mapping[str, SectionCheck]) -> Config:
    """Read `path`, apply `overrides` (``a.b=value``, the value in YAML) and validate the whole.

    `checks` look closer at the sections whose keys depend on what is chosen there (model, compression).
    Raises UserError with one line per problem: file and line (or the override), key, what is wrong, and the
    nearest valid name for an unknown key.
    """
    tree, lines = _read_yaml(path)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        key = _apply_override(tree, override)
        places[key] = f"command line ({override})"
    problems = []
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors()]
    for section, check in checks.items():
        problems += [((section, key), text) for key, text in check(tree.get(section))]
    if problems:
        report = [f"  {_place(key, places, str(path))}: {_named(key)}{text}" for key, text in problems]
        raise UserError("\n".join(["the configuration cannot be used:", *report]))
    return config


def dump(config: Config) -> str:
    """`config` as YAML that `load` reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def with_absolute_paths(config: Config) -> Config:
    """`config` with its folders as seen from the current one, so that it means the same from anywhere."""
    run = config.run.model_copy(update={"dir": os.path.abspath(config.run.dir)})
    data = config.data.model_copy(update={"store": os.path.abspath(config.data.store)})
    model = config.model
    if model.pretrained is not None:
        model = model.model_copy(update={"pretrained": os.path.abspath(model.pretrained)})
    return config.model_copy(update={"run": run, "data": data, "model": model})


def nearest(name: str, valid: Sequence[str]) -> str:
    """A hint for an unknown `name`: the closest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(sorted(valid))}"


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"the configuration file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, _Loader)
        lines = dict(_key_lines(yaml.compose(text, _Loader)))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{path} is not valid YAML: an anchor contains itself") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of sections (run, data, model, schedule, ...)")
    return tree, lines


def _key_lines(node: yaml.Node | None, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], int]]:
    if not isinstance(node, yaml.MappingNode):
        return []
    found = []
    for key, value in node.value:
        path = (*prefix, str(key.value))
        found += [(path, key.start_mark.line + 1), *_key_lines(value, path)]
    return found


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"the override '{override}' is not of the form section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"the value of the override '{override}' is not valid YAML: {error}") from None
    section = tree
    for name in path[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise UserError(f"the override '{override}' goes into '{name}', which is a value, not a section")
    section[path[-1]] = value
    return path


def _problem(item: Any) -> tuple[tuple[str, ...], str]:
    key = tuple(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return key, f"unknown key; {nearest(key[-1], _valid_names(key[:-1]))}"
    if item["type"] == "missing":
        return key, "missing; it has no default"
    text = item["msg"].removeprefix("Value error, ")
    return key, text if isinstance(item["input"], dict) else f"{text} (got {item['input']!r})"


def _named(key: tuple[str, ...]) -> str:
    """What goes before a problem: nothing if it is one of several sections together, which names its keys itself."""
    return f"{'.'.join(key)}: " if key else ""


def _valid_names(section: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for name in section:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _place(key: tuple[str, ...], places: dict[tuple[str, ...], str], default: str) -> str:
    while key:
        if key in places:
            return places[key]
        key = key[:-1]
    return default
