"""From a model directory to the parts that a renderer is made of."""

import datetime
from collections.abc import Callable

from mmrender.media.cache import MediaCache
from mmrender.media.pixels import ImageBackend
from mmrender.media.policy import MediaPolicy
from mmrender.media.processors.registry import load_processor
from mmrender.media.resolve import MediaResolver
from mmrender.model.files import ModelDir
from mmrender.model.stops import stop_token_ids
from mmrender.model.tokenizer import Tokenizer
from mmrender.probing.store import ProfileCache
from mmrender.probing.template_set import TemplateSet
from mmrender.template.limits import TemplateLimits
from mmrender.template.loader import load_templates, special_tokens


def load_template_set(
    model: ModelDir,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None,
    limits: TemplateLimits | None,
    clock: Callable[[], datetime.datetime],
    profile_cache: bool = True,
) -> TemplateSet:
    """Compile a model's templates, or the one given in their place.

    Args:
        model: The model directory.
        tokenizer: The model's tokenizer.
        chat_template: Jinja text, or the name of one of the model's templates.
        limits: What one run may spend.
        clock: What `strftime_now` reads.
        profile_cache: Whether what probes find out is kept on disk; see `mmrender.probing.store`.

    Raises:
        TemplateError: There is no template to use, or one does not compile.
    """
    sources = load_templates(model)
    if chat_template is not None and chat_template not in sources and _is_jinja(chat_template):
        sources, chat_template = {"default": chat_template}, None
    return TemplateSet(
        sources,
        tokenizer,
        special_tokens=special_tokens(model),
        chosen=chat_template,
        model_stop_ids=stop_token_ids(model, tokenizer),
        limits=limits,
        clock=clock,
        cache=ProfileCache.default() if profile_cache else None,
    )


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def load_media(
    model: ModelDir,
    *,
    image_backend: ImageBackend,
    trust_remote_code: bool,
    policy: MediaPolicy | None,
    cache: MediaCache | None,
) -> MediaResolver | None:
    """Load a model's image processing, or None for a text-only model.

    Raises:
        ProcessorError: The image settings cannot be used.
        MissingDependencyError: The back end or the family needs an extra.
    """
    processor = load_processor(model.path, image_backend=image_backend, trust_remote_code=trust_remote_code)
    if processor is None:
        return None
    return MediaResolver(processor, policy or MediaPolicy(), cache or MediaCache())
