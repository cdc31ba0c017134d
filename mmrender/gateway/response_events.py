"""`ResponseEvents`: replies of OpenAI's responses, whole or as the events of a stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from mmrender.gateway.call import Answer, AnswerCall, Call, Delta
from mmrender.gateway.writing import Blocks, Field, event, is_cut, openai_logprobs, total_usage


class ResponseEvents(Blocks):
    """Writes one streamed reply as the events of a response."""

    _number = 0
    """Events so far."""
    _answer: Answer | None = None

    def __init__(self, call: Call, answer_ids: Sequence[str], created: int | None = None) -> None:
        super().__init__(call, answer_ids, created)
        self._output: list[dict[str, Any]] = []

    def begin(self) -> bytes:
        """Return the beginning of the response."""
        response = _response(self._call, self._ids[0], self._created, "in_progress")
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def opened(self, field: Field) -> bytes:
        """Return the beginning of an item and of its part."""
        opening: dict[str, Any] = {"content": [], "status": "in_progress"}
        if field == "reasoning":
            item = _reasoning(self._item_id("rs"), "")
            part, kind = item["summary"][0], "reasoning_summary_part.added"
            opening["summary"] = []
        else:
            item = _message(self._item_id("msg"), "", None, self._call)
            part, kind = item["content"][0], "content_part.added"
        return self._added({**item, **opening}) + self._part(kind, field, part=part)

    def extended(self, field: Field, text: str) -> bytes:
        """Return more text of the part."""
        if field == "reasoning":
            return self._part("reasoning_summary_text.delta", field, delta=text)
        return self._part("output_text.delta", field, delta=text, logprobs=[])

    def closed(self, field: Field, text: str) -> bytes:
        """Return the end of the part and of its item."""
        if field == "reasoning":
            item = _reasoning(self._item_id("rs"), text)
            place = {"item_id": item["id"], "output_index": len(self._output), "content_index": 0}
            return (
                self._part("reasoning_summary_text.done", field, text=text)
                + self._part("reasoning_summary_part.done", field, part=item["summary"][0])
                + self._event("reasoning_text.delta", **place, delta=text)
                + self._event("reasoning_text.done", **place, text=text)
                + self._done(item)
            )
        item = _message(self._item_id("msg"), text, self._answer, self._call)
        part = item["content"][0]
        done = self._part("output_text.done", field, text=text, logprobs=part["logprobs"])
        return done + self._part("content_part.done", field, part=part) + self._done(item)

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return the rest of the text, the calls and the whole response."""
        self._answer = answer = answers[0]
        events = [self.rest(answer)]
        if not answer.calls and not answer.content:
            events.append(self.text(Delta(0, "content", "")))
        events.append(self.close())
        for call in answer.calls:
            item = _call(self._item_id("fc"), call)
            place = {"item_id": item["id"], "output_index": len(self._output)}
            events += [
                self._added({**item, "arguments": "", "status": "in_progress"}),
                self._event("function_call_arguments.delta", **place, delta=call.arguments),
                self._event(
                    "function_call_arguments.done", **place, name=item["name"], arguments=call.arguments
                ),
                self._done(item),
            ]
        response = self.whole(answer)
        return b"".join(events) + self._event(response["status"], response=response)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the response with all items, once they are written."""
        usage = total_usage([answer])
        counts = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        cut = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut(answer) else {}
        status = "incomplete" if cut else "completed"
        return _response(
            self._call, self._ids[0], self._created, status, output=self._output, usage=counts, **cut
        )

    def failure(self, status: int, code: str, message: str) -> bytes:
        """Return the failed response."""
        error = {"code": code, "message": message}
        response = _response(self._call, self._ids[0], self._created, "failed", error=error)
        return self._event("failed", response=response)

    def _item_id(self, kind: str) -> str:
        """Return the id of the item that is open, or opens now."""
        return f"{kind}_{self._ids[0]}_{len(self._output)}"

    def _added(self, item: Mapping[str, Any]) -> bytes:
        return self._event("output_item.added", output_index=len(self._output), item=item)

    def _done(self, item: dict[str, Any]) -> bytes:
        self._output.append(item)
        return self._event("output_item.done", output_index=len(self._output) - 1, item=item)

    def _part(self, kind: str, field: Field, **members: Any) -> bytes:
        """Return an event of the one part of the open item."""
        item, index = ("rs", "summary_index") if field == "reasoning" else ("msg", "content_index")
        place = {"item_id": self._item_id(item), "output_index": len(self._output), index: 0}
        return self._event(kind, **place, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        name = f"response.{kind}"
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **members}, name)


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    """Return a reasoning item: clients show its summary, and some repeat nothing but its content."""
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text}],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": item_id,  # nothing is hidden, since history is looked up
    }


def _message(item_id: str, text: str, answer: Answer | None, call: Call) -> dict[str, Any]:
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": "incomplete" if answer is not None and is_cut(answer) else "completed",
        "content": [_output_text(text, answer, call)],
    }


def _output_text(text: str, answer: Answer | None, call: Call) -> dict[str, Any]:
    logprobs = [] if answer is None or call.logprobs is None else openai_logprobs(answer)
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call(item_id: str, call: AnswerCall) -> dict[str, Any]:
    namespace, _, name = call.name.rpartition(".")
    item = {
        "id": item_id,
        "type": "function_call",
        "call_id": call.id,
        "name": name,
        "arguments": call.arguments,
        "status": "completed",
    }
    return {**item, "namespace": namespace} if namespace else item


def _response(call: Call, answer_id: str, created: int, status: str, **members: Any) -> dict[str, Any]:
    """Return a response. The tools are not repeated: the caller knows them, and they are long."""
    params = call.sampling_params
    return {
        "id": f"resp_{answer_id}",
        "object": "response",
        "created_at": created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": params.get("max_tokens"),
        "metadata": {},
        "model": call.model,
        "output": [],
        "parallel_tool_calls": call.parallel_tool_calls,
        "previous_response_id": call.previous,
        "store": False,
        "temperature": params.get("temperature"),
        "tool_choice": call.tool_choice,
        "tools": [],
        "top_p": params.get("top_p"),
        "truncation": "disabled",
        "usage": None,
        **members,
    }
