"""Build model directories of many families without a model hub and without weights.

    python tools/families.py PACKAGES OUTPUT [NAME ...]

PACKAGES is a folder of wheels that `make families` downloads. `families.toml` beside this file says, for
each family, which wheel holds its chat template, how its processor is set and what its added tokens are.
Vocabularies are stand-ins of the family's kind: other ids than the published model's, which does not matter
where both sides read them.
"""

import argparse
import base64
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from mmrender.testing.reference import import_torchvision

TABLE = Path(__file__).with_name("families.toml")
AUDIO_TABLE = Path(__file__).with_name("audio_families.toml")
_RANKS = 6_000
"""Tokens of a published byte-level vocabulary that a stand-in keeps: the first, and so the most frequent."""
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTED_O200K = _O200K % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}")
PATTERNS = {
    "qwen": _GPT % "",
    "qwen3_5": (_GPT % "").replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}", r" ?[^\s\p{L}\p{M}"),
    "llama3": _GPT % "{1,3}",
    "o200k": _CONTRACTED_O200K,
    "tekken": _O200K % ("", "", ""),
    "kimi": r"[\p{Han}]+|" + _CONTRACTED_O200K.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]"),
}
PARTS = {"image": "image_processor_type", "video": "video_processor_type", "audio": "feature_extractor_type"}


class Packages:
    """Files of the wheels in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, package: str, path: str) -> bytes:
        """File of a wheel.

        Raises:
            FileNotFoundError: The folder has no wheel of the package.
        """
        with zipfile.ZipFile(self.wheel(package)) as archive:
            return archive.read(path)

    def wheel(self, package: str) -> Path:
        found = sorted(self.folder.glob(f"{package}-*.whl"))
        if not found:
            raise FileNotFoundError(f"no wheel of {package} in {self.folder}; run make families")
        return found[-1]

    def template(self, package: str, path: str, *flags: str) -> str:
        """Chat template, as a file of its own, as a field of a JSON file, or written by mistral-common."""
        if package == "mistral_common":
            return _mistral_template(path, is_sentencepiece="spm" in flags)
        text = self.read(package, path).decode("utf-8")
        if not path.endswith(".json"):
            return text
        entry = json.loads(text)
        return str((entry[0] if isinstance(entry, list) else entry)["chat_template"])

    def ranks(self, vocabulary: str) -> list[bytes]:
        """First tokens of a published byte-level vocabulary, in the order of their merges."""
        if vocabulary == "tekken":
            path = "mistral_common/data/tekken_240911.json"
            rows = json.loads(self.read("mistral_common", path))["vocab"][:_RANKS]
            return [base64.b64decode(row["token_bytes"]) for row in rows]
        lines = self.read("llama_models", f"llama_models/{vocabulary}/tokenizer.model").splitlines()
        return [base64.b64decode(line.split()[0]) for line in lines[:_RANKS]]

    @cache  # noqa: B019 - one instance a run
    def corpus(self) -> list[str]:
        """Text to train small vocabularies on: the prose and the templates of the wheels."""
        texts = []
        for package in ("trl", "axolotl"):
            with zipfile.ZipFile(self.wheel(package)) as archive:
                prose = [name for name in archive.namelist() if name.endswith((".md", ".jinja", "METADATA"))]
                texts += [archive.read(name).decode("utf-8") for name in prose]
        return texts


def _mistral_template(version: str, *, is_sentencepiece: bool) -> str:
    from mistral_common.integrations.chat_templates.template_generator import (
        TemplateConfig,
        build_chat_template,
    )
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    config = TemplateConfig(
        version=TokenizerVersion(version),
        spm=is_sentencepiece,
        image_support=not is_sentencepiece,
        thinking_support=version == "v13",
        use_special_token_variables=True,
    )
    return str(build_chat_template(config))


def expand(names: list[str]) -> Iterator[str]:
    """Tokens that the names of a table stand for: `<h{1-6}>` for six."""
    for name in names:
        numbers = re.search(r"\{(\d+)-(\d+)\}", name)
        if numbers is None:
            yield name
            continue
        before, after = name[: numbers.start()], name[numbers.end() :]
        for number in range(int(numbers[1]), int(numbers[2]) + 1):
            yield from expand([f"{before}{number}{after}"])


def merges_of(ranks: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Merges of a vocabulary that is a list of tokens: the last step of joining each from its bytes."""
    order = {token: rank for rank, token in enumerate(ranks)}
    merges = []
    for token, rank in order.items():
        parts = [token[index : index + 1] for index in range(len(token))]
        while len(parts) > 2:
            joined = [order.get(left + right, rank) for left, right in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def byte_letters() -> dict[int, str]:
    """Printable character that a byte-level vocabulary writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def _byte_level(ranks: list[bytes], pattern: str) -> Tokenizer:
    letters = byte_letters()

    def written(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    single = [bytes([byte]) for byte in range(256)]
    tokens = dict.fromkeys(written(token) for token in [*single, *ranks])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [(written(left), written(right)) for left, right in merges_of(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    in_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern not in PATTERNS)
    splits: list[pre_tokenizers.PreTokenizer] = []
    if pattern == "gpt2":
        splits = [pre_tokenizers.Digits(individual_digits=True)]
    elif pattern in PATTERNS:
        splits = [pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, in_letters])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(corpus: list[str], special: list[str], kind: str) -> Tokenizer:
    """Byte-pair vocabulary with byte fallback, as SentencePiece writes one, with ▁ for a space."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
    trainer = trainers.BpeTrainer(vocab_size=6_000, special_tokens=[*special, *bytes_], show_progress=False)
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    spaces = normalizers.Replace(" ", "▁")
    bytes_back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        tokenizer.normalizer = spaces
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
        tokenizer.decoder = decoders.Sequence(bytes_back)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        tokenizer.decoder = decoders.Sequence([*bytes_back, decoders.Strip(" ", 1, 0)])
    return tokenizer


def build_tokenizer(family: dict[str, Any], packages: Packages) -> Tokenizer:
    """Stand-in vocabulary of the family's kind with its added tokens, normalizer and post-processor."""
    special = list(expand(family["special"]))
    kind, *details = family["vocabulary"]
    if kind == "byte_level":
        tokenizer = _byte_level(packages.ranks(details[0]), details[1])
    else:
        tokenizer = _sentencepiece(packages.corpus(), special, kind)
    if "normalizer" in family:
        tokenizer.normalizer = getattr(normalizers, family["normalizer"])()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    swallowing = expand(family.get("swallowing", []))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, rstrip=True) for token in swallowing]
    )
    runs = [character * length for character in family.get("runs", []) for length in range(2, 32)]
    plain = [*expand(family.get("plain", [])), *runs]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    if "bos" in family:
        bos = family["bos"]
        template = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
        first = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = (
            processors.Sequence([first, template]) if kind == "byte_level" else template
        )
    return tokenizer


def _part_settings(part: dict[str, Any], type_key: str) -> dict[str, Any]:
    """Settings of an image, video or audio processor: the class's own, and those that the table changes."""
    import_torchvision()  # before Transformers does, which would fail beside a CPU torch
    import transformers

    settings = {key: value for key, value in part.items() if key != "class"}
    written = json.loads(getattr(transformers, part["class"])(**settings).to_json_string())
    return {**written, type_key: part["class"]}


def _processor_files(family: dict[str, Any]) -> dict[str, Any]:
    """Settings of the processor and its parts: in files of their own, or in one where there is audio."""
    name = family["processor"]["class"]
    processor = family["processor"] | {"processor_class": name}
    del processor["class"]
    parts = {kind: _part_settings(family[kind], key) for kind, key in PARTS.items() if kind in family}
    if "audio_file" in family:
        # One file describes images and audio.
        parts["image"] = parts.pop("audio") | parts.get("image", {})
    elif "audio" in parts:
        keys = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}
        return {"processor_config.json": processor | {keys[kind]: part for kind, part in parts.items()}}
    files = {
        "processor_config.json": processor,
        "preprocessor_config.json": parts["image"] | {"processor_class": name},
    }
    if "video" in parts:
        files["video_preprocessor_config.json"] = parts["video"]
    return files


def build(name: str, family: dict[str, Any], packages: Packages, output: Path) -> None:
    """Write the model directory of a family."""
    folder = output / name
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(family, packages)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        key: value if key == "model_type" else tokenizer.token_to_id(value)
        for key, value in family["config"].items()
    }
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {
            "eos_token_id": [tokenizer.token_to_id(token) for token in family["stop"]]
        },
        "tokenizer_config.json": {"tokenizer_class": family["tokenizer_class"], **family["tokens"]},
    }
    if "processor" in family:
        files["tokenizer_config.json"]["processor_class"] = family["processor"]["class"]
        files |= _processor_files(family)
    source = family["template"]
    template = source if isinstance(source, str) else packages.template(*source)
    stored = family.get("stored", "chat_template.jinja")
    if stored.endswith(".json"):
        files.setdefault(stored, {})["chat_template"] = template
    else:
        (folder / stored).write_text(template, "utf-8")
    for path, content in files.items():
        (folder / path).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")


def read_table(*, audio: bool = False) -> dict[str, dict[str, Any]]:
    """Rows by family, with what they take from another: of models of audio, or of all other models."""
    rows = tomllib.loads(TABLE.read_text("utf-8"))
    chosen = tomllib.loads(AUDIO_TABLE.read_text("utf-8")) if audio else rows
    rows = rows | chosen
    table = {}
    for name, row in chosen.items():
        shared = rows[row["like"]] if "like" in row else {}
        table[name] = {key: value for key, value in shared.items() if key not in row.get("without", [])} | row
    return table


def main() -> int:
    """Build the families that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    table = read_table() | read_table(audio=True)
    packages = Packages(options.packages)
    for name in options.names or table:
        needed = table[name].get("needs")
        if needed is not None and find_spec(needed) is None:
            print(f"{name}: left out, since {needed} is not installed")
            continue
        build(name, table[name], packages, options.output)
        print(f"{name}: {options.output / name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
