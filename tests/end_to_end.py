"""From a rollout to a trainer in another process: what the end-to-end tests of every engine share.

Run as a program it is the trainer: it receives trajectories, batches them, runs the model over them, audits
them, and prints what it saw as JSON.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import replace

import msgspec
import numpy as np
from PIL import Image, ImageDraw

CELL = {"type": "object", "properties": {name: {"type": "integer"} for name in ("row", "column")}}
TOOLS = [{"type": "function", "function": {"name": "zoom", "description": "Enlarge.", "parameters": CELL}}]
ZOOM = {"name": "zoom", "arguments": {"row": 1, "column": 2}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": ZOOM}],
}
MAX_NEW_TOKENS = 8


def picture(seed):
    rng = np.random.default_rng(seed)
    width, height = 64 + 32 * int(rng.integers(0, 4)), 64 + 32 * int(rng.integers(0, 4))
    image = Image.new("RGB", (width, height), tuple(int(x) for x in rng.integers(0, 256, 3)))
    draw = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = (int(v) for v in rng.integers(0, 48, 2))
        draw.ellipse((x, y, x + 24, y + 24), fill=tuple(int(v) for v in rng.integers(0, 256, 3)))
    return image


def image_part(seed):
    return {"type": "image", "image": picture(seed)}


def no_placeholders(renderer):
    """Sampling parameters that keep a random model from sampling placeholder tokens, which stand for nothing."""
    names = ("<|image_pad|>", "<|video_pad|>")
    return {"logit_bias": {renderer.tokenizer.token_id(name): -100.0 for name in names}}


async def roll_out(client, number, trajectory):
    """One rollout with 1 to 6 images: two samples of the first turn, a tool call, and a turn for each image left."""
    left = [image_part(100 * number + index) for index in range(1 + number % 6)]
    messages = [
        {"role": "system", "content": "You look closely."},
        {
            "role": "user",
            "content": [left.pop(), {"type": "text", "text": f"Question {number}: what is it?"}],
        },
    ]
    # Imported here: the trainer, which runs this file as a program, needs nothing of it.
    from guided import guided_params

    params = {"max_tokens": MAX_NEW_TOKENS, "temperature": 1.0}

    async def turn(seed, **options):
        sampling = {**params, "seed": 1000 * number + seed, **options.pop("sampling", {})}
        return await client.create_completion(
            messages, trajectory=trajectory, tools=TOOLS, sampling_params=sampling, **options
        )

    await turn(1)
    messages.append((await turn(2)).message)
    messages.append({"role": "user", "content": "Look closer."})
    call = guided_params(client.renderer, [CALL], tools=TOOLS)
    guided = await turn(3, sampling={"max_tokens": 200, **call})
    guided.step.extra["guided"] = True
    called = guided.message
    messages.append(called)
    shown = [left.pop()] if left else []
    messages.append(
        {
            "role": "tool",
            "tool_call_id": called.tool_calls[0].id,
            "content": [{"type": "text", "text": "Here it is."}, *shown],
        }
    )
    seed = 4
    messages.append((await turn(seed)).message)
    while left:
        seed += 1
        messages.append({"role": "user", "content": [{"type": "text", "text": "And this?"}, left.pop()]})
        messages.append((await turn(seed)).message)
    return trajectory


async def roll_out_many(client, count, *, concurrency=4, first=0):
    """Roll out, a few at a time, and return the trajectories in order."""
    from mmrender import Trajectory

    slots = asyncio.Semaphore(concurrency)

    async def one(number):
        async with slots:
            return await roll_out(client, number, Trajectory(f"rollout-{number}"))

    return await asyncio.gather(*[one(first + number) for number in range(count)])


def completions_of(trajectories):
    """How many completions there are whose log-probabilities are compared."""
    return sum(not step.extra.get("guided") for trajectory in trajectories for step in trajectory.steps)


def samples_of(trajectory):
    """Its samples, without the completions that were held to a choice.

    Engines report log-probabilities of what their grammar left over, which are not the model's.
    """
    samples = []
    for sample in trajectory.samples():
        mask = sample.loss_mask.copy()
        for index in sample.extra["steps"]:
            step = trajectory.steps[index]
            if step.extra.get("guided"):
                mask[step.prompt_length : len(step)] = False
        logprobs = np.where(mask, sample.logprobs, 0).astype(np.float32)
        samples.append(replace(sample, loss_mask=mask, logprobs=logprobs))
    return samples


async def ship_to_trainer(trajectories, address, model, *, tolerance, plant=None):
    """Start this file as the trainer, ship the trajectories to it, and return what it reports."""
    from mmrender.shipping import Sender

    command = [sys.executable, __file__, "--address", address, "--model", str(model)]
    command += ["--count", str(len(trajectories)), "--tolerance", str(tolerance)]
    command += ["--plant", plant] if plant else []
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with Sender(address) as sender:
            for trajectory in trajectories:
                await sender.send(trajectory)
            out, err = await asyncio.wait_for(process.communicate(), 240)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise RuntimeError(f"the trainer failed:\n{err.decode()[-4000:]}")
    return json.loads(out.decode().strip().splitlines()[-1])


async def receive(address, count):
    from mmrender.shipping import Receiver

    found = []
    async with Receiver(address) as receiver:
        async for message in receiver:
            found.append(message.value)
            if len(found) == count:
                return found
    raise RuntimeError(f"{len(found)} of {count} trajectories came")


def largest_by_batch(trainer, samples, rows_of):
    """Largest difference between the sampler's log-probabilities and those of packed batches."""
    import torch

    from mmrender.training import collate, first_fit_decreasing, token_logprobs

    largest = 0.0
    for start in range(0, len(samples), 16):
        part = samples[start : start + 16]
        rows = first_fit_decreasing([len(sample) for sample in part], 2048) if rows_of == "packed" else None
        batch = collate(part, trainer.family, pad_token_id=0, rows=rows)
        with torch.inference_mode():
            logits = trainer.model(**batch.model_inputs()).logits
            found = token_logprobs(logits, batch)
        difference = (found - batch.logprobs)[batch.loss_mask].abs()
        largest = max(largest, float(difference.max()))
    return largest


def plant(name, sample, donor, pad):
    """A fault between sampler and trainer, in one sample that has an image."""
    from mmrender.audit.case import ChangedItem
    from mmrender.audit.report import sampled_runs
    from mmrender.sidecar import MultiModalData

    sidecar = sample.multi_modal_data
    items = [*sidecar.mm_items["image"]]
    ids = sample.token_ids.copy()
    start, stop = max(sampled_runs(sample.loss_mask), key=lambda run: run[1] - run[0])
    if name == "one patch off":
        items[0] = ChangedItem.of(items[0], lambda pixels, _: np.roll(pixels, 1, 0))
    elif name == "wrong normalisation":
        arithmetic = replace(items[0].arithmetic, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
        items[0] = msgspec.structs.replace(items[0], arithmetic=arithmetic)
    elif name == "stale image for a hash":
        items[0] = msgspec.structs.replace(donor, identity=items[0].identity)
    elif name == "ids shifted":
        ids[start:stop] = np.roll(ids[start:stop], 1)
    elif name == "sampled pad token":
        ids[start + 2] = pad
    changed = MultiModalData(
        {"image": [item.identity for item in items]}, sidecar.mm_placeholders, {"image": items}
    )
    return replace(sample, token_ids=ids, multi_modal_data=changed)


def train(address, model, count, tolerance, fault):
    from mmrender.audit import TrainerModel, audit

    trajectories = asyncio.run(receive(address, count))
    samples = [sample for trajectory in trajectories for sample in samples_of(trajectory)]
    trainer = TrainerModel.from_pretrained(model)
    if fault is not None:
        return report_fault(trainer, samples, fault, tolerance)
    report = audit(samples, trainer, tolerance=tolerance)
    return {
        "completions": completions_of(trajectories),
        "samples": len(samples),
        "tokens": report.tokens,
        "images": sorted({len(sample.multi_modal_data.mm_hashes.get("image", ())) for sample in samples}),
        "largest": report.largest,
        "padded": largest_by_batch(trainer, samples, "padded"),
        "packed": largest_by_batch(trainer, samples, "packed"),
        "kl": report.kl,
        "ok": report.ok,
        "text": report.text(),
    }


def report_fault(trainer, samples, fault, tolerance):
    from mmrender.audit import audit

    found = {}
    shown = [sample for sample in samples if sample.multi_modal_data.mm_items.get("image")]
    donors = {item.grid: item for sample in shown for item in sample.multi_modal_data.mm_items["image"]}
    for name in FAULTS if fault == "all" else (fault,):
        stale = name == "stale image for a hash"
        for sample in shown:
            item = sample.multi_modal_data.mm_items["image"][0]
            donor = donors[item.grid]
            if not stale or donor.identity != item.identity:
                break
        faulty = plant(name, sample, donor, trainer.family.feature_token_ids["image"])
        # The image that the sampler saw is another sample's too, as it would be in a group.
        others = [msgspec.structs.replace(item, identity="0" * 64)] if stale else []
        report = audit([faulty], trainer, tolerance=tolerance, others=others)
        found[name] = [[finding.stage, finding.statement] for finding in report.findings]
    return found


FAULTS = (
    "one patch off",
    "ids shifted",
    "wrong normalisation",
    "stale image for a hash",
    "sampled pad token",
)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--tolerance", type=float, required=True)
    parser.add_argument("--plant")
    options = parser.parse_args()
    found = train(options.address, options.model, options.count, options.tolerance, options.plant)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
