from __future__ import annotations

import sys
from typing import Annotated, Literal

import pytest
from pydantic import Field

from penstock.common.registry import BadOptions, Registry, UnknownName, import_object, nearest, options_of


def scale(x: float, *, by: Annotated[float, Field(gt=0)] = 2.0, norm: Literal["std", "none"] = "std") -> float:
    return x * by


def test_entries_paths_and_facts() -> None:
    registry: Registry = Registry("scaler", {"fraction": "fractions:Fraction"})
    assert registry.register("scale", needs=("x",))(scale) is scale
    assert registry.get("scale") is scale
    assert scale.needs == ("x",)  # type: ignore[attr-defined]
    assert registry.get("fraction").__name__ == "Fraction"
    assert registry.get("math:sqrt")(4.0) == registry.get("math.sqrt")(4.0) == 2.0
    assert registry.get("FILE.py:name", load=str.upper) == "FILE.PY:NAME"
    assert registry.names() == ["fraction", "scale"]
    assert "scale" in registry
    assert "sale" not in registry


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scal", ["scaler", "'scal'", "did you mean 'scale'", "(known: scale; or a path)"]),
        ("zzz", ["'zzz'; known: scale; or a path"]),
        ("math:sqr", ["math", "'sqr'", "did you mean 'sqrt'"]),
        ("no_such_module_at_all:x", ["no_such_module_at_all"]),
        (":x", ["':x'"]),
    ],
)
def test_unknown_names(name: str, words: list[str]) -> None:
    class Refused(ValueError):
        pass

    registry: Registry = Registry("scaler", {"scale": scale}, error=Refused, other="a path")
    with pytest.raises(Refused) as caught:
        registry.get(name)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_modules_of_a_package_register_themselves(tmp_path, monkeypatch) -> None:
    package = tmp_path / "scalers_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from penstock.common.registry import Registry\nSCALERS = Registry('scaler', package=__name__)\n"
    )
    (package / "one.py").write_text(
        f"from {package.name} import SCALERS\n@SCALERS.register('one')\ndef one(): ...\nassert 'one' in SCALERS\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = import_object(f"{package.name}:SCALERS")
    assert f"{package.name}.one" not in sys.modules
    assert registry.names() == ["one"]


def test_unique_names() -> None:
    registry: Registry = Registry("scaler", {"scale": scale}, unique=True)
    registry.register("scale")(scale)
    with pytest.raises(UnknownName, match="'scale'"):
        registry.register("scale")(nearest)


def test_options() -> None:
    registry: Registry = Registry("scaler", {"scale": scale})
    assert options_of(scale) == {"by": 2.0, "norm": "std"}
    assert registry.bind("scale", {"by": "3"})(2.0) == 6.0
    for options, words in (
        ({"bye": 1}, "'bye'; did you mean 'by'"),
        ({"by": 0}, "by is 0"),
        ({"norm": "max"}, "norm is 'max'"),
    ):
        with pytest.raises(BadOptions, match=words):
            registry.bind("scale", options)


def test_nearest() -> None:
    assert nearest("sqr", ["sqrt", "__sqr__"]) == "; did you mean 'sqrt'?"
    assert nearest("zzz", ["sqrt"]) == ""
