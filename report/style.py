"""The style sheet of a page: light and dark, for every width from a phone to a large screen."""

STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c1c1c; --soft: #5b5b5b; --rule: #dcdcdc; --card: #f7f7f7;
  --accent: #0072b2; --c0: #0072b2; --c1: #c04a00; --c2: #007a58; --c3: #a8447c; --c4: #966500; --c5: #2a7fb0;
  --c6: #1c1c1c; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #ececec; --soft: #a9adb3; --rule: #3a3e44;
  --card: #1e2125; --accent: #56b4e9; --c0: #56b4e9; --c1: #ff9d57; --c2: #3fcf9f; --c3: #f29cc8; --c4: #f0c050;
  --c5: #9bd3f5; --c6: #ececec; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 78rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; }
h1 { overflow-wrap: anywhere; font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.25rem; margin: 2.25rem 0 .5rem; border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.25rem 0 .25rem; }
p { max-width: 46rem; margin: .4rem 0; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: .5rem 0; }
a { color: var(--accent); }
.soft, figcaption span { color: var(--soft); font-weight: normal; }
.scroll { overflow-x: auto; margin: .5rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { font-weight: 600; }
td.n, th.n { text-align: right; }
td.long { white-space: normal; min-width: 16rem; max-width: 40rem; }
th:first-child, td:first-child { position: sticky; left: 0; background: var(--paper); }
.legend { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; padding: 0; margin: .5rem 0; list-style: none; }
.key { vertical-align: middle; margin-right: .35rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem; }
.small { grid-template-columns: repeat(auto-fill, minmax(min(100%, 15rem), 1fr)); }
figure { margin: 0; padding: .6rem; background: var(--card); border-radius: .4rem; min-width: 0; }
figcaption { font-weight: 600; font-size: .9rem; }
svg.chart { width: 100%; height: auto; display: block; }
svg text { font: 11px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
.tick { fill: var(--soft); text-anchor: end; } .middle { text-anchor: middle; } .end-of-axis { text-anchor: start; }
svg .end { font-weight: 600; fill: var(--c); }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); }
.line { fill: none; stroke: var(--c); stroke-width: 2; } .dot { fill: var(--c); }
.band { fill: var(--c); fill-opacity: .16; } .cell, .bar { fill: var(--accent); } .cell { stroke: var(--rule); }
svg .number { text-anchor: middle; } svg .number.dark { fill: var(--paper); }
.c0 { --c: var(--c0); } .c1 { --c: var(--c1); } .c2 { --c: var(--c2); } .c3 { --c: var(--c3); } .c4 { --c: var(--c4); }
.c5 { --c: var(--c5); } .c6 { --c: var(--c6); }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 34rem), 1fr)); gap: 1rem;
  margin-top: 1rem; align-items: start; }
.pictures img { width: 100%; min-width: 34rem; background: #fff; display: block; }
details > summary { cursor: pointer; margin: .75rem 0; color: var(--accent); }
"""
