"""What the replies of all engines have in common: decoding, completions, router choices.

A reply is foreign: whatever a server answers gives an `EngineResponse` that can be trained on, or an
`EngineReplyError` that names the field.
"""

import asyncio
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from mmrender.client.types import EngineRequest, FinishReason, TopLogprobs
from mmrender.errors import EngineMismatchError, EngineReplyError
from mmrender.trajectory.engine_data import RoutedExperts, WeightVersionSpan

T = TypeVar("T")
Base64: TypeAlias = str | bytes

_LARGE_REPLY: Final = 1 << 20
LOGPROB_SENTINEL: Final = -9999.0
"""What vLLM writes where it has no logprob."""
_LEAST_LOGPROB: Final = -3.0e38
"""SGLang writes the least float32 in place of minus infinity."""
_ROUNDING: Final = 1e-4
"""How far above 0 rounding may take the logprob of a certain token."""
_DTYPES: Final = frozenset({"uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"})


def decode_json(body: bytes, *, where: str) -> Any:
    """Decode a JSON reply."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineReplyError("the server's reply is not JSON", where=where, got=str(error)) from error


def decode_as(body: bytes, type: type[T], *, where: str) -> T:
    """Decode a JSON reply to a struct, strictly."""
    return convert(decode_json(body, where=where), type, where=where)


def convert(value: Any, type: type[T], *, where: str) -> T:
    """Convert decoded JSON to a struct, strictly."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise _malformed_reply(error, where) from error


def _malformed_reply(error: msgspec.ValidationError, where: str) -> EngineReplyError:
    problem, _, path = str(error).partition(" - at ")
    expected, _, got = problem.removeprefix("Expected ").partition(", got ")
    if not problem.startswith("Expected "):  # "Object missing required field `x`"
        expected, got = "", problem
    field = path.strip("`").removeprefix("$").removeprefix(".")
    return EngineReplyError(
        "the server's reply is malformed",
        where=f"{where} {field}".strip(),
        expected=expected.replace("`", "") or None,
        got=got.replace("`", "") or None,
    )


async def read_reply(body: bytes, read: Callable[[bytes], T]) -> T:
    """Return `read(body)`, on a thread where the body is so large that the event loop would wait."""
    if len(body) < _LARGE_REPLY:
        return read(body)
    return await asyncio.to_thread(read, body)


def check_completion(
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    request: EngineRequest,
    *,
    where: str,
    before: int = 0,
) -> tuple[list[int], list[float]]:
    """Return a completion's tokens with one finite logprob for each.

    Args:
        ids: The sampled tokens, integers.
        logprobs: What the engine says of each, numbers or None.
        request: Bounds them: `vocab_size`, and `max_tokens` of the sampling parameters.
        where: The completion in errors.
        before: Tokens that came in earlier chunks.
    """
    most = request.sampling_params.get("max_tokens")
    if most is not None and before + len(ids) > most:
        raise EngineReplyError(
            "the engine sampled more tokens than were asked for",
            where=where,
            expected=f"at most {most}",
            got=str(before + len(ids)),
        )
    if len(ids) != len(logprobs):
        raise EngineReplyError(
            "tokens and logprobs are not equally many",
            where=where,
            expected=f"{len(ids)} logprobs, one for each token",
            got=str(len(logprobs)),
        )
    vocab_size = request.vocab_size
    values = np.array(logprobs, np.float64)  # None becomes nan
    usable = (values > _LEAST_LOGPROB) & (values <= _ROUNDING) & (values != LOGPROB_SENTINEL)
    inside = min(ids, default=0) >= 0 and (vocab_size is None or max(ids, default=0) < vocab_size)
    if inside and usable.all():
        return list(ids), values.tolist()
    index, token = next(
        (index, token)
        for index, token in enumerate(ids)
        if not usable[index] or token < 0 or (vocab_size is not None and token >= vocab_size)
    )
    if usable[index]:
        raise EngineReplyError(
            "the engine gave a token that is outside the vocabulary",
            where=f"{where}[{index}]",
            expected="an id of 0 or more" if vocab_size is None else f"an id from 0 to {vocab_size - 1}",
            got=repr(token),
        )
    raise EngineReplyError(
        f"the engine has no usable logprob for the token {token}",
        where=f"{where}[{index}]",
        expected="a finite number of at most 0",
        got=repr(logprobs[index]),
    )


def finish_reason_in(
    reasons: Mapping[str, FinishReason], reported: str | None, *, where: str
) -> FinishReason:
    """Return why sampling ended, by an engine's names of reasons."""
    reason = reasons.get(reported or "")
    if reason is None:
        raise EngineReplyError(
            "the completion ended for an unknown reason",
            where=where,
            expected=", ".join(reasons),
            got=repr(reported),
        )
    return reason


def check_count(rows: Sequence[Any] | None, count: int, *, what: str, where: str) -> None:
    """Require `count` rows, one for each token."""
    if rows is None or len(rows) != count:
        raise EngineReplyError(
            f"{what} and tokens are not equally many",
            where=where,
            expected=str(count),
            got="nothing" if rows is None else str(len(rows)),
        )


class LogprobEntry(msgspec.Struct):
    """A token and its logprob, of vLLM and Dynamo: `token_id: 7`, before vLLM 0.32 `token: "token_id:7"`."""

    logprob: float | None = None
    token_id: int | None = None
    token: str | None = None
    top_logprobs: list["LogprobEntry"] | None = None

    @property
    def id(self) -> int | None:
        """The token that the entry is about, in either form."""
        name = self.token or ""
        if self.token_id is None and name.startswith("token_id:") and name[9:].isdecimal():
            return int(name[9:])
        return self.token_id


def check_named(entries: Sequence[LogprobEntry], ids: Sequence[int], *, where: str, required: bool) -> None:
    """Require that each logprob names the token that was sampled there, or none unless `required`."""
    if [entry.token_id for entry in entries] == ids:
        return
    for index, (token, entry) in enumerate(zip(ids, entries, strict=False)):
        named = entry.id
        if named != token and (required or named is not None):
            raise EngineReplyError(
                "a logprob is that of another token",
                where=f"{where}[{index}]",
                expected=f"the token {token}, as token_id or token 'token_id:{token}'",
                got=f"the token {named}" if named is not None else repr(entry)[:200],
            )


def alternatives(entries: Sequence[LogprobEntry], *, where: str) -> TopLogprobs:
    """Return the alternatives of each token."""
    for index, entry in enumerate(entries):
        for other in entry.top_logprobs or ():
            if other.id is None or other.logprob is None:
                raise EngineReplyError(
                    "an alternative lacks its token or its logprob",
                    where=f"{where}[{index}].top_logprobs",
                    expected="token_id, or token as 'token_id:N', and logprob",
                    got=repr(other)[:200],
                )
    return tuple(
        tuple((other.id or 0, other.logprob or 0.0) for other in entry.top_logprobs or ())
        for entry in entries
    )


class PromptDetails(msgspec.Struct):
    """Details of OpenAI's token counts."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """Token counts in OpenAI's form."""

    prompt_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache."""
        return None if self.prompt_tokens_details is None else self.prompt_tokens_details.cached_tokens


def check_prompt_count(usage: ReportedUsage | None, request: EngineRequest, *, where: str) -> None:
    """Require that the server counted as many prompt tokens as it should have used."""
    counted = None if usage is None else usage.prompt_tokens
    if counted is not None and counted != len(request.prompt_ids):
        raise EngineMismatchError(
            "the server counted other prompt tokens than were sent",
            where=where,
            expected=str(len(request.prompt_ids)),
            got=str(counted),
        )


class ReportedVersion(msgspec.Struct):
    """Completion tokens `[start, end)` that one version of the weights sampled."""

    version: str | int
    start: int
    end: int


def version_spans(
    reported: Sequence[ReportedVersion] | None, count: int, *, where: str
) -> tuple[WeightVersionSpan, ...]:
    """Return the weight versions of a completion of `count` tokens; empty spans are left out."""
    spans: list[WeightVersionSpan] = []
    position = 0
    for index, span in enumerate(reported or ()):
        if not position <= span.start <= span.end <= count:
            raise EngineReplyError(
                "weight versions are not spans of the completion",
                where=f"{where}[{index}]",
                expected=f"start and end within [{position}, {count}]",
                got=repr(span),
            )
        position = span.end
        if span.start < span.end:
            spans.append(WeightVersionSpan(str(span.version), span.start, span.end))
    return tuple(spans)


# --- router choices ---
#
# Every form leaves out the last sampled token: it is never fed back, so no router saw it. Of `n` tokens of
# prompt and completion and a start of 0 there are `n - 1` rows. Arrays are read-only views of decoded base64.


def experts_from_npy(data: Base64, start: int = 0, *, where: str) -> RoutedExperts:
    """Read vLLM's form: base64 of an `.npy` file, of shape `(rows, layers, top_k)`.

    Args:
        data: The base64 text.
        start: Position of the token that row 0 belongs to.
        where: The field in errors.
    """
    raw = _decode_base64(data, where)
    stream = io.BytesIO(raw)
    try:
        # `np.load` would reserve what the header claims before it has looked at the data.
        version = np.lib.format.read_magic(stream)
        read_header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, is_fortran, dtype = read_header(stream)
    except (ValueError, KeyError, EOFError) as error:
        raise _malformed_experts(where, "base64 of an .npy file", str(error)) from error
    if is_fortran:
        raise _malformed_experts(where, "an array in C order", "Fortran order")
    return _experts(memoryview(raw)[stream.tell() :], dtype, shape, start, where)


def experts_from_int32(
    data: Base64, *, rows: int, layers: int, top_k: int, start: int = 0, where: str
) -> RoutedExperts:
    """Read SGLang's form: base64 of little-endian int32 in C order, without a shape.

    Args:
        data: The base64 text.
        rows: Prompt plus completion tokens, less 1 and less `start`. Where the data has `start` rows more,
            the server gave every row.
        layers: Layers of the model that SGLang reports; from its configuration.
        top_k: Experts that each token is routed to.
        start: Position of the token that row 0 belongs to.
        where: The field in errors.
    """
    raw = _decode_base64(data, where)
    if start and len(raw) == (rows + start) * layers * top_k * 4:
        whole = _experts(raw, np.dtype("<i4"), (rows + start, layers, top_k), 0, where)
        return whole.from_position(start)
    return _experts(raw, np.dtype("<i4"), (rows, layers, top_k), start, where)


class ReportedExperts(msgspec.Struct):
    """Dynamo's form of router choices: base64 and its shape."""

    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int = 0


def experts_from_mapping(
    value: ReportedExperts, asked_from: int | None = None, *, where: str
) -> RoutedExperts:
    """Read Dynamo's form, without the rows before `asked_from`, which a worker may have left out already."""
    if value.dtype not in _DTYPES:
        raise _malformed_experts(f"{where}.dtype", "the name of an integer type", repr(value.dtype)[:100])
    raw = _decode_base64(value.data, f"{where}.data")
    dtype = np.dtype(value.dtype).newbyteorder("<")
    experts = _experts(raw, dtype, value.shape, value.start, where)
    return experts.from_position(max(asked_from or 0, experts.start))


def _decode_base64(data: Base64, where: str) -> bytes:
    try:
        return pybase64.b64decode(data, validate=True)
    except ValueError as error:
        raise _malformed_experts(where, "base64 text", str(error)) from error


def _experts(
    raw: bytes | memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], start: int, where: str
) -> RoutedExperts:
    if len(shape) != 3 or dtype.name not in _DTYPES or min(*shape, start) < 0:
        got = f"{dtype} {list(shape)}" if start >= 0 else f"start {start}"
        raise _malformed_experts(where, "integers of shape (rows, layers, top_k)", got)
    needed = math.prod(shape) * dtype.itemsize
    if len(raw) != needed:
        raise _malformed_experts(where, f"{needed} bytes for {dtype.name} {list(shape)}", f"{len(raw)} bytes")
    array: npt.NDArray[Any] = np.frombuffer(raw, dtype).reshape(shape)
    return RoutedExperts(array, start)


def _malformed_experts(where: str, expected: str, got: str) -> EngineReplyError:
    return EngineReplyError(
        "the routed experts of the reply are malformed", where=where, expected=expected, got=got
    )
