"""Plug-in folders: one file, one plug-in.

A folder such as `toolkit/recipes/` is a registry. Each public module in it (no leading underscore) defines one
constant, `RECIPE` for instance, and is found by its file name without importing its neighbours. Plug-ins from
outside arrive through the entry-point group `gradreel.plugins`, through `load_plugin_file`, or through `Registry.add`.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from traces.errors import GradreelError, unknown

T = TypeVar("T")

_REGISTRIES: dict[str, Registry[Any]] = {}
_ENTRY_POINT_GROUP = "gradreel.plugins"
_entry_points_loaded = False
_loaded_files: list[str] = []


class Registry(Generic[T]):
    """The plug-ins of one kind.

    `package` is the dotted folder, `constant` the name each of its modules must define, `kind` the word used in
    messages. The object behind the constant has a `name` equal to its module's name.
    """

    def __init__(self, package: str, constant: str, kind: str) -> None:
        self.package, self.constant, self.kind = package, constant, kind
        self._added: dict[str, T] = {}
        _REGISTRIES[constant] = self

    def names(self) -> list[str]:
        """All names, those of this project and those added, sorted. Imports no plug-in of the folder."""
        _load_entry_points()
        return sorted({*self._modules(), *self._added})

    def get(self, name: str) -> T:
        """Return the plug-in called `name`; raise `UnknownName` with the choices otherwise."""
        if name not in self._added and name not in self._modules():
            _load_entry_points()
        if name in self._added:
            return self._added[name]
        if name not in self._modules():
            raise unknown(self.kind, name, self.names())
        return self._constant_of(importlib.import_module(f"{self.package}.{name}"), expected=name)

    def all(self) -> list[T]:
        """Import and return every plug-in, sorted by name."""
        return [self.get(name) for name in self.names()]

    def add(self, item: T) -> T:
        """Add a plug-in object for this process. A name that is taken is an error."""
        name = str(getattr(item, "name", ""))
        if not name.isidentifier():
            raise GradreelError(f"{self.kind} name {name!r} is not an identifier; use letters, digits and _")
        if name in self._modules() or self._added.get(name, item) is not item:
            raise GradreelError(f"{self.kind} {name!r} exists already; choose another name")
        self._added[name] = item
        return item

    def _modules(self) -> list[str]:
        package = importlib.import_module(self.package)
        return [m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_")]

    def _constant_of(self, module: ModuleType, expected: str) -> T:
        item = getattr(module, self.constant, None)
        if item is None:
            raise GradreelError(f"{module.__name__} defines no {self.constant}; add it, or start the file name with _")
        if item.name != expected:
            raise GradreelError(f"{module.__name__}: {self.constant}.name is {item.name!r}, the file says {expected!r}")
        return item


def load_plugin_file(path: str | Path) -> list[str]:
    """Run the user's own file at `path` and add each plug-in constant it defines; return the names added."""
    file = Path(path)
    if not file.is_file():
        raise GradreelError(f"plug-in file {str(file)!r} does not exist; give the path of a Python file")
    spec = importlib.util.spec_from_file_location(f"gradreel_plugin_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise GradreelError(f"plug-in file {str(file)!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as an import does: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise GradreelError(f"plug-in file {str(file)!r} failed: {type(error).__name__}: {error}") from error
    added = _add_constants(module)
    if not added:
        raise GradreelError(f"plug-in file {str(file)!r} defines none of {', '.join(sorted(_REGISTRIES))}")
    _loaded_files.append(str(file.resolve()))
    return added


def loaded_plugin_files() -> tuple[str, ...]:
    """Absolute paths of the files that `load_plugin_file` read in this process, for processes that it starts."""
    return tuple(dict.fromkeys(_loaded_files))


def _add_constants(module: ModuleType) -> list[str]:
    added = []
    for constant, registry in _REGISTRIES.items():
        item = getattr(module, constant, None)
        if item is not None:
            registry.add(item)
            added.append(item.name)
    return added


def _load_entry_points() -> None:
    global _entry_points_loaded
    if _entry_points_loaded:
        return
    _entry_points_loaded = True
    for point in entry_points(group=_ENTRY_POINT_GROUP):
        _add_constants(point.load())
