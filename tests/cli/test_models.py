"""`evenflow pull` and `evenflow models`: from a hub, a URL or a path to a name that every command takes."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from evenflow.cli.options import ModelOptions, SchedulingOptions
from evenflow.cli.serve import ServeOptions
from evenflow.cli.serve_host import make_launch
from evenflow.engine.llm import LLM
from evenflow.hosts.launch import HostPackage
from evenflow.native.build import library
from tests.cli.running import Finished, command_line, run_cli
from tests.gguf_files import write_gguf
from tests.model.hub_server import COMMIT, HubServer, hub_server
from tests.models import byte_level_tokenizer, reference_model, tiny_llama

CAPSYS = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    return write_gguf(path, reference_model("LlamaForCausalLM"), byte_level_tokenizer())


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A hub with a safetensors model, and empty caches."""
    library()  # from the real cache: compiling it again would take long
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        hub.add_repository("us/Tiny", tiny_llama())
        hub.repositories["us/Tiny"] |= {"README.md": b"# Tiny", "pytorch_model.bin": b"pickle"}
        yield hub


def answer(model: str) -> str:
    with LLM(model, policy="fixed:64", max_model_len=64, threads=1) as llm:
        [output] = llm.generate("hello")
    return str(output.text)


def listed(capsys: CAPSYS) -> dict[str, dict[str, object]]:
    found = json.loads(run_cli(capsys, "models", "--json", "-").out)["models"]
    return {model["name"]: model for model in found}


def failed(finished: Finished, code: int) -> str:
    """The one line that a failed command prints."""
    assert (finished.code, finished.out) == (code, "")
    assert finished.err.startswith("evenflow: ")
    assert finished.err.count("\n") == 1
    return finished.err


def test_a_model_from_the_hub_goes_by_its_name(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    finished = run_cli(capsys, "pull", "us/Tiny")
    assert finished.code == 0, finished.err
    assert finished.out.startswith("us/Tiny: safetensors F32, LlamaForCausalLM, ")
    assert "evenflow serve --model us/Tiny" in finished.out
    assert answer("us/Tiny") == answer(str(tiny_llama()))
    assert not hub.fetched("pytorch_model.bin")
    assert len(hub.fetched("/config.json")) == 1
    run_cli(capsys, "pull", "us/Tiny")
    assert len(hub.fetched("/config.json")) == 1


def test_hugging_faces_own_tools_find_it(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    run_cli(capsys, "pull", "us/Tiny@v1.0")
    cache = tmp_path / "hf" / "hub"
    found = huggingface_hub.try_to_load_from_cache("us/Tiny", "model.safetensors", cache_dir=cache, revision="v1.0")
    assert Path(str(found)).read_bytes() == (tiny_llama() / "model.safetensors").read_bytes()
    [repository] = huggingface_hub.scan_cache_dir(cache).repos
    [revision] = repository.revisions
    assert (repository.repo_id, revision.commit_hash) == ("us/Tiny", COMMIT)
    assert answer("us/Tiny@v1.0") == answer(f"us/Tiny@{COMMIT[:8]}")


def test_one_file_of_many(hub: HubServer, capsys: CAPSYS, gguf: Path) -> None:
    content = gguf.read_bytes()
    hub.repositories["us/Tiny-GGUF"] = {"config.json": b"{}", "tiny-F32.gguf": content, "tiny-Q4_K_M.gguf": content}
    message = failed(run_cli(capsys, "pull", "us/Tiny-GGUF"), 2)
    assert "has several files: give one, as us/Tiny-GGUF:FILE; tiny-F32.gguf, tiny-Q4_K_M.gguf" in message
    assert "has no file like 'Q8'" in failed(run_cli(capsys, "pull", "us/Tiny-GGUF:Q8"), 2)
    finished = run_cli(capsys, "pull", "us/Tiny-GGUF:q4_k_m")
    assert finished.out.startswith("us/Tiny-GGUF:tiny-Q4_K_M.gguf: GGUF F32, llama, ")
    assert not hub.fetched("tiny-F32.gguf")
    assert answer("us/Tiny-GGUF:tiny-Q4_K_M.gguf") == answer("us/Tiny-GGUF") == answer(str(gguf))


@pytest.mark.parametrize("page", ["resolve/main/tiny.gguf?download=true", "blob/main/tiny.gguf"])
def test_pages_of_the_hub_are_understood(hub: HubServer, capsys: CAPSYS, gguf: Path, page: str) -> None:
    hub.repositories["us/Tiny-GGUF"] = {"tiny.gguf": gguf.read_bytes(), "other.gguf": b""}
    finished = run_cli(capsys, "pull", f"{hub.address}/us/Tiny-GGUF/{page}")
    assert finished.out.startswith("us/Tiny-GGUF:tiny.gguf: ")


def test_a_model_that_only_vllm_runs_is_fetched_with_a_warning(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    files = {"config.json": b'{"architectures": ["GPT2LMHeadModel"]}', "model.safetensors": b"weights"}
    hub.repositories["us/GPT"] = files
    finished = run_cli(capsys, "pull", "us/GPT", "--json", "-")
    assert "the architecture GPT2LMHeadModel (supported: " in finished.err
    assert json.loads(finished.out)["runs"] is False
    assert listed(capsys)["us/GPT"]["architecture"] == "GPT2LMHeadModel"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b""}, "holds neither safetensors nor GGUF files, only .bin"),
        ({"m-00001-of-00002.gguf": b""}, "a model split over several GGUF files is not supported"),
        ({"../x.gguf": b""}, "did not reply as a model hub does"),
    ],
)
def test_repositories_that_do_not_serve(
    hub: HubServer, capsys: CAPSYS, files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    hub.repositories["us/Odd"] = files
    finished = run_cli(capsys, "pull", "us/Odd")
    assert finished.code in (1, 2)
    assert message in finished.err
    assert not (tmp_path / "x.gguf").exists()


FILE = b'{"rfilename": "config.json", "blobId": "' + b"0" * 40 + b'", "size": 1}'


@pytest.mark.parametrize(
    "listing",
    [
        b"[" * 100_000,
        b"[]",
        b'{"sha": "' + b"0" * 40 + b'", "siblings": ["a"]}',
        *(
            b'{"sha": "' + b"0" * 40 + b'", "siblings": [' + FILE.replace(before, after) + b"]}"
            for before, after in [
                (b"config", b"a\\u0000b"),
                (b"config", b"a\\nb"),
                (b"config", b"\\ud800"),
                (b": 1}", b": -1}"),
                (b": 1}", b": Infinity}"),
                (b": 1}", b": 1" + b"0" * 30 + b"}"),
                (b": 1}", b": 1, " + b'"lfs": 7}'),
                (b": 1}", b": 1, " + b'"lfs": ["sha256"]}'),
            ]
        ),
    ],
)
def test_listings_that_no_hub_sends(hub: HubServer, capsys: CAPSYS, listing: bytes) -> None:
    hub.answers["us/Tiny"] = listing
    message = failed(run_cli(capsys, "pull", "us/Tiny"), 1)
    assert "did not reply as a model hub does" in message
    assert len(message) < 400


def test_a_file_that_is_longer_than_its_listing_says(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    hub.sizes["model.safetensors"] = 10
    assert "model.safetensors has more than 10 bytes" in failed(run_cli(capsys, "pull", "us/Tiny"), 1)
    assert listed(capsys) == {}
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


@pytest.mark.parametrize("config", [b"[" * 100_000, b"[1, 2]", b"{" + b" " * (2 << 20) + b"}", b"\xff"])
def test_a_configuration_that_is_none_is_a_warning(hub: HubServer, capsys: CAPSYS, config: bytes) -> None:
    hub.repositories["us/Tiny"]["config.json"] = config
    finished = run_cli(capsys, "pull", "us/Tiny")
    assert finished.code == 0
    assert "evenflow's own engine cannot run it: config.json" in finished.out


def test_a_token_opens_private_models(
    hub: HubServer, capsys: CAPSYS, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.token = "hf_secret"
    message = failed(run_cli(capsys, "pull", "us/Tiny"), 2)
    assert "us/Tiny does not exist, or is private" in message
    assert "(401); then set HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the token that is set has no access to it" in failed(run_cli(capsys, "pull", "us/Tiny"), 2)
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("hf_secret\n")
    assert run_cli(capsys, "pull", "us/Tiny").code == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("us/None", "us/None: no such model at http://127.0.0.1"),
        ("us/Tiny:model.safetensors", "us/Tiny has no GGUF file like 'model.safetensors', only .bin"),
        ("us/Tiny@v2", "us/Tiny@v2: no revision 'v2' at"),
        ("not a name!", "no model at not a name!: give a name on a model hub (ORG/NAME), a URL, a folder or a file"),
        ("./mistyped.gguf", "no model at ./mistyped.gguf"),
        ("us/mistyped.gguf", "no model at us/mistyped.gguf"),
        ("http://[1/a.gguf", "Got 'http://[1/a.gguf' but it is not a URL"),
        ("https://example.org/model.zip", "expected the address of a .gguf or .safetensors file"),
        ("https://example.org/a/model-00001-of-00002.safetensors", "expected a whole model.safetensors"),
    ],
)
def test_what_is_not_there(capsys: CAPSYS, source: str, message: str) -> None:
    assert message in failed(run_cli(capsys, "pull", source), 2)


def test_a_wrong_checksum_is_no_model(hub: HubServer, capsys: CAPSYS) -> None:
    hub.wrong_checksums = True
    assert "model.safetensors has sha256" in failed(run_cli(capsys, "pull", "us/Tiny"), 1)
    assert listed(capsys) == {}


def test_a_broken_connection_is_resumed(hub: HubServer, capsys: CAPSYS, gguf: Path) -> None:
    hub.files["/tiny.gguf"], hub.break_after = gguf.read_bytes(), [10_000]
    assert run_cli(capsys, "pull", f"{hub.address}/tiny.gguf").code == 0
    assert hub.fetched("tiny.gguf") == [None, "bytes=10000-"]


def test_without_a_network(hub: HubServer, capsys: CAPSYS, monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_server() as gone:
        pass
    monkeypatch.setenv("HF_ENDPOINT", gone.address)
    assert "cannot reach http://127.0.0.1" in failed(run_cli(capsys, "pull", "us/Tiny"), 1)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE forbids fetching it" in failed(run_cli(capsys, "pull", "us/Tiny"), 1)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    run_cli(capsys, "pull", "us/Tiny")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_cli(capsys, "pull", "us/Tiny").code == 0


def test_a_file_by_its_address(hub: HubServer, capsys: CAPSYS, gguf: Path, tmp_path: Path) -> None:
    hub.files["/files/tiny-F32.gguf"] = gguf.read_bytes()
    url = f"{hub.address}/files/tiny-F32.gguf"
    assert "has sha256" in failed(run_cli(capsys, "pull", url, "--sha256", "0" * 64), 1)
    assert run_cli(capsys, "pull", url).out.startswith("tiny-F32: GGUF F32, llama, ")
    assert run_cli(capsys, "pull", url).code == 0  # it is there
    assert answer("tiny-F32") == answer("tiny-F32.gguf") == answer(str(gguf))
    hub.files["/other/tiny-F32.gguf"] = gguf.read_bytes()
    other = f"{hub.address}/other/tiny-F32.gguf"
    assert "tiny-F32 is the name of another model" in failed(run_cli(capsys, "pull", other), 2)
    assert run_cli(capsys, "pull", other, "--name", "second").code == 0
    assert sorted(listed(capsys)) == ["second", "tiny-F32"]


def test_a_folder_by_the_address_of_its_weights(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    for path in tiny_llama().iterdir():
        hub.files[f"/tiny/{path.name}"] = path.read_bytes()
    assert run_cli(capsys, "pull", f"{hub.address}/tiny/model.safetensors").out.startswith("tiny: safetensors F32")
    assert answer("tiny") == answer(str(tiny_llama()))
    assert sorted(path.name for path in (tmp_path / "cache" / "models" / "tiny").iterdir()) == sorted(
        path.name for path in tiny_llama().iterdir()
    )


def test_an_address_of_something_else(hub: HubServer, capsys: CAPSYS, tmp_path: Path) -> None:
    hub.files["/page.gguf"] = b"<html>Please log in</html>"
    assert "not a GGUF file: it starts with b'<htm'" in failed(run_cli(capsys, "pull", f"{hub.address}/page.gguf"), 2)
    assert listed(capsys) == {}


def test_a_path_gets_a_name_and_stays(capsys: CAPSYS, gguf: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny_llama(), folder)
    for source in (folder, folder / "model.safetensors"):
        assert run_cli(capsys, "pull", source).out.startswith("mine: safetensors F32")
    assert run_cli(capsys, "pull", gguf.parent, "--name", "file").out.startswith("file: GGUF F32")
    assert answer("mine") == answer(str(folder))
    assert "mine is the name of another model" in failed(run_cli(capsys, "pull", gguf, "--name", "mine"), 2)
    assert run_cli(capsys, "models", "rm", "--yes", "mine", "file").code == 0
    assert listed(capsys) == {}
    assert (folder / "model.safetensors").is_file()
    assert gguf.is_file()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json and no .gguf file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 4), "is not a safetensors file"),
        (lambda folder: _cut(folder / "model.safetensors"), "its header says"),
    ],
)
def test_a_damaged_folder_gets_no_name(capsys: CAPSYS, tmp_path: Path, damage: object, message: str) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(tiny_llama(), folder)
    damage(folder)  # type: ignore[operator]
    assert message in failed(run_cli(capsys, "pull", folder), 2)
    assert listed(capsys) == {}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_cache_that_cannot_be_written(
    hub: HubServer, capsys: CAPSYS, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EVENFLOW_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file" / "hf"))
    hub.files["/files/tiny.gguf"] = gguf.read_bytes()
    for source in (gguf, "us/Tiny", f"{hub.address}/files/tiny.gguf"):
        assert "cannot be written" in failed(run_cli(capsys, "pull", source), 1)


def test_names_that_cannot_be_used(capsys: CAPSYS, gguf: Path) -> None:
    for name in ("default", "a/b", "../x", "."):
        assert f"Got the name {name!r}" in failed(run_cli(capsys, "pull", gguf, "--name", name), 2)
    assert "Got --name mine but us/Tiny has a name" in failed(run_cli(capsys, "pull", "us/Tiny", "--name", "mine"), 2)
    assert "expected 64 hexadecimal digits" in failed(run_cli(capsys, "pull", gguf, "--sha256", "abc"), 2)
    assert "Got --sha256 but only a URL" in failed(run_cli(capsys, "pull", gguf, "--sha256", "a" * 64), 2)


def test_the_list(hub: HubServer, capsys: CAPSYS, gguf: Path) -> None:
    assert "No model is cached" in run_cli(capsys, "models").out
    run_cli(capsys, "pull", "us/Tiny")
    run_cli(capsys, "pull", gguf, "--name", "mine")
    found = listed(capsys)
    assert [found[name]["source"] for name in ("mine", "us/Tiny")] == ["link", "hub"]
    assert found["mine"]["bytes"] == gguf.stat().st_size
    assert {model["last_used"] for model in found.values()} == {None}
    answer("mine")
    assert listed(capsys)["mine"]["last_used"] is not None
    table = run_cli(capsys, "models").out
    assert "GGUF F32" in table
    assert "never" in table
    gguf_content = gguf.read_bytes()
    gguf.write_bytes(gguf_content[:-64])
    try:
        assert "the file is truncated" in run_cli(capsys, "models").out
    finally:
        gguf.write_bytes(gguf_content)


def test_removing(hub: HubServer, capsys: CAPSYS, gguf: Path, tmp_path: Path) -> None:
    hub.repositories["us/Tiny-GGUF"] = {"a.gguf": gguf.read_bytes(), "b.gguf": gguf.read_bytes() + b"\0"}
    for name in ("us/Tiny", "us/Tiny-GGUF:a.gguf", "us/Tiny-GGUF:b.gguf"):
        run_cli(capsys, "pull", name)
    assert "give --yes" in failed(run_cli(capsys, "models", "rm", "us/Tiny"), 2)
    message = failed(run_cli(capsys, "models", "rm", "--yes", "us/None"), 2)
    assert "no model 'us/None' is cached: there are us/Tiny, us/Tiny-GGUF:a.gguf, us/Tiny-GGUF:b.gguf" in message
    run_cli(capsys, "models", "rm", "--yes", "us/Tiny", "us/Tiny-GGUF:a.gguf")
    assert list(listed(capsys)) == ["us/Tiny-GGUF:b.gguf"]
    assert answer("us/Tiny-GGUF:b.gguf")
    repositories = tmp_path / "hf" / "hub"
    assert [path.name for path in repositories.iterdir()] == ["models--us--Tiny-GGUF"]
    assert len(list((repositories / "models--us--Tiny-GGUF" / "blobs").iterdir())) == 1
    run_cli(capsys, "models", "rm", "--yes", "us/Tiny-GGUF:b.gguf")
    assert list(repositories.iterdir()) == []


def test_a_host_engine_gets_the_path_and_the_name(capsys: CAPSYS, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostPackage, "find_python", lambda self, named: "python")
    run_cli(capsys, "pull", gguf, "--name", "mine")
    run_cli(capsys, "pull", "us/Tiny")
    options, scheduling = ServeOptions(engine="vllm"), SchedulingOptions(policy="fixed:512")
    named = make_launch(options, ModelOptions(model="mine"), scheduling, [])
    assert Path(named.model).resolve() == gguf.resolve()
    assert named.model_names == ("mine",)
    on_hub = make_launch(options, ModelOptions(model="us/Tiny"), scheduling, [])
    assert (on_hub.model, on_hub.model_names) == ("us/Tiny", ())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_removing_asks_at_a_terminal(capsys: CAPSYS, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_cli(capsys, "pull", gguf, "--name", "mine")
    run_cli(capsys, "pull", "us/Tiny")
    monkeypatch.setattr("sys.stdin", Terminal("n\ny\n"))
    finished = run_cli(capsys, "models", "rm", "mine", "us/Tiny")
    assert finished.code == 0
    assert "Remove mine (the name)?" in finished.err
    assert "in Hugging Face's cache, which other programs use too)?" in finished.err
    assert list(listed(capsys)) == ["mine"]


@pytest.mark.slow
def test_two_processes_pull_one_address(hub: HubServer, capsys: CAPSYS, gguf: Path) -> None:
    hub.files["/files/tiny.gguf"] = gguf.read_bytes()
    line = command_line(["pull", f"{hub.address}/files/tiny.gguf"])
    processes = [subprocess.Popen(line, stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0][:18] for process in processes] == [b"tiny: GGUF F32, ll"] * 2
    assert len(hub.fetched("tiny.gguf")) == 1
    assert list(listed(capsys)) == ["tiny"]
