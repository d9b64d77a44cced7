"""The walls of the house: the judge and the judged share no code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = {"torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes"}


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of every import statement, wherever it stands, and of importlib's with a literal."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and _is_import_call(node.func):
            yield from (
                str(argument.value).partition(".")[0]
                for argument in node.args
                if isinstance(argument, ast.Constant)
            )


def _is_import_call(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in ("import_module", "__import__")


def _files(*patterns: str) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    assert found, patterns
    return found


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", _files("gates/**/*.py", "skills/*/gate.py"), ids=_name)
def test_the_judge_knows_neither_runtime_nor_torch(path: Path) -> None:
    assert not set(_imports(path)) & {"runtime", *HEAVY}


@pytest.mark.parametrize("path", _files("runtime/**/*.py"), ids=_name)
def test_the_worker_knows_no_judge(path: Path) -> None:
    assert "gates" not in set(_imports(path))


def test_the_scan_sees_what_it_should(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(
        "def f():\n    import torch.nn\n    from runtime.a import b\n"
        "    importlib.import_module('gates.cli')\n    __import__('peft')\n",
        encoding="utf-8",
    )
    assert set(_imports(path)) == {"torch", "runtime", "gates", "peft"}


def test_skills_and_schemas_are_data() -> None:
    assert not [path for name in ("skills", "schemas") for path in (ROOT / name).rglob("__init__.py")]


def test_tests_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))
