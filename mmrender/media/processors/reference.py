"""Build a model's own Transformers processor from the packages that are installed.

`AutoProcessor` builds every part of a processor and checks each part's class. For several families it fails
without torchvision, which only the video part needs. Here the parts that images need are built, and the
processor is made of them.
"""

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

from mmrender.errors import MissingDependencyError, MMRenderError, ProcessorError, importing
from mmrender.media.pixels import ImageBackend
from mmrender.media.processor import ProcessorFiles
from mmrender.template.sources import load_templates

_BACKEND_NAMES: dict[ImageBackend, str] = {"torch": "torchvision", "pil": "pil"}
INSTALL_TORCHVISION: Final = "Install it with: pip install torchvision"
"""No extra brings it: which of its wheels fits depends on the build of torch."""
_OTHER_PARTS = ("video_processor", "feature_extractor", "audio_processor", "audio_tokenizer")
"""Parts of a processor that images do without."""


class VideoSettings(dict[str, Any]):
    """The settings of a video processor that is not built. Settings that the files leave out are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)


def use_one_torch_thread() -> None:
    """Keep torch, if it is loaded, from its other threads, which are not alive in a forked child."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def build_reference_processor(
    files: ProcessorFiles, backend: ImageBackend, *, trust_remote_code: bool = False
) -> Any:
    """Return the model's processor with its tokenizer and its image processor on `backend`.

    Raises:
        MissingDependencyError: A package that Transformers needs for this family is not installed.
        ProcessorError: Transformers does not know the processor, or cannot build it from these files.
    """
    image_processor = build_image_processor(files, backend, trust_remote_code=trust_remote_code)
    from transformers import AutoProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = files.processor_class or PROCESSOR_MAPPING_NAMES.get(str(files.model.config.get("model_type")))
    # Code of the directory comes before a class of the same name, as in AutoProcessor.
    is_own = trust_remote_code and files.has_own_code("AutoProcessor")
    with _build_errors(name or "the processor"):
        cls = _processor_class(name) if isinstance(name, str) and not is_own else None
        if cls is not None:
            parts = {
                "image_processor": image_processor,
                "tokenizer": load_tokenizer(files, trust_remote_code),
            }
            return _processor_of_parts(cls, parts, files)
        processor = AutoProcessor.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
        if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
            raise ProcessorError(
                "the model's processor does not join an image processor and a tokenizer",
                got=type(processor).__name__,
            )
        processor.image_processor = image_processor
        return processor


def load_tokenizer(files: ProcessorFiles, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of Transformers, from converted files if it cannot read the vocabulary itself."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    conversion = files.model.conversion
    if conversion is None or conversion.is_native:
        return AutoTokenizer.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    with TemporaryDirectory() as folder:
        for file, text in conversion.files.items():
            Path(folder, file).write_text(text, "utf-8")
        return PreTrainedTokenizerFast.from_pretrained(folder)


def _processor_of_parts(cls: Any, parts: dict[str, Any], files: ProcessorFiles) -> Any:
    # The class check forbids an empty video part. Everything else is the model's own.
    lenient: Any = type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})
    names = cls.get_attributes()
    if unknown := {*names} - {*parts, "image_processor", *_OTHER_PARTS}:
        part = "an image processor" if "image_processor" in parts else "a feature extractor"
        raise ProcessorError(
            f"{cls.__name__} has parts beside {part} and a tokenizer",
            got=", ".join(sorted(unknown)),
        )

    def build() -> Any:
        settings = {key: value for key, value in files.processor.items() if key not in names}
        return lenient.from_args_and_dict([parts.get(part) for part in names], settings)

    try:
        processor = build()
    except AttributeError:
        # MiniCPM-V's reads settings of its video processor when it is made.
        parts = {**parts, "video_processor": VideoSettings(files.video)}
        processor = build()
    except ImportError as error:
        with _missing_until_called(sys.modules[cls.__module__], str(error)):
            processor = build()
    if not getattr(processor, "chat_template", None):  # ShieldGemma 2's renders messages of its own
        try:
            processor.chat_template = load_templates(files.model).get("default")
        except MMRenderError:
            processor.chat_template = None
    return processor


def build_video_reference(files: ProcessorFiles, *, trust_remote_code: bool = False) -> Any:
    """Return the model's whole processor, its video processor included.

    Raises:
        MissingDependencyError: A package that it needs is not installed, such as torchvision.
        ProcessorError: The model has no video processor, or Transformers cannot build it.
    """
    try:
        import torchvision  # noqa: F401
        from transformers import AutoProcessor
    except (ImportError, RuntimeError) as error:
        raise MissingDependencyError(
            "videos of this family need Transformers and torchvision, which cannot be imported",
            got=str(error),
            remedy=f"{INSTALL_TORCHVISION} 'mmrender[hf]', or pass the frames as images",
        ) from error
    with _build_errors("the video processor"):
        processor = AutoProcessor.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
    videos = getattr(processor, "video_processor", None)
    if videos is None or not isinstance(getattr(processor, "video_token", None), str):
        raise ProcessorError(
            f"{type(processor).__name__} takes no videos",
            expected="a processor with a video processor and a token of videos",
            remedy="Pass the frames as images.",
        )
    return processor


def build_audio_reference(files: ProcessorFiles, *, trust_remote_code: bool = False) -> Any:
    """Return the model's processor with its tokenizer and its audio feature extractor alone.

    Raises:
        MissingDependencyError: A package that Transformers needs for this family is not installed.
        ProcessorError: Transformers does not know the processor, or cannot build it from these files.
    """
    name = files.processor_class or "the audio processor"
    with importing("transformers", "hf", name):
        from transformers import AutoFeatureExtractor
    with _build_errors(name):
        cls = _processor_class(name)
        if cls is None:
            raise ProcessorError(
                "Transformers does not know the processor of this model", where="processor_class", got=name
            )
        extractor = AutoFeatureExtractor.from_pretrained(files.directory, trust_remote_code=trust_remote_code)
        parts = dict.fromkeys(("feature_extractor", "audio_processor"), extractor)
        tokenizer = load_tokenizer(files, trust_remote_code)
        return _processor_of_parts(cls, {**parts, "tokenizer": tokenizer}, files)


def build_image_processor(
    files: ProcessorFiles, backend: ImageBackend, *, trust_remote_code: bool = False
) -> Any:
    """Return the model's image processor on `backend`. Raises as `build_reference_processor` does."""
    name = files.image_processor_type or "the image processor"
    with importing("transformers", "hf", name):
        import transformers
        from transformers import AutoImageProcessor
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
            otherwise = ', or choose image_backend="pil"' if "pil" in offered else ""
            raise MissingDependencyError(
                f"{name} on the torch back end needs torchvision, which cannot be imported",
                got=str(error),
                remedy=INSTALL_TORCHVISION + otherwise,
            ) from error
    with _build_errors(name):
        processor = AutoImageProcessor.from_pretrained(
            files.directory, backend=_BACKEND_NAMES[backend], trust_remote_code=trust_remote_code
        )
    actual = getattr(processor, "backend", "pil")
    if actual != _BACKEND_NAMES[backend]:
        # A processor that the model brings along.
        offered = [ours for ours, theirs in _BACKEND_NAMES.items() if theirs == actual]
        raise _not_offered(type(processor).__name__, backend, offered)
    return processor


def _offered_backends(name: str) -> Sequence[ImageBackend]:
    """Return the back ends that Transformers has for an image processor. Both for an unknown one."""
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
    """Return the class of that name, or None if Transformers does not have it.

    Transformers exports a dummy for a class whose module seems to need a package that is missing. Several of
    these modules need it for videos only, and can be imported.
    """
    import transformers

    cls = getattr(transformers, name, None)
    if cls is None or not getattr(cls, "is_dummy", False):
        return cls
    for path in (Path(transformers.__file__).parent / "models").glob("*/processing_*.py"):
        if f"\nclass {name}(" in path.read_text(encoding="utf-8"):
            with torchvision_hidden():
                module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
            return getattr(module, name)
    return cls


@contextmanager
def torchvision_hidden() -> Iterator[None]:
    """Without torchvision, let modules be imported that import it and do not use it for images.

    Pixtral's processor, for one, takes a function of pure arithmetic from the module of its torchvision back
    end. The stand-in modules are empty: code that does use torchvision fails on its first call, by name.
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
def _missing_until_called(module: ModuleType, complaint: str) -> Iterator[None]:
    """Let a processor be made without the packages that a complaint names. Calling them raises.

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
def named_errors(failed: Callable[[str], MMRenderError]) -> Iterator[None]:
    """Turn any exception of Transformers into an error with a name: `failed(cause)`, or a missing package."""
    try:
        yield
    except MMRenderError:
        raise
    except ImportError as error:
        raise MissingDependencyError(
            "the model's own processor needs a package that is not installed",
            got=" ".join(line.strip() for line in str(error).splitlines() if line.strip()),
        ) from error
    except Exception as error:
        raise failed(f"{type(error).__name__}: {error}") from error


def _build_errors(name: str) -> AbstractContextManager[None]:
    def failed(cause: str) -> ProcessorError:
        if "`trust_remote_code=True`" in cause:
            problem = f"{name} is code of the model directory"
            return ProcessorError(problem, remedy="Pass trust_remote_code=True to run it.")
        return ProcessorError(f"{name} cannot be built from this directory", got=cause)

    return named_errors(failed)
