"""What a pool was made from: enough to find it again in this process, and to make it again in another."""

import inspect
import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrender.errors import InputError, PoolError
from mmrender.renderer import Renderer

_FROM_PRETRAINED = inspect.signature(Renderer.from_pretrained)


@dataclass(frozen=True)
class Recipe:
    """A model and the options of its renderer.

    Attributes:
        name: A directory, absolute so that it means the same elsewhere, or a hub id.
        options: Options of `Renderer.from_pretrained`.
    """

    name: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, name_or_path: str | os.PathLike[str], options: Mapping[str, Any]) -> "Recipe":
        """Make a recipe.

        Raises:
            TypeError: `Renderer.from_pretrained` has no such option.
        """
        _FROM_PRETRAINED.bind(name_or_path, **options)
        path = Path(name_or_path)
        return cls(str(path.resolve()) if path.is_dir() else os.fspath(name_or_path), dict(options))

    def build(self) -> Renderer:
        """Load the renderer; errors as for `Renderer.from_pretrained`."""
        return Renderer.from_pretrained(self.name, **self.options)

    @property
    def key(self) -> Hashable:
        """What equal recipes share; an option left out equals its default.

        Raises:
            InputError: An option cannot be compared.
        """
        bound = _FROM_PRETRAINED.bind(self.name, **self.options)
        bound.apply_defaults()
        return tuple((name, _key(name, value)) for name, value in bound.arguments.items())

    def check_portable(self) -> None:
        """Refuse a recipe that means nothing in another process.

        Raises:
            PoolError: It holds a media cache.
        """
        if self.options.get("media_cache") is not None:
            raise PoolError(
                "a pool with a media cache of its own cannot be sent to another process",
                where="media_cache",
                remedy="Leave media_cache out, and each process has one",
            )


def _key(name: str, value: Any) -> Hashable:
    if isinstance(value, Mapping):
        return frozenset((key, _key(name, item)) for key, item in value.items())
    try:
        hash(value)
    except TypeError as error:
        raise InputError(
            "pools cannot be told apart by this option",
            where=name,
            expected="a hashable value",
            got=type(value).__name__,
            remedy="Make the pool with RendererPool(Renderer.from_pretrained(...))",
        ) from error
    return type(value), value
