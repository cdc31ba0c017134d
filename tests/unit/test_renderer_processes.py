"""A renderer in other processes: pickled, forked, spawned, in a DataLoader, and at the interpreter's end."""

import multiprocessing
import pickle
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from PIL import Image

from kit import error_of, user
from mmrender.errors import InputError
from mmrender.media.policy import MediaPolicy
from mmrender.media.resolve import MediaCache
from mmrender.processes import BoundedProcesses
from mmrender.renderer import Renderer

IMAGE = Image.fromarray(np.arange(64 * 96 * 3, dtype=np.uint8).reshape(64, 96, 3))
MESSAGES = [user("<|im_end|>", IMAGE)]


def rendered(renderer):
    result = renderer.render(MESSAGES, add_generation_prompt=True)
    (item,) = result.multi_modal_data.mm_items["image"]
    return result.token_ids, item.identity, float(item.tensors("float32")["pixel_values"].sum())


class Conversations:
    """A dataset for torch, which processes that only render do not import."""

    def __init__(self, renderer):
        self.renderer = renderer

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return np.array(rendered(self.renderer)[0])


@pytest.fixture
def renderer(tiny_model):
    return Renderer.from_pretrained(
        tiny_model,
        image_backend="pil",
        content_special_tokens={"user": "parse"},
        media_policy=MediaPolicy(max_items=7),
        media_cache=MediaCache(123),
        template_processes=BoundedProcesses(1, cpu_seconds=3),
    )


def test_a_pickled_rendering_is_decoded_by_its_renderer(renderer):
    whole = renderer.render([user("Hi.")])
    copy = pickle.loads(pickle.dumps(whole))
    assert "carries no tokenizer. Call renderer.decode" in error_of(InputError, copy.decode)
    assert renderer.decode(copy.token_ids) == whole.decode()


def test_a_pickled_renderer_has_its_options(renderer, monkeypatch, tmp_path):
    data = pickle.dumps(renderer)
    monkeypatch.chdir(tmp_path)
    other = pickle.loads(data)
    assert rendered(other) == rendered(renderer)
    assert (other.rules, other.media.policy) == (renderer.rules, renderer.media.policy)
    assert other.media.cache._items.max_size == 123
    assert rendered(pickle.loads(pickle.dumps(other))) == rendered(renderer)


def test_a_renderer_of_parts_is_refused(renderer):
    with pytest.raises(InputError, match="put together from its parts"):
        pickle.dumps(Renderer(renderer.templates, renderer.tokenizer))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_render_alike(tiny_model, method):
    renderer = Renderer.from_pretrained(tiny_model)
    expected = rendered(renderer)
    busy = threading.Event()

    def work():
        while not busy.is_set():
            rendered(renderer)

    # Locks that another thread holds while the process forks must not hold up the child.
    threads = [threading.Thread(target=work) for _ in range(2 if method == "fork" else 0)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2 if method == "fork" else 1):
            with multiprocessing.get_context(method).Pool(2 if method == "fork" else 1) as pool:
                assert pool.map_async(rendered, [renderer] * 2).get(timeout=60) == [expected] * 2
    finally:
        busy.set()
        for thread in threads:
            thread.join()


def test_a_data_loader_renders(tiny_model):
    """In a fork; a process that is spawned is that of the test of the collator."""
    from torch.utils.data import DataLoader

    renderer = Renderer.from_pretrained(tiny_model)
    loader = DataLoader(Conversations(renderer), 2, num_workers=1, multiprocessing_context="fork")
    assert [batch.tolist() for batch in loader] == [[rendered(renderer)[0]] * 2] * 2


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "import gc; gc.collect()"])
def test_open_clients_are_silent_at_the_interpreters_end(ending):
    program = f"""
import asyncio
from mmrender.client.http import HTTPTransport
transport = HTTPTransport("http://127.0.0.1:9")
async def ask():
    try:
        await transport.request("GET", "/health", timeout=0.2)
    except Exception:
        pass
asyncio.run(ask())
loop = asyncio.new_event_loop()
loop.run_until_complete(ask())
{ending}
"""
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    # A busy machine is slow, which asyncio tells in this mode.
    expected = re.compile(r"unclosed event loop|^Executing .* took [\d.]+ seconds$")
    assert [line for line in done.stderr.splitlines() if not expected.search(line)] == []
