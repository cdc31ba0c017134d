"""A child of a fork renders whatever the other threads of its parent were in the middle of, or is refused by name."""

import ast
import asyncio
import io
import os
import select
import signal
import sys
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path

import jinja2.lexer
import numpy as np
import pytest
from PIL import Image

import mmrender
from adapter_models import TEMPLATE, llava
from kit import encoded, shown, user
from mmcodecs import BufferPool
from mmrender.caching import LRUCache, cached_property
from mmrender.client import server_facts
from mmrender.client.http import HTTPTransport
from mmrender.client.local import LocalBackend
from mmrender.engines.client import InferenceEngineClient
from mmrender.media import encoded as encoded_items
from mmrender.media import load, sources
from mmrender.media.encoded import encoded_image
from mmrender.model import fast
from mmrender.processes import BoundedProcesses
from mmrender.renderer import Renderer, RendererPool
from mmrender.template.known import TemplateSet
from scripted_engine import ScriptedEngine

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no forks"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning"),
]

SECONDS = 60
"""How long a child may take before it counts as hanging."""


def in_child(function):
    """Run a function in a fork; return the text that it returns, or of what it raises."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            answer = function()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, str(answer).encode())
        os._exit(0)
    os.close(writing)
    try:
        if not select.select([reading], [], [], SECONDS)[0]:
            os.kill(child, signal.SIGKILL)
            return "hangs"
        return os.read(reading, 1 << 16).decode()
    finally:
        os.waitpid(child, 0)
        os.close(reading)


class Pause:
    """A place in a function at which another thread stays while a block of the test runs."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()

    def here(self):
        self.begun.set()
        self.go_on.wait()

    @contextmanager
    def of_thread(self, function):
        thread = threading.Thread(target=function)
        thread.start()
        self.begun.wait()
        try:
            yield
        finally:
            self.go_on.set()
            thread.join()


@contextmanager
def thread_within(context):
    """Have another thread inside a context, a lock's say, for as long as this one lasts."""
    pause = Pause()

    def hold():
        with context:
            pause.here()

    with pause.of_thread(hold):
        yield


def picture(shade=0):
    return Image.fromarray((np.arange(64 * 96 * 3).reshape(64, 96, 3) + shade).astype(np.uint8))


def work(renderer, source, text="Moo?"):
    """Do everything that takes a lock, and return a digest of it."""
    content = [shown(source), {"type": "text", "text": text}]
    prompt = renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
    (item,) = prompt.multi_modal_data.mm_items["image"]
    completion = [*renderer.tokenizer.encode("A cow."), *renderer.get_stop_token_ids()[-1:]]
    parsed = renderer.parse_response(completion, prompt_ids=prompt.token_ids)
    bridged = renderer.bridge_to_next_turn(
        prompt.token_ids,
        completion,
        [user("And which says meow?")],
        previous_multi_modal_data=prompt.multi_modal_data,
    )
    sums = [float(values.sum()) for values in item.tensors().values()]
    return repr((bridged.token_ids, parsed.content, sums, len(encoded_image(item).data)))


TRANSPORT = HTTPTransport("http://127.0.0.1:9")

LOCKS = {
    "memo of renderings": lambda renderer: [renderer._memo._entries._lock],
    "bridges": lambda renderer: [renderer._bridges._lock, renderer._bridges._flight._lock],
    "findings and parsers": lambda renderer: [
        (memory := renderer.templates.find({}, has_tools=False).findings._memory)._lock,
        memory._flight._lock,
    ],
    "items": lambda renderer: [renderer.media.cache._items._lock, renderer.media.cache._items._flight._lock],
    "identities of sources": lambda renderer: [renderer.media.cache._identities._lock],
    "sources that load": lambda renderer: [renderer.media.cache._loading._lock],
    "memo of runs": lambda renderer: [renderer.tokenizer._memo._lock],
    "encoded images": lambda _: [encoded_items._encoded._lock],
    "images": lambda _: load.image_locks._locks,
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_another_thread_holds_is_free_in_the_child(name, renderer):
    shade = 60 + list(LOCKS).index(name)
    with ExitStack() as held:
        for lock in LOCKS[name](renderer):
            held.enter_context(thread_within(lock))
        answer = in_child(lambda: work(renderer, picture(shade)))
    assert answer == work(renderer, picture(shade))


def test_a_child_computes_for_itself_what_another_thread_was_computing():
    cache, pause = LRUCache(10), Pause()

    def compute():
        pause.here()
        return "the parent's"

    with pause.of_thread(lambda: cache.get_or_compute("key", compute)):
        assert in_child(lambda: cache.get_or_compute("key", lambda: "the child's")) == "the child's"
    assert cache.get("key") == "the parent's"


@pytest.mark.parametrize("fails", [False, True])
def test_a_computation_that_forks_ends_in_both_processes(fails):
    cache = LRUCache(10)

    def compute():
        if fails:
            raise KeyError("no such value")
        return "value"

    def fork_and_compute():
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        forked.append(child)
        return compute()

    forked = []
    try:
        answer = cache.get_or_compute("key", fork_and_compute)
    except KeyError as error:
        answer = error.args[0]
    if forked == [0]:
        os._exit(0 if answer == ("no such value" if fails else "value") and not cache._flight._running else 1)
    assert answer == ("no such value" if fails else "value")


def test_the_size_of_a_cache_is_whole_in_the_child():
    cache = LRUCache(10, size_of=len)
    cache.put("a", "aaa")
    # As after a fork between the two steps of another thread's `put`.
    cache._size = 0
    assert in_child(lambda: cache.stats.size) == "3"


def test_an_image_that_another_thread_decodes_is_refused_by_the_child(renderer):
    shared, other = Image.open(io.BytesIO(encoded(picture(1)))), picture(2)
    with thread_within(load.image_locks.reading(shared)):
        answer = in_child(lambda: work(renderer, shared))
        assert answer.startswith("MediaDecodeError: messages[0].content[0]: another thread was reading")
        assert "Open it again" in answer
        assert in_child(lambda: work(renderer, other)) == work(renderer, other)
    assert in_child(lambda: work(renderer, shared)) == work(renderer, shared)


def test_a_stream_that_another_thread_reads_is_refused_by_the_child(renderer):
    pause = Pause()

    class Slow(io.BytesIO):
        def read(self, *size):
            if threading.current_thread() is not threading.main_thread():
                pause.here()
            return super().read(*size)

    stream = Slow(encoded(picture()))
    with pause.of_thread(lambda: load.load_image(stream)):
        assert "another thread was reading this object" in in_child(lambda: work(renderer, stream))
    assert in_child(lambda: work(renderer, stream)) == work(renderer, picture())


def test_an_object_that_the_forking_thread_reads_is_its_own_in_the_child():
    locks = sources.ReadLocks()
    source = object()
    with locks.reading(source):
        assert in_child(lambda: locks._interrupted) == "[]"


def test_a_fork_waits_for_the_imports_of_other_threads(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        "from test_forks_events import pause\npause.here()\nVALUE = 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    events = type(sys)("test_forks_events")
    events.pause = Pause()
    monkeypatch.setitem(sys.modules, "test_forks_events", events)

    def value():
        import slow_to_import

        return slow_to_import.VALUE

    with events.pause.of_thread(value):
        threading.Timer(0.5, events.pause.go_on.set).start()
        assert in_child(value) == "7"
    sys.modules.pop("slow_to_import", None)


def test_a_child_computes_a_cached_property_that_another_thread_computes():
    pause = Pause()

    class Slow:
        is_slow = True

        @cached_property
        def value(self):
            if self.is_slow:
                pause.here()
            return 7

    slow, other = Slow(), Slow()
    other.is_slow = False
    with pause.of_thread(lambda: slow.value):
        assert in_child(lambda: other.value) == "7"


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_fast_tokenizer_that_another_thread_is_inside_of_does_not_serve_the_child(is_inside, tiny_model):
    tokenizer = Renderer.from_pretrained(tiny_model, image_backend="pil").tokenizer
    twin, pause = tokenizer._engines["token"], Pause()

    def encode(text):
        if text == "slow":
            pause.here()
        return twin.encode(text, add_special_tokens=False)

    engine = object.__new__(fast.FastEngine)
    engine._engine, engine._inside, engine._encode = twin, set(), encode
    engine._normalizer, engine._keeps_ascii, engine._lengths = None, True, None
    tokenizer.choice.fast, tokenizer.choice._is_settled = engine, True

    def served():
        return f"{tokenizer.choice.fast is engine} {tokenizer.encode_run('some text').ids}"

    if not is_inside:
        pause.begun.set()
    with pause.of_thread(lambda: tokenizer.encode_run("slow" if is_inside else "fast")):
        answer = in_child(served)
    ids = twin.encode("some text", add_special_tokens=False).ids
    if is_inside:
        assert answer == f"False {ids}"
    assert served() == f"True {ids}"


def test_a_child_compiles_a_template_while_another_thread_does(renderer):
    messages, source = [user("Moo?")], "{{ messages[0].content }} in a child"

    def rendered():
        other = Renderer(TemplateSet({"default": source}, renderer.tokenizer), renderer.tokenizer)
        return other.render_text(messages)

    with thread_within(jinja2.lexer._lexer_cache._wlock):
        assert in_child(rendered) == "Moo? in a child"


def test_processes_of_templates_are_started_again_in_the_child(tiny_model):
    with BoundedProcesses(1) as processes:
        renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", template_processes=processes)
        expected = work(renderer, picture())
        with thread_within(processes._lock):

            def anew():
                renderer._memo._entries.clear()
                answer = work(renderer, picture(), "Moo?")
                processes.close()
                return answer

            assert in_child(anew) == expected
        renderer._memo._entries.clear()
        assert work(renderer, picture()) == expected


def test_a_model_s_own_processor_is_built_again_where_another_thread_was_inside_of_it(tmp_path):
    directory = llava(tmp_path / "model")
    (directory / "chat_template.jinja").write_text(TEMPLATE.replace("PLACEHOLDER", "<image>"))
    renderer = Renderer.from_pretrained(directory, image_backend="pil")
    messages = [{"role": "user", "content": [shown(picture().resize((333, 77)))]}]
    processor = renderer.media.processor.load()
    with thread_within(processor._watched.lock):

        def rendered_anew():
            is_dropped = processor._watched._reference is None
            return is_dropped, renderer.render_ids(messages)

        answer = in_child(rendered_anew)
    assert answer == repr((True, renderer.render_ids(messages)))
    assert in_child(lambda: processor._watched._reference is None) == "False"


def test_the_loader_of_the_fast_tokenizer_starts_in_the_child(tiny_model):
    choice = Renderer.from_pretrained(tiny_model, image_backend="pil").tokenizer.choice
    with thread_within(choice._starting):

        def spend():
            choice.spend(1 << 30)
            return choice._thread is not None

        assert in_child(spend) == "True"


def test_a_model_that_was_loaded_before_a_fork_is_refused_by_name(tiny_model):
    backend = LocalBackend(tiny_model)

    def model():
        return type(backend.model).__name__

    with thread_within(backend._lock):
        loaded = in_child(model)
    assert loaded == type(backend.model).__name__
    assert in_child(model).startswith("EngineStateError: the model was loaded before this process forked")


def test_a_transport_and_a_buffer_pool_serve_the_child():
    assert (
        in_child(lambda: (server_facts.forget(TRANSPORT), asyncio.run(TRANSPORT.aclose()))) == "(None, None)"
    )
    pool = BufferPool()
    with thread_within(pool._lock):
        assert in_child(lambda: len(pool.acquire(5000))) == "5000"


async def test_requests_of_the_parent_are_not_those_of_the_child():
    client = InferenceEngineClient([ScriptedEngine()])
    (replica,) = client._pool.replicas
    replica.calls.add(object())
    client._pool.enter()
    assert in_child(client._pool.calls) == "[]"


def test_a_pool_opens_its_threads_again_in_the_child(renderer):
    source = picture(4)
    messages = [{"role": "user", "content": [shown(each) for each in (source, picture(5))]}]
    with RendererPool(renderer, workers=1, queue_size=0) as pool:
        expected = asyncio.run(pool.arender(messages)).token_ids

        def rendered():
            renderer._memo._entries.clear()
            renderer.media.cache.clear()
            answer = asyncio.run(pool.arender(messages, nowait=True)).token_ids
            pool.close()
            return answer

        with thread_within(pool._workers._threads._lock), thread_within(pool._workers.media._lock):
            assert in_child(rendered) == repr(expected)


def test_children_render_while_threads_render(tiny_model):
    renderer = Renderer.from_pretrained(tiny_model, image_backend="pil", memo_bytes=1 << 16)
    expected = [work(renderer, picture(shade), str(shade)) for shade in range(4)]
    done = threading.Event()

    def keep_rendering(start):
        shade = start
        while not done.is_set():
            work(renderer, picture(shade % 50), str(shade % 4))
            shade += 1

    threads = [threading.Thread(target=keep_rendering, args=(start,)) for start in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(4):
            answer = in_child(lambda: [work(renderer, picture(shade), str(shade)) for shade in range(4)])
            assert answer == repr(expected)
    finally:
        done.set()
        for thread in threads:
            thread.join()


def test_every_module_with_locks_or_threads_renews_them():
    """A new lock is renewed after a fork, or its module is named here with the reason."""
    exempt = {
        "mmrender/engines/pool.py": "conditions of a pool, which renews them",
        "mmrender/gateway/session.py": "a lock of an event loop, which a child does not go on with",
        "mmrender/gateway/store.py": "a thread of a gateway, which belongs to the process that opened its files",
        "mmrender/gateway/gateway.py": "a thread that a child only joins, and that Python has marked as ended",
        "mmrender/integrations/fleet.py": "a thread of a process that runs one function of a fleet",
        "mmrender/integrations/trl_rollouts.py": "a thread of one call",
        "mmrender/integrations/vllm.py": "a thread of an engine, which a child does not go on with",
        "mmrender/media/fetch.py": "a thread and a future of one call",
        "mmrender/media/resolve.py": "futures of one call",
    }
    roots = [Path(mmrender.__file__).parent, Path(sys.modules["mmcodecs"].__file__).parent]
    makers = {"Lock", "RLock", "Condition", "Thread", "Future", "ThreadPoolExecutor", "ProcessPoolExecutor"}
    missing = []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            source = path.read_text()
            if not any(maker in source for maker in makers) or "watch_forks(" in source:
                continue
            name = f"{root.name}/{path.relative_to(root)}"
            calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            made = {getattr(call, "attr", getattr(call, "id", None)) for call in calls} & makers
            # A connection of the shipping rooms belongs to the process that made it.
            is_exempt = name in exempt or name.startswith("mmrender/shipping/")
            if made and not is_exempt:
                missing.append(f"{name}: {', '.join(sorted(made))}")
    assert missing == []
