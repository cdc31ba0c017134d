"""A pytest plugin: the parity laws on a model directory of the user's own.

```bash
pytest --mmrender-model my-finetune --mmrender-cases 100
```

It adds two tests for each directory: renderings against Transformers, and bridges against whole renderings.
"""

from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("mmrender")
    group.addoption(
        "--mmrender-model", action="append", default=[], metavar="DIR", help="Model directory to test."
    )
    group.addoption("--mmrender-cases", type=int, default=50, help="Conversations for each law.")
    group.addoption("--mmrender-seed", type=int, default=0, help="Of the conversations.")
    group.addoption("--mmrender-backend", choices=("torch", "pil"), default="pil", help="For images.")


def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add the laws behind the tests that were collected."""
    for model in session.config.getoption("--mmrender-model"):
        for law in (Parity, Bridges):
            name = f"mmrender {law.__name__.lower()}[{Path(model).name}]"
            items.append(law.from_parent(session, name=name, model=Path(model)))


class _Law(pytest.Item):
    def __init__(self, *, model: Path, **options: Any) -> None:
        super().__init__(**options)
        self.model = model

    def option(self, name: str) -> Any:
        """Value of one of the plugin's options."""
        return self.config.getoption(f"--mmrender-{name}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Print a difference without the traceback."""
        return str(excinfo.value) if excinfo.errisinstance(AssertionError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Place and name of the test."""
        return self.model, None, self.name


class Parity(_Law):
    """Text, tokens, ranges and pixels equal those of Transformers."""

    def runtest(self) -> None:
        """Compare; what could not be compared, such as a model's images, fails as well."""
        from mmrender.testing.parity import check_parity

        report = check_parity(
            self.model,
            image_backend=self.option("backend"),
            cases=self.option("cases"),
            seed=self.option("seed"),
        )
        if report.mismatch is not None:
            raise AssertionError(str(report.mismatch))
        if report.not_compared is not None:
            raise AssertionError(f"not compared: {report.not_compared}")


class Bridges(_Law):
    """Every bridge that is given equals the rendering of the whole conversation."""

    def runtest(self) -> None:
        """Compare; a template of which no bridge is proved fails nothing."""
        from mmrender.renderer import Renderer
        from mmrender.testing.bridge_parity import check_bridge

        renderer = Renderer.from_pretrained(self.model, image_backend=self.option("backend"))
        report = check_bridge(renderer, self.model.name, cases=self.option("cases"), seed=self.option("seed"))
        if report.mismatches:
            raise AssertionError(str(report.mismatches[0]))
