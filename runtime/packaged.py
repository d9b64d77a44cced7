"""Where the skills lie: copied into the wheel, or beside the packages in a checkout."""

from pathlib import Path


def skills_dir() -> Path:
    """The wheel carries one copy, as data of the judge; it is read by path, never imported from there."""
    site = Path(__file__).resolve().parent.parent
    carried = site / "gates" / "_data" / "skills"
    return carried if carried.is_dir() else site / "skills"
