"""What the wheel and the source distribution hold, and the wheel's program without a clone."""

import email
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="needs the extra dev")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Folder with the wheel and the source distribution, and the unpacked wheel in `site`."""
    folder = tmp_path_factory.mktemp("dist")
    # Hatchling itself builds it: pip would first install hatchling into another environment.
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder


def wheel_files(dist: Path) -> set[str]:
    """Return the paths of all files in the wheel."""
    site = dist / "site"
    return {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}


def run_from_wheel(dist: Path, code: str) -> str:
    """Run Python code with the unpacked wheel, in an empty folder, and return its output."""
    folder = dist / "empty"
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"PYTHONPATH": str(dist / "site")}
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, cwd=folder, env=environment, text=True)


def test_wheel_holds_recipes_and_templates(dist):
    files = wheel_files(dist)

    for name in ("recipes", "src/skilltrain"):
        for path in (ROOT / name).rglob("*.*"):
            if "__pycache__" not in path.parts and path.is_file():
                shipped = path.relative_to(ROOT).as_posix().removeprefix("src/skilltrain/")
                assert f"skilltrain/{shipped}" in files
    assert "skilltrain/py.typed" in files


def test_wheel_holds_nothing_else(dist):
    files = wheel_files(dist)

    metadata = {name for name in files if name.startswith("skilltrain-")}
    assert {Path(name).name for name in metadata} == {
        "LICENSE",
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
    }
    others = {name for name in files - metadata if not name.startswith("skilltrain/")}
    assert others == set()
    assert not [name for name in files if "test_" in name or name.endswith((".pyc", ".parquet"))]


def test_wheel_names_its_programs(dist):
    (entry_points,) = (dist / "site").glob("*.dist-info/entry_points.txt")

    assert entry_points.read_text() == (
        "[console_scripts]\n"
        "skilltrain = skilltrain.cli:main\n"
        "skilltrain-hook = skilltrain.serving.hook:main\n"
    )


def test_wheel_links_to_papers(dist):
    (metadata,) = (dist / "site").glob("*.dist-info/METADATA")

    urls = email.message_from_string(metadata.read_text()).get_all("Project-URL")

    address = r"https://arxiv\.org/abs/\d{4}\.\d{5}"
    papers = re.findall(rf"^Paper (\w+), {address}$", "\n".join(urls), re.MULTILINE)
    assert papers == ["SkillRouter", "R3", "SkillFlow", "SkillWeaver"]
    assert len(urls) == len(papers)


def test_wheel_copies_recipes_without_clone(dist):
    output = run_from_wheel(
        dist, "import skilltrain.cli as c; c.main(['recipes', 'copy', 'tiny/sr_emb_0.6b'])"
    )

    copy = dist / "empty" / "recipes" / "tiny" / "sr_emb_0.6b.yaml"
    assert copy.read_text() == (ROOT / "recipes" / "tiny" / copy.name).read_text()
    assert "names files of the repository, not in this folder: launch/tiny_data.sh" in output


def test_wheel_installs_extra_by_packages(dist):
    output = run_from_wheel(
        dist, "from skilltrain.errors import install_command as i; print(i('trackers'))"
    )

    assert output == "extra trackers: pip install 'tensorboard>=2.18' 'wandb>=0.19'\n"


def test_source_distribution_holds_plugin_and_skill(dist):
    (archive,) = dist.glob("*.tar.gz")

    with tarfile.open(archive) as tar:
        files = {name.partition("/")[2] for name in tar.getnames()}

    assert {".claude-plugin/plugin.json", "skills/skilltrain/SKILL.md", "constraints.txt"} <= files
    assert not [name for name in files if name.startswith(("tests/", "benchmarks/", "runs/"))]
