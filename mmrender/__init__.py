"""Exact multimodal rendering and tensor transport for training vision-language models.

Names are listed in `__init__.pyi` and imported at first use, so that `import mmrender` costs next to nothing.
"""

from typing import Any

import lazy_loader

from mmrender import notebook
from mmrender._version import __version__ as __version__

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _page(value: Any) -> str:
    from mmrender.view.page import Page

    return Page(value)._repr_html_()


notebook.draw_with(_page)
