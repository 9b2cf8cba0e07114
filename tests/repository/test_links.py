"""Links between documents lead to headings that exist, on forges and on the site."""

import importlib.util
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import yaml

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s#]*)#([^)\s]+)\)")
PAGES = subprocess.run(
    ["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.split()


def list_anchors(page: Path) -> Iterator[str]:
    """Anchors of the headings as forges form them; of equal ones the second ends with -1."""
    seen: Counter[str] = Counter()
    text = re.sub(r"(?ms)^(```|~~~).*?^\1", "", page.read_text())
    for heading in re.findall(r"(?m)^#{1,6} (.+?)\s*$", text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_headings_that_exist(page: str) -> None:
    for target, anchor in LINK.findall((ROOT / page).read_text()):
        path = (ROOT / page).parent / target if target else ROOT / page
        if path.suffix == ".md":
            assert anchor in list_anchors(path), f"{page} links to {target}#{anchor}"


def test_anchors_are_those_of_forges(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`, c_d-e\n```\n# no heading\n```\n## [Links](x.md) stay\n## A b, c_d-e\n"
    )
    assert list(list_anchors(page)) == ["a-b-c_d-e", "links-stay", "a-b-c_d-e-1"]


@pytest.fixture(scope="module")
def site_links() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_links", ROOT / "scripts/site_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("url", "page", "written", "shown"),
    [
        ("", "a.md", "see [full](../examples/full.yaml)", "see full"),
        (
            "https://x/main/",
            "a.md",
            "[f](../examples/f.yaml)",
            "[f](https://x/main/examples/f.yaml)",
        ),
        ("https://x", "decisions/1.md", "[P](../../README.md#a)", "[P](https://x/README.md#a)"),
        ("", "decisions/1.md", "[P](../plan.md#models)", "[P](../plan.md#models)"),
        ("", "a.md", "[P](plan.md) [`q [r]`](../x)", "[P](plan.md) `q [r]`"),
    ],
)
def test_the_site_links_to_files_of_the_repository_if_it_has_an_address(
    site_links, url: str, page: str, written: str, shown: str
) -> None:
    assert site_links.replace_links(written, page, url) == shown


def test_every_page_is_in_the_sites_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    config = yaml.safe_load(re.sub(r"!!python/object/apply:\S+ \{.*\}", "slugify", text))

    def list_pages(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        else:
            for inner in node.values() if isinstance(node, dict) else node:
                yield from list_pages(inner)

    pages = {page for page in PAGES if re.fullmatch(r"docs/(reference/)?[^/]+\.md", page)}
    in_navigation = {f"docs/{page}" for page in list_pages(config["nav"])}
    assert pages | {"docs/decisions/README.md"} == in_navigation
