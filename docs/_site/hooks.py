"""What the site needs beyond its pages: files of the root as pages, links to the glossary, the explorer."""

from __future__ import annotations

import hashlib
import html
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
# Files of the root that are pages of the site; pages link to them as ../NAME, which GitHub follows too.
OUTSIDE = {
    name: f"{name.removesuffix('.md').lower()}.md" for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
EXPLORER = "explorer.html"
PLACE = "<!-- explorer -->"  # on the start page
FRAME = f"""## See it

Move over the left photograph: the right one shows where that point attends. `scram explore A B` makes such a page of
your pictures or tensors. [Open it alone]({EXPLORER})

<iframe class="explorer" src="{EXPLORER}" title="Attention explorer" loading="lazy"></iframe>
<a class="explorer-link" href="{EXPLORER}"><img src="images/explore.jpg" alt="The attention explorer"></a>
<script>
addEventListener("message", ({{ data }}) => {{
  const frame = document.querySelector("iframe.explorer");
  if (data && data.scramExplorerHeight) frame.style.height = `${{Math.ceil(data.scramExplorerHeight) + 4}}px`;
}});
</script>
"""
WIDE = 6  # columns from which a table is shown as cards on a phone
# What no link may be put into: code, links and pictures, HTML.
KEPT = re.compile(
    r"(?s:```.*?^ *```)|`[^`\n]+`|!?\[[^\]]*\]\([^)]*\)|<[^>]*>|^#.*$|^    .*$|^:::.*$|^-? ?\[.*\]: .*$", re.M
)
FENCES = re.compile(r"(^```.*?^```$)", re.M | re.S)
ALSO = re.compile(r"^Also: (.*)\.$", re.M)  # other forms of a word of the glossary
SHIM = "https://unpkg.com/iframe-worker/shim"  # what the offline search would fetch; worker.js stands for it


def on_files(files: Any, config: Any) -> Any:
    """The files of the root, and the explorer where SCRAM can make one."""
    for name, page in OUTSIDE.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:docs/)?([\w./]+\.md)", lambda found: f"]({OUTSIDE.get(found[1], found[1])}", text)
        files.append(File.generated(config, page, content=text))
    for name in ("style.css", "worker.js"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / "docs" / "_site" / name)))
    made = explorer()
    if made is not None:
        files.append(File.generated(config, EXPLORER, content=made))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    markdown = "".join(part if part.startswith("```") else spaced(part) for part in FENCES.split(markdown))
    if page.file.src_uri in ("index.md", "faq.md"):
        page.meta["hide"] = ["navigation"]  # no other page is in their section
    for name, target in OUTSIDE.items():
        markdown = markdown.replace(f"](../{up}{name}", f"]({up}{target}")
    there = files.get_file_from_path(EXPLORER) is not None
    markdown = markdown.replace(PLACE, FRAME if there else "")
    if page.file.src_uri in ("glossary.md", "changelog.md"):
        return ALSO.sub("", markdown)
    return linked(markdown, terms((ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")), f"{up}glossary.md")


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    return re.sub(r"<table>.*?</table>", lambda found: labeled(found[0]), content, flags=re.S)


def labeled(table: str) -> str:
    """A wide table whose cells name their column; empty ones of the first two columns also what stands above."""
    heads = re.findall(r"<th(?:\s[^>]*)?>(.*?)</th>", table, re.S)  # not <thead>
    names = [re.sub(r"<[^>]*>", "", cell) for cell in heads]
    if len(names) < WIDE:
        return table
    above = {0: "", 1: ""}

    def row(found: re.Match[str]) -> str:
        cells = re.findall(r"<td[^>]*>(.*?)</td>", found[0], re.S)
        made = []
        for place, (name, cell) in enumerate(zip(names, cells, strict=True)):
            plain = re.sub(r"<[^>]*>", "", cell)
            if place in above and plain:
                above[place] = plain
            given = f' data-above="{above[place]}"' if place in above and not plain else ""
            made.append(f'<td data-label="{name}"{given}>{cell}</td>')
        return f"<tr>{''.join(made)}</tr>"

    head, body = table.split("<tbody>")
    body = re.sub(r"<tr>.*?</tr>", row, body, flags=re.S)
    return f"{head.replace('<table>', '<table data-wide>')}<tbody>{body}"


def spaced(markdown: str) -> str:
    """Lists inside numbered lists as Python's Markdown has them: four spaces, and empty lines around."""
    markdown = re.sub(r"^   (?=\S)", "    ", markdown, flags=re.M)
    return re.sub(r"^(    [^-\s].*\n)(?=    - |\d\. )", r"\1\n", markdown, flags=re.M)


def on_post_page(output: str, page: Any, config: Any) -> str:
    return output.replace(SHIM, "../" * page.file.src_uri.count("/") + "worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return output_content.replace(SHIM, "worker.js")


def terms(glossary: str) -> dict[str, tuple[str, str]]:
    """Of every word of the glossary its anchor and its first sentence; "Also: a, b." names other words for it."""
    found = {}
    for heading, body in re.findall(r"^### (.+?)\n\n(.*?)(?=^##|\Z)", glossary, re.M | re.S):
        anchor = re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        also = ALSO.search(body)
        sentence = re.match(r".*?[.:](?=\s|$)", " ".join(body.split()))
        said = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", sentence[0] if sentence else "").replace("`", "").rstrip(":")
        for word in (heading, *(also[1].split(", ") if also else ())):
            found[word.lower()] = anchor, said
    return found


def linked(markdown: str, words: dict[str, tuple[str, str]], target: str) -> str:
    """A page whose first mention of each entry of the glossary is a link to it."""
    longest_first = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
    one = re.compile(rf"(?<![\w@-])({longest_first})(?![\w@-])", re.I)
    seen = set()

    def link(found: re.Match[str]) -> str:
        anchor, said = words[found[0].lower()]
        if anchor in seen:
            return found[0]
        seen.add(anchor)
        return f'[{found[0]}]({target}#{anchor}){{ .term title="{html.escape(said)}" }}'

    parts, last = [], 0
    for kept in KEPT.finditer(markdown):
        parts += [one.sub(link, markdown[last : kept.start()]), kept[0]]
        last = kept.end()
    return "".join([*parts, one.sub(link, markdown[last:])])


def explorer() -> str | None:
    """One page that shows the attention between two photographs, kept under build/ until the sources change."""
    import scram

    if "explore" not in scram.__all__:
        return None
    sources = [path for path in sorted((ROOT / "src").rglob("*")) if path.is_file() and path.suffix != ".pyc"]
    state = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    kept = ROOT / "build" / f"explorer-{state}.html"
    if not kept.is_file():
        kept.parent.mkdir(exist_ok=True)
        for old in kept.parent.glob("explorer-*.html"):
            old.unlink()
        subprocess.run([sys.executable, str(ROOT / "docs" / "_site" / "explorer.py"), str(kept)], check=True)
    return kept.read_text(encoding="utf-8")
