"""Make the documentation site of the pages under docs/, and check it: every link, anchor and picture leads somewhere within it.

    python docs/site/build.py [FOLDER]     write FOLDER/site/; exit 1 and name what is broken. FOLDER is build/ unless given

The pages are written for GitHub and link to files beside docs/: code, examples, the changelog. Here such a file becomes a
page too, so that the site needs nothing else, neither a server nor a network.
"""

import argparse
import html
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
DOCS = ROOT / "docs"
ALONGSIDE = (ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md")
"""pages of the site that are not under docs/"""
COPIED = {".png", ".webp", ".html"}
LANGUAGES = {".py": "python", ".toml": "toml", ".md": "markdown"}
NO_PROSE = "---\nsearch:\n  exclude: true\nhide:\n  - navigation\n  - toc\n---\n\n"
MARKUP = re.compile(r"^```.*?^```|`[^`\n]+`|\]\(([^)\s]+)\)|\\<", re.M | re.S)
"""a link, or an escaped <; or code, in which what looks like one is none"""
SHIM = "https://unpkg.com/iframe-worker/shim"
"""what the search of a site without a server needs, which pages would fetch; a copy of it is in assets/"""


# ---- from the repository's files to the site's pages ------------------------------------------------------------------


def is_page(path: Path) -> bool:
    """Whether it was written as a page of the site."""
    return path.is_relative_to(DOCS) or path in ALONGSIDE


def place(path: Path) -> str:
    """Where a file of the repository lies in the site's folder of pages."""
    if path.is_relative_to(DOCS):
        path = path.with_suffix(".md") if path.suffix == ".ipynb" else path
        return path.relative_to(DOCS).as_posix()
    if path in ALONGSIDE:
        return path.name
    inside = path.relative_to(ROOT).as_posix()
    return f"source/{inside}/index.md" if path.is_dir() else f"source/{inside}.md"


def on_the_site(text: str, path: Path) -> tuple[str, set[Path]]:
    """A page as the site's Markdown wants it, its links as they are there; and the files of the repository that it links to."""
    linked: set[Path] = set()

    def changed(match: re.Match[str]) -> str:
        if re.match(r"`[^`]", match[0]) and r"\|" in match[0]:  # a pipe in a table, which this Markdown would leave escaped
            return f"<code>{html.escape(match[0].strip('`')).replace(chr(92) + '|', '&#124;')}</code>"
        if match[0] == r"\<":  # which this Markdown would leave escaped, too
            return "&lt;"
        target, mark, anchor = (match[1] or "").partition("#")
        if not target or urlsplit(target).scheme:
            return match[0]
        file = (path.parent / target).resolve()
        if not file.exists() or not file.is_relative_to(ROOT):
            raise SystemExit(f"{path.relative_to(ROOT)}: the link {match[1]} leads nowhere")
        linked.add(file)
        return f"]({posixpath.relpath(place(file), posixpath.dirname(place(path)))}{mark}{anchor})"

    return MARKUP.sub(changed, text), linked


def source_page(path: Path) -> str:
    """A file of the repository, or a folder of them, as a page."""
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in LANGUAGES)
        return f"{NO_PROSE}# `{name}/`\n\n" + "\n".join(f"- [{file.name}]({file.name}.md)" for file in files) + "\n"
    text = path.read_text("utf-8").rstrip()
    return f"{NO_PROSE}# `{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def notebook_page(path: Path) -> str:
    """A notebook as Markdown: words, code, and what the code printed and drew."""
    parts = []
    for cell in nbformat.read(path, as_version=4).cells:
        parts.append(cell.source if cell.cell_type == "markdown" else f"```python\n{cell.source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![What this code draws](data:image/png;base64,{''.join(data['image/png'].split())})")
            else:
                parts.append(f"```text\n{output.get('text', data.get('text/plain', '')).rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def text_of(path: Path) -> str:
    """A page's text, as it is written: code becomes a page, and so does a notebook."""
    if path.suffix == ".ipynb":
        return notebook_page(path)
    return path.read_text("utf-8") if is_page(path) else source_page(path)


def write_pages(folder: Path) -> None:
    """Every page, and whatever the pages link to."""
    shutil.copytree(HERE / "assets", folder / "assets")
    todo = [*sorted(DOCS.rglob("*.md")), *sorted(DOCS.rglob("*.ipynb")), *ALONGSIDE]
    queued = set(todo)
    while todo:
        path = todo.pop()
        target = folder / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix in COPIED:
            shutil.copy(path, target)
            if path.suffix == ".html":  # alone, as on a reader's disk, its links name files instead
                target.write_text(path.read_text("utf-8").replace("<html ", "<html data-site ", 1), "utf-8", newline="\n")
            continue
        text, linked = text_of(path), {file for file in path.iterdir() if file.suffix in LANGUAGES} if path.is_dir() else set()
        if is_page(path):
            text, linked = on_the_site(text, path)
        target.write_text(text, "utf-8", newline="\n")
        todo += sorted(linked - queued)
        queued |= linked


# ---- what was built ---------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """What a page of the site names: its own anchors, and the addresses that it links to or fetches."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value for name, value in attrs if value}
        self.anchors |= {fields[name] for name in ("id", "name") if name in fields}
        if tag == "a" and "href" in fields:
            self.links.append(fields["href"])
        elif tag == "link" and fields.get("rel") not in {"canonical", "next", "prev"} and "href" in fields:
            self.fetched.append(fields["href"])
        elif "src" in fields:
            self.fetched.append(fields["src"])


def is_elsewhere(link: str) -> bool:
    return bool(urlsplit(link).netloc or urlsplit(link).scheme not in {"", "data"})


def broken(site: Path) -> Iterator[str]:
    """Links, anchors and files that are not in the site, and whatever a page would fetch from elsewhere."""
    files = (file for file in sorted(site.rglob("*.html")) if file.name != "404.html")  # it is shown at any address
    pages = {file: Page(file.read_text("utf-8")) for file in files}
    for file, page in pages.items():
        name = file.relative_to(site).as_posix()
        yield from (f"{name}: fetches {link}" for link in page.fetched if is_elsewhere(link))
        for link in [*page.links, *page.fetched]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = Path(os.path.normpath(file.parent / unquote(parts.path))) if parts.path else file
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors | {"__search"}):
                yield f"{name}: {link} leads nowhere"


def version() -> str:
    """Surefoot's, read without importing it."""
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "src" / "surefoot" / "__init__.py").read_text("utf-8"), re.M)
    assert found is not None, "the package has one"
    return found[1]


def build(folder: Path) -> list[str]:
    """Write ``folder``/site/, and return what is broken in it. Raises CalledProcessError where a page can't be made."""
    for old in ("pages", "site"):
        shutil.rmtree(folder / old, ignore_errors=True)
    write_pages(folder / "pages")
    config = (HERE / "zensical.toml").read_text("utf-8")
    (folder / "zensical.toml").write_text(config.replace("VERSION", version()), "utf-8", newline="\n")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict", "--clean"], cwd=folder, check=True)
    for page in (folder / "site").rglob("*.html"):
        copy = os.path.relpath(folder / "site" / "assets" / "iframe-worker" / "shim.js", page.parent)
        page.write_text(page.read_text("utf-8").replace(SHIM, Path(copy).as_posix()), "utf-8", newline="\n")
    return list(broken(folder / "site"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "build", help="where to make it")
    folder = parser.parse_args().folder
    try:
        problems = build(folder)
    except subprocess.CalledProcessError as error:
        return error.returncode
    print("\n".join(problems) if problems else f"{folder / 'site' / 'index.html'}: open it in a browser")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
