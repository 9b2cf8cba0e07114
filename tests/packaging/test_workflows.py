"""Rules for the forge's workflows, which nothing here can run."""

import re
from pathlib import Path

import pytest
import yaml

FOLDER = Path(__file__).parents[2] / ".github"
WORKFLOWS = sorted((FOLDER / "workflows").glob("*.yml"))
PATHS = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
PINNED = re.compile(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


def parse(path: Path) -> dict:
    # YAML 1.1 reads the key `on` as true.
    return yaml.safe_load(re.sub(r"(?m)^on:", "triggers:", path.read_text()))


def test_there_are_workflows_for_changes_releases_and_vulnerabilities() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"ci", "release", "audit", "codeql", "scorecard"}


@PATHS
def test_actions_are_pinned_by_a_commit_that_names_its_version(path: Path) -> None:
    uses = [line.strip().removeprefix("- ") for line in path.read_text().splitlines()]
    uses = [line for line in uses if line.startswith("uses:")]
    assert uses
    assert all(PINNED.match(line) for line in uses)


def test_an_action_has_one_commit_everywhere() -> None:
    text = "".join(path.read_text() for path in WORKFLOWS)
    commits: dict[str, set[str]] = {}
    for action, commit in re.findall(r"uses: ([\w.-]+/[\w.-]+)[\w./-]*@([0-9a-f]{40})", text):
        commits.setdefault(action, set()).add(commit)
    assert [action for action, found in commits.items() if len(found) > 1] == []


@PATHS
def test_rights_are_given_job_by_job(path: Path) -> None:
    workflow = parse(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 180
        assert job["runs-on"] == "ubuntu-24.04"


@PATHS
def test_no_strangers_text_becomes_a_command(path: Path) -> None:
    workflow = parse(path)
    triggers = workflow["triggers"]
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & triggers.keys()
    for job in workflow["jobs"].values():
        for step in job["steps"]:
            assert "${{" not in step.get("run", "")
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def test_makefile_targets_of_workflows_exist() -> None:
    targets = re.findall(r"(?m)^([a-z][a-z0-9-]*):", (FOLDER.parent / "Makefile").read_text())
    for path in WORKFLOWS:
        for job in parse(path)["jobs"].values():
            for step in job["steps"]:
                for line in step.get("run", "").splitlines():
                    if line.startswith("make "):
                        assert set(line.split()[1:]) <= set(targets)


def test_a_release_gets_its_name_after_all_is_built_scanned_and_signed() -> None:
    jobs = parse(FOLDER / "workflows" / "release.yml")["jobs"]
    texts = {
        name: [f"{step.get('uses', '')}\n{step.get('run', '')}" for step in job["steps"]]
        for name, job in jobs.items()
    }

    def find(job: str, part: str) -> list[int]:
        return [number for number, text in enumerate(texts[job]) if part in text]

    (build,), (scan,) = find("images", "scripts/images"), find("images", "anchore/scan-action")
    (push,), (sign,) = find("images", "docker push"), find("images", "cosign sign")
    assert build < scan < push < sign
    assert jobs["publish"]["needs"] == ["files", "images"]
    assert "--draft " in texts["files"][find("files", "gh release create")[0]]
    (verify,) = find("publish", "cosign verify ")
    (verify_chart,) = find("publish", "cosign verify-blob")
    assert texts["publish"][verify].index("cosign verify") < texts["publish"][verify].index("--tag")
    assert "cleave-$kind@${digests[$kind]}" in texts["publish"][verify]
    (chart,), (publish,) = find("publish", "helm push"), find("publish", "--draft=false")
    assert verify < verify_chart < chart < publish
    for job in ("files", "images"):
        assert not find(job, "helm push")
        assert not find(job, 'docker push --quiet "$IMAGE:$VERSION"')
    kinds = jobs["images"]["strategy"]["matrix"]["kind"]
    assert jobs["publish"]["steps"][verify]["env"]["KINDS"].split() == kinds


def test_updates_are_proposed_for_all_that_is_pinned() -> None:
    updates = yaml.safe_load((FOLDER / "dependabot.yml").read_text())["updates"]
    assert {each["package-ecosystem"] for each in updates} == {
        "uv", "pip", "docker", "gomod", "github-actions",
    }  # fmt: skip
    for each in updates:
        for directory in each.get("directories", [each.get("directory")]):
            assert (FOLDER.parent / directory.strip("/")).is_dir()


@pytest.mark.parametrize("path", sorted((FOLDER / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=str)
def test_forms_for_issues_are_of_the_forges_schema(path: Path) -> None:
    form = yaml.safe_load(path.read_text())
    assert form.keys() <= {"name", "description", "labels", "body"}
    fields = [each for each in form["body"] if each["type"] != "markdown"]
    assert {each["type"] for each in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)
    assert any(each.get("validations", {}).get("required") for each in fields)


def test_code_owners_are_named_for_paths_that_exist() -> None:
    lines = (FOLDER / "CODEOWNERS").read_text().splitlines()
    rules = [line.split() for line in lines if line and not line.startswith("#")]
    assert all(owner.startswith("@") for _, *owners in rules for owner in owners)
    named = [path for path, *_ in rules if path != "*"]
    assert [path for path in named if not (FOLDER.parent / path.strip("/")).exists()] == []
