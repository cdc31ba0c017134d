"""Tokenizers of other formats, converted to the engine of `tokenizers` and proved equal to their library.

Transformers' own converters build the engine. The library that the format belongs to then encodes the texts
of `proof_texts`, and a single difference refuses the directory. The result is kept on disk under the digest
of all that it depends on, so the converters are imported once for each vocabulary.

For SentencePiece the proof compares text without the blank that begins a first word: where that blank is
written, between added tokens too, is decided by the class of Transformers that `tokenizer_config.json` names.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from blake3 import blake3
from tokenizers import Tokenizer as Engine
from tokenizers import models, normalizers

from mmrender.caching import FileCache, cache_folder, digest_of_code, release_of
from mmrender.errors import MissingDependencyError, MMRenderError, TokenizerError
from mmrender.model.engines import Before, declare_added, without_added
from mmrender.model.fast import proof_texts
from mmrender.model.files import SPECIAL_TOKEN_KEYS, Conversion, ModelDir, find_model
from mmrender.model.pattern import declared_pattern
from mmrender.model.vocabulary import (
    BLANK,
    Vocabulary,
    check_merges,
    check_tekken,
    check_work,
    find_vocabulary,
    read_bounded,
    read_ranks,
    special_tokens,
)

FOLDER = "tokenizers"
"""Folder of converted tokenizers within the folder of `MMRENDER_CACHE`."""
_MAX_FILES = 16
"""Maximum number of converted tokenizers on disk, of up to 30 MB each."""
_LIBRARIES = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "mistral-common")
_SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files beside the vocabulary that a conversion reads."""

_MAX_LENGTH = 1 << 40
_SAVE = "Save a tokenizer.json that you trust: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
_RUN = "Pass trust_remote_code=True to run the model's own tokenizer, or save a tokenizer.json"

Encode: TypeAlias = Callable[[str], list[int]]


class Candidate(NamedTuple):
    """A converted engine, before its proof.

    Attributes:
        engine: With all added tokens of the vocabulary.
        library: Name of the library whose tokens are the reference.
        encode: Encodes text without added tokens by the reference.
        parse: Encodes text in which added tokens are syntax, or None if the reference never does.
        before: Kind of text before a run, for the comparison with `encode`.
        names: Names of special tokens, such as `bos_token`, by the reference.
        template: A chat template, or None.
        no_template: The reason why there is no template.
    """

    engine: Engine
    library: str
    encode: Encode
    parse: Encode | None = None
    before: Before = "nothing"
    names: Mapping[str, str] = {}
    template: str | None = None
    no_template: str = ""


def open_model(
    name_or_path: str | os.PathLike[str], *, revision: str | None = None, trust_remote_code: bool = False
) -> ModelDir:
    """Find a model, and convert its tokenizer if the directory has it in another format.

    Args:
        name_or_path: A directory, or a hub id.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Run tokenizer code of the directory.

    Raises:
        ModelNotFoundError: The directory or repository does not exist.
        TokenizerError: The vocabulary is damaged, or cannot be converted exactly.
        MissingDependencyError: A library of its format is not installed.
    """
    return with_tokenizer(find_model(name_or_path, revision=revision), trust_remote_code=trust_remote_code)


def with_tokenizer(model: ModelDir, *, trust_remote_code: bool = False) -> ModelDir:
    """Return a directory with the files of a fast tokenizer; errors as for `open_model`.

    A directory with `tokenizer.json`, or without any vocabulary, is returned as it is.
    """
    if model.conversion is not None or (model.path / "tokenizer.json").is_file():
        return model
    vocabulary = find_vocabulary(model)
    if vocabulary is None:
        return model
    cache = FileCache(cache_folder(FOLDER), _MAX_FILES)
    name = _digest(model, vocabulary, trust_remote_code)
    conversion = cache.get(name, Conversion)
    if conversion is None:
        conversion = _convert(model, vocabulary, trust_remote_code)
        cache.put(name, conversion)
    return replace(model, conversion=conversion)


def _digest(model: ModelDir, vocabulary: Vocabulary, trust_remote_code: bool) -> str:
    digest = blake3(digest_of_code(("model/*.py",)).encode())
    digest.update(repr((vocabulary.format, trust_remote_code, [*map(release_of, _LIBRARIES)])).encode())
    code = sorted(model.path.glob("*.py")) if vocabulary.format == "tiktoken" or trust_remote_code else []
    for file in (*vocabulary.files, *(model.path / name for name in _SETTINGS), *code):
        content = read_bounded(file) if file.is_file() else b""
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest(length=16)


def _convert(model: ModelDir, vocabulary: Vocabulary, trust_remote_code: bool) -> Conversion:
    with _conversion_errors(vocabulary):
        match vocabulary.format:
            case "tekken":
                candidate = _from_tekken(vocabulary.files[0])
            case "tiktoken":
                candidate = _from_ranks(model, vocabulary.files[0], trust_remote_code)
            case "sentencepiece":
                candidate = _from_pieces(model, vocabulary.files[0], trust_remote_code)
            case "merges":
                candidate = _from_merges(model, vocabulary.files, trust_remote_code)
        definition = candidate.engine.to_str()
        names = {name: text for name, text in candidate.names.items() if name not in model.named_tokens}
        config = {**model.tokenizer_config, **names}
        files = {"tokenizer.json": definition, "tokenizer_config.json": json.dumps(config)}
        conversion = Conversion(files, candidate.library, "", candidate.template, candidate.no_template)
        engine = Engine.from_str(definition)
        declare_added(engine, replace(model, conversion=conversion))
        count = _prove(engine, candidate, vocabulary)
    release = release_of(candidate.library)
    proof = f"{vocabulary.name}, equal to {candidate.library} {release} over {count} texts"
    return msgspec.structs.replace(conversion, proof=proof)


def _prove(engine: Engine, candidate: Candidate, vocabulary: Vocabulary) -> int:
    """Compare the tokens of texts with the reference, and return the number of texts."""
    plain = without_added(engine, engine.model)[candidate.before]
    added = [token.content for token in engine.get_added_tokens_decoder().values()]
    pairs = [(text, plain, candidate.encode) for text in proof_texts(())]
    if candidate.parse is not None:
        pairs += [(text, engine, candidate.parse) for text in proof_texts(added)]
    for text, ours, theirs in pairs:
        ids, expected = ours.encode(text, add_special_tokens=False).ids, theirs(text)
        if ids != expected:
            raise TokenizerError(
                f"{vocabulary.name} cannot be converted exactly",
                where=str(vocabulary.files[0]),
                expected=f"the tokens of {candidate.library}, {expected[:12]} for {text[:60]!r}",
                got=str(ids[:12]),
                remedy=_SAVE,
            )
    return len(pairs)


def _from_tekken(file: Path) -> Candidate:
    check_tekken(file)
    from mmrender.model.mistral import TekkenSource

    source = TekkenSource(file)
    template, reason = source.template()
    return Candidate(
        source.engine,
        "mistral-common",
        source.encode,
        names=source.names,
        template=template,
        no_template=reason,
    )


def _from_ranks(model: ModelDir, file: Path, trust_remote_code: bool) -> Candidate:
    ranks = read_ranks(file)
    import tiktoken
    from transformers.convert_slow_tokenizer import TikTokenConverter

    if trust_remote_code and "auto_map" in model.tokenizer_config:
        reference = _reference(model, trust_remote_code)
        parts = vars(reference).values()
        encoding = next((part for part in parts if isinstance(part, tiktoken.Encoding)), None)
        if encoding is None:
            raise TokenizerError(
                f"{type(reference).__name__} keeps no encoding of tiktoken",
                where=str(file),
                expected="an attribute that is a tiktoken.Encoding",
                remedy=_SAVE,
            )
        parse: Encode = partial(_parsed, reference)
    else:
        special = special_tokens(model, file, len(ranks))
        pattern = declared_pattern(model)
        if pattern is None:
            raise TokenizerError(
                f"{file.name} does not say where text is cut",
                where=str(model.path),
                expected="tokenization_*.py with the pattern as text, as pat_str of tiktoken.Encoding",
                remedy=_RUN,
            )
        encoding = tiktoken.Encoding(
            file.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        parse = partial(encoding.encode, allowed_special="all")
    special = dict(encoding._special_tokens)
    ordered = sorted(special, key=special.__getitem__)
    if [special[token] for token in ordered] != [*range(len(ranks), len(ranks) + len(special))]:
        raise TokenizerError(
            "special tokens do not follow the vocabulary",
            where=str(file),
            expected=f"ids from {len(ranks)} without a gap",
            got=f"{len(special)} tokens with ids up to {max(special.values())}",
            remedy=_SAVE,
        )

    class Converter(TikTokenConverter):  # type: ignore[misc]
        # tiktoken's own reader keeps files by path in a shared folder, and would return an older one.
        load_tiktoken_bpe = staticmethod(lambda _: ranks)

    engine = Converter(str(file), pattern=encoding._pat_str, extra_special_tokens=ordered).converted()
    return Candidate(engine, "tiktoken", encoding.encode_ordinary, parse)


def _from_pieces(model: ModelDir, file: Path, trust_remote_code: bool) -> Candidate:
    content = read_bounded(file)
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto.FromString(content)
    check_work((piece.piece for piece in proto.pieces), file)
    has_prefix = proto.normalizer_spec.add_dummy_prefix
    proto.normalizer_spec.add_dummy_prefix = False
    source = SentencePieceProcessor()
    source.LoadFromSerializedProto(proto.SerializeToString())
    reference = _reference(model, trust_remote_code)
    parse = partial(_parsed, reference)
    if isinstance(getattr(reference, "backend_tokenizer", None), Engine):
        engine = _engine_of(reference, file)
    else:
        engine = _engine_of_slow(model, reference, has_prefix)
    added = {token.content for token in engine.get_added_tokens_decoder().values()}
    whole = [piece.piece for piece in proto.pieces if piece.type == piece.USER_DEFINED]
    if lacking := [piece for piece in whole if piece not in added and piece.strip(f"{BLANK} \n\t")]:
        raise TokenizerError(
            f"{type(reference).__name__} splits tokens that SentencePiece keeps whole",
            where=str(file),
            expected=f"{lacking[0]!r} as an added token",
            got=f"{len(lacking)} tokens that no file declares",
            remedy="List them in added_tokens_decoder of tokenizer_config.json",
        )
    return Candidate(engine, "sentencepiece", source.encode, parse, "text", _names_of(reference))


def _engine_of_slow(model: ModelDir, reference: Any, has_prefix: bool) -> Engine:
    """Return an engine for a class that hands each text between added tokens to SentencePiece."""
    from transformers import LlamaTokenizer

    engine: Engine = LlamaTokenizer.from_pretrained(model.path, local_files_only=True).backend_tokenizer
    prefix = [normalizers.Prepend(BLANK)] if has_prefix else []
    engine.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", BLANK)])
    engine.pre_tokenizer = None
    for _, token in sorted(reference.added_tokens_decoder.items()):
        (engine.add_special_tokens if token.special else engine.add_tokens)([token])
    return engine


def _from_merges(model: ModelDir, files: tuple[Path, ...], trust_remote_code: bool) -> Candidate:
    vocab, merges = files
    declared = Engine(models.BPE())
    declare_added(declared, model)
    check_merges(vocab, merges, {token.content for token in declared.get_added_tokens_decoder().values()})
    reference = _reference(model, trust_remote_code)
    engine, parse = _engine_of(reference, vocab), partial(_parsed, reference)

    def encode(text: str) -> list[int]:
        # The class of Transformers defines the cuts. A class that fits another vocabulary loses text.
        ids = parse(text)
        normalized = text if engine.normalizer is None else engine.normalizer.normalize_str(text)
        decoded = engine.decode(ids, skip_special_tokens=False)
        if decoded not in (normalized, text):
            raise TokenizerError(
                f"{type(reference).__name__} loses text with this vocabulary",
                where=str(vocab),
                expected=repr(text[:60]),
                got=repr(decoded[:60]),
                remedy="Name the class of the tokenizer as tokenizer_class in tokenizer_config.json",
            )
        return ids

    return Candidate(engine, "transformers", encode, parse, names=_names_of(reference))


def _reference(model: ModelDir, trust_remote_code: bool) -> Any:
    """Return the directory's tokenizer as Transformers loads it."""
    from transformers import AutoTokenizer

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    # Without a length it warns of long texts.
    try:
        return AutoTokenizer.from_pretrained(model.path, model_max_length=_MAX_LENGTH, **options)
    except ValueError as error:
        if trust_remote_code or "trust_remote_code" not in str(error):
            raise
        raise TokenizerError(
            "the tokenizer is code of the model directory", where=str(model.path), remedy=_RUN
        ) from error


def _parsed(reference: Any, text: str) -> list[int]:
    return list(reference(text, add_special_tokens=False).input_ids)


def _engine_of(reference: Any, file: Path) -> Engine:
    engine = getattr(reference, "backend_tokenizer", None)
    if not isinstance(engine, Engine):
        raise TokenizerError(
            f"Transformers does not convert {type(reference).__name__}",
            where=str(file),
            expected="a class on the tokenizers library",
            remedy=_SAVE,
        )
    return engine


def _names_of(reference: Any) -> dict[str, str]:
    named = reference.special_tokens_map
    return {name: str(named[name]) for name in SPECIAL_TOKEN_KEYS if isinstance(named.get(name), str)}


@contextmanager
def _conversion_errors(vocabulary: Vocabulary) -> Iterator[None]:
    """Turn any exception of a library into an error that names the file, or the extra that it needs."""
    try:
        yield
    except MMRenderError:
        raise
    except ImportError as error:
        package = str(error.name or error).partition(".")[0]
        extra = "mistral" if vocabulary.format == "tekken" else "convert"
        raise MissingDependencyError.of_extra(
            package, extra, vocabulary.name, otherwise="save a tokenizer.json"
        ) from error
    except BaseException as error:
        # A panic of compiled code is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        cause = " ".join(str(error).split()) or type(error).__name__
        where = str(vocabulary.files[0])
        raise TokenizerError(
            f"{vocabulary.name} cannot be converted", where=where, got=cause[:200]
        ) from error
