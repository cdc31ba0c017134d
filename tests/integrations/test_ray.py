"""`mmrender.integrations.ray` on a cluster of this machine.

`RAY_CONVERSATIONS` sets how many conversations the longest test renders; 2,000 take some minutes.
"""

import asyncio
import json
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from itertools import islice
from pathlib import Path

import aiohttp
import numpy as np
import openai
import pytest
import ray
from PIL import Image
from starlette.requests import Request

import fleet_cases
import mmrender
from integrations.ray_cases import SHARDS, STARTS, conversations, gated_model, rendered, train_on
from kit import error_of, free_port
from mmrender import Renderer, Trajectory, build_training_sample
from mmrender.errors import FleetError, InputError, MessageError
from mmrender.gateway import GatewaySettings
from mmrender.integrations.fleet import Fleet, Role
from mmrender.integrations.ray import RayRendererPool, ToSamples, render_to_files
from mmrender.integrations.ray_fleet import RayFleet
from mmrender.trajectory.files import load_trajectories, received_ids

with warnings.catch_warnings():  # Serve's models use what pydantic has deprecated
    warnings.simplefilter("ignore")
    from ray import serve

    from mmrender.integrations.ray_serve import _file, _Ingress, gateway_deployment, gateway_of

# A proxy of Serve that takes 5 seconds to start is killed by default.
os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"

COUNT = int(os.environ.get("RAY_CONVERSATIONS", "120"))
WORKERS = 4

pytestmark = [
    pytest.mark.timeout(1500),
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def cluster():
    ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 29)
    yield
    ray.shutdown()


def state(sample):
    """All that a sample holds, as bytes."""
    return pickle.dumps((sample.token_ids, sample.loss_mask, sample.multi_modal_data, sample.sample_id), 5)


def workers():
    """Process ids of Ray's workers that run a task of ours."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if "ray::_render_to_file" in line]


@pytest.fixture
def served(cluster, tiny_model, tmp_path):
    """Two gateways on Ray Serve: their URL, the folder of their files, and the folder of the engine's gate."""
    gates, out = tmp_path / "gates", tmp_path / "rollouts"
    gates.mkdir()
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    engines, options = partial(gated_model, gates), {"health_check_period_s": 0.5}
    serve.run(gateway_deployment(engines, str(tiny_model), out=out, deployment=options))
    yield f"http://127.0.0.1:{port}", out, gates
    serve.shutdown()


class Player:
    """An agent with the official client, which repeats failed requests. Broken streams it repeats itself."""

    def __init__(self, url, name, stream):
        self.client = openai.AsyncOpenAI(base_url=f"{url}/s/{name}/v1", api_key="none", max_retries=20)
        self.name, self.stream, self.messages, self.replies = name, stream, [], []
        self.sees_text, self.broken = asyncio.Event(), 0

    async def turn(self, words="Go on."):
        self.messages.append({"role": "user", "content": f"session {self.name}: {words}"})
        self.sees_text.clear()
        name, text = await (self.streamed() if self.stream else self.whole())
        self.messages.append({"role": "assistant", "content": text})
        self.replies.append(name[-24:])
        assert text == f"This is step-{len(self.replies)}."

    def request(self):
        request = {"model": "any", "messages": self.messages, "max_tokens": 64, "stream": self.stream}
        return self.client.chat.completions.create(**request)

    async def whole(self):
        reply = await self.request()
        return reply.id, reply.choices[0].message.content

    async def streamed(self):
        while True:
            text = ""
            try:
                async for chunk in await self.request():
                    for choice in chunk.choices:
                        text += choice.delta.content or ""
                        if text:
                            self.sees_text.set()
                        if choice.finish_reason:
                            return chunk.id, text
            except openai.APIConnectionError:
                pass
            self.broken += 1


async def check_routes(http, url, gates):
    """Sessions are opened where their names lead. Requests without a session are refused. Callers may leave."""
    async with http.post("/sessions", json={"group": "g"}) as reply:
        opened = await reply.json()
        assert (reply.status, opened["base_url"]) == (201, f"{url}/s/{opened['name']}/v1")
    for number in (0, 1):
        async with http.get(f"/gateways/{number}/sessions") as reply:
            listed = [each["name"] for each in (await reply.json())["data"]]
            assert listed == [opened["name"]] * (gateway_of(opened["name"], 2) == number)
    body = {"model": "any", "messages": [{"role": "user", "content": f"session {opened['name']}: Wait."}]}
    async with http.post("/v1/chat/completions", json=body) as reply:
        assert (reply.status, (await reply.json())["error"]["code"]) == (400, "no_session")
    call = asyncio.create_task(http.post(f"/s/{opened['name']}/v1/chat/completions", json=body))
    while not (gates / f"waiting-{opened['name']}").exists():
        await asyncio.sleep(0.02)
    call.cancel()
    metrics, status = "", 'status="499"'
    while status not in metrics:
        async with http.get(f"/gateways/{gateway_of(opened['name'], 2)}/metrics") as reply:
            metrics = await reply.text()
    async with http.delete(f"/sessions/{opened['name']}") as reply:
        assert (await reply.json())["state"] == "abandoned"


async def play(url, gates, players, homes):
    """Play five turns in all sessions. Kill gateway 0 while half of its sessions are in a turn."""
    async with aiohttp.ClientSession(url) as http:
        await check_routes(http, url, gates)
    for _ in range(2):
        await asyncio.gather(*(player.turn() for player in players))
    in_turn = players[::2]
    turns = asyncio.gather(*(player.turn("Wait.") for player in in_turn))
    waiting = [gates / f"waiting-{player.name}" for player in in_turn]
    while not all(path.exists() and path.read_text() for path in waiting):
        await asyncio.sleep(0.02)
    await asyncio.gather(*(player.sees_text.wait() for player in in_turn if player.stream))
    pids = {homes[player.name]: int(path.read_text()) for player, path in zip(in_turn, waiting, strict=True)}
    assert len(set(pids.values())) == 2
    os.kill(pids[0], signal.SIGKILL)
    (gates / "open").touch()
    await asyncio.gather(turns, *(player.turn() for player in players[1::2]))
    for _ in range(2):
        await asyncio.gather(*(player.turn() for player in players))
    async with aiohttp.ClientSession(url) as http:
        for player in players:
            async with http.post(f"/sessions/{player.name}/finish", json={"reward": 1.0}) as reply:
                assert reply.status == 200
            await player.client.close()
            is_cut = player.stream and player in in_turn and not homes[player.name]
            assert player.broken == is_cut


def test_sessions_on_serve_have_one_gateway_each_and_survive_its_death(served):
    url, out, gates = served
    names = [f"play-{number}" for number in range(8)]
    homes = {name: gateway_of(name, 2) for name in names}
    # Both gateways have sessions in the turn of the kill, and others.
    assert {homes[name] for name in names[::2]} == {homes[name] for name in names[1::2]} == {0, 1}
    players = [Player(url, name, stream=number % 3 == 0) for number, name in enumerate(names)]
    asyncio.run(play(url, gates, players, homes))
    for number in (0, 1):
        path = out / f"gateway-{number}-of-2.mmr"
        assert sorted(received_ids(path)) == [name for name in names if homes[name] == number]
        assert not list(Path(f"{path}.open").iterdir())
        for tree in load_trajectories(path):
            [player] = [each for each in players if each.name == tree.trajectory_id]
            assert [step.extra["gateway"]["response"] for step in tree.steps] == player.replies
            assert [step.parent for step in tree.steps] == [None, *tree.steps[:-1]]
            assert (tree.reward, tree.error) == (1.0, None)


def test_callers_of_other_machines_need_a_key():
    def status(address, settings):
        scope = {"type": "http", "method": "GET", "path": "/nothing", "headers": [], "query_string": b""}
        request = Request({**scope, "client": (address, 1), "server": ("host", 80)}, receive)
        return asyncio.run(_Ingress(settings)(request)).status_code

    async def receive():
        return {"type": "http.request", "body": b""}

    open_to = [GatewaySettings(), GatewaySettings(open_to_all=True), GatewaySettings(api_key="k")]
    assert [status("10.0.0.7", each) for each in open_to] == [403, 400, 400]
    assert [status("127.0.0.1", each) for each in open_to] == [400, 400, 400]


def test_a_folder_keeps_its_number_of_gateways(tmp_path):
    assert _file(tmp_path / "new", 1, 2).name == "gateway-1-of-2.mmr"
    (tmp_path / "new" / "gateway-0-of-2.mmr").touch()
    _file(tmp_path / "new", 1, 2)
    with pytest.raises(InputError, match=r"another number of gateways.*gateway-0-of-2\.mmr"):
        _file(tmp_path / "new", 2, 3)
    with pytest.raises(InputError, match="1 or more"):
        gateway_deployment("http://engine", "MODEL", out=tmp_path, gateways=0)


def test_actors_of_a_fleet_that_die_are_started_again_and_servers_end_last(cluster, tmp_path):
    half = {"num_cpus": 0.5}
    roles = {
        "server": Role(fleet_cases.serve, 2, serves=True, options=half),
        "mortal": Role(fleet_cases.die_twice, 2, options=half, placement="PACK"),
        "asker": Role(fleet_cases.ask, options=half),
    }
    with RayFleet(Fleet(tmp_path, roles)) as fleet:
        fleet.run()
        assert set(fleet.pids()) == {("server", 0), ("server", 1)}
    assert [(tmp_path / f"lives-{number}").read_text() for number in (0, 1)] == ["xxx", "xxx"]
    assert json.loads((tmp_path / "asked").read_text()) == ["address of 0", "address of 1"]
    assert all((tmp_path / f"ended-{number}").exists() for number in (0, 1))


@pytest.mark.parametrize(
    ("role", "got"),
    [
        (Role(fleet_cases.fail), "ValueError: no luck in process 0 of 1"),
        (Role(fleet_cases.serve, serves=True), "it returned"),
    ],
)
def test_an_error_of_an_actor_ends_the_fleet(cluster, tmp_path, role, got):
    with RayFleet(Fleet(tmp_path, {"one": role, "other": Role(fleet_cases.forever)})) as fleet:
        if role.serves:
            fleet.actors["one", 0].end.remote()  # before the others
        error = error_of(FleetError, fleet.run)
    assert str(error) == f"one 0: a process has failed - got {got}"


def test_a_fleet_on_two_nodes_that_is_killed_trains_on_each_answered_turn_once(tmp_path):
    tests = Path(__file__).resolve().parent.parent
    sizes = "--workers 2 --environments 6 --engines 4 --mortal 1 --slow 1 --hung 1 --receivers 2 --ranks 2"
    deadlines = "--control-s 2 --attempt-s 2 --slow-s 0.3"
    command = [sys.executable, str(tests / "fleet_faults.py"), "--ray", "2", "--steps", "3", "--kills", "4"]
    figures = tmp_path / "figures.json"
    subprocess.run([*command, *sizes.split(), *deadlines.split(), "--json", str(figures)], check=True)
    kills = json.loads(figures.read_text())["kills"]
    assert kills["machine"] == 1
    assert sum(kills.values()) == 4


def test_the_example_that_learns_survives_the_death_of_its_actors(tmp_path):
    tests = Path(__file__).resolve().parent.parent
    paths = [str(tests), str(tests.parent / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    small = ["--steps", "16", "--grid", "2", "--boards", "4", "--rollouts", "4", "--audit-share", "0.1"]
    command = [sys.executable, str(tests / "learn_faults.py"), "--out", str(tmp_path / "run"), "--ray"]
    subprocess.run(
        [*command, "--server", "local", "--kills", "3", "--p", "1", "--", *small, "--workers", "2"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
    )


def test_a_worker_and_the_driver_die_and_the_output_equals_the_serial_run(tiny_model, tmp_path, monkeypatch):
    gates, folder = tmp_path / "gates", tmp_path / "samples"
    gates.mkdir()
    monkeypatch.setenv("RAY_GATES", str(gates))
    shard = max(COUNT // SHARDS, 1)
    command = [sys.executable, str(Path(__file__).with_name("ray_cases.py")), str(tiny_model), str(folder)]
    with subprocess.Popen(
        [*command, str(COUNT), str(shard), str(WORKERS)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as driver:
        wait_for_shards(driver, STARTS["first"])
        # The workers wait for the gate, each within a shard.
        os.kill(next(filter(None, polled(workers)))[0], signal.SIGKILL)
        (gates / "first").touch()
        wait_for_shards(driver, STARTS["last"] - STARTS["first"])
        driver.kill()
    # Ray ends the workers of a dead driver; the gate opens after that, so that the second run has work.
    assert any(not running for running in polled(workers))
    assert len(list(folder.glob("samples-*"))) == STARTS["last"]
    (gates / "last").touch()
    started = time.perf_counter()
    found = list(rendered(str(tiny_model), str(folder), COUNT, shard, WORKERS))
    print(f"resumed: {time.perf_counter() - started:.1f} s for the rest")
    renderer = Renderer.from_pretrained(tiny_model)
    started = time.perf_counter()
    serial = [
        build_training_sample(renderer, messages, sample_id=str(index), train_on=train_on)
        for index, messages in enumerate(conversations(COUNT))
    ]
    print(f"serial: {time.perf_counter() - started:.1f} s for all")
    assert list(map(state, found)) == list(map(state, serial))


def wait_for_shards(driver, count):
    """Read the driver's output until this number of further shards is done."""
    lines = (line for line in driver.stdout if line.startswith("shard"))
    assert sum(1 for _ in islice(lines, count)) == count


def polled(function):
    """Yield what the function returns, five times a second, for two minutes."""
    for _ in range(600):
        yield function()
        time.sleep(0.2)


def test_the_store_holds_pixels_without_a_copy(cluster, tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    trajectory = Trajectory()
    side, pictures = 512, 90
    pixels = np.random.default_rng(0).integers(0, 255, (pictures, side, side, 3), np.uint8)
    parts = [{"type": "image", "image": Image.fromarray(one)} for one in pixels]
    prompt = renderer.render([{"role": "user", "content": parts}], add_generation_prompt=True)
    trajectory.append(prompt.token_ids, [5, 6], logprobs=[-1, -1], multi_modal_data=prompt.multi_modal_data)
    assert trajectory.nbytes > 64e6
    held = ray.put(trajectory)

    def addresses(value):
        buffers = []
        pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers if buffer.raw().nbytes > 1 << 18]
        assert all(one.readonly for one in raw)
        return [np.frombuffer(one, np.uint8).ctypes.data for one in raw]

    before = _own_memory()
    first, second = ray.get(held), ray.get(held)
    assert addresses(first) == addresses(second)
    assert len(addresses(first)) == pictures
    print(
        f"ray.get of {trajectory.nbytes / 1e6:.0f} MB: {(_own_memory() - before) / 1e6:.1f} MB of own memory"
    )
    assert _own_memory() - before < 16e6
    assert first.to_bytes() == trajectory.to_bytes()


def _own_memory():
    """Bytes of this process that it shares with none, in memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


async def test_a_pool_in_actors_gives_what_a_renderer_gives_and_survives_its_actors(cluster, tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    asked = [messages[:1] for messages in conversations(12)]
    async with RayRendererPool(str(tiny_model), actors=2) as pool:
        assert isinstance(pool, mmrender.RendererProtocol)
        first = await asyncio.gather(*[pool.arender(one, add_generation_prompt=True) for one in asked])
        victim = await asyncio.wrap_future(pool.actors[0].process_id.remote().future())
        os.kill(victim, signal.SIGKILL)
        again = await asyncio.gather(*[pool.arender(one, add_generation_prompt=True) for one in asked])
        serial = [renderer.render(one, add_generation_prompt=True) for one in asked]
        for found in (first, again):
            assert [one.token_ids for one in found] == [one.token_ids for one in serial]
            assert [one.multi_modal_data for one in found] == [one.multi_modal_data for one in serial]
        assert first[0].decode() == serial[0].decode()
        refused = await pool.abridge_to_next_turn(serial[0].token_ids, [5], [])
        assert refused is None
        assert pool.why_not_bridged == "the extension is empty"
        with pytest.raises(MessageError, match="has no source"):
            await pool.arender([{"role": "user", "content": [{"type": "image"}]}])


def test_map_batches_renders_a_data_set(cluster, tiny_model):
    renderer = Renderer.from_pretrained(tiny_model)
    texts = [
        [{"role": "user", "content": f"{index}?"}, {"role": "assistant", "content": "Yes."}]
        for index in range(40)
    ]
    data = ray.data.from_items(
        [{"messages": messages, "group": index} for index, messages in enumerate(texts)]
    )
    rows = data.map_batches(
        ToSamples,
        fn_constructor_args=(str(tiny_model),),
        batch_size=8,
        compute=ray.data.ActorPoolStrategy(size=2),
    ).take_all()
    rows.sort(key=lambda row: row["group"])
    assert [row["sample"].token_ids.tolist() for row in rows] == [
        build_training_sample(renderer, messages).token_ids.tolist() for messages in texts
    ]


def test_shards_of_another_size_are_not_taken_for_these(cluster, tiny_model, tmp_path):
    given = conversations(5, side=32)
    every = [
        [state(sample) for sample in render_to_files(given, str(tiny_model), tmp_path, shard_size=size)]
        for size in (4, 2)
    ]
    assert every[0] == every[1]
    assert len(every[0]) == 5
    for count, options, name in ((4, {}, "conversations"), (5, {"final_stop": False}, "options")):
        with pytest.raises(
            InputError, match=f"rendering.json: {name}: the folder contains samples of another"
        ):
            list(render_to_files(given[:count], str(tiny_model), tmp_path, **options))
