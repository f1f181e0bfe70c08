"""Sections of a config whose class is chosen by `type`, from a registry that packages extend.

A registry maps a name to the path of a config class (`package.module:Class`) that lives in a
torch-free module. Names come from the product itself and from entry points of installed packages.
A path may stand in place of a name only where the user wrote it: on the command line, or in the
user's own config file. A config that came with a checkpoint or from the Hub resolves registered
names alone, since importing a module that a stranger names would run the stranger's code.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from parallel_config.errors import ConfigError, Problem, nearest

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """Named config classes of one kind of section."""

    section: str
    """Path of the section in a config (`policy`)."""
    base: type[T]
    """Class that every entry derives from."""
    builtin: Mapping[str, str]
    """Name to `package.module:Class`."""
    entry_point_group: str
    """Group under which installed packages announce theirs."""
    # Filled by `resolve`, so it takes no part in the comparison of registries.
    _names: dict[type, str] = field(default_factory=dict, compare=False, repr=False)

    def names(self) -> list[str]:
        """Every registered name, sorted."""
        return sorted({*self.builtin, *self._announced()})

    def resolve(self, name: str, *, trusted: bool) -> type[T]:
        """The config class that `name` stands for.

        `trusted` says that the user wrote the name, so that it may be `package.module:Class`.

        Raises:
            ConfigError: unknown name, a path where only names are allowed, or a class that is
                not a dataclass derived from the base.
        """
        announced = self._announced()
        # Our own names come first, so no installed package can change what they mean.
        if name in self.builtin:
            path = self.builtin[name]
        elif name in announced:
            path = announced[name]
        elif ":" in name:
            if not trusted:
                raise self._error(
                    f"= {name!r} names a class by path. A config beside a checkpoint may come "
                    "from anyone. So its code is imported only if you ask for it.",
                    f"If you trust it, repeat it: --{self.section}.type {name}.",
                )
            path = name
        else:
            raise self._error(
                f"= {name!r} is not registered. Registered: {', '.join(self.names())}.",
                nearest(name, self.names())
                or f"Use one of these, or a path: --{self.section}.type my_package.module:Class.",
            )
        return self._load(name, path)

    def name_of(self, config: object) -> str:
        """The name that `config`'s class is written under: its registered name, or its path."""
        cls = type(config)
        if cls in self._names:
            return self._names[cls]
        path = f"{cls.__module__}:{cls.__qualname__}"
        known = {**self._announced(), **self.builtin}
        return next((name for name, target in known.items() if target == path), path)

    def path_of(self, config: object) -> str:
        """The `package.module:Class` behind `name_of`: of the config, or of what stands for it."""
        name = self.name_of(config)
        return self.builtin.get(name) or self._announced().get(name, name)

    def _announced(self) -> dict[str, str]:
        points = importlib.metadata.entry_points(group=self.entry_point_group)
        return {point.name: point.value for point in points}

    def _load(self, name: str, path: str) -> type[T]:
        module_name, _, qualname = path.partition(":")
        try:
            found: Any = importlib.import_module(module_name)
            for part in qualname.split("."):
                found = getattr(found, part)
        # ValueError: the name of the module is empty.
        except (ImportError, AttributeError, ValueError) as error:
            raise self._error(
                f"= {name!r} cannot be imported: {error}.",
                "Check the path, and that its package is installed.",
            ) from error
        # A model class may stand for its config: it names it by the attribute `config_class`.
        found = getattr(found, "config_class", found)
        if not (
            isinstance(found, type)
            and issubclass(found, self.base)
            and dataclasses.is_dataclass(found)
        ):
            raise self._error(
                f"= {name!r} is not a {self.base.__name__}: {found!r}.",
                f"Name a dataclass derived from {self.base.__module__}.{self.base.__qualname__}, "
                "or a class whose config_class is one.",
            )
        # A model class may stand for its config: what the user wrote is written again, not its
        # config.
        self._names.setdefault(found, name)
        return cast(type[T], found)

    def _error(self, message: str, remedy: str) -> ConfigError:
        return ConfigError(Problem(f"{self.section}.type", message, remedy))
