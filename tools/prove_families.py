"""Prove every family with images of the installed Transformers, and write the table of docs/proved.md.

    python tools/prove_families.py [MODEL_TYPE ...]

Each family is tried in a process of its own, with the default configuration of its class, made small. Its row
is printed and written at once, so that a run may be cut off and be continued with the families that remain.
"""

import multiprocessing
import resource
import sys
import warnings
from pathlib import Path
from typing import Any, get_args

from mmrender.errors import MMRenderError
from mmrender.testing.families import FamilyReport, compare_family
from mmrender.testing.reference import has_reference_backend, import_torchvision
from mmrender.training.families import Layout
from mmrender.training.tensor_list import torch

PAGE = Path(__file__).resolve().parent.parent / "docs" / "proved.md"
BEGIN, END = "<!-- written by tools/prove_families.py -->\n", "<!-- end -->\n"
_HEAD = "| `model_type` | proved | lengths crossed | largest difference | refused |\n|---|---|---|---|---|\n"
_SECONDS = 300
_MOST_BYTES = 12 << 30
"""Address space of one family: what its defaults make too large fails by itself."""
_MOST_CHARACTERS = 260
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8}
_IMAGE_TOKEN = 1000
_SETTINGS: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {"900": 16}},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "cosmos3_omni": {"text_config": {"rope_parameters": _MROPE | {"mrope_interleaved": True}}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 11]}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": _MROPE | {"mrope_section": [22, 22, 20]}}},
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "gemma4_unified": {"text_config": {"use_bidirectional_attention": "vision"}},
    "glmga": {"text_config": {"rope_parameters": _MROPE}},
    "hunyuan_vl": {"text_config": {"head_dim": 128, "rope_parameters": _MROPE | {"mrope_section": [16] * 4}}},
    "llama4": {"vision_config": {"hidden_size": 1408}},
    "lfm2_vl": {"text_config": _CONVOLUTIONS},
    "lfm3_vl": {"text_config": _CONVOLUTIONS},
    "paddleocr_vl": {"text_config": {"rope_parameters": _MROPE}},
    "step3p7": {"text_config": {"sliding_window": 512}},
}
"""Settings of released models where the defaults of a class contradict each other or lack a kind of layer."""


_LACKING = {
    "chameleon": "vocabulary_map",
    "diffusion_gemma": "num_experts",
    "emu3": "vocabulary_map",
    "granite4_vision": "deepstack_layer_map",
    "molmo2": "the id of its image token",
    "perception_lm": "vision_config.model_args",
    "qwen4_exp": "the sizes of its sparse attention",
}
"""What the default configuration of a class leaves out, where nothing else stands in the way."""


def main(names: list[str]) -> None:
    """Try the families that are named, or all, and write their rows."""
    if has_reference_backend("torch"):
        import_torchvision()
    torch.set_num_threads(1)
    known = model_types()
    for name in names or known:
        row = _tried(name)
        print(row, flush=True)
        PAGE.write_text(with_row(PAGE.read_text("utf-8"), name, row, known), "utf-8")


def model_types() -> list[str]:
    """Return the families with images that the installed Transformers has."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def with_row(page: str, name: str, row: str, known: list[str]) -> str:
    """Return the page with this row in the place of its family; rows of unknown families leave."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {line.split("`")[1]: line for line in table.splitlines() if line.startswith("| `")}
    rows[name] = row
    held = "".join(f"{rows[one]}\n" for one in known if one in rows)
    return before + BEGIN + _HEAD + held + END + after


def _tried(name: str) -> str:
    """Return the row of a family, tried in a forked process, which has all that is imported here."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(name, sending))
    process.start()
    sending.close()
    try:
        if receiving.poll(_SECONDS):
            return str(receiving.recv())
        return f"| `{name}` | | | | takes more than {_SECONDS} seconds |"
    except EOFError:
        process.join()
        return f"| `{name}` | | | | ends its process with {process.exitcode} |"
    finally:
        process.kill()
        process.join()


def _try(name: str, sending: Any) -> None:
    warnings.filterwarnings("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    sending.send(_row(name))


def _row(name: str) -> str:
    try:
        report = compare_family(_config(name))
    except MMRenderError as error:
        lacking = _LACKING.get(name)
        reason = f"cannot be built tiny: the defaults of its class lack {lacking}" if lacking else str(error)
        return f"| `{name}` | | | | {_cell(reason)} |"
    except Exception as error:  # noqa: BLE001 - the default configuration may raise anything
        return f"| `{name}` | | | | no default configuration: {_cell(f'{type(error).__name__}: {error}')} |"
    return row_of(name, report)


def row_of(name: str, report: FamilyReport) -> str:
    """Return the row of a family: its layouts, lengths and differences."""
    family = report.family
    proved: list[Layout] = [one for one in get_args(Layout) if one not in family.refused]
    named = family.recurrent.replace("|", "`, `")
    notes = f" (`recurrent_segments` over `{named}`)" if named else ""
    bound = family.max_sample_tokens
    notes += f" (samples of up to {bound:,} tokens)" if bound is not None else ""
    lengths = {one.path.rpartition(".")[2]: one.tokens for one in report.lengths}
    crossed = ", ".join(f"`{key}` {tokens:,}" for key, tokens in lengths.items())
    largest = [max((part[one] for one in proved), default=0.0) for part in (report.logits, report.gradients)]
    off = ", ".join(f"{value:.0e}" for value in largest)
    refused = "; ".join(f"{one}: {family.refused[one]}" for one in get_args(Layout) if one in family.refused)
    return f"| `{name}` | {', '.join(proved)}{notes} | {crossed} | {off} | {_cell(refused)} |"


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[name]
    parts = getattr(cls, "sub_configs", {})
    missing = {
        key: part() for key, part in parts.items() if "vision" in key and getattr(cls(), key, None) is None
    }
    settings = cls(**missing).to_dict()
    for key in ("image_token_id", "image_token_index"):
        if settings.get(key, 0) is None:  # a tokenizer's, which every released model names
            settings[key] = _IMAGE_TOKEN
    for key, own in _SETTINGS.get(name, {}).items():
        settings[key] = {**settings[key], **own} if isinstance(settings[key], dict) else own
        settings[key].pop("full_attn_idxs", None)
    return cls.from_dict(settings)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:_MOST_CHARACTERS]


if __name__ == "__main__":
    main(sys.argv[1:])
