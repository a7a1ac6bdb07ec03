"""The style sheet of HTML reports. Series' colours are told apart by colour-blind readers, in light and dark."""

STYLE = """\
:root { color-scheme: light dark;
  --ground: #ffffff; --card: #f7f7f5; --ink: #1c1c1a; --muted: #5f5f5a; --rule: #dcdcd6; --grid: #e6e6e1;
  --good: #00694b; --bad: #a8321c; --bad-ground: #fdeee9;
  --s0: #0067a8; --s1: #c24a00; --s2: #00795a; --s3: #a43f86; --s4: #7d6200; --s5: #3f3f46; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #17181a; --card: #1f2023; --ink: #ececea; --muted: #a5a5a0; --rule: #3a3b3f; --grid: #2d2e32;
  --good: #4fd1a5; --bad: #ff9478; --bad-ground: #3a211b;
  --s0: #5eb3f2; --s1: #ff9650; --s2: #45cf9f; --s3: #ec9dd0; --s4: #e2c14c; --s5: #c9c9d1; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 6px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 8px; padding-top: 12px; border-top: 1px solid var(--rule);
  overflow-wrap: anywhere; }
p { margin: 6px 0; max-width: 78ch; overflow-wrap: anywhere; }
.fact { color: var(--muted); margin: 2px 0; max-width: none; }
.alarm { color: var(--bad); background: var(--bad-ground); border-left: 4px solid var(--bad); padding: 8px 12px;
  font-weight: 600; max-width: none; border-radius: 0 6px 6px 0; }
ul { margin: 6px 0; padding-left: 20px; } li { overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: 10px 0; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); padding: 4px 0; font-size: 13.5px; }
th, td { padding: 4px 12px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
th { font-weight: 600; color: var(--muted); border-bottom-color: var(--rule); white-space: nowrap; }
td { max-width: 560px; overflow-wrap: break-word; }
th.n, td.n { text-align: right; padding: 4px 12px 4px 12px; white-space: nowrap; }
.good { color: var(--good); font-weight: 600; } .bad { color: var(--bad); font-weight: 700; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 430px), 1fr)); gap: 18px;
  align-items: start; }
figure { margin: 0; padding: 14px 16px 10px; background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  break-inside: avoid; min-width: 0; }
figcaption { font-weight: 600; } figcaption span { color: var(--muted); font-weight: 400; }
.legend { list-style: none; margin: 4px 0 2px; padding: 0; display: flex; flex-wrap: wrap; gap: 2px 16px;
  font-size: 12.5px; color: var(--muted); }
.legend li { display: flex; align-items: center; gap: 6px; }
.swatch { flex: none; }
svg.plot { display: block; width: 100%; height: auto; margin: 6px 0; }
svg text { font-size: 12px; fill: var(--muted); font-family: inherit; font-variant-numeric: tabular-nums; }
svg .name { fill: var(--ink); font-weight: 600; paint-order: stroke; stroke: var(--card); stroke-width: 4px;
  stroke-linejoin: round; }
svg .mark { fill: var(--ink); font-size: 11px; paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; } svg .start { text-anchor: start; }
svg .grid { stroke: var(--grid); fill: none; } svg .base { stroke: var(--muted); fill: none; }
svg .limit { stroke: var(--bad); stroke-width: 1.3; stroke-dasharray: 5 4; fill: none; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); }
.s3 { --c: var(--s3); } .s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
svg .line { stroke: var(--c); stroke-width: 2; fill: none; stroke-linejoin: round; }
svg .thin { stroke: var(--c); stroke-width: 1.5; fill: none; }
svg .thick { stroke: var(--c); stroke-width: 7; opacity: .45; fill: none; }
svg .dot { fill: var(--c); stroke: var(--card); stroke-width: 1; }
svg .hollow { fill: var(--card); stroke: var(--c); stroke-width: 2; }
svg .cross { stroke: var(--c); stroke-width: 2.2; fill: none; }
svg .ring { fill: none; stroke: var(--c); stroke-width: 1.6; }
svg text.s0, svg text.s1, svg text.s2, svg text.s3, svg text.s4, svg text.s5 { fill: var(--c); }
table.numbers { font-size: 12px; } .numbers td, .numbers th { padding-top: 2px; padding-bottom: 2px; }
@media print { :root { color-scheme: light;
  --ground: #fff; --card: #fff; --ink: #000; --muted: #444; --rule: #bbb; --grid: #ddd; --good: #00694b; --bad: #a8321c;
  --bad-ground: #fff; --s0: #0067a8; --s1: #c24a00; --s2: #00795a; --s3: #a43f86; --s4: #7d6200; --s5: #3f3f46; }
  body { font-size: 11px; } main { max-width: none; padding: 0; } table { font-size: 10px; }
  h2 { break-after: avoid; } tr, figure, .alarm { break-inside: avoid; } .scroll { overflow: visible; }
  caption, .legend { font-size: 10px; } table.numbers { font-size: 9px; } .numbers th { white-space: normal; }
  .numbers th.n, .numbers td.n { padding-left: 8px; } .figures { grid-template-columns: 1fr 1fr; } }
"""
