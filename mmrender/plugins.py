"""Plugins: processors and tool-call grammars from entry points of other installed packages.

They are looked up when mmrender itself lacks an answer, once in a process.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from mmrender.errors import PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


class Plugin(NamedTuple):
    """The object of one entry point.

    Attributes:
        value: The object.
        where: The entry point and its package, for errors.
    """

    value: Any
    where: str

    def failed(self, error: Exception) -> PluginError:
        """Build the error for an exception of the object."""
        return _error("the plugin failed", self.where, got=f"{type(error).__name__}: {error}")


@cache
def load_plugins(group: str, is_valid: Callable[[Any], bool], expected: str) -> Mapping[str, Plugin]:
    """Load every entry point of a group, by name.

    Args:
        group: The group, such as `mmrender.processors`.
        is_valid: Whether an object is of the right kind.
        expected: The right kind, for errors.

    Raises:
        PluginError: An entry point cannot be loaded, is of another kind, or has the name of another plugin.
    """
    from importlib.metadata import entry_points

    plugins: dict[str, Plugin] = {}
    for entry in entry_points(group=group):
        where = _described(entry)
        if entry.name in plugins:
            raise _error("two plugins have one name", where, got=plugins[entry.name].where)
        try:
            value = entry.load()
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise _error("the plugin cannot be loaded", where, got=got) from error
        if not is_valid(value):
            raise _error("the plugin is of another kind", where, expected=expected, got=repr(value))
        plugins[entry.name] = Plugin(value, where)
    return plugins


def _described(entry: "EntryPoint") -> str:
    package = "an unnamed package" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
    return f"entry point {entry.name!r} ({entry.value}) of {package} in {entry.group}"


def _error(problem: str, where: str, **details: str) -> PluginError:
    remedy = "Mend or uninstall that package"
    return PluginError(problem, where=where, remedy=remedy, **details)
