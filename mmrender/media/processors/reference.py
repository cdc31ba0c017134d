"""Build a model's own Transformers processor with what is installed here.

`AutoProcessor` builds every part of a processor and checks each one's class; for several families it fails
without torchvision, which only the video part needs. Here the parts that images need are built, and the
processor is made of these.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrender.errors import MissingDependencyError, MMRenderError, ProcessorError
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import ProcessorFiles
from mmrender.template.sources import load_templates

_BACKEND_NAMES: dict[ImageBackend, str] = {"torch": "torchvision", "pil": "pil"}
_PARTS_OF_OTHERS = ("video_processor", "feature_extractor", "audio_processor", "audio_tokenizer")
"""Parts of a processor that images do without."""


class VideoSettings(dict[str, Any]):
    """The settings of a video processor that is not built; one that the files leave out is None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def use_one_torch_thread() -> None:
    """Keep torch, where it is loaded, from its other threads, which are not alive in a forked child."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def build_reference_processor(
    files: ProcessorFiles, backend: ImageBackend, *, trust_remote_code: bool = False
) -> Any:
    """Return the model's processor with its tokenizer and its image processor on `backend`.

    Raises:
        MissingDependencyError: Something that Transformers needs for this family is not installed.
        ProcessorError: Transformers does not know the processor, or cannot build it from these files.
    """
    image_processor = build_image_processor(files, backend, trust_remote_code=trust_remote_code)
    from transformers import AutoProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = files.processor_class or PROCESSOR_MAPPING_NAMES.get(str(files.model.config.get("model_type")))
    with _named_errors(name or "the processor"):
        cls = _processor_class(name) if isinstance(name, str) else None
        if cls is not None:
            tokenizer = AutoTokenizer.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
            # The class check is what forbids an empty video part; everything else is the model's own.
            lenient: Any = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
            parts = {"image_processor": image_processor, "tokenizer": tokenizer}
            names = cls.get_attributes()
            settings = {key: value for key, value in files.processor.items() if key not in names}
            if unknown := {*names} - {*parts, *_PARTS_OF_OTHERS}:
                raise ProcessorError(
                    f"{name} has parts beside an image processor and a tokenizer",
                    got=", ".join(sorted(unknown)),
                )
            arguments = [parts.get(part) for part in names]
            try:
                built = lenient.from_args_and_dict(arguments, dict(settings))
            except AttributeError:
                # MiniCPM-V's reads settings of its video processor when it is made.
                parts["video_processor"] = VideoSettings(files.video)
                built = lenient.from_args_and_dict([parts.get(part) for part in names], dict(settings))
            except ImportError as error:
                with _asked_for_when_called(sys.modules[cls.__module__], str(error)):
                    built = lenient.from_args_and_dict(arguments, settings)
            # ShieldGemma 2's renders messages of its own.
            built.chat_template = getattr(built, "chat_template", None) or _default_template(files)
            return built
        processor = AutoProcessor.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
        if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
            raise ProcessorError(
                "the model's processor does not join an image processor and a tokenizer",
                got=type(processor).__name__,
            )
        processor.image_processor = image_processor
        return processor


def _default_template(files: ProcessorFiles) -> str | None:
    """Return the model's unnamed chat template, or None."""
    try:
        return load_templates(files.model).get("default")
    except MMRenderError:
        return None


def build_video_reference(files: ProcessorFiles, *, trust_remote_code: bool = False) -> Any:
    """Return the model's whole processor, its video processor included.

    Raises:
        MissingDependencyError: Something that it needs is not installed, such as torchvision.
        ProcessorError: The model has no video processor, or Transformers cannot build it.
    """
    try:
        import torchvision  # noqa: F401
        from transformers import AutoProcessor
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            "videos of this family need Transformers and torchvision, which cannot be imported",
            got=str(error),
            remedy="Install them, or pass the frames as images.",
        ) from error
    with _named_errors("the video processor"):
        processor = AutoProcessor.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    videos = getattr(processor, "video_processor", None)
    if videos is None or not isinstance(getattr(processor, "video_token", None), str):
        raise ProcessorError(
            f"{type(processor).__name__} takes no videos",
            expected="a processor with a video processor and a token of videos",
            remedy="Pass the frames as images.",
        )
    return processor


def build_image_processor(
    files: ProcessorFiles, backend: ImageBackend, *, trust_remote_code: bool = False
) -> Any:
    """Return the model's image processor on `backend`. Raises what `build_reference_processor` raises."""
    name = files.image_processor_type or "the image processor"
    try:
        import transformers
        from transformers import AutoImageProcessor
    except ImportError as error:
        raise MissingDependencyError.of_extra("transformers", "hf", name) from error
    if find_spec("transformers.image_processing_backends") is None:
        raise MissingDependencyError(
            f"{name} needs image processors whose back end can be chosen",
            expected="transformers>=5.4",
            got=transformers.__version__,
            remedy="Install it with: pip install 'mmrender[hf]'",
        )
    offered = _offered_backends(name)
    if backend not in offered:
        raise _not_offered(name, backend, offered)
    if backend == "torch":
        try:
            import torchvision  # noqa: F401
        except (ImportError, RuntimeError) as error:
            raise MissingDependencyError(
                f"{name} on the torch back end needs torchvision, which cannot be imported",
                got=str(error),
                remedy='Install it, or choose image_backend="pil".' if "pil" in offered else "Install it.",
            ) from error
    with _named_errors(name):
        processor = AutoImageProcessor.from_pretrained(
            files.directory, backend=_BACKEND_NAMES[backend], trust_remote_code=trust_remote_code
        )
    found = getattr(processor, "backend", "pil")
    if found != _BACKEND_NAMES[backend]:
        # A processor that the model brings along.
        offered = [ours for ours, theirs in _BACKEND_NAMES.items() if theirs == found]
        raise _not_offered(type(processor).__name__, backend, offered)
    return processor


def _offered_backends(name: str) -> Sequence[ImageBackend]:
    """Return the back ends that Transformers has for an image processor; both where it does not know it."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    known = (classes for classes in IMAGE_PROCESSOR_MAPPING_NAMES.values() if name in classes.values())
    classes = next(known, dict.fromkeys(_BACKEND_NAMES.values(), name))
    return [ours for ours, theirs in _BACKEND_NAMES.items() if classes.get(theirs)]


def _not_offered(name: str, backend: ImageBackend, offered: Sequence[ImageBackend]) -> ProcessorError:
    return ProcessorError(
        f"{name} does not run on this back end",
        expected=" or ".join(map(repr, offered)),
        got=repr(backend),
        remedy=f'Choose image_backend="{offered[0]}".' if offered else None,
    )


def _processor_class(name: str) -> Any:
    """Return the class of that name, or `None` where Transformers has none.

    Transformers exports a dummy for a class whose module it takes to need a package that is missing; several
    of these modules need it for videos only, and can be imported.
    """
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None or not getattr(cls, "is_dummy", False):
        return cls
    for path in (Path(transformers.__file__).parent / "models").glob("*/processing_*.py"):
        if f"\nclass {name}(" in path.read_text(encoding="utf-8"):
            with _torchvision_hidden():
                module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            return getattr(module, name)
    return cls


@contextmanager
def _torchvision_hidden() -> Iterator[None]:
    """Without torchvision, let modules be imported that import it and do not use it for images.

    Pixtral's processor, for one, takes a function of pure arithmetic from the module of its torchvision back
    end. The names are empty: code that does use torchvision fails on its first call, by name.
    """
    if find_spec("torchvision") is not None:
        yield
        return
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # Settles, for the life of the process, that it is missing.
    names = [
        "torchvision",
        "torchvision.transforms",
        "torchvision.transforms.v2",
        "torchvision.transforms.v2.functional",
    ]
    modules = {name: ModuleType(name) for name in names}
    for parent, child in pairwise(names):
        setattr(modules[parent], child.rpartition(".")[2], modules[child])
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


@contextmanager
def _asked_for_when_called(module: ModuleType, complaint: str) -> Iterator[None]:
    """Let a processor be made without the packages that a complaint names; to call one raises.

    SmolVLM's processor, for one, refuses to be made without a package that spells out numbers for videos.
    """
    absent = [name for name, value in vars(module).items() if value is None and name in complaint]
    for name in absent:
        setattr(module, name, partial(_raise_missing, name))
    try:
        yield
    finally:
        for name in absent:
            setattr(module, name, None)


def _raise_missing(name: str, *_: Any, **__: Any) -> None:
    raise ImportError(f"{name} is not installed")


@contextmanager
def _named_errors(name: str) -> Iterator[None]:
    """Turn whatever Transformers raises while it builds a part into one of our errors."""
    try:
        yield
    except MMRenderError:
        raise
    except ImportError as error:
        raise missing_package(error) from error
    except Exception as error:
        raise ProcessorError(
            f"{name} cannot be built from this directory",
            got=f"{type(error).__name__}: {error}",
        ) from error


def missing_package(error: ImportError) -> MissingDependencyError:
    """Return the error for a package that Transformers asks for."""
    return MissingDependencyError(
        "the model's own processor needs a package that is not installed",
        got=" ".join(line.strip() for line in str(error).splitlines() if line.strip()),
    )
