"""Says which releases of vLLM and SGLang have what evenflow's adapters use of them.

By the wheels' sources: nothing of them is run, and only a few files are fetched. What the adapters use is what they
declare (`evenflow.hosts.uses`) and what they import. Exits with 1 if a release in the supported range lacks any of it.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from package_index import PackageIndex, open_index  # noqa: E402
from source_names import Package  # noqa: E402

from evenflow.hosts.launch import HostPackage  # noqa: E402
from evenflow.hosts.uses import Uses  # noqa: E402
from evenflow.sglang.launch import SGLANG  # noqa: E402
from evenflow.sglang.uses import USES as SGLANG_USES  # noqa: E402
from evenflow.vllm.launch import VLLM  # noqa: E402
from evenflow.vllm.uses import USES as VLLM_USES  # noqa: E402

ROOT = HERE.parents[1]
DATA = HERE / "versions.json"
BEGIN, END = "<!-- by benchmarks/hosts/check_versions.py -->", "<!-- end of the table -->"
_WORKERS = 8  # that wait for the network

Data = dict[str, dict[str, dict[str, Any]]]  # by package and version


@dataclass(frozen=True, slots=True)
class Host:
    package: HostPackage
    uses: Sequence[Uses]
    oldest: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of the package that is imported, and of the adapter's folder."""
        return self.package.packages[0]

    @property
    def page(self) -> Path:
        return ROOT / "docs" / f"{self.name}.md"

    def adapter(self) -> list[ast.Module]:
        """Its modules, for what they import."""
        return [ast.parse(path.read_text()) for path in (ROOT / "src" / "evenflow" / self.name).glob("*.py")]

    def missing(self, sources: Package, adapter: Sequence[ast.Module]) -> list[str]:
        found = {name for uses in self.uses for name in sources.missing(uses)}
        for module in adapter:
            found.update(sources.missing_imports(module, self.name))
        return sorted(found)


HOSTS = (Host(VLLM, VLLM_USES, (0, 26)), Host(SGLANG, SGLANG_USES, (0, 5, 16)))


def numbers_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def check(index: PackageIndex, ends_only: bool) -> Iterator[tuple[str, str, list[str]]]:
    """Each package, version and what it lacks."""
    wanted = []
    for host in HOSTS:
        adapter = host.adapter()  # parsed here, not in several threads
        for package in host.package.packages:
            releases = {
                version: link for version, link in index.releases(package).items() if numbers_of(version) >= host.oldest
            }
            kept = {min(releases, key=numbers_of), max(releases, key=numbers_of)} if ends_only else releases
            wanted += [(host, adapter, package, version, releases[version]) for version in releases if version in kept]

    def check_one(job: tuple[Host, list[ast.Module], str, str, Any]) -> tuple[str, str, list[str]]:
        host, adapter, package, version, link = job
        with closing(index.open(link)) as files:
            return package, version, host.missing(Package(files.read), adapter)

    with ThreadPoolExecutor(_WORKERS) as pool:
        yield from pool.map(check_one, wanted)


def table(data: Data, host: Host) -> str:
    """For the host's page, newest first."""
    lines = [
        f"| {host.package.name} | has what the plug-in needs | its scheduler in tests | measured on a GPU |",
        "|---|---|---|---|",
    ]
    for package in host.package.packages:
        for version, row in reversed(data.get(package, {}).items()):
            lacks = "yes" if not row["missing"] else "no: " + ", ".join(f"`{name}`" for name in row["missing"])
            name = version if package == host.name else f"{version} ({package})"
            lines.append(f"| {name} | {lacks} | {row.get('tests', '')} | {row.get('gpu', '')} |")
    return "\n".join(lines)


def with_table(page: str, data: Data, host: Host) -> str:
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(data, host)}\n\n{END}{rest.partition(END)[2]}"


def updated(data: Mapping[str, Any], found: Sequence[tuple[str, str, list[str]]]) -> Data:
    """With what was found; what was tested and measured is kept."""
    new: Data = {}
    for package, version, missing in found:
        before = data.get(package, {}).get(version, {})
        new.setdefault(package, {})[version] = {**before, "missing": missing}
    return new


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ends", action="store_true", help="check only the oldest and the newest release of each")
    parser.add_argument("--write", action="store_true", help="update versions.json and the tables of docs/")
    options = parser.parse_args()
    if options.ends and options.write:
        parser.error("--write needs all releases: leave out --ends")
    data: Data = json.loads(DATA.read_text())
    with open_index() as index:
        found = list(check(index, options.ends))
    status = 0
    for package, version, missing in found:
        is_known = version in data.get(package, {})
        status |= bool(missing) and is_known and not data[package][version]["missing"]
        note = "" if is_known else " (not in the tables yet)"
        print(f"{package} {version}{note}: {', '.join(missing) if missing else 'has all'}")
    if options.write:
        data = updated(data, found)
        DATA.write_text(json.dumps(data, indent=1) + "\n")
        for host in HOSTS:
            host.page.write_text(with_table(host.page.read_text(), data, host))
    return status


if __name__ == "__main__":
    sys.exit(main())
