"""Reading YAML strictly: no key twice, and values from nodes where every complaint is to have a line.

A complaint is a YamlError, or a subclass of it, ``FILE:LINE: FIELD: reason``.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from yaml.constructor import ConstructorError

T = TypeVar("T")

if TYPE_CHECKING:
    from yaml import SafeLoader as Safe
else:  # libyaml's where PyYAML was built with it: a tenth of the time
    Safe = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_SECRET = re.compile(r"passw|passphrase|secret|(^|_)token(_|$)|api_?key|private_?key|credential", re.IGNORECASE)


class YamlError(Exception):
    """The file is not what it should be."""


class Strict(Safe):
    """A loader for which a key that is given twice is a mistake; PyYAML takes the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, Hashable):
                break  # PyYAML itself complains of it
            if name in seen:
                raise ConstructorError(None, None, f"{name!r} is given twice", key.start_mark)
            seen.add(name)
        fields: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return fields


def parsed(text: str, file: object, loader: type[yaml.SafeLoader] = Strict) -> Any:
    """The content of a file. Raises YamlError ``FILE:LINE: reason``."""
    try:
        return yaml.load(text, loader)
    except (ValueError, yaml.YAMLError) as error:
        raise YamlError(located(error, file)) from None


def located(error: Exception, file: object) -> str:
    """``FILE:LINE: reason`` of what PyYAML complains of."""
    kind = "" if isinstance(error, ConstructorError) else "not YAML: "
    if not isinstance(error, yaml.MarkedYAMLError):
        return f"{file}: {kind}{' '.join(str(error).split())}"
    mark = error.problem_mark or error.context_mark
    return f"{file}:{mark.line + 1 if mark else 1}: {kind}{error.problem or error.context}"


def looks_secret(name: str) -> bool:
    """Whether a field of this name would hold a secret."""
    return bool(_SECRET.search(name))


class Reader:
    """Turns YAML nodes into values; every complaint has the node's line."""

    complaint: type[YamlError] = YamlError

    def __init__(self, file: str) -> None:
        self.file = file

    def error(self, node: yaml.Node, where: str, reason: str) -> YamlError:
        return self.complaint(f"{self.file}:{node.start_mark.line + 1}: {where}: {reason}")

    def mapping(self, node: yaml.Node, where: str) -> dict[str, tuple[yaml.Node, yaml.Node]]:
        """Key and value nodes by key."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, where, f"expected fields, found {found(node)}")
        fields: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag != "tag:yaml.org,2002:str":
                raise self.error(key, where, f"{found(key)} is not a name; quote it")
            if key.value in fields:
                raise self.error(key, f"{where}.{key.value}", "given twice")
            fields[key.value] = (key, value)
        return fields

    def record(
        self, node: yaml.Node, where: str, readers: Mapping[str, Callable[[yaml.Node, str], Any]]
    ) -> dict[str, Any]:
        values = {}
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, where, f"expected fields ({', '.join(readers)}), found {found(node)}")
        for name, (key, value) in self.mapping(node, where).items():
            if name not in readers:
                if looks_secret(name):
                    raise self.error(
                        key, f"{where}.{name}", "no secrets here: keys come from the SSH agent or ssh_config"
                    )
                near = difflib.get_close_matches(name, readers, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(readers)}"
                raise self.error(key, f"{where}.{name}", f"unknown field{hint}")
            values[name] = readers[name](value, f"{where}.{name}")
        return values

    def text(self, node: yaml.Node, where: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or node.tag != "tag:yaml.org,2002:str":
            raise self.error(node, where, f"expected text, found {found(node)}")
        if not node.value.strip() or "\0" in node.value or "\n" in node.value.strip():
            raise self.error(node, where, "expected one line of text")
        return str(node.value)

    def matching(self, pattern: re.Pattern[str], what: str) -> Callable[[yaml.Node, str], str]:
        def read(node: yaml.Node, where: str) -> str:
            text = self.text(node, where)
            if not pattern.fullmatch(text):
                raise self.error(node, where, f"expected {what}, found {text!r}")
            return text

        return read

    def number(self, low: float, high: float, kind: type[T]) -> Callable[[yaml.Node, str], T]:
        def read(node: yaml.Node, where: str) -> T:
            what = (
                f"expected {'an integer' if kind is int else 'a number'} from {low:g} to {high:g}, found {found(node)}"
            )
            if not isinstance(node, yaml.ScalarNode) or node.style:
                raise self.error(node, where, what)
            try:
                value: Any = kind(node.value)  # type: ignore[call-arg]
            except ValueError:
                raise self.error(node, where, what) from None
            if not low <= value <= high:
                raise self.error(node, where, what)
            return value  # type: ignore[no-any-return]

        return read

    def listing(self, item: Callable[[yaml.Node, str], str]) -> Callable[[yaml.Node, str], tuple[str, ...]]:
        def read(node: yaml.Node, where: str) -> tuple[str, ...]:
            if not isinstance(node, yaml.SequenceNode):
                raise self.error(node, where, f"expected a list, found {found(node)}")
            return tuple(item(child, f"{where}[{i}]") for i, child in enumerate(node.value))

        return read


def found(node: yaml.Node) -> str:
    """What stands where something else was expected, in words for a complaint."""
    if isinstance(node, yaml.ScalarNode):
        return repr(node.value) if node.value else "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "fields"
