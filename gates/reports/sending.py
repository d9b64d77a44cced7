"""`gate report`: write the page and the bundle, and say what was written."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gates.chain import Judged
from gates.reports import bundle, html, story
from gates.verdict import write_text
from gates.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    verdict: str
    page: str | None = None
    page_bytes: int = 0
    bundle: str | None = None
    bundle_bytes: int = 0
    files: int = 0
    absent: tuple[str, ...] = ()
    """what the bundle lacks"""
    homeless: tuple[str, ...] = ()
    problem: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "absent": list(self.absent), "homeless": list(self.homeless)}

    def to_text(self) -> str:
        lines = []
        if self.page:
            lines.append(f"{self.page}: {self.page_bytes} bytes, {self.verdict}")
        if self.bundle:
            lines.append(f"{self.bundle}: {self.files} files, {self.bundle_bytes} bytes")
            lines += [f"left out, for it lies outside under no name: {name}" for name in self.homeless]
            lines.append(f"next: gate verify --bundle {self.bundle} --allow-absent {','.join(self.absent)}")
        return "".join(f"{line}\n" for line in lines)


def send(
    workspace: Workspace,
    judged: Sequence[Judged],
    page: Path | None,
    archive: Path | None,
    *,
    without: Sequence[str] = (),
    also: Sequence[str] = (),
) -> Sent:
    verdicts = [item.whole for item in judged]
    told: dict[str, Any] = {"verdict": "PASS" if all(item.passes for item in verdicts) else "FAIL"}
    if page is not None:
        text = html.render(story.collect(workspace.again(), verdicts))
        write_text(page, text)
        told |= {
            "page": page.name if page.parent == workspace.root else page.as_posix(),
            "page_bytes": len(text.encode("utf-8")),
        }
    if archive is not None:
        try:
            packed = bundle.write(workspace.again(), archive, without=without, also=also)
        except bundle.BundleError as error:
            return Sent(**told, problem=str(error))
        told |= {"bundle": archive.as_posix(), "bundle_bytes": packed.size, "files": packed.files}
        told |= {"absent": packed.absent, "homeless": packed.homeless}
    return Sent(**told)
