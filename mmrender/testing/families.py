"""`prove_family`: proof that batches of an architecture have the logits and gradients of single forwards.

A family is proved on its own architecture, built small with random weights, or on a model of the caller's.
Samples with images and without run one by one, with the inputs of the family's image processor, as the model
numbers and masks them itself, and then in batches: padded on the right, padded on the left, and packed.
Samples lie on both sides of each length of the configuration: windows, chunks, the lengths that rotary
embeddings were trained for. A layout with other logits or gradients is refused, with the first module that
differs. Differences that float64 does not have are rounding. If every layout differs, and none with samples
up to a length, samples are bounded by that length. A model whose logits do not depend on the text or the
images before them proves nothing, and is refused as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

from mmrender.errors import BatchError, importing
from mmrender.sidecar import MediaItem
from mmrender.testing.family_runs import Bench, Difference, undisturbed
from mmrender.testing.family_samples import Images, make_images, make_samples, with_inputs
from mmrender.testing.small_architecture import Length, SmallModel, build_small, unchecked_lengths
from mmrender.training.families import (
    Layout,
    ModelFamily,
    Proof,
    read_settings,
    remember_proof,
    unproved_family,
)
from mmrender.training.tensor_list import torch
from mmrender.trajectory.sample import TrainingSample

_MOST_TOKENS: Final = 512
"""The longest length that samples of a caller's model cross. Longer ones are crossed by a small model."""


@dataclass(frozen=True)
class FamilyReport:
    """Outcome of the comparison of a family's batches with single forwards.

    Attributes:
        family: The family, with its findings.
        lengths: The lengths that samples lie on both sides of.
        logits: Largest difference of a logit by layout, in standard deviations of the logits. Of float64, if
            a larger one of float32 is rounding.
        gradients: Largest difference of a gradient by layout, in parts of the largest of its parameter; empty
            if the model is the caller's.
    """

    family: ModelFamily
    lengths: tuple[Length, ...]
    logits: Mapping[Layout, float] = field(default_factory=dict)
    gradients: Mapping[Layout, float] = field(default_factory=dict)


def prove_family(model_or_config: Any, *, images: Sequence[MediaItem] | None = None) -> ModelFamily:
    """Compare batches of an architecture with single forwards, and return the family with its findings.

    The architecture is built small, with random weights and short windows, unless a model in float32 is
    passed, which runs as it is. Lengths of its configuration beyond 512 tokens are then crossed by a small
    model of its class. Padded (right and left) and packed batches of samples with images and without run in
    train mode. The proof is remembered by the configuration: `ModelFamily.from_config` uses it in this
    process and, if the architecture was built here, in others with the same releases of Transformers, torch
    and mmrender, too. `MMRENDER_CACHE` names the folder, and `off` keeps nothing.

    Args:
        model_or_config: A Transformers model, or a configuration as `ModelFamily.from_config` takes it.
        images: Four items of the model's own processor or more, images or audio, the last two of one size.
            Needed if the family's image processor cannot be built from its name alone, and for audio, which
            a proof with images does not cover. A second proof adds its media to the first.

    Returns:
        The family, with the layouts that failed and the module at fault in `refused`, and in
        `max_sample_tokens` the length beyond which every layout fails, or that could not be crossed.

    Raises:
        ModelError: The configuration cannot be read.
        BatchError: All layouts fail, or nothing can be compared.
        MissingDependencyError: Transformers is not installed.
    """
    report = compare_family(model_or_config, images=images)
    settings = read_settings(getattr(model_or_config, "config", model_or_config))
    family = report.family
    shown = [item.modality for item in images or ()]
    if not images and "image" in family.feature_token_ids:
        shown = ["image"]
    proof = Proof.of(family, dict.fromkeys(shown))
    # A model of the caller's may have code of its own, which no configuration names.
    return family.proved(remember_proof(settings, proof, on_disk=not _runs(model_or_config)))


def compare_family(model_or_config: Any, *, images: Sequence[MediaItem] | None = None) -> FamilyReport:
    """Compare as `prove_family`, and return all differences. Nothing is remembered. Raises the same."""
    settings = read_settings(getattr(model_or_config, "config", model_or_config))
    whole = unproved_family(settings)
    if not _runs(model_or_config):
        small = build_small(_transformers_config(model_or_config, settings))
        report = _compared(small.model, small.lengths, images, gradients=True)
    else:
        model = model_or_config
        try:
            # The configuration of a model of the caller's own class may be built small, too.
            small = build_small(model.config, type(model))
            lengths = small.lengths
        except BatchError:
            small, lengths = None, unchecked_lengths(model)
        near = tuple(one._replace(small=one.tokens) for one in lengths if one.tokens <= _MOST_TOKENS)
        report = _compared(model, near, images, gradients=False)
        if len(near) < len(lengths):
            report = _joined(report, _beyond(lengths[len(near) :], small, images))
    bounds = [one for one in (whole.max_sample_tokens, report.family.max_sample_tokens) if one is not None]
    family = replace(
        whole,
        token_types=report.family.token_types,
        recurrent=report.family.recurrent,
        refused=report.family.refused,
        max_sample_tokens=min(bounds, default=None),
    )
    return replace(report, family=family)


def _runs(model_or_config: Any) -> bool:
    """Whether a model in float32 is passed, which runs as it is."""
    if not hasattr(model_or_config, "forward"):
        return False
    return bool(next(model_or_config.parameters()).dtype == torch.float32)


def _transformers_config(given: Any, settings: Mapping[str, Any]) -> Any:
    given = getattr(given, "config", given)
    if hasattr(given, "to_dict"):
        return given
    with importing("transformers", "hf", "prove_family"):
        from transformers import CONFIG_MAPPING
    model_type = settings["model_type"]
    if model_type not in CONFIG_MAPPING:
        raise BatchError(
            "Transformers does not know this family",
            where="config.model_type",
            got=repr(model_type),
            remedy="Pass the model itself, in float32",
        )
    return CONFIG_MAPPING[model_type].from_dict(dict(settings))


def _beyond(lengths: Sequence[Length], small: SmallModel | None, images: Any) -> FamilyReport:
    """Compare a small model of the caller's class across lengths that the caller's model is too long for."""
    if small is not None:
        try:
            return _compared(small.model, small.lengths, None, gradients=True)
        except BatchError:
            pass  # what a small model cannot show stays unknown
    bound = min(one.tokens for one in lengths)
    return FamilyReport(ModelFamily("", max_sample_tokens=bound), ())


def _joined(one: FamilyReport, other: FamilyReport) -> FamilyReport:
    """Return the findings of two comparisons of one family."""
    family = one.family.proved(Proof.of(one.family).joined(Proof.of(other.family)))
    logits = {layout: max(report.logits.get(layout, 0.0) for report in (one, other)) for layout in one.logits}
    return FamilyReport(family, other.lengths or one.lengths, logits, other.gradients)


def _compared(
    model: Any, lengths: tuple[Length, ...], given: Sequence[MediaItem] | None, *, gradients: bool
) -> FamilyReport:
    """Compare one model, whose configuration has the small values of the lengths."""
    draft = replace(with_inputs(unproved_family(model.config.to_dict()), model), max_sample_tokens=None)
    with undisturbed(model):
        images = Images(given) if given else make_images(model, draft)
        samples = make_samples(draft, images.items, sorted({one.small for one in lengths}))
        bench = Bench(model, draft, images, gradients)
        bench.check_sensitive()
        family, found = _by_layout(bench, draft, samples)
        bound = None
        for length in sorted(lengths, key=lambda one: -one.tokens):
            if not all(one.text for one in found.values()):
                break
            within = [one for one in samples if len(one) <= length.small]
            if not any(one.media_spans for one in within) and any(one.media_spans for one in samples):
                break  # without images nothing is proved of them
            shorter, again = _by_layout(bench, draft, within)
            if not all(one.text for one in again.values()):
                family, found, bound = shorter, again, length.tokens
    refused = {layout: found[layout].text for layout in get_args(Layout) if found[layout].text}
    if len(refused) == len(found):
        raise BatchError(
            f"batches for {draft.model_type} differ from single forwards in every layout",
            where="config.model_type",
            got="; ".join(dict.fromkeys(refused.values())),
            remedy="Train on one sample at a time with the model's own inputs",
        )
    return FamilyReport(
        replace(family, refused={**draft.refused, **refused}, max_sample_tokens=bound),
        lengths,
        {layout: one.logits for layout, one in found.items()},
        {layout: one.gradients for layout, one in found.items()} if gradients else {},
    )


def _by_layout(
    bench: Bench, family: ModelFamily, samples: Sequence[TrainingSample]
) -> tuple[ModelFamily, dict[Layout, Difference]]:
    """Return the difference in each layout, and the family with the modules that run sample by sample."""
    packed = bench.difference(family, "packed", samples)
    names: list[str] = [] if not family.recurrent else family.recurrent.split("|")
    mixing = packed
    while mixing.text and mixing.module not in ("", *names):
        # A module that mixes samples along the row may run sample by sample, if nothing else mixes.
        names.append(mixing.module)
        recurrent = replace(family, recurrent="|".join(names))
        mixing = bench.difference(recurrent, "packed", samples)
        if not mixing.text:
            family, packed = recurrent, mixing
    found: dict[Layout, Difference] = {"packed": packed}
    for layout in get_args(Layout):
        if layout not in found:
            found[layout] = bench.difference(family, layout, samples)
    return family, found
