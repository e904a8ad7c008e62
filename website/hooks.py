"""Makes one site of docs/ and of the pages beside it, with links that work there as they do in the repository.

mkdocs knows the files in docs/ only. So the other pages of the repository are added under their own paths, and each
link is rewritten for the place of its page on the site. No link may lead to a host of the repository, as none is known:
a link to a file that is no page becomes its text, and an example's page shows the example's files at its end.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_SOURCE = re.compile(r'\b(src|srcset)="([^":]+)"')  # of a <picture>, which has one for light and one for dark
_EXAMPLES = "examples/README.md"
_COMMENT = re.compile(r"^<!-- .*? -->\n", re.MULTILINE)


def outside_pages() -> dict[str, str]:
    """Return the pages outside of docs/: path in the repository -> path on the site."""
    found = ["CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md"]
    found += [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/**/README.md"))]
    return {"README.md": "overview.md", **{name: name for name in found}}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put every example into the navigation, below the page that lists them."""
    others = [uri for uri in outside_pages() if uri.startswith("examples/") and uri != _EXAMPLES]
    for section in config.nav or ():
        for entries in section.values():
            if isinstance(entries, list):
                entries[:] = [{"Examples": [_EXAMPLES, *others]} if entry == _EXAMPLES else entry for entry in entries]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/."""
    for name, uri in outside_pages().items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page; show the files of an example."""
    uri = page.file.src_uri
    by_uri = {there: here for here, there in outside_pages().items()}
    path = by_uri.get(uri, f"docs/{uri}")
    text = "".join(part if part.startswith("```") else _with_links(part, path, uri) for part in _FENCE.split(markdown))
    return _COMMENT.sub("", text) + _example_files(path)


def _with_links(text: str, path: str, uri: str) -> str:
    """Return a text of the page at `path` with all links and pictures as they must be at `uri` on the site."""
    text = _LINK.sub(lambda match: _link(match, path, uri), text)
    return _SOURCE.sub(lambda match: f'{match[1]}="{_moved(match[2], path, uri)}"', text)


def _moved(target: str, path: str, uri: str) -> str | None:
    """Return the relative address of a link's target on the site, or None if it is not there."""
    there = _on_site(posixpath.normpath(posixpath.join(posixpath.dirname(path), target)))
    return None if there is None else posixpath.relpath(there, posixpath.dirname(uri) or ".")


def _link(match: re.Match[str], path: str, uri: str) -> str:
    """Return a link of the page at `path` in the repository as it must be at `uri` on the site."""
    mark, label, target, anchor = match[1], match[2], match[3], match[4] or ""
    if not target or re.match(r"[a-z]+:", target):
        return match[0]
    there = _moved(target, path, uri)
    return label if there is None else f"{mark}[{label}]({there}{anchor})"


def _on_site(path: str) -> str | None:
    """Return where a file of the repository is on the site, or None if it is no page of it."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    pages = outside_pages()
    if not (ROOT / path).exists():
        return path  # mkdocs says that there is no such page
    return pages.get(path) or pages.get(f"{path}/README.md")


def _example_files(path: str) -> str:
    """Return the files of an example, to be shown below its page."""
    folder = (ROOT / path).parent
    if folder.parent.name != "examples":
        return ""
    shown = sorted(folder.glob("*.py"), key=lambda file: (file.name != "flow.py", file.name))
    return "".join(f"\n\n## {file.name}\n\n```python\n{file.read_text(encoding='utf-8')}```\n" for file in shown)
