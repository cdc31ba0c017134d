"""Compare every model type with images of Transformers, and write the last table of docs/families.md.

    python tools/processors_page.py PACKAGES OUTPUT [--cases N] [NAME ...]

PACKAGES is the folder of wheels that `make families` downloads. A directory of each model type is built in
OUTPUT: `processors.toml` and `families.toml` beside this file say which tokens and settings differ from the
defaults of Transformers. Each model type is compared in a process of its own, and its row is written at once,
so that a run may be cut off and be continued with the names that remain.
"""

import argparse
import json
import multiprocessing
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image

import families
from mmrender.media.pixels import ImageBackend
from mmrender.testing.parity import check_parity
from mmrender.testing.reference import ReferenceRenderer, import_torchvision
from mmrender.testing.reports import ParityReport

PAGE = Path(__file__).resolve().parent.parent / "docs" / "families.md"
TABLE = Path(__file__).with_name("processors.toml")
BEGIN, END = "<!-- written by tools/processors_page.py -->\n", "<!-- end of tools/processors_page.py -->\n"
HEAD = ("| model type | processor | template | torch | pil | why |", "|---|---|---|---|---|---|")
OUTCOMES = {
    "exact": "all that both sides rendered was equal",
    "not for chat": "Transformers has no processor for it that puts images into prompts of a template",
    "refused": "mmrender refuses its images by name",
    "not buildable": "Transformers cannot build its processor here",
    "reference fails": "Transformers raises an error in a conversation that mmrender renders",
    "not compared": "nothing was compared",
    "wrong": "the two differ",
    "raw exception": "mmrender raises an exception that has no name",
}
"""Outcomes of one model type in one image mode, the better ones first."""
MODES: dict[ImageBackend, str] = {"torch": "torchvision", "pil": "pil"}
_SECONDS = 420
_MOST_CHARACTERS = 240
_ODD_SIZES = ((640, 40), (24, 500), (20, 20), (200, 321))
"""Widths and heights in pixels."""
_TEMPLATE = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_DEFAULTS: dict[str, Any] = {
    "vocabulary": ["byte_level", "llama3", "qwen"],
    "tokenizer_class": "PreTrainedTokenizerFast",
    "stop": ["</s>", "<|im_end|>"],
}


def model_types() -> list[str]:
    """Return every model type of Transformers that has an image processor, or text of images."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return sorted({*IMAGE_PROCESSOR_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES})


def read_rows() -> dict[str, dict[str, Any]]:
    """Return the rows of processors.toml by model type."""
    return tomllib.loads(TABLE.read_text("utf-8"))


def read_row(name: str) -> dict[str, Any]:
    """Return the row of a model type with everything that it takes from others."""
    rows = read_rows()
    row = rows.get(name)
    if row is None:
        return dict(families.read_table().get(name, {}))
    shared = {}
    if (like := row.get("like")) is not None:
        shared = families.read_table()[like] if like == name or like not in rows else read_row(like)
    return {key: value for key, value in shared.items() if key not in row.get("without", ())} | row


def classes(name: str) -> dict[str, str | None]:
    """Return the classes of a model type by part, or of the row that it is like."""
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        processing_auto,
        video_processing_auto,
    )

    image = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(name, {})
    video = video_processing_auto.VIDEO_PROCESSOR_MAPPING_NAMES.get(name, {})
    named = {
        "processor": processing_auto.PROCESSOR_MAPPING_NAMES.get(name),
        "image": image.get("torchvision") or image.get("pil"),
        "video": video.get("torchvision"),
        "audio": feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING_NAMES.get(name),
    }
    like = read_row(name).get("like")
    shared = classes(like) if named["image"] is None and like is not None else {}
    return shared | {part: cls for part, cls in named.items() if cls is not None or part not in shared}


def offered(name: str) -> set[str]:
    """Return the image modes that Transformers has for a model type."""
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    image = IMAGE_PROCESSOR_MAPPING_NAMES.get(name, dict.fromkeys(MODES.values(), ""))
    return {mode for mode, backend in MODES.items() if backend in image}


def family_of(name: str) -> dict[str, Any]:
    """Return the whole row that `families.build` takes."""
    row = read_row(name)
    tokens = _NAMED | row.get("tokens", {})
    image_token = row.get("tokens", {}).get("image_token", "<image>")
    text = _TEMPLATE.replace("IMAGE", row.get("image_text", image_token))
    said = [] if "image_text" in row else [image_token]
    special = [*row.get("special", []), *tokens.values(), "<|im_start|>", "<|im_end|>", *said]
    is_named = "image_token" in row.get("tokens", {})
    feature = row.get("feature", image_token if is_named else row.get("image_text", image_token))
    video = row.get("video_feature", tokens.get("video_token"))
    family = {
        **_DEFAULTS,
        "template": text.replace("VIDEO", row.get("video_text", "<video>")),
        "config": {"image_token_id": feature} | ({"video_token_id": video} if video else {}),
        **row,
        "special": list(dict.fromkeys(special)),
        "tokens": tokens,
    }
    if "template" in row and "special" in row:
        # A row of families.toml says all of it.
        family |= {"special": row["special"], "tokens": row["tokens"]} if "stop" in row else {}
    family["config"] = {**family["config"], "model_type": name}
    for part, cls in classes(name).items():
        settings = {"class": None, **family.pop(part, {})} | ({} if cls is None else {"class": cls})
        if settings["class"] is not None:
            family[part] = settings
    return family


def build(name: str, packages: families.Packages, output: Path) -> None:
    """Write the model directory of a model type.

    Raises:
        LookupError: Transformers has no image processor for it.
    """
    family = family_of(name)
    if "image" not in family:
        raise LookupError("Transformers names no image processor for it")
    families.build(name, family, packages, output)
    if "processor" not in family and "image" in family:
        settings = families._part_settings(family["image"], families.PARTS["image"])
        (output / name / "preprocessor_config.json").write_text(json.dumps(settings), "utf-8")


def is_for_chat(name: str) -> bool:
    """Return whether a processor of Transformers names a placeholder for images in text."""
    import inspect

    import transformers

    cls = classes(name)["processor"]
    try:
        bases = getattr(transformers, cls).__mro__ if cls is not None else ()
    except ImportError:
        return False
    if transformers.ProcessorMixin not in bases:
        return False  # a class whose packages are missing
    kinds = bases[: bases.index(transformers.ProcessorMixin)]
    return any("image_token" in inspect.getsource(kind) for kind in kinds)


def renders_images(directory: Path, mode: ImageBackend) -> bool:
    """Return whether the model's own processor renders a prompt of text with an image, text included."""
    picture = {"type": "image", "image": _picture(0, 64, 64)}
    parts = [[{"type": "text", "text": text}, picture] for text in ("one", "two words")]
    try:
        reference = ReferenceRenderer(directory, mode)
        ids = [reference.render([{"role": "user", "content": content}]).ids for content in parts]
    except Exception:  # noqa: BLE001 - Transformers raises anything
        return False
    return ids[0] != ids[1]


def outcome(name: str, directory: Path, mode: ImageBackend, cases: int) -> tuple[str, str]:
    """Return the outcome of a model type in one mode, and why it is not exact."""
    if mode not in offered(name):
        return "-", ""
    pictures = [_picture(number, *size) for number, size in enumerate(_ODD_SIZES)]
    try:
        for_chat = is_for_chat(name) and renders_images(directory, mode)
        report = check_parity(directory, image_backend=mode, cases=cases, pictures=pictures)
    except Exception as error:  # noqa: BLE001 - which is the finding
        return "raw exception", f"{type(error).__name__}: {error}"
    kind, why = judged(report, for_chat=for_chat)
    return kind, why.replace(f"{directory.parent}/", "")


def judged(report: ParityReport, *, for_chat: bool) -> tuple[str, str]:
    """Return the outcome that a report amounts to, and why it is not exact."""
    why = (report.not_compared or "").removeprefix("images: ")
    if why and not for_chat:
        return "not for chat", why
    if report.mismatch is not None:
        what, ours, theirs = report.mismatch.difference
        if what == "acceptance" and ours == "renders":
            return "reference fails", theirs
        return "wrong", f"{what}: {ours} / {theirs}"
    if why:
        return "refused", why
    if not report.images:
        return "not compared", "no conversation held an image"
    return "exact", f"without videos: {report.without_videos}" if report.without_videos else ""


def _picture(seed: int, width: int, height: int) -> Image.Image:
    noise = Image.effect_noise((width, height), 90)
    ramp = Image.linear_gradient("L").rotate(90 * seed).resize((width, height))
    return Image.merge("RGB", (noise, ramp, Image.blend(noise, ramp, 0.5)))


def _tried(name: str, packages: Path, output: Path, cases: int) -> str:
    """Return the row of a model type, tried in a forked process, which has all that is imported here."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(name, packages, output, cases, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(_SECONDS):
            return str(receiving.recv())
        return row_of(name, "", {}, f"takes more than {_SECONDS} seconds")
    except EOFError:
        process.join()
        return row_of(name, "", {}, f"ends its process with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _try(name: str, packages: Path, output: Path, cases: int, sending: Any) -> None:
    warnings.filterwarnings("ignore")
    template = read_row(name).get("template")
    source = "minimal" if template is None else " ".join((template[0], Path(template[1]).name))
    try:
        build(name, families.Packages(packages), output)
    except Exception as error:  # noqa: BLE001 - Transformers raises anything
        kind = "not buildable" if is_for_chat(name) else "not for chat"
        row = row_of(name, source, dict.fromkeys(MODES, kind), str(error))
    else:
        found = {mode: outcome(name, output / name, mode, cases) for mode in MODES}
        whys = dict.fromkeys(why for _, why in found.values() if why)
        row = row_of(name, source, {mode: kind for mode, (kind, _) in found.items()}, "; ".join(whys))
    sending.send(row)


def row_of(name: str, template: str, kinds: dict[ImageBackend, str], why: str) -> str:
    """Return a line of the table."""
    said = " ".join(why.split()).replace("|", "\\|")
    said = said if len(said) <= _MOST_CHARACTERS else f"{said[:_MOST_CHARACTERS].rstrip(chr(92))}..."
    said = said.replace("<", "&lt;")  # a token's text is no markup
    modes = " | ".join(kinds.get(mode, "not buildable") for mode in MODES)
    return f"| `{name}` | {classes(name)['processor'] or '-'} | {template or '-'} | {modes} | {said} |"


def rows_of(page: str) -> dict[str, str]:
    """Return the lines of the page's table by model type."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}


def with_row(page: str, name: str, row: str, known: list[str]) -> str:
    """Return the page with this row in the place of its model type; rows of unknown ones leave."""
    rows = rows_of(page) | {name: row}
    lines = [rows[one] for one in known if one in rows]
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    table = "\n".join([*HEAD, *lines])
    return f"{before}{begin}\n{summary(lines)}\n\n{table}\n\n{end}{after}"


def kinds_of(line: str) -> list[str]:
    """Return the outcomes of a line, one for each image mode that there is."""
    cells = [cell.strip() for cell in line.split("|")[4:6]]
    return [cell for cell in cells if cell != "-"]


def summary(lines: Sequence[str]) -> str:
    """Return how many model types have each outcome, in the mode where it is worse."""
    order = list(OUTCOMES)
    worst = Counter(max(kinds_of(line), key=order.index) for line in lines)
    return f"Of {len(lines)}: " + ", ".join(f"{worst[kind]} {kind}" for kind in order if worst[kind]) + "."


def main() -> int:
    """Compare the model types that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--cases", type=int, default=24)
    options = parser.parse_args()
    import_torchvision()
    known = model_types()
    for name in options.names or known:
        row = _tried(name, options.packages, options.output, options.cases)
        print(row, flush=True)
        PAGE.write_text(with_row(PAGE.read_text("utf-8"), name, row, known), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
