"""The CSS of the gang's page in Metaflow's cards, for light and dark. Pure."""

from __future__ import annotations

from .charts import COLOURS

# For the parts of the page in any card; the card defines the variables (Metaflow 2.19). The last two rules mend Metaflow's
# own style: a chart of the width of its container has no width on a phone, and an empty section shows a line.
_PARTS = """
.tr { --tr-c: #98a2b3; margin-bottom: 1rem; line-height: 1.45; overflow-wrap: anywhere; }
.tr p { margin: 0 0 .5rem; }
.tr-verdict { border-left: 6px solid var(--tr-c); background: var(--lt-lt-grey); padding: .6rem 1rem;
  border-radius: 6px; margin-bottom: .5rem; }
.tr .tr-headline { font-size: 1rem; font-weight: 600; color: var(--dk-grey); margin: 0 0 .8rem !important; }
.tr .tr-note { color: var(--dk-grey); font-size: .85rem; }
.tr-sentence { font-size: 1.15rem; font-weight: 500; }
.tr-cause, .tr-restart { border: 1px solid var(--grey); border-radius: 6px; padding: .6rem .9rem; margin-top: .6rem; }
.tr-cause { border-color: var(--error); }
.tr-restart summary { cursor: pointer; }
.tr-bar { width: 100%; height: .5rem; appearance: none; border: 0; border-radius: 4px; overflow: hidden;
  background: var(--grey); margin-bottom: .6rem; }
.tr-bar::-webkit-progress-bar { background: var(--grey); }
.tr-bar::-webkit-progress-value { background: var(--tr-c); }
.tr-bar::-moz-progress-bar { background: var(--tr-c); }
.tr-outputs .tr-facts, .tr-progress .tr-facts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.tr-cells { list-style: none; display: grid; gap: .5rem; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); }
.tr-cell { border: 1px solid var(--tr-c); border-left-width: 6px; border-radius: 6px; padding: .4rem .6rem;
  background: var(--lt-lt-grey); min-width: 0; }
.tr-cell b, .tr-cell .tr-state { display: block; }
.tr-cell small { display: block; color: var(--dk-grey); white-space: nowrap; overflow: hidden; text-overflow: ellipsis; }
.tr-small { gap: 3px; grid-template-columns: repeat(auto-fill, minmax(2.1rem, 1fr)); }
.tr-small .tr-cell { border: 0; padding: .15rem 0; text-align: center; font-size: .72rem; color: #fff; border-radius: 3px;
  background: var(--tr-c); }
.tr-key { display: inline-block; margin: 0 1.2rem .6rem 0; }
.tr-key::before { content: ""; display: inline-block; width: .7rem; height: .7rem; border-radius: 2px;
  background: var(--tr-c); margin-right: .45rem; }
.tr-facts { display: grid; gap: .5rem 1.5rem; margin: .5rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 9rem), 1fr)); }
.tr-facts dt { color: var(--dk-grey); font-size: .85rem; }
.tr-facts dd { margin: 0; white-space: pre-wrap; }
.tr-label { color: var(--dk-grey); font-size: .85rem; margin-top: .6rem; }
.tr-code { background: var(--lt-grey); color: var(--black); border-radius: 6px; padding: .7rem; margin: .2rem 0 0;
  overflow: auto; max-height: 32rem; font-family: var(--mono-font); font-size: .85rem; white-space: pre-wrap; }
.mf-card .vega-embed.fit-x { width: 100%; }
.mf-card section:not([data-section-id]):has(> .sectionItems:empty) { display: none; }
"""

# Only for our own page.
_PAGE = """
aside { display: none !important; }
.mf-card main { margin-left: auto !important; margin-right: auto; max-width: 76rem !important; padding: 1rem !important; }
.mf-card .mainContainer { max-width: none !important; }
.mf-card main { min-width: 0; flex: 1 1 auto !important; width: 100%; box-sizing: border-box; }
.mf-card section { --component-spacer: 1.2rem; min-width: 0; }
.mf-card .heading { margin-bottom: .6rem !important; }
.mf-card .sectionItems, .mf-card .sectionItems > * { min-width: 0; max-width: 100%; }
.mf-card .tableContainer { overflow-x: auto; max-width: calc(100vw - 2rem); }
.mf-card td { padding: .4rem .7rem !important; text-align: left !important; }
.mf-card th { text-align: left !important; padding: .4rem .7rem !important; }
.mf-card td:first-child { white-space: nowrap; }
.mf-card section section .heading { display: none; }
@media (min-width: 60rem) {
  .mf-card section.columns > .sectionItems { grid-template-columns: 1fr 1fr; grid-gap: .5rem 2rem; }
}
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --bg: #14171c; --white: #14171c; --black: #e6e8eb; --dk-grey: #9aa4b2; --lt-grey: #232830;
    --lt-lt-grey: #1c2027; --grey: rgba(255, 255, 255, .16); --error: #ff6b6b; --blue: #7cb7ff; --highlight: #4a2a2e; }
  .mf-card a { color: var(--blue); }
}
"""

PARTS_STYLE = _PARTS + "".join(
    f".tr-{name.replace(' ', '-')} {{ --tr-c: {colour}; }}\n" for name, colour in COLOURS.items()
)
STYLE = PARTS_STYLE + _PAGE
