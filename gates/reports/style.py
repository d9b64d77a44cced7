"""The style of the HTML report: light, dark, narrow, and on paper."""

CSS = """
:root { color-scheme: light dark; --bg: #ffffff; --fg: #1c2128; --soft: #57606a; --line: #d0d7de; --box: #f6f8fa;
  --pass: #116329; --fail: #b42318; --warn: #8a5300; --skip: #0550ae;
  --c1: #0550ae; --c2: #b35900; --c3: #8250df; --c4: #116329; --warm: #fff1cc; }
@media (prefers-color-scheme: dark) { :root { --bg: #0d1117; --fg: #e6edf3; --soft: #9da7b3; --line: #3d444d;
  --box: #161b22; --pass: #56d364; --fail: #ff8f85; --warn: #e3b341; --skip: #79c0ff;
  --c1: #79c0ff; --c2: #ffa657; --c3: #d2a8ff; --c4: #56d364; --warm: #3a2f14; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1120px; padding: 1rem; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, "Segoe UI", sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .5rem; }
p { margin: .4rem 0; }
a { color: var(--skip); }
code, pre, .num { font: .92em/1.45 ui-monospace, Consolas, monospace; }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .75rem;
  white-space: pre-wrap; }
.soft { color: var(--soft); }
.banner { border: 2px solid; border-radius: 8px; padding: .5rem 1rem; margin: 1rem 0; }
.banner b { font-size: 1.2rem; }
.status { font-weight: 700; white-space: nowrap; }
.PASS { color: var(--pass); } .FAIL, .ERROR, .bad { color: var(--fail); } .WARN { color: var(--warn); }
.SKIP, .INFO { color: var(--skip); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: .5rem 0; }
dt { color: var(--soft); } dd { margin: 0; min-width: 0; }
table { border-collapse: collapse; width: 100%; font-size: .93em; }
caption { text-align: left; color: var(--soft); padding: .25rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .5rem; border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); }
.checks { table-layout: fixed; } .checks thead th:first-child { width: 5rem; }
.checks thead th:last-child { width: 34%; }
.checks td small { display: block; color: var(--soft); }
.do { color: var(--fail); }
svg { display: block; width: 100%; max-width: 880px; height: auto; background: var(--box);
  border-radius: 6px; margin-top: .5rem; }
svg text { fill: var(--soft); font: 12px system-ui, sans-serif; } svg .small { font-size: 10px; }
svg .bad { fill: var(--fail); font-size: 15px; }
svg polyline { fill: none; stroke-width: 1.8; } svg .faint { stroke-width: 1; opacity: .55; }
.grid { stroke: var(--line); } .mark { stroke: var(--soft); stroke-dasharray: 3 4; } .warm { fill: var(--warm); }
.c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); } .c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); }
circle.c1 { fill: var(--c1); } circle.c2 { fill: var(--c2); } circle.c3 { fill: var(--c3); }
circle.c4 { fill: var(--c4); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1.2rem; margin: .3rem 0; padding: 0;
  font-size: .9em; }
.key { display: inline-block; width: 1.5em; height: 0; border-top: 3px solid; margin-right: .4em;
  vertical-align: middle; }
.key.c1 { color: var(--c1); } .key.c2 { color: var(--c2); } .key.c3 { color: var(--c3); }
.key.c4 { color: var(--c4); } .key.mark { color: var(--soft); border-top-style: dashed; }
.key.warm { height: .9em; border: 1px solid var(--line); background: var(--warm); } .key.faint { opacity: .55; }
.sample { border: 1px solid var(--line); border-radius: 8px; padding: .5rem .75rem; margin: .75rem 0;
  break-inside: avoid; }
.sample h3 { margin: .25rem 0; }
.pictures { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: .5rem; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: .9em; }
img { display: block; width: 100%; height: auto; border-radius: 4px; background: var(--box); }
img.tiny { image-rendering: pixelated; }
.absent { border: 1px dashed var(--line); border-radius: 4px; padding: 1rem .5rem; color: var(--soft); }
@media (max-width: 720px) {
  body { padding: .75rem; } .pictures { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .3rem; }
  .flow thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .flow, .flow caption, .flow tbody, .flow tr, .flow th, .flow td { display: block; width: auto; }
  .flow tr { border-bottom: 2px solid var(--line); padding: .4rem 0; }
  .flow th, .flow td { border: 0; padding: .1rem 0; } .flow td:empty { display: none; }
  svg text { font-size: 19px; } svg .small { font-size: 17px; }
  .flow td[data-label]::before { content: attr(data-label) ": "; color: var(--soft); } }
@media print {
  :root { color-scheme: light; --bg: #fff; --fg: #000; --soft: #444; --line: #bbb; --box: #fff; --pass: #116329;
    --fail: #b42318; --warn: #8a5300; --skip: #0550ae; --c1: #0550ae; --c2: #b35900; --c3: #8250df;
    --c4: #116329; --warm: #fff1cc; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  h2, h3 { break-after: avoid; } tr, figure, svg { break-inside: avoid; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
