"""Configuration errors name the key, the value and the expectation, before anything starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import ConfigError
from runtime.node.config import NodeConfig, parse_config
from runtime.node.config_file import load_config

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"pol": {}}, "pol: unknown key; did you mean 'pool'?"),
    ({"pool": {"worker": 2}}, "pool.worker: unknown key; did you mean 'workers'?"),
    ({"http": {"zzz": 1}}, "http.zzz: unknown key; known here: host, port"),
    ({"http": {"vllm_metrics": True}}, "http.vllm_metrics: this key was removed: /metrics has vLLM's names, too"),
    (
        {"answer_cache": {"enabled": False, "threshold": 0.9}},
        "answer_cache.enabled: this key was removed: remove it; the cache is on if answer_cache.threshold",
    ),
    (
        {"collections": [{"name": "a", "path": "b"}, {"name": "a", "pth": "b"}]},
        "collections[1].pth: unknown key; did you mean 'path'?",
    ),
    ({"node": {"drain_s": "5"}}, "node.drain_s = '5': expected `float`, got `str`"),
    ({"http": {"port": True}}, "http.port = True: expected `int`, got `bool`"),
    ({"pool": {"top_m": 2.5}}, "pool.top_m = 2.5: expected `int`, got `float`"),
    ({"pool": 3}, "pool = 3: expected `object`, got `int`"),
    ({"collections": {"name": "a"}}, "collections: expected `array`, got `object`"),
    ({"pool": {"cores": [0]}}, "pool.cores[0] = 0: expected `array`, got `int`"),
    ({"pool": {"cores": [[0], [-1]]}}, "pool.cores[1][0] = -1: expected `int` >= 0"),
    ({"http": {"port": 65_536}}, "http.port = 65536: expected `int` <= 65535"),
    ({"decode": {"slots": 0}}, "decode.slots = 0: expected `int` >= 1"),
    ({"pool": {"reserve": 1.5}}, "pool.reserve = 1.5: expected `float` <= 1.0"),
    ({"pool": {"reserve": float("nan")}}, "pool.reserve = nan"),
    ({"node": {"start_s": float("inf")}}, "node.start_s = inf"),
    ({"node": {"start_s": 0.001}}, "node.start_s = 0.001: expected `float` >= 1"),
    ({"pool": {"top_m": 513}}, "pool.top_m = 513: expected `int` <= 512"),
    ({"node": {"name": "../x"}}, "node.name = '../x': expected `str` matching regex"),
    ({"node": {"name": "x\n"}}, "node.name = 'x\\n'"),
    ({"model": {}}, "model.name: required key is missing"),
    ({"model": {"engine": "vlm", "name": "x"}}, "model.engine = 'vlm': expected one of 'openai', 'trinity'"),
    ({"handover": {"disaggregate": "x"}}, "handover.disaggregate = 'x': expected one of 'always', 'auto', 'never'"),
    ({"log": {"format": "xml"}}, "log.format = 'xml': expected one of 'json', 'text'"),
    (
        {"collections": [{"name": "a", "path": "b", "verify": "no"}]},
        "collections[0].verify = 'no': expected one of 'background', 'never', 'start'",
    ),
    ({"http": {"open_paths": ["/health", "/v1"]}}, "http.open_paths[1] = '/v1': expected one of '/health', '/metrics'"),
    ({"pool": {"slots": "many"}}, "pool.slots = 'many': expected an integer from 1 to 4096 or 'auto'"),
    ({"prefill": {"chunk_tokens": 8}}, "prefill.chunk_tokens = 8: expected an integer from 16 to 65536 or 'auto'"),
    ({"pool": {"reserve": "much"}}, "pool.reserve = 'much': expected `float`, got `str`"),
    (
        {"model": {"engine": "openai", "name": "x", "url": "u", "zzz": 8}},
        "model.zzz: unknown key; known here: name, url",
    ),
    ({"model": {"engine": "openai", "name": "x"}}, "model.url: required key is missing"),
    ({"model": {"engine": "openai", "name": "x", "url": []}}, "model.url: expected `array` of length"),
    ({"rerank": {"url": "http://a/v1"}}, "rerank: url = 'http://a/v1' requires model"),
    ({"rerank": {"model": "m", "key_file": "k"}}, "rerank: key_file = 'k' requires"),
    ({"rerank": {"model": "m", "url": "http://k@a/v1"}}, "rerank.url = "),
    ({"collections": [{"name": "a"}]}, "collections[0].path: required key is missing"),
]


@pytest.mark.parametrize(("raw", "message"), WRONG)
def test_invalid_values_are_refused_with_key_and_expectation(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(raw)
    assert caught.value.message.startswith(message), caught.value.message


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text("")
    assert load_config(path) == NodeConfig()


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xef\xbb\xbf[node]\r\nname = 'a'\r\n")
    assert load_config(path).node.name == "a"


def test_relative_paths_are_relative_to_the_file_and_packaged_names_are_not_paths(tmp_path: Path) -> None:
    text = """
    node.run_dir = "run"
    http.api_keys_file = "keys"
    model.name = "./llama"
    rerank.model = "models/ranker"
    collections = [{name = "a", path = "data/a"}, {name = "b", path = "/b"}]
    """
    path = tmp_path / "node.toml"
    path.write_text(text)
    config = load_config(path)
    assert config.model is not None
    assert config.node.run_dir == str(tmp_path / "run")
    assert config.http.api_keys_file == str(tmp_path / "keys")
    assert config.rerank.model == str(tmp_path / "models/ranker")
    assert Path(config.model.name) == tmp_path / "llama"
    assert [collection.path for collection in config.collections] == [str(tmp_path / "data/a"), "/b"]
    path.write_text(
        'model.name = "smollm2-135m-instruct"\nrerank = {model = "org/m", url = "http://a/v1", key_file = "k"}'
    )
    rerank = load_config(path).rerank
    assert (rerank.model, rerank.key_file) == ("org/m", str(tmp_path / "k"))
    packaged = load_config(path).model
    assert packaged is not None
    assert packaged.name == "smollm2-135m-instruct"


PATHS = {
    'node.run_dir = "x"': "node.run_dir",
    'log.directory = "x"': "log.directory",
    'http.api_keys_file = "x"': "http.api_keys_file",
    'kv = {disk_mib = 64, disk_path = "x"}': "kv.disk_path",
    'stores.path = "x"': "stores.path",
    'rerank = {model = "m", url = "http://a/v1", key_file = "x"}': "rerank.key_file",
    'collections = [{name = "a", path = "x"}]': "collections[0].path",
    'collections = [{name = "a", path = "a"}, {name = "b", path = "b", embedder = "x"}]': "collections[1].embedder",
    'collections = [{name = "a", path = "a", embedder_key_file = "x"}]': "collections[0].embedder_key_file",
    'model = {engine = "openai", name = "m", url = "http://a/v1", api_key_file = "x"}': "model.api_key_file",
    'model = {engine = "vllm", name = "m", path = "./x"}': "model.path",
    'model = {engine = "vllm", name = "m", python = "./x"}': "model.python",
}


def found(config: Any, key: str) -> Any:
    for part in re.findall(r"\w+", key):
        config = config[int(part)] if part.isdigit() else getattr(config, part)
    return config


@pytest.mark.parametrize("text", PATHS)
def test_every_path_is_relative_to_the_file_and_refused_by_its_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(text)
    assert found(load_config(path), PATHS[text]) == str(tmp_path / "x")
    path.write_text(re.sub('"(./)?x"', f'"/{"x" * 256}"', text))
    with pytest.raises(ConfigError, match=re.escape(f"{path}: {PATHS[text]} = '/xxx")):
        load_config(path)


UNREADABLE = {
    "not TOML": (b"[node\n", "not valid TOML"),
    "not UTF-8": (b"[node]\nname = '\xff'\n", "not UTF-8 text: invalid start byte at byte 15"),
    "a home of nobody": (b"node.run_dir = '~nobody-of-that-name/x'", "~nobody-of-that-name/x"),
    "a wrong value": (b"http.port = -1", "http.port = -1"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_an_unusable_file_is_refused_with_its_path(case: str, tmp_path: Path) -> None:
    content, reason = UNREADABLE[case]
    path = tmp_path / "node.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.message.startswith(f"{path}: ")
    assert reason in caught.value.message


@pytest.mark.parametrize(("name", "reason"), [("missing.toml", "No such file"), (".", "Is a directory")])
def test_a_path_that_is_not_a_file_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[node]\nrun_dir = "a\\u0000b"', r"node\.run_dir = 'a\\x00b': a path cannot contain a NUL"),
        ('[log]\ndirectory = "~a\\u0000b"', r"log\.directory = '~a\\x00b': a path cannot contain a NUL"),
        (f'[node]\nrun_dir = "{"a/" * 2500}"', r"node\.run_dir = .*: the path has 5\d\d\d bytes; the limits are 3839"),
        (f'[[collections]]\nname = "a"\npath = "{"ä" * 200}"', r"collections\[0\]\.path = .* 255 for each component"),
        ('[http]\napi_keys_file = "~nobody-of-that-name/keys"', r"http\.api_keys_file = '~nobody"),
    ],
)
def test_an_invalid_path_is_refused_when_the_configuration_is_read(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(tmp_path / "node.toml")
    assert "\n" not in refused.value.message


def test_several_nodes_can_share_a_file_with_different_names_and_ports(tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text('[node]\nname = "one"\ndrain_s = 5.0\n[[collections]]\nname = "docs"\npath = "docs"\n')
    config = load_config(file, "two", 0)
    assert (config.node.name, config.node.drain_s, config.http.port) == ("two", 5.0, 0)
    assert load_config(file).node.name == "one"
    with pytest.raises(ConfigError, match=r"node\.name"):
        load_config(file, "a/b")
    with pytest.raises(ConfigError, match=r"http\.port"):
        load_config(file, port=70_000)
