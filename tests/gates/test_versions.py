import pytest

from gates import versions


@pytest.mark.parametrize(
    ("version", "bounds", "fits"),
    [
        ("2.13.0+xpu", ">=2.9,<3", True),
        ("2.9", ">=2.9.0", True),
        ("2.8.1", ">=2.9,<3", False),
        ("2.10.0", ">=2.9", True),
        ("3.0.0", ">=2.9,<3", False),
        ("3.0.0rc1", ">=2.9,<3", False),
        ("2.14.0.dev20260805+xpu", ">=2.9,<3", True),
        ("2.9.0rc1", ">=2.9", False),
        ("2.9.0.post1", ">=2.9", True),
        ("0.48.1", ">=0.48.2", False),
        ("0.50.2", ">=0.48.2,<0.51", True),
        ("0.51.0", ">=0.48.2,<0.51", False),
        ("1.0", "", True),
        ("1.0", "==1.0.0", True),
        ("1.0", "!=1.0", False),
        ("1.1", ">1.0", True),
        ("1.1", "<=1.0", False),
    ],
)
def test_within(version: str, bounds: str, fits: bool) -> None:
    assert versions.within(version, bounds) == fits


@pytest.mark.parametrize(
    ("version", "bounds"), [("unknown", ">=1"), ("1.0", "~1"), ("1.0", ">=x"), ("", ">=1")]
)
def test_what_is_no_version_or_bound(version: str, bounds: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        versions.within(version, bounds)


@pytest.mark.parametrize(
    ("version", "local", "minor"),
    [
        ("2.13.0+xpu", "xpu", (2, 13)),
        ("2.8.0", "", (2, 8)),
        ("2.13.10+cu128.x", "cu128.x", (2, 13)),
        ("3", "", (3, 0)),
    ],
)
def test_parts(version: str, local: str, minor: tuple[int, int]) -> None:
    assert versions.local_part(version) == local
    assert versions.minor(version) == minor
