"""Version bounds, from the `Requires-Dist` lines of our own distribution."""

import re
from collections.abc import Iterable

# "torch<3,>=2.9; extra == 'train'", as metadata writes it
_LINE = re.compile(
    r"^(?P<name>[A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*\(?(?P<bounds>[^;)]*)\)?\s*(?:;(?P<marker>.*))?$"
)
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[\w-]+)['"]""")


def bounds(lines: Iterable[str], extra: str) -> dict[str, str]:
    """Name to bounds (">=2.9,<3", "" for any) of what is always needed and of `extra`."""
    found = {}
    for line in lines:
        match = _LINE.match(line.strip())
        if match is None:
            continue
        named = _EXTRA.search(match["marker"] or "")
        if named is None or named["extra"] == extra:
            clauses = sorted(part.strip() for part in match["bounds"].split(",") if part.strip())
            found[re.sub(r"[-_.]+", "-", match["name"]).lower()] = ",".join(reversed(clauses))
    return found
