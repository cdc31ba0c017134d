"""Record what SGLang answers to each form of request, for tests that run without it.

Usage: `python tools/servers/sglang/record.py BASE_URL MODEL OUT`, with the project's own environment, a
server of `serve.py` at BASE_URL and its model directory MODEL.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from PIL import Image

from mmrender import Renderer
from mmrender.media.encoded import encoded_image
from mmrender.sidecar import collapse
from servers.recording import Recorder

PROMPT = [10, 11, 12]


def body(ids: list[int], rid: str, sampling: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A request as the backend sends it."""
    return {
        "input_ids": ids,
        "rid": rid,
        "stream": False,
        "sampling_params": {"skip_special_tokens": False, "no_stop_trim": True, **sampling},
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "return_prompt_token_ids": True,
        **fields,
    }


def record_answers(recorder: Recorder) -> None:
    """Every form of an answer of status 200."""
    greedy = {"max_new_tokens": 4, "temperature": 0.0}
    plain = recorder.record("text", "/generate", body(PROMPT, "text", greedy))
    fields = {"top_logprobs_num": 2, "cache_salt": "salt", "priority": -3}
    recorder.record("alternatives", "/generate", body(PROMPT, "alternatives", greedy, **fields))
    stop = {**greedy, "stop_token_ids": [plain["output_ids"][1]]}
    recorder.record("stop_token", "/generate", body(PROMPT, "stop_token", stop))
    recorder.record("stop_string", "/generate", body(PROMPT, "stop_string", {**greedy, "stop": ["low"]}))
    recorder.record("several", "/generate", body(PROMPT, "several", {**greedy, "n": 2}))
    cut = {"max_new_tokens": 7, "temperature": 0.0, "ignore_eos": True}
    recorder.record("cut", "/generate", body([5] * 2041, "cut", cut))
    experts = {"return_routed_experts": True, "routed_experts_start_len": 0}
    recorder.record("no_experts", "/generate", body(PROMPT, "no_experts", greedy, **experts))
    recorder.record(
        "server_info",
        "/server_info",
        keep=("version", "served_model_name", "context_length", "max_req_input_len", "allow_auto_truncate"),
    )


def record_abort(recorder: Recorder) -> None:
    """Answer to an aborted request: a status of 200."""

    def abort() -> None:
        time.sleep(0.3)
        recorder.ask("/abort_request", {"rid": "aborted"})

    aborter = threading.Thread(target=abort)
    aborter.start()
    sampling = {"max_new_tokens": 1900, "temperature": 0.0, "ignore_eos": True}
    recorder.record("aborted", "/generate", body(PROMPT, "aborted", sampling))
    aborter.join()


def record_images(recorder: Recorder, model: Path) -> None:
    """An image, whose placeholder the server widens, and a prompt that becomes too long by it."""
    renderer = Renderer.from_pretrained(model, image_backend="pil")  # which needs no torch
    pixels = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    content = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "What?"}]
    rendered = renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
    collapsed = collapse(rendered.token_ids, rendered.multi_modal_data)
    urls = [encoded_image(item).data_url for item in rendered.multi_modal_data.mm_items["image"]]
    greedy = {"max_new_tokens": 4, "temperature": 0.0}
    recorder.record("image", "/generate", body(collapsed, "image", greedy, image_data=urls))
    longer = collapsed + [5] * (2035 - len(collapsed))
    recorder.record("image_too_long", "/generate", body(longer, "image_too_long", greedy, image_data=urls))
    recorder.record("widened", "/generate", body(rendered.token_ids, "widened", greedy, image_data=urls))


def record_errors(recorder: Recorder) -> None:
    """Every form of an error reply."""
    one = {"max_new_tokens": 1, "temperature": 0.0}
    recorder.record("error_object", "/generate", body([], "error_object", one))
    recorder.record("error_text", "/generate", body(PROMPT, "error_text", {"max_tokens": 4}))
    recorder.record("error_flat", "/generate", {"input_ids": "text"})
    recorder.record("too_long_input", "/generate", body([5] * 2042, "too_long_input", one))
    recorder.record("too_long_context", "/generate", body([5] * 3000, "too_long_context", one))
    total = {"max_new_tokens": 20, "temperature": 0.0}
    recorder.record("too_long_total", "/generate", body([5] * 2040, "too_long_total", total))
    much = {"max_new_tokens": 4000, "temperature": 0.0}
    recorder.record("too_many_tokens", "/generate", body(PROMPT, "too_many_tokens", much))


def main() -> None:
    """Record everything."""
    base_url, model, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    out.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(base_url, out)
    record_answers(recorder)
    record_abort(recorder)
    record_images(recorder, model)
    record_errors(recorder)


if __name__ == "__main__":
    main()
