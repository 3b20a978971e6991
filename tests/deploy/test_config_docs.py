from pathlib import Path

from pydantic import BaseModel
from scripts.reference import render_configuration, section_of

from penstock.deploy import RunConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_configuration_page_is_current() -> None:
    assert PAGE.read_text() == render_configuration(), "run: python -m scripts.reference"


def test_configuration_describes_every_key() -> None:
    assert list(undescribed(RunConfig)) == []


def undescribed(model: type[BaseModel], prefix: str = ""):
    for name, field in model.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            yield from undescribed(inner, f"{prefix}{name}.")
        elif not field.description:
            yield prefix + name
