"""Where a server's settings come from, what is refused, and what is never shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.server import llama_env
from llamakeep.server.options import Option
from llamakeep.server.settings import BY_NAME, MASK, OPTIONS, ServerSettings
from llamakeep.server.sources import CONFIG_ENV, resolve
from llamakeep.tiers import ENVIRONMENT, TierSettings

MODEL = {"model": "m.gguf"}
SECRET = "a-secret-that-nobody-sees"


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "serve.toml"
    path.write_text(text, encoding="utf-8")
    return path


def of(environment: dict[str, str] | None = None, **flags: Any) -> ServerSettings:
    return resolve(MODEL | flags, environment=environment or {})


def test_the_defaults() -> None:
    settings = of()
    assert (settings.host, settings.port) == (("127.0.0.1",), 8080)
    assert (settings.parallel, settings.flash_attn, settings.cache) == (1, "on", "tree")
    assert (settings.ctx_checkpoints, settings.checkpoint_min_step) == (32, 512)
    assert settings.policy == "hazard"
    assert settings.predict is None
    assert settings == ServerSettings(model=Path("m.gguf"))


def test_prompt_mode_has_the_defaults_of_llama_server() -> None:
    settings = of(cache="prompt")
    assert (settings.ctx_checkpoints, settings.checkpoint_min_step) == (32, 8192)
    assert settings.policy == "upstream"


def test_llama_servers_variables_mean_what_they_mean_there() -> None:
    environment = {
        "LLAMA_ARG_MODEL": "theirs.gguf",
        "LLAMA_ARG_PORT": "1",
        "LLAMA_ARG_N_PARALLEL": "2",
        "LLAMAKEEP_PARALLEL": "3",
        "LLAMA_ARG_ENDPOINT_METRICS": "disabled",
        "LLAMA_ARG_NO_CACHE_IDLE_SLOTS": "whatever",
        "LLAMA_API_KEY": "a,b",
        "LLAMA_ARG_EMPTY": "",
        "LLAMA_ARG_CONTEXT_SHIFT": "1",
    }
    settings = resolve({"port": "4"}, environment=environment)
    assert (settings.model.name, settings.port, settings.parallel) == ("theirs.gguf", 4, 3)
    assert (settings.metrics, settings.cache_idle_slots) == (False, False)
    assert settings.api_key == ("a", "b")
    assert settings.sources["model"] == "LLAMA_ARG_MODEL"
    assert settings.sources["cache_idle_slots"] == "LLAMA_ARG_NO_CACHE_IDLE_SLOTS"
    assert settings.notices == ("LLAMA_ARG_CONTEXT_SHIFT is not known here, and ignored",)
    with pytest.raises(InvalidValue, match=r"^LLAMA_ARG_PORT must be between"):
        resolve(MODEL, environment={"LLAMA_ARG_PORT": "-7"})
    with pytest.raises(InvalidValue, match=r"^LLAMA_ARG_NO_KV_UNIFIED is refused"):
        resolve(MODEL, environment={"LLAMA_ARG_NO_KV_UNIFIED": "1"})


def test_llama_servers_variables_are_of_options_that_are_there() -> None:
    assert set(llama_env.NAMES) <= set(BY_NAME)
    assert len(set(llama_env.NAMES.values())) == len(llama_env.NAMES)


def test_each_source_is_over_the_one_before(tmp_path: Path) -> None:
    path = toml(tmp_path, "port = 1\nparallel = 2\nqueue = 3\n")
    environment = {"LLAMAKEEP_PARALLEL": "20", "LLAMAKEEP_QUEUE": "30"}
    settings = resolve(MODEL | {"queue": "300"}, config=path, environment=environment)
    assert (settings.port, settings.parallel, settings.queue) == (1, 20, 300)
    assert settings.sources == {
        "model": "--model",
        "port": "port in serve.toml",
        "parallel": "LLAMAKEEP_PARALLEL",
        "queue": "--queue",
    }


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "m.gguf"\nport = 81\n')
    assert resolve(environment={CONFIG_ENV: str(path)}).port == 81


def test_a_flag_that_did_not_come_changes_nothing() -> None:
    assert of({"LLAMAKEEP_METRICS": "off", "LLAMAKEEP_API_KEY": "k"}, metrics=None, api_key=[]) == (
        ServerSettings(model=Path("m.gguf"), metrics=False, api_key=("k",))
    )


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_option_can_come_from_file_and_environment_alike(
    option: Option, tmp_path: Path
) -> None:
    text = _example(option)
    environment = {"LLAMAKEEP_MODEL": "m.gguf", option.env: text}
    of_environment = resolve(environment=environment)
    path = toml(tmp_path, f"{option.key} = {json.dumps(text)}")
    of_file = resolve(config=path, environment={"LLAMAKEEP_MODEL": "m.gguf"} | _model(option))
    assert of_environment.sources[option.name] == option.env
    assert of_file.sources[option.name] == f"{option.key} in serve.toml"
    assert getattr(of_environment, option.name) == getattr(of_file, option.name)
    if option.flags:
        flags: dict[str, Any] = MODEL | {option.name: [text] if option.kind.repeatable else text}
        of_flag = resolve(flags, environment={})
        assert of_flag.sources[option.name] == f"--{option.key}"
        assert getattr(of_flag, option.name) == getattr(of_environment, option.name)


def _example(option: Option) -> str:
    """A value, in text, that the option takes and that is not its default."""
    words = {
        "cors": "https://a.example",
        "lora_scaled": "/a/style.gguf:0.5",
        "policy": "oldest",
        "slot_prompt_similarity": "0.5",
        "kv_unified": "true",
        "cache": "off",
        "flash_attn": "off",
        "reasoning": "off",
        "reasoning_format": "none",
        "host": "0.0.0.0",
        "ctx_size": "4096",
        "top_p": "0.5",
        "typical_p": "0.5",
        "load_mode": "mlock",
        "chat_template_kwargs": '{"a": 1}',
        "min_p": "0.5",
    }
    if option.name in words:
        return words[option.name]
    if option.kind.is_path:
        return "/a/file"
    if option.default is True or option.default is False:
        return "off" if option.default else "on"
    return {"TYPE": "q8_0", "SIZE": "3MiB"}.get(option.kind.metavar, "7")


def _model(option: Option) -> dict[str, str]:
    return {"LLAMAKEEP_MODEL": ""} if option.name == "model" else {}


def test_what_attach_reads_from_the_environment_means_the_same() -> None:
    environment = {
        "LLAMAKEEP_CACHE_DIR": "~/kept",
        "LLAMAKEEP_DISK_BYTES": "3GiB",
        "LLAMAKEEP_REDIS_URL": "redis://h",
        "LLAMAKEEP_REDIS_PREFIX": "fleet-7",
        "LLAMAKEEP_SECRET": SECRET,
        "LLAMAKEEP_SALT": "tenant",
    }
    assert set(environment) == set(ENVIRONMENT.values())
    attached, served = TierSettings.resolve(environment=environment), of(environment)
    for name in ENVIRONMENT:
        assert getattr(served, name) == getattr(attached, name)
        assert BY_NAME[name].env == ENVIRONMENT[name]


def test_an_empty_variable_is_none_and_an_empty_flag_switches_off() -> None:
    assert of({"LLAMAKEEP_PORT": "", "LLAMAKEEP_CACHE_DIR": ""}) == of()
    assert of({"LLAMAKEEP_CACHE_DIR": "/kept"}, cache_dir="").cache_dir is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", "65536"),
        ("port", "eight"),
        ("port", "8" * 5000),
        ("port", "\N{ARABIC-INDIC DIGIT EIGHT}"),
        ("parallel", "0"),
        ("ctx_size", "-1"),
        ("batch_size", "1e3"),
        ("cache", "trees"),
        ("cache_ram_bytes", "-2"),
        ("cache_ram_bytes", "8GB"),
        ("max_body_bytes", "16MB"),
        ("slot_prompt_similarity", "nan"),
        ("slot_prompt_similarity", "1.1"),
        ("timeout_s", "inf"),
        ("cors", "example.org"),
        ("cors", "https://a.example/path"),
        ("lora_scaled", "style.gguf"),
        ("lora_scaled", "style.gguf:nan"),
        ("host", " "),
        ("policy", "newest"),
        ("policy", "upstream"),
        ("alias", "a\0b"),
    ],
)
def test_a_wrong_value_names_its_option(name: str, value: str) -> None:
    flag = f"--{BY_NAME[name].key}"
    with pytest.raises(InvalidValue, match=f"^{flag}[ :]"):
        of(**{name: [value] if BY_NAME[name].kind.repeatable else value})
    if "\0" not in value and value.strip():
        with pytest.raises(InvalidValue, match=f"^{BY_NAME[name].env}[ :]"):
            of({BY_NAME[name].env: value})


@pytest.mark.parametrize(
    "line",
    ["port = 65536", "port = true", "port = 1.5", "alias = 3", "cors = [3]", "queue = []"],
)
def test_a_wrong_value_in_a_file_names_key_and_file(tmp_path: Path, line: str) -> None:
    with pytest.raises(InvalidValue, match=rf"^{line.split()[0]} in serve\.toml must be"):
        resolve(MODEL, config=toml(tmp_path, line), environment={})


def test_typed_values_of_a_file(tmp_path: Path) -> None:
    path = toml(
        tmp_path,
        'flash_attn = false\nmax-body = 1024\ncache-ram = "1GiB"\ncors = ["https://a.example"]\n'
        "timeout = 5\nmetrics = false\n",
    )
    settings = resolve(MODEL, config=path, environment={})
    assert (settings.flash_attn, settings.max_body_bytes) == ("off", 1024)
    assert (settings.cache_ram_bytes, settings.cors) == (1 << 30, ("https://a.example",))
    assert (settings.timeout_s, settings.metrics) == (5.0, False)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    path = toml(
        tmp_path, 'model = "m.gguf"\nlora-scaled = ["style.gguf:0.5", "/a/b.gguf:1"]\nlora = "c"\n'
    )
    settings = resolve(config=path, environment={})
    assert settings.model == tmp_path / "m.gguf"
    assert settings.lora_scaled == ((tmp_path / "style.gguf", 0.5), (Path("/a/b.gguf"), 1.0))
    assert settings.adapters[0] == (tmp_path / "c", 1.0)
    assert resolve(MODEL, config=path, environment={}).model == Path("m.gguf").absolute()


def test_paths_of_flags_and_environment_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("slot_save_path", "cache_dir", "lora", "chat_template_file", "api_key_file")
    for settings in (
        of(**dict.fromkeys(names, "sub/x")),
        of({BY_NAME[name].env: "sub/x" for name in names}),
    ):
        assert {getattr(settings, name) for name in names if name != "lora"} == {tmp_path / "sub/x"}
        assert settings.lora == (tmp_path / "sub/x",)
    assert of().model == tmp_path / "m.gguf"
    assert of(lora_scaled="a:0.5").adapters == ((tmp_path / "a", 0.5),)


def test_an_unknown_key_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"serve\.toml has an unknown key 'prot'.*'port'"):
        resolve(MODEL, config=toml(tmp_path, "prot = 1"), environment={})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("c = 1", r"unknown key 'c'; the nearest is 'ctx-size'$"),
        ("np = 1", r"unknown key 'np'; the nearest is 'parallel'$"),
        ("ctx_siz = 1", r"the nearest is 'ctx-size'$"),
        ("qqqq = 1", r"unknown key 'qqqq'; llamakeep serve --help lists all$"),
        ("no-metrics = true", r"write metrics = false$"),
        ("[server]\nport = 1", r"a table \[server\]: tables are not known"),
        ("gpu-layers = 1\nn-gpu-layers = 2", r"gpu-layers .* and n-gpu-layers .* are one option$"),
    ],
)
def test_hints_on_unknown_keys_make_sense(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        resolve(MODEL, config=toml(tmp_path, text), environment={})


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_every_long_name_is_a_key(option: Option, tmp_path: Path) -> None:
    names = {part.partition("/")[0] for part in option.flags if part.startswith("--")}
    assert {name[2:] for name in names} <= set(option.keys)
    for key in option.keys:
        path = toml(tmp_path, f"{key} = {json.dumps(_example(option))}")
        settings = resolve({} if option.name == "model" else MODEL, config=path, environment={})
        assert settings.sources[option.name] == f"{key} in serve.toml"


def test_unknown_variables_are_told_with_the_nearest_known_one() -> None:
    variables = ("LLAMAKEEP_CTX_SIZ", "LLAMAKEEP_N_GPU_LAYERS", "LLAMAKEEP_XYZZY", "LLAMAKEEP_PORT")
    others = (
        "LLAMAKEEP_TEST_CACHE",
        CONFIG_ENV,
        "LLAMAKEEP_EMPTY",
        "OTHERS",
        *ENVIRONMENT.values(),
    )
    environment = dict.fromkeys(variables, "7") | dict.fromkeys(others, "")
    assert of(environment | {"LLAMAKEEP_TEST_CACHE": "/x"}).notices == (
        "LLAMAKEEP_CTX_SIZ is not known, and ignored; did you mean LLAMAKEEP_CTX_SIZE?",
        "LLAMAKEEP_N_GPU_LAYERS is not known, and ignored; did you mean LLAMAKEEP_GPU_LAYERS?",
        "LLAMAKEEP_XYZZY is not known, and ignored",
    )


def test_what_changes_nothing_is_taken_with_a_line(tmp_path: Path) -> None:
    path = toml(tmp_path, "cache-reuse = 256\n")
    settings = resolve(
        MODEL | {"accepted_jinja": True, "accepted_verbose": None},
        config=path,
        environment={"LLAMAKEEP_NO_WEBUI": "1"},
    )
    file, variable, flag = settings.notices
    assert file.startswith("cache-reuse in serve.toml changes nothing: ")
    assert variable == "LLAMAKEEP_NO_WEBUI changes nothing: there is no web UI"
    assert flag.startswith("--jinja changes nothing: ")


@pytest.mark.parametrize(
    ("said", "mapped", "locked"),
    [
        ({}, True, False),
        ({"mmap": False}, False, False),
        ({"load_mode": "none"}, False, False),
        ({"load_mode": "mmap"}, True, False),
        ({"load_mode": "mlock"}, False, True),
        ({"load_mode": "mmap+mlock"}, True, True),
    ],
)
def test_how_a_model_is_loaded(said: dict[str, Any], mapped: bool, locked: bool) -> None:
    settings = of(**said)
    assert (settings.use_mmap, settings.use_mlock) == (mapped, locked)


IDLE = [
    ({"cache": "off", "cache_ram_bytes": "8"}, "--cache-ram"),
    ({"cache": "off", "policy": "lru"}, "--policy"),
    ({"cache": "off", "ctx_checkpoints": "4"}, "--ctx-checkpoints"),
    ({"cache": "off", "checkpoint_min_step": "4"}, "--checkpoint-min-step"),
    ({"cache": "prompt", "align": "64"}, "--align"),
    ({"allow_unauthenticated": True}, "--allow-unauthenticated"),
]


@pytest.mark.parametrize(("flags", "flag"), IDLE)
def test_what_changes_nothing_beside_others_is_told(flags: dict[str, Any], flag: str) -> None:
    (notice,) = of(**flags).notices
    assert notice.startswith(f"{flag} changes nothing: ")


@pytest.mark.parametrize(
    "flags",
    [
        {"cache": "off"},
        {"cache": "prompt", "cache_ram_bytes": "8", "ctx_checkpoints": "4", "policy": "upstream"},
        {"align": "64", "policy": "oldest", "cache_ram_bytes": "0"},
        {"allow_unauthenticated": True, "redis_url": "redis://localhost"},
    ],
)
def test_nothing_is_told_of_what_has_an_effect(flags: dict[str, Any]) -> None:
    assert of(**flags).notices == ()


def test_defaults_of_requests() -> None:
    assert of().sampling == {}
    chosen = of(temperature="0.2", top_k="-1", seed="5", repeat_penalty="1.1", min_p="0").sampling
    assert chosen == {"temperature": 0.2, "top_k": -1, "seed": 5, "repeat_penalty": 1.1, "min_p": 0}
    assert of(temperature="0", ignore_eos=True).sampling == {"temperature": 0, "ignore_eos": True}
    assert of(seed="-1").sampling == of(seed=str(2**32 - 1)).sampling == {}
    with pytest.raises(InvalidValue, match=r"^--top-p must be a number from 0 to 1"):
        of(top_p="2")


@pytest.mark.parametrize("content", [b"port = ", b"\xff", None])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "serve.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidValue, match=r"serve\.toml"):
        resolve(MODEL, config=path, environment={})


def test_without_a_model() -> None:
    with pytest.raises(InvalidValue, match=r"--model FILE"):
        resolve(environment={})


def test_a_divided_buffer_is_refused_with_the_reason() -> None:
    with pytest.raises(InvalidValue, match=r"^--no-kv-unified is refused: .*unified"):
        of(kv_unified=False)


def test_two_templates_are_one_too_many_unless_one_source_is_over_the_other() -> None:
    with pytest.raises(InvalidValue, match="--chat-template and --chat-template-file"):
        of(chat_template="chatml", chat_template_file="f.jinja")
    settings = of({"LLAMAKEEP_CHAT_TEMPLATE_FILE": "f.jinja"}, chat_template="chatml")
    assert (settings.chat_template, settings.chat_template_file) == ("chatml", None)


def test_a_context_that_is_too_small_for_the_slots() -> None:
    with pytest.raises(InvalidValue, match=r"^--ctx-size: .*255 tokens .* 4 slots: 256 is"):
        of(ctx_size="255", parallel="4")
    assert of(ctx_size="256", parallel="4").ctx_size == 256


def test_memory_for_states() -> None:
    assert of().capacity_bytes(64 << 30) == 8 << 30
    assert of().capacity_bytes(4 << 30) == 2 << 30
    assert of(cache_ram_bytes="-1").capacity_bytes(64 << 30) == 32 << 30
    assert of(cache_ram_bytes="100").capacity_bytes(1 << 20) == 100 << 20
    assert of(cache_ram_bytes="0").capacity_bytes(1 << 40) == 0
    assert of(cache="off").capacity_bytes(1 << 40) == 0


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("threads", "-1", None),
        ("predict", "-1", None),
        ("predict", "0", 0),
        ("gpu_layers", "all", -1),
        ("gpu_layers", "12", 12),
        ("cache_ram_bytes", "1.5GiB", 3 << 29),
        ("cors", "*", ("*",)),
        ("cors", "localhost, https://a.example", ("localhost", "https://a.example")),
        ("flash_attn", "1", "on"),
        ("flash_attn", "disabled", "off"),
        ("metrics", "disabled", False),
        ("chat_template_kwargs", '{"a": [1]}', {"a": [1]}),
        ("load_mode", "auto", None),
        ("host", "127.0.0.1, ::1", ("127.0.0.1", "::1")),
        ("ping_s", "-1", None),
        ("api_key", "a, b", ("a", "b")),
    ],
)
def test_what_values_mean(name: str, text: str, value: object) -> None:
    assert getattr(of(**{name: text}), name) == value


def test_no_secret_is_shown_anywhere(tmp_path: Path) -> None:
    secrets = {each.name: SECRET for each in OPTIONS if each.is_secret}
    assert set(secrets) == {"secret", "salt", "api_key", "redis_url"}
    settings = of(**secrets)
    assert settings.secret == SECRET
    shown = repr(settings) + json.dumps(settings.masked()) + repr(settings.sources)
    assert SECRET not in shown
    assert settings.masked()["secret"] == MASK
    assert of().masked()["secret"] is None
    path = toml(tmp_path, f'api-key = [["{SECRET}"]]')
    with pytest.raises(InvalidValue) as caught:
        resolve(MODEL, config=path, environment={})
    assert SECRET not in str(caught.value)


def test_masked_settings_are_json() -> None:
    shown = json.loads(json.dumps(of(lora_scaled="a.gguf:0.5").masked()))
    assert shown["lora_scaled"] == [[str(Path("a.gguf").absolute()), 0.5]]
    assert list(shown) == [option.name for option in OPTIONS]


@pytest.mark.parametrize("empty", ["", " , ", [""]])
def test_an_empty_key_lets_nobody_in(empty: object) -> None:
    with pytest.raises(InvalidValue, match=r"^--api-key has a value that cannot be meant"):
        of(api_key=empty)


def test_keys_come_from_flags_and_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\nfirst\n\n second \n")
    assert of(api_key="zero", api_key_file=str(path)).read_api_keys() == ("zero", "first", "second")
    path.write_text("# none\n")
    with pytest.raises(InvalidValue, match="--api-key-file: no key"):
        of(api_key_file=str(path)).read_api_keys()


def test_missing_files_are_named_with_their_option(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    with pytest.raises(ModelError, match=rf"^--model: {model} does not exist"):
        resolve({"model": str(model)}, environment={}).check_files()
    with pytest.raises(ModelError, match=f"^--model: {tmp_path} is no file"):
        resolve({"model": str(tmp_path)}, environment={}).check_files()
    model.touch()
    resolve({"model": str(model)}, environment={}).check_files()
    for name in ("chat_template_file", "api_key_file", "slot_save_path", "lora"):
        with pytest.raises((InvalidValue, ModelError), match=f"^--{BY_NAME[name].key}: .*nothing"):
            resolve(
                {"model": str(model), name: str(tmp_path / "nothing")}, environment={}
            ).check_files()


def test_a_template_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages }}")
    assert of(chat_template_file=str(path)).read_chat_template() == "{{ messages }}"
    assert of(chat_template="chatml").read_chat_template() == "chatml"
    assert of().read_chat_template() is None


def test_names_in_the_table_are_unique() -> None:
    flags = [flag for each in OPTIONS for part in each.flags for flag in part.split("/")]
    for names in (flags, [each.key for each in OPTIONS], [each.env for each in OPTIONS]):
        assert len(names) == len(set(names))
    assert all(each.help.endswith(".") for each in OPTIONS)
