"""The skeleton of every report page: one HTML file that loads no script, font or image from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root{--bg:#fbfbfa;--fg:#1d2329;--dim:#66707a;--line:#dcdfe2;--card:#fff;--c1:#2563c9;--c2:#c2410c;--c3:#15803d;
--good:#15803d;--warn:#b45309;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--fg:#e6e8ea;--dim:#98a2ac;--line:#2e343a;--card:#1b1f23;
--c1:#6aa5ff;--c2:#ff9a5c;--c3:#5fd08a;--good:#5fd08a;--warn:#f0b24a;--bad:#ff7b72}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--fg);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}h1{font-size:1.35rem;margin:.2em 0}
h2{font-size:1.05rem;margin:1.8em 0 .6em}.sub{color:var(--dim);overflow-wrap:anywhere}
.verdict{border-left:5px solid;padding:.5em .9em;margin:1em 0;background:var(--card);border-radius:4px}
.valid{border-color:var(--good)}.caution{border-color:var(--warn)}.invalid{border-color:var(--bad)}
.verdict ul{margin:.3em 0;padding-left:1.2em}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px}
.card{background:var(--card);border:1px solid var(--line);border-radius:6px;padding:.55em .8em}
.card b{display:block;font-size:1.3rem;font-variant-numeric:tabular-nums}.card span{color:var(--dim);font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:6px;padding:8px}
figcaption{font-size:.9rem;padding:0 4px 4px}svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto;margin-bottom:14px}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{padding:.35em .6em;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}.facts td{white-space:normal;text-align:left;overflow-wrap:anywhere}
.facts td:first-child{color:var(--dim);width:11em}
.items td{white-space:pre-wrap;text-align:left;vertical-align:top;overflow-wrap:anywhere}
@media(max-width:480px){table{font-size:.82rem}th,td{padding:.35em .3em}.facts td:first-child{width:8em}}
.grid{stroke:var(--line);stroke-width:1}.tick{fill:var(--dim);font-size:12.5px}.axis{fill:var(--fg);font-size:13px}
polyline{fill:none;stroke-width:2}.c1{stroke:var(--c1);stroke-width:2}.c2{stroke:var(--c2);stroke-width:2}
.c3{stroke:var(--c3);stroke-width:2}.d1,.b1{fill:var(--c1)}.d2{fill:var(--c2)}.d3{fill:var(--c3)}
.mark{stroke:var(--c2);stroke-width:1.5;stroke-dasharray:3 3}
"""


def document(title: str, body: Sequence[str]) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def drawing(caption: str, svg: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{svg}</figure>" if svg else ""


def cards(pairs: Sequence[tuple[str, str]]) -> str:
    cells = (f'<div class="card"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in pairs)
    return f'<div class="cards">{"".join(cells)}</div>'


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    head = "".join(f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if heads else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def verdict_box(verdict: str, sentence: str, problems: Sequence[str]) -> str:
    listed = f"<ul>{''.join(f'<li>{escape(p)}</li>' for p in problems)}</ul>" if problems else ""
    return f'<div class="verdict {verdict}"><b>{escape(sentence)}</b>{listed}</div>'
