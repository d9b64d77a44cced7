"""Copies of the skills where an agent looks for them: made, checked, brought up to date, taken away.

A copy is for reading and following. It has no gate.py, for only the installed package judges, and no evals,
which would show an agent the answers. `MANIFEST` beside the copies says what was put there.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from gates import index, registry
from gates.chain import tool
from gates.evidence import EvidenceError, file_digest, read_json
from gates.verdict import render, write_bytes, write_text

MANIFEST = ".aipc-finetune.json"
SCHEMA = "install/1"
NOT_COPIED = ("gate.py", "evals", "__pycache__")
NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")  # what every agent takes as a skill's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Folders of skills, relative to a project and to the home folder."""

    project: str
    user: str


AGENTS: Mapping[str, Agent] = {
    "claude": Agent(project=".claude/skills", user=".claude/skills"),
    "codex": Agent(project=".agents/skills", user=".agents/skills"),
    "gemini": Agent(project=".gemini/skills", user=".gemini/skills"),
    "copilot": Agent(project=".github/skills", user=".copilot/skills"),
    "cursor": Agent(project=".cursor/skills", user=".cursor/skills"),
    "agents": Agent(project=".agents/skills", user=".agents/skills"),
}

State = Literal["added", "updated", "unchanged", "removed", "kept"]


class InstallError(Exception):
    """The folder can't be written to as it is; the message says what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    folder: str
    dry_run: bool
    files: Mapping[str, State]
    """path below `folder` to what was done; `kept` is a file that someone changed"""
    problems: tuple[str, ...]

    def counts(self) -> dict[str, int]:
        found = list(self.files.values())
        return {state: found.count(state) for state in dict.fromkeys(found)}


# ---- what there is to do


def sources() -> dict[str, Path]:
    """Path below the folder of skills to the file of the package that belongs there."""
    root = index.skills_dir()
    return {
        path.relative_to(root).as_posix(): path
        for skill in registry.SKILLS
        for path in sorted((root / skill).rglob("*"))
        if path.is_file() and not set(path.relative_to(root).parts) & set(NOT_COPIED)
    }


def install(base: Path, place: str, *, dry_run: bool = False) -> Outcome:
    """Bring `base/place` to the package's skills; a file that someone changed is kept and named."""
    folder, wanted = _folder(base, place), sources()
    before = _recorded(folder)
    _refuse_links(folder, {**wanted, **before})
    digests = {path: file_digest(source) for path, source in wanted.items()}
    files = {path: _state(folder / path, digest, before.get(path)) for path, digest in digests.items()}
    gone = {path: digest for path, digest in before.items() if path not in wanted}
    files |= _leaving(folder, gone)
    problems = _kept_lines(folder, files)
    if not dry_run:
        for path, source in wanted.items():
            if files[path] in ("added", "updated"):
                write_bytes(folder / path, source.read_bytes())
        _take_away(folder, [path for path, state in files.items() if state == "removed"])
        ours = {path: digest for path, digest in digests.items() if files[path] != "kept"}
        theirs = {path: before[path] for path, state in files.items() if state == "kept" and path in before}
        _record(folder, {**ours, **theirs})
        problems += _faults(folder, ours)
    return Outcome(folder=place, dry_run=dry_run, files=files, problems=tuple(problems))


def remove(base: Path, place: str, *, dry_run: bool = False) -> Outcome:
    """Take away what `install` put into `base/place`, where nobody changed it since."""
    folder = _folder(base, place)
    before = _recorded(folder)
    _refuse_links(folder, before)
    files = _leaving(folder, before)
    if not dry_run:
        _take_away(folder, [path for path, state in files.items() if state == "removed"])
        rest = {path: before[path] for path, state in files.items() if state == "kept"}
        if rest:
            _record(folder, rest)
        else:
            (folder / MANIFEST).unlink(missing_ok=True)
            _remove_empty(folder, base)
    return Outcome(folder=place, dry_run=dry_run, files=files, problems=tuple(_kept_lines(folder, files)))


def _state(path: Path, digest: str, before: str | None) -> State:
    if not path.exists():
        return "added"
    now = file_digest(path) if path.is_file() else ""
    if now == digest:
        return "unchanged"
    return "updated" if now == before else "kept"


def _leaving(folder: Path, recorded: Mapping[str, str]) -> dict[str, State]:
    """Of the recorded files those that are still there: to be removed, or kept where they were changed."""
    there = {path: digest for path, digest in recorded.items() if (folder / path).is_file()}
    return {
        path: "removed" if file_digest(folder / path) == digest else "kept" for path, digest in there.items()
    }


def _kept_lines(folder: Path, files: Mapping[str, State]) -> list[str]:
    return [
        f"{path} was changed by someone and is kept; if you don't need the change, delete it and run this again"
        for path, state in files.items()
        if state == "kept"
    ]


# ---- the folder


def _folder(base: Path, place: str) -> Path:
    if not base.is_dir():
        raise InstallError(f"{base} is no folder; give the project's folder, or make it first")
    return base.resolve() / place


def _refuse_links(folder: Path, paths: Iterable[str]) -> None:
    """Through a link we would write, or delete, in a place that belongs to something else."""
    base = folder.parents[1]
    for path in (folder, *(folder / path for path in paths)):
        for part in (*reversed(path.relative_to(base).parents), path.relative_to(base)):
            real = (base / part).resolve()
            if os.path.normcase(real) != os.path.normcase(base / part):
                shown = part.as_posix()
                raise InstallError(f"{shown} is a link to {real}; remove the link and run this again")


def _recorded(folder: Path) -> dict[str, str]:
    """Path to digest of what an earlier run put here; empty where there was none."""
    path = folder / MANIFEST
    if not path.is_file():
        return {}
    try:
        files = read_json(path, MANIFEST)["files"]
        for name, digest in files.items():
            parts = name.replace("\\", "/").split("/")
            if not name.startswith(registry.SERIES) or ".." in parts or not isinstance(digest, str):
                raise ValueError(f"names {name}, which is no file of a skill")
    except (EvidenceError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InstallError(
            f"{path} can't be relied on ({error}); delete it and run `gate install` again: "
            "files that are as the package has them are recognised"
        ) from error
    return dict(files)


def _record(folder: Path, files: Mapping[str, str]) -> None:
    document = {"schema": SCHEMA, "tool": tool(), "files": dict(sorted(files.items()))}
    path, text = folder / MANIFEST, render(document)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)


def _take_away(folder: Path, paths: Iterable[str]) -> None:
    for path in paths:
        (folder / path).unlink()
        _remove_empty((folder / path).parent, folder)


def _remove_empty(path: Path, stop: Path) -> None:
    """`path` and the folders above it up to `stop`, as long as nothing is in them."""
    while path != stop and path.is_dir() and not any(path.iterdir()):
        path.rmdir()
        path = path.parent


# ---- the check


def _faults(folder: Path, expected: Mapping[str, str]) -> Iterator[str]:
    """A line for each file that is not as the package has it, and for what an agent could not load."""
    for path, digest in expected.items():
        if not (folder / path).is_file() or file_digest(folder / path) != digest:
            yield f"{path} is not what was written; is the disk full, or does another program change it?"
    for skill in registry.SKILLS:
        yield from skill_faults(folder / skill)


def skill_faults(folder: Path) -> Iterator[str]:
    """What would keep an agent from loading or following the copy in `folder`."""
    text = folder / "SKILL.md"
    if not text.is_file():
        yield f"{folder.name}/SKILL.md is missing"
        return
    try:
        front = index.front_matter(text.read_text(encoding="utf-8"))
    except (ValueError, yaml.YAMLError) as error:
        yield f"{folder.name}/SKILL.md: {' '.join(str(error).split())}"
        return
    if front.get("name") != folder.name or not NAME.fullmatch(folder.name):
        yield f"{folder.name}/SKILL.md: its name is {front.get('name')!r}, expected the folder's"
    if not 0 < len(str(front.get("description") or "")) <= 1024:
        yield f"{folder.name}/SKILL.md: the description must have 1 to 1024 characters"
    yield from missing_paths(folder)


def missing_paths(folder: Path) -> Iterator[str]:
    """Paths that the texts of a skill name and the skill does not have."""
    for path in sorted(folder.rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        linked = {(path.parent / link).resolve() for link in re.findall(r"\]\((?!\w+:)([^)#]+)", text)}
        named = {
            (folder / name).resolve() for name in re.findall(r"\b(?:scripts|references)/[\w.-]+\.\w+", text)
        }
        for target in sorted(linked | named):
            if not target.is_file() or not target.is_relative_to(folder.resolve()):
                shown = os.path.relpath(target, folder).replace(os.sep, "/")
                yield f"{folder.name}/{path.name} names {shown}, which the copy does not have"


def to_json(agent: str, action: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "agent": agent,
        "action": action,
        "folder": outcome.folder,
        "dry_run": outcome.dry_run,
        "files": dict(outcome.files),
        "counts": outcome.counts(),
        "problems": list(outcome.problems),
    }


def to_text(outcome: Outcome) -> str:
    """A line for each file that changed or is kept, and the sum last."""
    done = [f"{state:<9} {path}" for path, state in outcome.files.items() if state != "unchanged"]
    counts = ", ".join(f"{count} {state}" for state, count in outcome.counts().items()) or "nothing installed"
    would = " (dry run: nothing was done)" if outcome.dry_run else ""
    return "\n".join([*done, f"{outcome.folder}: {counts}{would}", ""])
