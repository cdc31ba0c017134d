"""A real renderer's prompts and bridges as a trajectory, and rendered prompts over the codec."""

import copy

import numpy as np
import pytest
from PIL import Image

import mmcodecs
from item_cases import same_tensors
from mmrender import Renderer
from mmrender.errors import TrajectoryError
from mmrender.trajectory.tree import Trajectory, trajectories_from_wire, trajectories_to_wire
from mmrender.trajectory.rendered_wire import rendered_from_wire, rendered_to_wire
from tree_cases import assert_same


@pytest.fixture(scope="module")
def renderer(tiny_model):
    return Renderer.from_pretrained(str(tiny_model), image_backend="pil")


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 96, 3), np.uint8), "RGB")


def turn(seed):
    content = [{"type": "image", "image": picture(seed)}, {"type": "text", "text": f"And {seed}?"}]
    return {"role": "user", "content": content}


def test_rollouts_of_a_real_renderer(renderer):
    stop = sorted(renderer.get_stop_token_ids())[0]
    group = []
    for number in range(2):
        trajectory = Trajectory(f"t{number}")
        rendered = renderer.render([turn(0)], add_generation_prompt=True)
        for seed in (1, 2, 0):
            completion = [40 + number, 41 + seed, stop]
            step = trajectory.append(
                rendered.token_ids,
                completion,
                logprobs=[-1.0] * 3,
                multi_modal_data=rendered.multi_modal_data,
            )
            rendered = renderer.bridge_to_next_turn(
                rendered.token_ids,
                completion,
                [turn(seed)],
                previous_multi_modal_data=rendered.multi_modal_data,
            )
            assert rendered is not None
            assert step.previous is (trajectory.steps[-2] if len(trajectory) > 1 else None)
        trajectory.append(rendered.token_ids, multi_modal_data=rendered.multi_modal_data)
        group.append(trajectory)
    assert [len(step.new_items) for step in group[0].steps] == [1, 1, 1, 0]
    assert len(group[0].branches()) == 1
    wire = mmcodecs.decode(mmcodecs.encode(trajectories_to_wire(group)))
    assert len(wire["items"]["items"]) == 3
    for old, new in zip(group, trajectories_from_wire(wire), strict=True):
        assert_same(old, new)
        assert all(map(same_tensors, old.items, new.items))
        np.testing.assert_array_equal(
            new.steps[-1].prompt_ids, rendered.token_ids if old is group[1] else old.steps[-1].prompt_ids
        )


def rendered_prompt(renderer):
    call = {"role": "assistant", "content": "Done.", "tool_calls": []}
    return renderer.render([turn(0), call, turn(1)], add_generation_prompt=True)


def test_rendered_prompts_survive_the_codec(renderer):
    prompt = rendered_prompt(renderer)
    read = rendered_from_wire(mmcodecs.decode(mmcodecs.encode(rendered_to_wire(prompt))))
    assert read == prompt
    assert all(
        map(same_tensors, read.multi_modal_data.mm_items["image"], prompt.multi_modal_data.mm_items["image"])
    )
    np.testing.assert_array_equal(read.sampled_mask, prompt.sampled_mask)
    with pytest.raises(ValueError, match="carries no tokenizer"):
        read.decode()


DAMAGE = {
    "version": lambda w: w.update(version=2),
    "field": lambda w: w.pop("text"),
    "ids": lambda w: w.update(token_ids=w["token_ids"].astype(np.int64)),
    "columns": lambda w: w.update(spans=w["spans"][:, :4]),
    "gap": lambda w: w["spans"].__setitem__((1, 0), w["spans"][1, 0] + 1),
    "short": lambda w: w.update(spans=w["spans"][:-1]),
    "kind": lambda w: w["kinds"].__setitem__(0, "pickle"),
    "kinds": lambda w: w.update(kinds=[[]]),
    "row": lambda w: w["spans"].__setitem__((0, 3), 99),
    "message": lambda w: w["spans"].__setitem__((0, 2), 99),
    "role": lambda w: w["roles"].__setitem__(0, "root"),
    "tools": lambda w: w.update(tool_names=[None]),
    "rewritten": lambda w: w.update(rewritten=[9]),
    "text": lambda w: w.update(text=b""),
    "outside": lambda w: w["multi_modal_data"]["ranges"].__setitem__((1, 1), len(w["token_ids"])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_prompts_are_refused(renderer, damage):
    wire = copy.deepcopy(
        mmcodecs.decode(mmcodecs.encode(rendered_to_wire(rendered_prompt(renderer))), copy=True)
    )
    rendered_from_wire(wire)
    DAMAGE[damage](wire)
    with pytest.raises(TrajectoryError, match=r"rendered.*: a rendered prompt cannot be read - expected"):
        rendered_from_wire(wire)


def test_errors_of_prompts_name_their_place(renderer):
    wire = mmcodecs.decode(mmcodecs.encode(rendered_to_wire(rendered_prompt(renderer))), copy=True)
    wire["roles"][0] = "root"
    with pytest.raises(TrajectoryError) as error:
        rendered_from_wire(wire)
    assert str(error.value) == (
        "rendered.roles: a rendered prompt cannot be read - expected a list of known values, got "
        "['root', 'assistant', 'user']"
    )
