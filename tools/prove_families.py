"""Prove every family with images of the installed Transformers, and print a table for the docs.

    python tools/prove_families.py [MODEL_TYPE ...]

Each family is tried in a process of its own, with the default configuration of its class, made small.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterable
from typing import Any

_SECONDS = 240
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8}
_SETTINGS: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": {"use_bidirectional_attention": "vision"}},
    "gemma4_unified": {"text_config": {"use_bidirectional_attention": "vision"}},
    "lfm2_vl": {"text_config": _CONVOLUTIONS},
    "lfm3_vl": {"text_config": _CONVOLUTIONS},
}
"""Settings of released models where the defaults of a class contradict each other or lack a kind of layer."""


def main(names: list[str]) -> None:
    print("| model_type | proved | refused |\n|---|---|---|")
    for name in names or list(_model_types()):
        command = [sys.executable, __file__, "--one", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_SECONDS, check=False, env=_environment()
            )
            lines = done.stdout.splitlines()
            row = lines[-1] if lines else ""
            if not row.startswith("|"):
                row = f"| `{name}` | | ends its process with {done.returncode} |"
        except subprocess.TimeoutExpired:
            row = f"| `{name}` | | takes more than {_SECONDS} seconds |"
        print(row, flush=True)


def _environment() -> dict[str, str]:
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _model_types() -> Iterable[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    names: Iterable[str] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return names


def _config(name: str) -> Any:
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[name]
    parts = getattr(cls, "sub_configs", {})
    missing = {
        key: part() for key, part in parts.items() if "vision" in key and getattr(cls(), key, None) is None
    }
    settings = cls(**missing).to_dict()
    for key, own in _SETTINGS.get(name, {}).items():
        settings[key] = {**settings[key], **own}
        settings[key].pop("full_attn_idxs", None)
    return cls.from_dict(settings)


def one(name: str) -> None:
    warnings.filterwarnings("ignore")
    from mmrender.errors import MMRenderError
    from mmrender.training import ModelFamily

    try:
        found = ModelFamily.prove(_config(name))
    except MMRenderError as error:
        print(f"| `{name}` | | {_cell(str(error))} |")
        return
    except Exception as error:  # noqa: BLE001 - the default configuration may raise anything
        print(f"| `{name}` | | no default configuration: {_cell(f'{type(error).__name__}: {error}')} |")
        return
    proved = [layout for layout in ("right", "left", "packed") if layout not in found.refused]
    notes = f" (`recurrent_segments` over `{found.recurrent}`)" if found.recurrent else ""
    print(f"| `{name}` | {', '.join(proved)}{notes} | {_cell('; '.join(found.refused.values()))} |")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:240]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2])
    else:
        main(sys.argv[1:])
