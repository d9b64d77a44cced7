"""Where the data of the package lies: skills and schemas."""

from pathlib import Path


def data_dir(name: str) -> Path:
    """`schemas` or `skills`: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    beside = here.parent / name
    # A stray folder of that name in site-packages is not ours: only a checkout has both.
    if beside.is_dir() and (here.parent / "pyproject.toml").is_file():
        return beside
    return here / "_data" / name
