from pathlib import Path

from pydantic import BaseModel

from penstock.deploy import RunConfig, _model_in, render

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_the_tree() -> None:
    assert PAGE.read_text() == render(), "run: python -m scripts.reference.configuration > docs/configuration.md"


def test_every_key_is_described() -> None:
    assert list(undescribed(RunConfig)) == []


def undescribed(model: type[BaseModel], prefix: str = ""):
    for name, field in model.model_fields.items():
        inner = _model_in(field.annotation)
        if inner is not None:
            yield from undescribed(inner, f"{prefix}{name}.")
        elif not field.description:
            yield prefix + name
