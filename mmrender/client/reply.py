"""Decoding and checks that the replies of all servers share.

A reply is foreign: it becomes an `EngineResponse` that can be trained on, or an `EngineReplyError` that names
the field. A backend knows its server's form and passes the parts to `response_of`, which checks them.
"""

import io
import math
import re
import tokenize
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from mmcodecs.structs import ready
from mmrender.client.types import EngineRequest, EngineResponse, FinishReason, TopLogprobs, Usage
from mmrender.errors import EngineMismatchError, EngineReplyError, EngineUnsupportedError
from mmrender.sidecar import common_prefix
from mmrender.trajectory.engine_data import AllowedTokens, RoutedExperts, WeightVersionSpan
from mmrender.trajectory.step import are_finite

T = TypeVar("T")

LOGPROB_SENTINEL: Final = -9999.0
"""vLLM's number for a missing logprob."""
_ROUNDING: Final = 1e-4
"""Distance above 0 that rounding may add to the logprob of a certain token."""
_LISTS: Final = (
    ("completion_ids", int | np.integer, "token ids"),
    ("logprobs", float | int | np.floating, "numbers"),
)
_REASONS: Final[Mapping[str, FinishReason]] = {
    "stop": "stop",
    "length": "length",
    "abort": "abort",
    "repetition": "stop",  # vLLM's detection of repetition, which a caller asked for
    "tool_calls": "stop",  # a Dynamo frontend's own parser found a call
}


class FailedInEngineError(EngineReplyError):
    """The engine gave up on the request, and said so with HTTP 200.

    vLLM 0.27 and 0.28 answer so to a hash whose data they do not have.
    """


class PromptNotShownError(EngineReplyError):
    """The server was asked to widen a prompt and does not show it, as one that ignored the images."""


def decode_as(body: bytes, type: type[T], *, where: str) -> T:
    """Decode a JSON reply strictly, to a struct or another type."""
    try:
        return msgspec.json.decode(body, type=ready(type))
    except msgspec.ValidationError as error:
        # "Expected `int`, got `str` - at `$.data[0]`", or "Object missing required field `x`"
        text = str(error).replace("`", "")
        match = re.fullmatch(r"(?:Expected (.*), got )?(.*?)(?: - at \$\.?(.*))?", text)
        expected, got, path = match.groups() if match else (None, text, None)
        where = f"{where} {path or ''}".strip()
        problem = "the server's reply is malformed"
        raise EngineReplyError(problem, where=where, expected=expected, got=got) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineReplyError("the server's reply is not JSON", where=where, got=str(error)) from error


def only(completions: Sequence[T], *, where: str) -> T:
    """Return the one completion of a reply."""
    if len(completions) != 1:
        raise EngineReplyError("the reply is not one completion", where=where, got=str(len(completions)))
    return completions[0]


async def read_events(lines: AsyncIterator[bytes], type: type[T], *, where: str) -> AsyncIterator[T]:
    """Yield the values of a stream of server-sent events, up to `[DONE]`."""
    async for line in lines:
        if not line.startswith(b"data:"):
            continue  # empty lines between events, comments, names of events
        text = line[5:].strip()
        if text == b"[DONE]":
            return
        yield decode_as(text, type, where=where)
    raise EngineReplyError("the stream broke off", where=where, expected="[DONE] at its end")


class LogprobEntry(msgspec.Struct, gc=False):
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


class ReportedLogprobs(msgspec.Struct):
    """Logprobs in OpenAI's form."""

    content: list[LogprobEntry] | None = None


class PromptDetails(msgspec.Struct):
    """Details of OpenAI's token counts."""

    cached_tokens: int | None = None


class ReportedUsage(msgspec.Struct):
    """Token counts in OpenAI's form."""

    prompt_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class ReportedVersion(msgspec.Struct):
    """Completion tokens `[start, end)` that one version of the weights sampled."""

    version: str | int
    start: int
    end: int


class ReportedExperts(msgspec.Struct):
    """Dynamo's form of router choices: base64 and its shape."""

    data: str
    shape: tuple[int, int, int]
    dtype: str
    start: int = 0


def response_of(
    request: EngineRequest,
    *,
    where: str,
    ids: Sequence[int],
    entries: Sequence[LogprobEntry],
    named: bool = True,
    reason: str | None,
    stop_reason: int | str | None = None,
    seen: Sequence[int] | None = None,
    usage: ReportedUsage | None = None,
    experts: str | ReportedExperts | None = None,
    experts_shape: tuple[int, int] | None = None,
    versions: Sequence[ReportedVersion] | None = None,
    masks: Sequence[Sequence[int]] | None = None,
    request_id: str | None = None,
) -> EngineResponse:
    """Check a server's account of one completion. `where` is the call in errors.

    `named` says whether each logprob must name its token, `seen` is the prompt that the server used, and
    `experts_shape` is `(layers, experts of a token)`, for router choices without a shape.
    """
    finish_reason = finish_reason_in(reason, where=where)
    logprobs = check_completion(ids, entries, request, where=where, named=named)
    if seen is not None:
        check_prompt_seen(seen, request, where=f"{where} prompt_token_ids")
    usage = usage or ReportedUsage()
    prompt_count, count = len(request.prompt_ids), len(ids)
    if usage.prompt_tokens not in (None, prompt_count):
        raise EngineMismatchError(
            "the server counted other prompt tokens than were sent",
            where=f"{where} usage.prompt_tokens",
            expected=str(prompt_count),
            got=str(usage.prompt_tokens),
        )
    routed = None
    if request.routed_experts:
        routed = routed_experts(experts, request, count, shape=experts_shape, where=where)
    return EngineResponse(
        completion_ids=list(ids),
        logprobs=logprobs,
        finish_reason=finish_reason,
        usage=Usage(prompt_count, count, (usage.prompt_tokens_details or PromptDetails()).cached_tokens),
        stop_reason=stop_reason,
        routed_experts=routed,
        weight_versions=version_spans(versions, count, where=where) if versions else (),
        allowed=() if masks is None else kept_tokens(masks, ids, request, where=where),
        request_id=request_id,
        top_logprobs=alternatives(entries, where=where) if request.sampling_params.get("logprobs") else None,
    )


def finish_reason_in(reported: str | None, *, where: str) -> FinishReason:
    """Return why sampling ended, by the words of any server."""
    if reported == "error":
        raise FailedInEngineError(
            "the engine failed during the request",
            where=where,
            got="finish_reason 'error'",
            remedy="The server's log says why",
        )
    reason = _REASONS.get(reported or "")
    if reason is None:
        problem, expected = "the completion ended for an unknown reason", ", ".join(_REASONS)
        raise EngineReplyError(problem, where=f"{where} finish_reason", expected=expected, got=repr(reported))
    return reason


def check_response(response: object, request: EngineRequest, *, where: str) -> EngineResponse:
    """Require of the response of any engine, as of one of the user's own, what is required of a server's.

    `where` is the engine's name in errors.
    """
    if not isinstance(response, EngineResponse):
        got = type(response).__name__
        raise EngineReplyError("not a response", where=where, expected="an EngineResponse", got=got)
    for name, kinds, noun in _LISTS:
        values = getattr(response, name)
        if not isinstance(values, list | tuple) or not all(
            issubclass(kind, kinds) for kind in {*map(type, values)}
        ):
            raise EngineReplyError(
                "the engine's response is malformed",
                where=f"{where} {name}",
                expected=f"a list of {noun}",
                got=repr(values)[:80],
            )
    finish_reason_in(response.finish_reason, where=where)
    check_tokens(response.completion_ids, response.logprobs, request, where=where)
    return response


def check_completion(
    ids: Sequence[int],
    entries: Sequence[LogprobEntry],
    request: EngineRequest,
    *,
    where: str,
    named: bool = True,
    before: int = 0,
) -> list[float]:
    """Check tokens and logprobs, and with `named` that each entry names its token. Return the logprobs."""
    logprobs = check_tokens(ids, [entry.logprob for entry in entries], request, where=where, before=before)
    if named and [entry.token_id for entry in entries] != ids:
        for index, (token, entry) in enumerate(zip(ids, entries, strict=True)):
            if entry.id != token:
                raise EngineReplyError(
                    "a logprob belongs to another token",
                    where=f"{where} logprobs[{index}]",
                    expected=f"the token {token}, as token_id or token 'token_id:{token}'",
                    got=repr(entry)[:200] if entry.id is None else f"the token {entry.id}",
                )
    return logprobs


def check_tokens(
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    request: EngineRequest,
    *,
    where: str,
    before: int = 0,
) -> list[float]:
    """Require tokens within the budget and the vocabulary, and return a finite logprob for each.

    `before` counts the tokens of earlier chunks.
    """
    budget = request.sampling_params.get("max_tokens")
    if budget is not None and before + len(ids) > budget:
        raise EngineReplyError(
            "the engine sampled more tokens than were asked for",
            where=f"{where} token_ids",
            expected=f"at most {budget}",
            got=str(before + len(ids)),
        )
    if len(logprobs) != len(ids):
        raise _miscounted("logprobs", len(logprobs), len(ids), f"{where} token_ids")
    values = np.array(logprobs, np.float64)  # None becomes nan
    usable = are_finite(values) & (values <= _ROUNDING) & (values != LOGPROB_SENTINEL)
    if not usable.all():
        index = int(usable.argmin())
        raise EngineReplyError(
            f"the engine returned an unusable logprob for the token {ids[index]}",
            where=f"{where} logprobs[{index}]",
            expected="a finite number of at most 0",
            got=repr(logprobs[index]),
        )
    size = request.vocab_size
    end = math.inf if size is None else size
    if ids and not 0 <= min(ids) <= max(ids) < end:
        index = next(index for index, token in enumerate(ids) if not 0 <= token < end)
        raise EngineReplyError(
            "the engine returned a token outside the vocabulary",
            where=f"{where} token_ids[{index}]",
            expected="an id of 0 or more" if size is None else f"an id from 0 to {size - 1}",
            got=repr(ids[index]),
        )
    checked: list[float] = values.tolist()
    return checked


def _miscounted(noun: str, count: int, expected: int, where: str) -> EngineReplyError:
    return EngineReplyError(
        f"the numbers of tokens and {noun} differ",
        where=where,
        expected=f"{expected} {noun}, one for each token",
        got=str(count),
    )


def check_prompt_seen(seen: Sequence[int], request: EngineRequest, *, where: str) -> None:
    """Require that the prompt that a server widened is the request's. `where` is the field in errors."""
    if isinstance(request.prompt_ids, list) and seen == request.prompt_ids:  # ten times as fast as arrays
        return
    theirs, ours = np.asarray(seen), np.asarray(request.prompt_ids)
    if np.array_equal(theirs, ours):
        return
    first = common_prefix(theirs, ours)
    items = (
        f" ({modality} {number})"
        for modality, ranges in request.multi_modal_data.mm_placeholders.items()
        for number, place in enumerate(ranges)
        if place.offset <= first <= place.offset + place.length
    )
    raise EngineMismatchError(
        "the server saw another prompt than the renderer's",
        where=f"{where}[{first}]{next(items, '')}",
        expected=f"{token_at(ours, first)} of {len(ours)}",
        got=f"{token_at(theirs, first)} of {len(theirs)}",
        remedy="Render with the files and processor settings of the model that the server runs",
    )


def token_at(ids: Any, index: int) -> str:
    """Describe one token of a sequence in an error."""
    return f"the token {ids[index]}" if index < len(ids) else "the end"


def alternatives(entries: Sequence[LogprobEntry], *, where: str) -> TopLogprobs:
    """Return the alternatives of each token."""
    rows: list[tuple[Any, ...]] = []
    for index, entry in enumerate(entries):
        rows.append(tuple((other.id, other.logprob) for other in entry.top_logprobs or ()))
        if any(None in pair for pair in rows[-1]):
            raise EngineReplyError(
                "an alternative lacks its token or its logprob",
                where=f"{where} logprobs[{index}].top_logprobs",
                expected="token_id, or token as 'token_id:N', and logprob",
                got=repr(entry.top_logprobs)[:200],
            )
    return tuple(rows)


def add_alternatives(
    entries: Sequence[LogprobEntry], rows: Sequence[list[LogprobEntry] | None], *, where: str
) -> None:
    """Set the alternatives of each token, if a reply lists them apart from the tokens."""
    if len(rows) != len(entries):
        raise _miscounted("alternatives", len(rows), len(entries), f"{where} top_logprobs")
    for entry, row in zip(entries, rows, strict=True):
        entry.top_logprobs = row


def version_spans(
    reported: Sequence[ReportedVersion], count: int, *, where: str
) -> tuple[WeightVersionSpan, ...]:
    """Return the weight versions of a completion of `count` tokens, without empty spans."""
    position = 0
    for index, span in enumerate(reported):
        if not position <= span.start <= span.end <= count:
            raise EngineReplyError(
                "weight versions are not spans of the completion",
                where=f"{where} weight_versions[{index}]",
                expected=f"start and end within [{position}, {count}]",
                got=repr(span),
            )
        position = span.end
    spans = [WeightVersionSpan(str(span.version), span.start, span.end) for span in reported]
    return tuple(span for span in spans if span.start < span.stop)


def kept_tokens(
    masks: Sequence[Sequence[int]], ids: Sequence[int], request: EngineRequest, *, where: str
) -> tuple[AllowedTokens, ...]:
    """Return the tokens that each of `ids` was chosen among, from a server's sampling masks.

    vLLM lists the tokens with finite logits after its whole sampling chain, so a grammar and
    `allowed_token_ids` have been applied. Media tokens are forbidden by a bias that leaves their logits
    finite, and are taken out here.
    """
    if len(masks) != len(ids):
        raise _miscounted("sampling masks", len(masks), len(ids), f"{where} sampling_mask")
    end = math.inf if request.vocab_size is None else request.vocab_size
    forbidden, permitted = set(request.forbidden_token_ids), request.sampling_params.get("allowed_token_ids")
    spans: list[AllowedTokens] = []
    for place, (token, mask) in enumerate(zip(ids, masks, strict=True)):
        kept = set(mask) - forbidden
        token_ids = tuple(sorted(kept if permitted is None else kept.intersection(permitted)))
        if token not in token_ids or token_ids[0] < 0 or token_ids[-1] >= end:
            raise EngineReplyError(
                f"the sampling mask does not fit the sampled token {token}",
                where=f"{where} sampling_mask[{place}]",
                expected="ids of the vocabulary, the sampled one among them",
                got=str(mask)[:100],
            )
        if spans and spans[-1].token_ids == token_ids:
            spans[-1] = spans[-1]._replace(stop=place + 1)
        else:
            spans.append(AllowedTokens(place, place + 1, token_ids))
    return tuple(spans)


def routed_experts(
    data: str | ReportedExperts | None,
    request: EngineRequest,
    completion: int,
    *,
    shape: tuple[int, int] | None = None,
    where: str,
) -> RoutedExperts | None:
    """Read the router choices of a prompt and its completion, from the position that was asked for.

    Every form leaves out the last sampled token: it is never fed back, so no router saw it. Without a start,
    the rows are all of them or the rows that were asked for. The array is a read-only view.

    `data` is vLLM's base64 of an `.npy` file of shape `(rows, layers, top_k)`, SGLang's base64 of
    little-endian int32 in C order with rows of `shape`, or Dynamo's struct. `completion` is the number of
    sampled tokens.
    """
    where = f"{where} routed_experts"
    if data is None:
        if not completion:
            return None
        raise EngineUnsupportedError(
            "router choices were asked for, and the server sends none",
            where=where,
            remedy="Start it with --enable-return-routed-experts, with a mixture-of-experts model",
        )
    array = _expert_rows(data, shape, where)
    asked = request.routed_experts_prompt_start or 0
    count = max(0, len(request.prompt_ids) + completion - 1)
    if isinstance(data, ReportedExperts):
        start = data.start
    elif len(array) in (count, count - asked):
        start = count - len(array)
    else:
        problem = "the reply has another number of routed rows"
        raise EngineReplyError(problem, where=where, expected=str(count), got=str(len(array)))
    experts = RoutedExperts(array, start)
    return experts.cut(max(asked, start), experts.stop)


def _expert_rows(data: str | ReportedExperts, shape: tuple[int, int] | None, where: str) -> npt.NDArray[Any]:
    """Decode router choices in any form to `(rows, layers, top_k)`."""
    try:
        text = data.data if isinstance(data, ReportedExperts) else data
        raw = memoryview(pybase64.b64decode(text, validate=True))
        sizes: tuple[int, ...]
        if isinstance(data, ReportedExperts):
            if data.start < 0:
                raise ValueError(f"start {data.start}")
            dtype, sizes = np.dtype(data.dtype).newbyteorder("<"), data.shape
        elif shape is not None:
            dtype = np.dtype("<i4")
            sizes = (len(raw) // max(1, math.prod(shape) * dtype.itemsize), *shape)
        else:
            stream = io.BytesIO(raw)
            # `np.load` would reserve the memory that the header claims before it looks at the data.
            version = np.lib.format.read_magic(stream)
            read_header = getattr(np.lib.format, f"read_array_header_{version[0]}_{version[1]}")
            sizes, is_fortran, dtype = read_header(stream)
            if is_fortran:
                raise ValueError("Fortran order")
            raw = raw[stream.tell() :]
        if len(sizes) != 3 or min(sizes) < 0 or dtype.kind not in "iu":
            raise ValueError(f"{dtype} {list(sizes)}")
        needed = math.prod(sizes) * dtype.itemsize
        if len(raw) != needed:
            raise ValueError(f"{len(raw)} bytes for {needed} of {dtype.name} {list(sizes)}")
    except (ValueError, TypeError, AttributeError, EOFError, tokenize.TokenError) as error:
        raise EngineReplyError(
            "the routed experts of the reply are malformed",
            where=where,
            expected="base64 of integers of shape (rows, layers, top_k), in C order",
            got=str(error),
        ) from error
    return np.frombuffer(raw, dtype).reshape(sizes)
