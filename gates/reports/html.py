"""`gate report`: one HTML file that needs no network, no script and no other file."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from gates.reports.curves import curves_of
from gates.reports.story import SIDE_SHARP, Picture, Sample, Story
from gates.reports.style import CSS
from gates.reports.text import first_failure, mark
from gates.verdict import Check, Verdict

TITLE = "Fine-tune report"
LONGEST = 300  # characters of one value; the verdict file has the rest
# Whatever a file of the workspace smuggles in is refused by the browser: no script, no request.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def render(story: Story) -> str:
    """The whole page."""
    parts = [
        *_banner(story),
        *_summary(story),
        *curves_of(story.run),
        *_samples(story),
        *_gates(story.verdicts),
        *_environment(story),
        *_digests(story),
        *_commands(story),
    ]
    body = "\n".join(parts)
    for path, label in story.hidden:
        body = body.replace(escape(path), escape(label))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}: {_word(story)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f"<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _word(story: Story) -> str:
    return "PASS" if story.passes else "FAIL"


def _banner(story: Story) -> Iterator[str]:
    word, passed = _word(story), sum(verdict.passes for verdict in story.verdicts)
    yield f"<h1>{TITLE}</h1>"
    yield (
        '<nav aria-label="Sections"><a href="#summary">Summary</a> &middot; <a href="#curves">Curves</a> &middot; '
        '<a href="#pictures">Pictures</a> &middot; <a href="#checks">Checks</a> &middot; '
        '<a href="#environment">Environment</a> &middot; <a href="#digests">Digests</a> &middot; '
        '<a href="#commands">Commands</a></nav>'
    )
    first = next((verdict for verdict in story.verdicts if not verdict.passes), None)
    why = f"<p>{escape(_sentence(first))}</p>" if first else ""
    yield (
        f'<div class="banner {word}"><b>{word}</b> {passed} of {len(story.verdicts)} gates pass{why}</div>'
    )
    yield from (f'<p class="WARN">Not read: {escape(note)}</p>' for note in story.notes)


def _sentence(verdict: Verdict) -> str:
    check = verdict.first_check
    told = f"{first_failure(verdict)}: {check.message or check.title}" if check else verdict.summary
    return f"Gate {verdict.gate} ({verdict.name}) {verdict.outcome}. {told}. Next: {verdict.next_command}"


# ---- summary


def _summary(story: Story) -> Iterator[str]:
    yield '<h2 id="summary">Summary</h2>'
    yield _facts(_summary_facts(story))
    rows = [
        (
            f'<a href="#gate-{v.gate}">{v.gate}</a> {escape(v.name)}',
            _status(v.verdict),
            escape(v.outcome),
            escape(v.summary),
            f"<code>{escape(first_failure(v))}</code>" if v.first_failure else "",
        )
        for v in story.verdicts
    ]
    yield _table("The eight gates", ("gate", "verdict", "outcome", "why", "first failing check"), rows)


def _summary_facts(story: Story) -> Iterator[tuple[str, str]]:
    run = story.run.record if story.run else None
    device = run["device"] if run else {"type": story.target.get("device", "not said"), "name": ""}
    yield "device", " ".join(part for part in (device["type"], device["name"]) if part)
    yield "base", _nameless(run["model"]["name"] if run else str(story.target.get("model", "not said")))
    if story.dataset:
        splits = [sample["split"] for sample in story.dataset["samples"]]
        held = splits.count("holdout")
        yield "dataset", f"{len(splits)} samples, {held} of them held out ({story.dataset['layout']})"
    else:
        yield "dataset", "not scanned yet"
    if run is None or story.run is None:
        yield "run", "none that can be read" if story.notes else "none yet"
        return
    yield "run", f"{story.run.path}, {run['kind']}, {run['state']}: {run['reason'] or run['outcome'] or ''}"
    yield "steps", f"{run['done_steps']} of {run['planned_steps']}"
    trainable, lora = run["trainable"], run["resolved"].get("model", {}).get("lora") or {}
    rank = f", rank {lora['r']}" if "r" in lora else ""
    yield "trained", f"{trainable['name']}{rank}: {trainable['parameters']:,} parameters"
    if origin := run["resumed_from"]:
        yield "resumed from", f"{_nameless(str(origin['run']))}, step {origin['step']}"
    if story.validation:
        means = story.validation["heldout_mean"]
        yield "held-out loss", f"base {means['base']:.4f}, adapter {means['adapter']:.4f}"


def _nameless(text: str) -> str:
    """A name that travels: of an absolute path its last part."""
    for kind in (PurePosixPath, PureWindowsPath):
        if kind(text).is_absolute():
            return f"external:{kind(text).name}"
    return text


# ---- pictures


def _samples(story: Story) -> Iterator[str]:
    yield '<h2 id="pictures">Before, after, target</h2>'
    if not story.samples:
        yield '<p class="soft">No validation yet: <code>finetune validate</code> paints them.</p>'
        return
    yield from map(_sample, story.samples)
    if story.samples_left_out:
        yield f'<p class="soft">And {story.samples_left_out} samples more in the workspace.</p>'


def _sample(sample: Sample) -> str:
    figures = "".join(_figure(sample, picture) for picture in sample.pictures)
    return (
        f'<section class="sample"><h3>{escape(sample.id)} <span class="soft">({escape(sample.split)})</span></h3>'
        f'<p>&ldquo;{escape(sample.prompt)}&rdquo;</p><div class="pictures">{figures}</div></section>'
    )


def _figure(sample: Sample, picture: Picture) -> str:
    caption = f"<figcaption>{escape(picture.label)}</figcaption>"
    if picture.uri is None:
        return f'<figure><div class="absent">no picture: it {escape(picture.why)}</div>{caption}</figure>'
    tiny = ' class="tiny"' if max(picture.width, picture.height) <= SIDE_SHARP else ""
    return (
        f'<figure><img{tiny} src="{picture.uri}" width="{picture.width}" height="{picture.height}" '
        f'alt="{escape(f"{sample.id}, {picture.label}")}">{caption}</figure>'
    )


# ---- checks


def _gates(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield '<h2 id="checks">Every check</h2>'
    for verdict in verdicts:
        yield (
            f'<h3 id="gate-{verdict.gate}">{verdict.gate} {escape(verdict.name)} {_status(verdict.verdict)} '
            f'<span class="soft">({escape(verdict.outcome)})</span></h3>'
        )
        yield f"<p>{escape(verdict.summary)}. Next: <code>{escape(verdict.next_command)}</code></p>"
        if verdict.outcome == "blocked" and all(check.status == "skip" for check in verdict.checks):
            yield f'<p class="soft">{len(verdict.checks)} checks were not judged.</p>'
            continue
        for phase in dict.fromkeys(check.phase for check in verdict.checks):
            checks = [check for check in verdict.checks if check.phase == phase]
            caption = f"Checks of gate {verdict.gate}" + (f", phase {phase}" if phase else "")
            yield _table(
                caption, ("status", "check", "expected", "seen", "told"), map(_check, checks), "checks"
            )


def _check(check: Check) -> tuple[str, ...]:
    advisory = "" if check.required else " (advisory)"
    evidence = ", ".join(ref.path + (f" {ref.locator}" if ref.locator else "") for ref in check.evidence)
    told = [escape(check.message)] if check.message else []
    if check.remedy:
        told.append(f'<span class="do">Do: <code>{escape(check.remedy)}</code></span>')
    if evidence:
        told.append(f"<small>Evidence: {escape(evidence)}</small>")
    unit = f" {check.unit}" if check.unit else ""
    return (
        _status(mark(check)),
        f"{escape(check.title)}<small><code>{escape(check.id)}</code>{advisory}, section {escape(check.section)}"
        "</small>",
        _value(check.expected, unit),
        _value(check.observed, unit),
        "<br>".join(told),
    )


def _value(value: Any, unit: str) -> str:
    """A mapping as a line for each of its keys."""
    if value is None:
        return ""
    if isinstance(value, dict) and value:
        lines = [f"{escape(str(key))}: {escape(_short(item))}" for key, item in value.items()]
        return f'<span class="num">{"<br>".join(lines)}</span>{escape(unit)}'
    return f'<span class="num">{escape(_short(value))}</span>{escape(unit)}'


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


# ---- the rest


def _environment(story: Story) -> Iterator[str]:
    yield '<h2 id="environment">Environment</h2>'
    yield _facts(_environment_facts(story))
    if story.run is None:
        yield '<p class="soft">Packages are recorded by a run; there is none yet.</p>'
        return
    rows = [
        (escape(name), escape(str(version))) for name, version in sorted(story.run.record["packages"].items())
    ]
    yield _table("Packages of the run", ("package", "version"), rows)


def _environment_facts(story: Story) -> Iterator[tuple[str, str]]:
    if story.host:
        system, python = story.host["system"], story.host["python"]
        yield "system", f"{system['name']} {system['release']}, {system['machine']}"
        yield "memory", f"{story.host['ram_gib']:.1f} GiB"
        for adapter in story.host["adapters"]:
            yield "graphics", f"{adapter['name']}, driver {adapter['driver_version'] or 'not recorded'}"
        yield "Python", python["version"]
    else:
        yield "machine", "not probed yet"
    if story.verdicts:
        yield "judged by", f"{story.verdicts[0].tool['name']} {story.verdicts[0].tool['version']}"


def _digests(story: Story) -> Iterator[str]:
    yield '<h2 id="digests">Digests</h2>'
    rows = [(escape(name), f"<code>{escape(digest)}</code>") for name, digest in story.digests]
    yield _table("SHA-256, as schemas/README.md of the project defines them", ("of", "digest"), rows)


def _commands(story: Story) -> Iterator[str]:
    yield '<h2 id="commands">Commands to do it again</h2>'
    yield f"<pre>{escape(chr(10).join(story.commands))}</pre>"
    yield (
        '<p class="soft">A gate judges by the files of a workspace. Who has its bundle judges again: '
        "<code>gate verify --bundle ZIP</code>.</p>"
    )


def _facts(facts: Iterator[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts) + "</dl>"


def _status(word: str) -> str:
    return f'<span class="status {word}">{word}</span>'


def _table(caption: str, heads: Sequence[str], rows: Any, kind: str = "") -> str:
    """Cells are HTML already. On a narrow screen each row becomes a block."""
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(
            f'<td data-label="{name}">{cell}</td>' if cell else "<td></td>"
            for name, cell in zip(heads[1:], rest, strict=True)
        )
        body.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<table class="flow {kind}"><caption>{escape(caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )
