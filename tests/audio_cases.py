"""Audio clips, and small directories of models that take audio, as their own classes write them. No weights."""

import io
import json
import wave
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kit import text
from mmrender import Renderer
from mmrender.media.item import ProcessedItem
from mmrender.media.levels import compacted
from mmrender.media.processor import Prepared, ProcessorFiles, VideoProcessor
from mmrender.media.processors.patch_videos import PatchVideoProcessor

RATE: Final = 16_000
"""Samples per second that the models here take."""
_CHATML: Final = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}PLACEHOLDER{% elif part.type == 'image' %}<|image|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def clip(seconds: float = 0.5, seed: int = 0, rate: int = RATE, channels: int = 1) -> npt.NDArray[np.float32]:
    """Noise under a slow wave: `(samples,)`, or `(channels, samples)` for several channels."""
    count = max(1, round(seconds * rate))
    noise = np.random.default_rng(seed).uniform(-0.4, 0.4, (channels, count))
    samples = (noise + 0.3 * np.sin(np.arange(count) / (200 + seed))).astype(np.float32)
    return samples[0] if channels == 1 else samples


def wav(samples: npt.NDArray[np.float32], rate: int = RATE) -> bytes:
    """A WAV file of 16-bit samples."""
    levels = np.rint(np.atleast_2d(samples).T * 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(levels.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(levels.tobytes())
    return out.getvalue()


def heard(samples: Any, rate: int = RATE) -> dict[str, Any]:
    """A part with samples."""
    return {"type": "audio", "audio": samples, "sampling_rate": rate}


def film(frames: int = 8, seconds: float = 3.0, seed: int = 0) -> dict[str, Any]:
    """A part with a video of two frames a second. Without seconds it is silent."""
    return {"type": "video", "video": _encoded_film(frames, seconds, seed)}


@cache  # the encoder, whose threads race, does not write the same file twice
def _encoded_film(frames: int, seconds: float, seed: int) -> bytes:
    from video_cases import encoded_video, frames_of  # it needs torch

    sound = clip(seconds, seed) if seconds else None
    return encoded_video(frames_of(frames, 28, 56, seed), fps=2, container="matroska", sound=sound)


def asked(*parts: Any) -> dict[str, Any]:
    """A user's message of parts. A string is a part of text."""
    return {"role": "user", "content": [text(part) if isinstance(part, str) else part for part in parts]}


def _directory(
    folder: Path,
    processor: str,
    audio: Mapping[str, Any],
    written: str,
    tokens: Mapping[str, str],
    config: Mapping[str, str],
    **settings: Any,
) -> Path:
    folder.mkdir(parents=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict.fromkeys(("<|endoftext|>", "<|im_start|>", "<|im_end|>", *tokens.values()))
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "extra_special_tokens": dict(tokens),
            **tokens,
        },
        "config.json": {key: tokenizer.token_to_id(token) for key, token in config.items()},
        "processor_config.json": {"processor_class": processor, "feature_extractor": dict(audio), **settings},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(_CHATML.replace("PLACEHOLDER", written))
    return folder


_WHISPER: Final = {"feature_extractor_type": "WhisperFeatureExtractor", "sampling_rate": RATE}


def qwen2_audio(folder: Path, *, seconds: int = 4) -> Path:
    """Clips are padded to a fixed length, and so do not depend on each other. vLLM takes 30 seconds alone."""
    tokens = {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    audio = {**_WHISPER, "feature_size": 16, "chunk_length": seconds}
    written, config = "".join(tokens[f"audio_{one}"] for one in ("bos_token", "token", "eos_token")), tokens
    return _directory(
        folder,
        "Qwen2AudioProcessor",
        audio,
        written,
        tokens,
        {"audio_token_index": config["audio_token"]},
    )


def qwen3_omni(folder: Path) -> Path:
    """Clips are padded to the longest of the prompt, which changes the last frames of the others."""
    tokens = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    audio = {**_WHISPER, "feature_size": 16}
    written = "<|audio_start|><|audio_pad|><|audio_end|>"
    return _directory(
        folder,
        "Qwen3OmniMoeProcessor",
        audio,
        written,
        tokens,
        {"audio_token_id": "<|audio_pad|>"},
    )


def qwen2_5_omni(folder: Path) -> Path:
    """As Qwen3-Omni, with another number of tokens for a clip."""
    tokens = {
        "audio_token": "<|AUDIO|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    }
    audio = {**_WHISPER, "feature_size": 16}
    written = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    return _directory(
        folder, "Qwen2_5OmniProcessor", audio, written, tokens, {"audio_token_index": "<|AUDIO|>"}
    )


def gemma4(folder: Path) -> Path:
    """Text around the features, and clips that do not depend on each other."""
    tokens = {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    }
    audio = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "feature_size": 16}
    return _directory(
        folder,
        "Gemma4Processor",
        audio,
        "<|audio|>",
        tokens,
        {"audio_token_id": "<|audio|>"},
    )


def audio_flamingo(folder: Path) -> Path:
    """One clip in a prompt, cut into windows."""
    audio = {**_WHISPER, "feature_size": 16, "chunk_length": 2}
    return _directory(
        folder,
        "AudioFlamingo3Processor",
        audio,
        "<sound>",
        {"sound_token": "<sound>"},
        {"audio_token_id": "<sound>"},
    )


_WITH_VIDEO: Final = "{% elif part.type == 'video' %}<|vision_start|><|video|><|vision_end|>"


def with_videos(folder: Path, patch: int = 14) -> Path:
    """Let a directory of `qwen3_omni` or `qwen2_5_omni` take images and videos as well."""
    template = folder / "chat_template.jinja"
    text_branch = "{% elif part.type == 'text' %}"
    template.write_text(template.read_text().replace(text_branch, _WITH_VIDEO + text_branch))
    settings = json.loads((folder / "processor_config.json").read_text())
    for part, name in (("image", "Qwen2VLImageProcessor"), ("video", "Qwen2VLVideoProcessor")):
        settings[f"{part}_processor"] = {f"{part}_processor_type": name, "patch_size": patch}
    (folder / "processor_config.json").write_text(json.dumps(settings))
    return folder


class _OmniVideos(VideoProcessor):
    """Qwen2.5-VL's videos, which need no torchvision, with the names of Qwen's omni models."""

    def __init__(self, folder: Path) -> None:
        files = replace(ProcessorFiles.read(folder), processor={"processor_class": "Qwen2_5_VLProcessor"})
        tokens = {"image_token": "<|image|>", "video_token": "<|video|>"}
        self.native: Any = PatchVideoProcessor.from_files(files, **tokens)
        self.name, self.settings_digest = self.native.name, self.native.settings_digest

    def prepare(self, video: Any) -> Prepared:
        prepared = self.native.prepare(video)

        def finish() -> ProcessedItem:
            item = prepared.finish()
            tensors = item.tensors()
            tensors["video_second_per_grid"] = tensors.pop("second_per_grid_ts")
            parts = {name: compacted(values, None) for name, values in tensors.items()}
            names = ("identity", "size", "grid", "expansion", "modality")
            return ProcessedItem(**{name: getattr(item, name) for name in names}, parts=parts)

        return Prepared(prepared.identity, finish)


def omni_renderer(folder: Path) -> Any:
    """Open a directory of `with_videos` to render sound tracks."""
    renderer = Renderer.from_pretrained(folder, image_backend="pil", use_audio_in_video=True)
    renderer.media.processor.videos = _OmniVideos(folder)
    return renderer


def qwen2_audio_model(renderer: Any, *, seconds: int = 4) -> Any:
    """A model for `qwen2_audio` of as many seconds, with heads of 32, the smallest that inference servers take."""
    import torch
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    encoder = {
        "model_type": "qwen2_audio_encoder",
        "num_mel_bins": 16,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
        "max_source_positions": 50 * seconds,
    }
    text = {
        "model_type": "qwen2",
        "vocab_size": renderer.tokenizer.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
    }
    token = renderer.tokenizer.token_id("<|AUDIO|>")
    torch.manual_seed(0)
    model = Qwen2AudioForConditionalGeneration(
        Qwen2AudioConfig(audio_config=encoder, text_config=text, audio_token_index=token)
    )
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.1)
    return model.float().eval()


def logprobs_of(model: Any, turn: Any, *, is_muted: bool = False) -> Any:
    """Log-probabilities of a completion in one forward of all tokens, the clips joined by hand, or muted."""
    import torch

    items = [span.item.tensors(framework="torch") for span in turn.multi_modal_data.spans()]
    media = {name: torch.cat([tensors[name] for tensors in items]) for name in items[0]}
    if is_muted:
        media["input_features"].zero_()
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0]
    start = len(turn.prompt_ids)
    logprobs = torch.log_softmax(logits.float(), -1)[start - 1 : -1]
    return logprobs.gather(1, ids[0, start:, None])[:, 0].numpy()


FAMILIES: Final = {each.__name__: each for each in (qwen2_audio, qwen3_omni, gemma4, audio_flamingo)}
