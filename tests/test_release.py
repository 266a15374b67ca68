"""What a released library has: one version, and files that name what is there."""

import re
from pathlib import Path

import pytest

import scram

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_version_stands_in_one_place():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    file = ROOT / project["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{scram.__version__}"' in file.read_text()
    assert f"## [{scram.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_citation_names_the_paper_and_its_authors():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert cited["title"] == "SCRAM: Spatially Coherent Randomized Attention Maps"
    assert [author["family-names"] for author in cited["authors"]][:2] == ["Calian", "Roelants"]


@pytest.mark.parametrize("name", ["tests", "docs", "release"])
def test_workflows_run_what_is_there(name):
    work = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    steps = [step["run"] for job in work["jobs"].values() for step in job["steps"] if "run" in step]
    assert steps
    for line in steps:
        made = re.match(r"make (\w+)$", line)
        assert made is None or made[1] in TARGETS
        assert not line.startswith(".ci/") or (ROOT / line).is_file()


def test_the_workflow_runs_the_oldest_torch_that_is_supported():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = next(re.fullmatch(r"torch>=([\d.]+)", line)[1] for line in wanted["dependencies"] if "torch" in line)
    work = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    rows = work["jobs"]["versions"]["strategy"]["matrix"]["include"]
    assert rows[0]["torch"] == f"{oldest}.*"
    assert f">={rows[0]['python']}" == wanted["requires-python"]


def test_the_sources_of_a_release_hold_what_its_tests_read():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    held = {path.lstrip("/") for path in project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]}
    unheld = {path.name for path in ROOT.iterdir()} - held
    assert (
        not {"src", "tests", "docs", "mkdocs.yml", ".ci", ".github", "CITATION.cff", "Makefile", "conftest.py"} & unheld
    )


def test_hooks_are_steps_of_the_environment():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/mypy"}
