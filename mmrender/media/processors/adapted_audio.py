"""Audio of any family, through the model's own Transformers processor (extra `hf`).

The processor runs whole, as for images: the text that replaces the placeholder is the expansion, whatever
rule counts its tokens, and each output that a prompt without audio lacks is a tensor of the clip.

If the processor knows the number of tokens from the number of samples (that of Qwen's omni models does) and
its runs agree, a clip is kept as a file: the one it came from, or FLAC. The same run computes its features
when they are asked for. Other clips are kept as features, without the constant columns that pad them to 30
seconds. So are clips that leave the process: matrix products of another machine give features of other bits.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt

from mmrender.caching import LRUCache, cached_property
from mmrender.errors import MediaError, ProcessorError
from mmrender.media.audio import LoadedAudio, PackedAudio, Samples, load_audio
from mmrender.media.item import DeferredParts, ProcessedItem, nbytes_of
from mmrender.media.levels import Compact, padded
from mmrender.media.load import LoadedImage
from mmrender.media.pixels import ImageBackend, media_identity
from mmrender.media.processor import (
    AudioProcessor,
    EffectOfOthers,
    MediaProcessor,
    Prepared,
    ProcessorFiles,
    TokenRun,
)
from mmrender.media.processors.adapter import (
    Tensors,
    marks_of,
    parse_expansion,
    split_at,
)
from mmrender.media.processors.reference import VideoSettings, build_audio_reference, named_errors
from mmrender.media.processors.watched import Run, WatchedProcessor, as_numpy
from mmrender.sidecar import Expansion, Repeat, feature_count

TOO_SHORT = "the clip is so short that the model's processor writes no token for it"
_PROBE_SECONDS = (0.31, 1.27)
"""Durations of the clips of probes."""
_MIN_PACKED_SECONDS: Final = 1
"""Minimum duration of a clip whose features are computed later. An extractor may refuse a shorter one."""
_MAX_FEATURES: Final = 256 << 20
"""Maximum size of the features of packed clips that are kept once computed, in bytes."""
_MAX_SAMPLES: Final = 64 << 20
"""Maximum size of the samples that are kept until features are computed, in bytes."""


class AdaptedAudioProcessor(AudioProcessor):
    """The model's own processor behind the interface of `AudioProcessor`. Loaded with the first clip.

    Args:
        files: The model's settings.
        token: The placeholder that the chat template writes.
        audio_text: Text that the chat template writes for a clip, placeholder included.
        trust_remote_code: Run processor code of the directory.
    """

    def __init__(
        self, files: ProcessorFiles, token: str, audio_text: str, *, trust_remote_code: bool = False
    ) -> None:
        self.name = str(files.audio.get("feature_extractor_type") or "the model's own feature extractor")
        self._token = token
        start, _, end = audio_text.partition(token)
        self._around = start, end
        build = partial(build_audio_reference, files, trust_remote_code=trust_remote_code)
        self._watched = WatchedProcessor(build, files)
        self._samples: LRUCache[str, Samples] = LRUCache(_MAX_SAMPLES, size_of=lambda samples: samples.nbytes)
        self._features: LRUCache[str, Mapping[str, Compact]] = LRUCache(_MAX_FEATURES, size_of=nbytes_of)

    @cached_property
    def sampling_rate(self) -> int:  # type: ignore[override]
        """Samples per second that the feature extractor takes.

        Raises:
            MissingDependencyError: A package that it needs is not installed, such as torchaudio.
            ProcessorError: Transformers cannot build it, or it names no rate.
        """
        rate = getattr(self._extractor, "sampling_rate", None)
        if not isinstance(rate, int):
            raise ProcessorError(f"{self.name} names no sampling rate", got=repr(rate))
        return rate

    @cached_property
    def settings_digest(self) -> bytes:  # type: ignore[override]
        """Digest of the reference's release and of all its settings. Raises as `sampling_rate`."""
        return self._watched.digest("feature_extractor", self._extractor, "audio of transformers")

    @cached_property
    def effect_of_others(self) -> EffectOfOthers:  # type: ignore[override]
        """Effect of other clips, found on two clips and proved on three. See `AudioProcessor`."""
        short, long = (_probe(seconds, self.sampling_rate) for seconds in _PROBE_SECONDS)
        try:
            run = self._run([long, short, short])
            _, pieces, _ = self._pieces(run.text, 3)
            together = self._tensors(run)
            alone = [self._processed(clip) for clip in (long, short)]
            if _are_joined(pieces, together, [alone[0], alone[1], alone[1]]):
                return "none"
            padded_clips = [self._processed(clip, len(long)) for clip in (long, short)]
        except (MediaError, ProcessorError):
            return "refused"
        if not _are_joined(pieces, together, [padded_clips[0], padded_clips[1], padded_clips[1]]):
            return "refused"
        return "longer" if _are_joined([alone[0][0]], alone[0][1], [padded_clips[0]]) else "any"

    def prepare(self, loaded: LoadedAudio, *, longest: int | None = None) -> Prepared:
        """Identify a clip by its samples, their rate and the settings. See `AudioProcessor`."""
        effect = "none" if longest is None else self.effect_of_others
        if effect == "none" or (effect == "longer" and longest == len(loaded.samples)):
            longest = None
        about = f"audio at {loaded.rate}" if longest is None else f"audio at {loaded.rate} of {longest}"
        identity = media_identity(self.settings_digest, loaded.samples.view(np.uint8), about.encode())
        return Prepared(identity, partial(self._finish, identity, loaded, longest))

    def alternate(self, frames: int, frame_tokens: int, seconds: float, tokens: int) -> Sequence[TokenRun]:
        """Run the rule of the model's own processor. See `AudioProcessor`."""
        reference = self._watched.reference
        rule = getattr(reference, "replace_video_with_audio_token", None)
        if rule is None:
            return super().alternate(frames, frame_tokens, seconds, tokens)
        problem = "the model's own processor cannot join a sound track with its video"
        with self._watched.lock, named_errors(lambda cause: ProcessorError(problem, got=cause)):
            # Patches are merged already, and no other setting of its videos matters here.
            videos, reference.video_processor = reference.video_processor, VideoSettings(merge_size=1)
            try:
                text = rule(
                    {
                        "video_grid_thw": np.array([[frames, 1, frame_tokens]]),
                        "video_second_per_grid": [seconds],
                    },
                    0,
                    {"num_audio_tokens": [tokens]},
                    0,
                    **reference._merge_kwargs(tokenizer_init_kwargs=reference.tokenizer.init_kwargs),
                )
            finally:
                reference.video_processor = videos
        return _runs(text, reference.tokenizer.get_added_vocab())

    def _finish(self, identity: str, loaded: LoadedAudio, longest: int | None) -> ProcessedItem:
        samples = loaded.samples
        expansion = None if longest is not None else self._counted(len(samples))
        packed = None if expansion is None else loaded.packed()
        parts: Mapping[str, Compact]
        if expansion is None or packed is None:
            expansion, parts = self._computed(samples, longest)
        else:
            self._samples.put(identity, samples)
            parts = DeferredParts(partial(self._unpacked, identity, packed, expansion), packed[0])
        if not feature_count(expansion):
            raise MediaError(
                TOO_SHORT,
                expected="a token of features or more",
                got=f"{len(samples) / self.sampling_rate:.3f} s",
                remedy="Leave it out, or pad it with silence.",
            )
        return ProcessedItem(
            identity=identity,
            size=(self.sampling_rate, len(samples)),
            grid=(feature_count(expansion),),
            expansion=expansion,
            modality="audio",
            parts=parts,
        )

    def _computed(
        self, samples: Samples, longest: int | None = None
    ) -> tuple[Expansion, Mapping[str, Compact]]:
        piece, tensors = self._processed(samples, longest)
        parts = {name: padded(values) for name, values in tensors.items()}
        return parse_expansion(piece, self._feature_token), parts

    def _unpacked(self, identity: str, packed: PackedAudio, expected: Expansion) -> Mapping[str, Compact]:
        """Return the features of a packed clip, which must have the tokens that were counted for it."""

        def compute() -> Mapping[str, Compact]:
            samples, (file, policy) = self._samples.pop(identity), packed
            if samples is None:
                samples = load_audio(file, self.sampling_rate, policy).samples
            expansion, parts = self._computed(samples)
            if expansion != expected:
                raise ProcessorError(
                    "the model's own processor writes another number of tokens for a clip than it counts",
                    where=f"item {identity[:12]}",
                    expected=str(feature_count(expected)),
                    got=str(feature_count(expansion)),
                )
            return parts

        return self._features.get_or_compute(identity, compute)

    def _counted(self, count: int) -> Expansion | None:
        """Return the expansion of a clip of `count` samples, or None if only a run shows it."""
        if count < _MIN_PACKED_SECONDS * self.sampling_rate or self._shape is None:
            return None
        tokens = self._count_tokens(count)
        return tuple(
            msgspec.structs.replace(piece, count=tokens) if isinstance(piece, Repeat) else piece
            for piece in self._shape
        )

    def _count_tokens(self, count: int) -> int:
        counts = self._watched.reference._get_num_multimodal_tokens(audio_lengths=[count])
        return int(counts["num_audio_tokens"][0])

    @cached_property
    def _shape(self) -> Expansion | None:
        """The expansion of a clip, if the processor counts the tokens of two clips as its runs write them."""
        try:
            clips = [_probe(seconds, self.sampling_rate) for seconds in _PROBE_SECONDS]
            counts = [self._count_tokens(len(clip)) for clip in clips]
            shapes = [self._computed(clip)[0] for clip in clips]
        except (MediaError, ProcessorError, AttributeError, TypeError, KeyError, ValueError):
            return None
        repeats = [[piece for piece in shape if isinstance(piece, Repeat)] for shape in shapes]
        rest = [[piece for piece in shape if not isinstance(piece, Repeat)] for shape in shapes]
        is_plain = rest[0] == rest[1] and all(len(one) == 1 for one in repeats)
        return shapes[0] if is_plain and counts == [*map(feature_count, shapes)] else None

    @property
    def _extractor(self) -> object:
        reference = self._watched.reference
        return getattr(reference, "audio_processor", None) or reference.feature_extractor

    @cached_property
    def _text_outputs(self) -> frozenset[str]:
        """Names of the outputs for a prompt without audio."""
        return frozenset(self._watched.run("before after", return_tensors="pt").output)

    @cached_property
    def _feature_token(self) -> str:
        """The token that holds features: one that the settings name, or else the placeholder.

        Raises:
            ProcessorError: The processor adds other text to a prompt with audio than to others, or writes a
                clip without a token of features.
        """
        run = self._run([_probe(_PROBE_SECONDS[0], self.sampling_rate)])
        opening, (piece,), ending = self._pieces(run.text)
        self._watched.require_same_affixes(run, opening, ending, "audio")
        own = getattr(self._watched.reference, "audio_token", None)
        return self._watched.feature_token(("audio",), piece, own, self._token)

    def _processed(self, samples: Samples, longest: int | None = None) -> tuple[str, Tensors]:
        """Return the text that replaces the placeholder of a clip, and its tensors.

        With `longest`, the number of samples of another clip, they are of the clip among others.
        """
        if longest is None:
            run = self._run([samples])
            return self._pieces(run.text)[1][0], self._tensors(run)
        run = self._run([samples, np.zeros(longest, np.float32)])
        pieces, tensors = self._pieces(run.text, 2)[1], self._tensors(run)
        if any(values.ndim == 0 or len(values) != 2 for values in tensors.values()):
            raise ProcessorError(
                f"{self.name} returns tensors without a row for each clip",
                expected="two rows for two clips",
                got=str({name: list(values.shape) for name, values in tensors.items()}),
            )
        return pieces[0], {name: values[:1] for name, values in tensors.items()}

    def _tensors(self, run: Run) -> Tensors:
        names = run.output.keys() - self._text_outputs - run.of_text
        return {name: as_numpy(run.output[name]) for name in run.output if name in names}

    def _pieces(self, text: str, copies: int = 1) -> tuple[str, list[str], str]:
        """Return the text before a prompt, the expansions within it, and the text after it."""
        return split_at(text, marks_of(self._around, copies), "audio", "the marks of the probe")

    def _run(self, clips: Sequence[Samples]) -> Run:
        """Run the whole processor on a text with a placeholder for each clip."""
        rate = self.sampling_rate
        seconds = " and ".join(f"{len(clip) / rate:.3f}" for clip in clips)
        return self._watched.run(
            self._token.join(marks_of(self._around, len(clips))),
            f"audio of {seconds} s",
            audio=[np.array(clip) for clip in clips],  # some processors refuse or change read-only arrays
            sampling_rate=rate,
            return_tensors="pt",
        )


class AudioOnlyProcessor(MediaProcessor):
    """The processor of a model that takes audio and no images.

    Args:
        name: The feature extractor, for display.
        backend: Of images, which it does not take.
    """

    def __init__(self, name: str, backend: ImageBackend) -> None:
        self.name = name
        self.image_backend = backend
        self.settings_digest = b""
        self.placeholder = {}
        self.placeholder_tokens = frozenset()

    def geometry(self, height: int, width: int, *, num_images: int = 1) -> NoReturn:
        """Refuse an image. See `MediaProcessor`."""
        raise ProcessorError(
            f"images are not supported for {self.name}", expected="text and audio", remedy="Remove the image"
        )

    def prepare(self, loaded: LoadedImage, *, num_images: int = 1) -> Prepared:
        """Refuse an image. See `MediaProcessor`."""
        return self.geometry(loaded.height, loaded.width)


def _probe(seconds: float, rate: int) -> Samples:
    """Return a clip in which no two neighbouring samples are equal."""
    count = np.arange(round(seconds * rate), dtype=np.uint32)
    return (((count * 2654435761) >> 16) / np.float32(1 << 17) - np.float32(0.25)).astype(np.float32)


def _runs(text: str, added: Iterable[str]) -> list[TokenRun]:
    """Cut a text of added tokens into runs of the same token."""
    runs = [(match["token"], match[0]) for match in re.finditer(_repeated(added), text)]
    if "".join(run for _, run in runs) != text:
        raise ProcessorError(
            "the model's processor writes other text for a video with a sound track than added tokens",
            got=repr(text[:200]),
        )
    return [(token, len(run) // len(token)) for token, run in runs]


def _repeated(added: Iterable[str]) -> str:
    """Return the pattern of a token, once or several times."""
    longest_first = sorted(added, key=len, reverse=True)
    return rf"(?P<token>{'|'.join(map(re.escape, longest_first))})(?P=token)*"


def _are_joined(pieces: Sequence[str], together: Tensors, clips: Sequence[tuple[str, Tensors]]) -> bool:
    """Whether texts and tensors of several clips are those of each, joined on the first axis."""
    if list(pieces) != [piece for piece, _ in clips]:
        return False
    if any(tensors.keys() != together.keys() for _, tensors in clips):
        return False
    return all(_is_joined([tensors[name] for _, tensors in clips], whole) for name, whole in together.items())


def _is_joined(parts: Sequence[npt.NDArray[np.generic]], whole: npt.NDArray[np.generic]) -> bool:
    """Whether a tensor is its parts along the first axis, each with zeros at its ends."""
    if any(part.ndim != whole.ndim or part.dtype != whole.dtype for part in parts) or not whole.ndim:
        return False
    if sum(map(len, parts)) != len(whole):
        return False
    start = 0
    for part in parts:
        rest = whole[start : start + len(part)].copy()
        start += len(part)
        inside = tuple(map(slice, part.shape))
        if rest[inside].shape != part.shape or not np.array_equal(rest[inside], part):
            return False
        rest[inside] = 0
        if rest.any():
            return False
    return True
