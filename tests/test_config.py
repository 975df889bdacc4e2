"""Laws of the configuration: one table, three spellings, a fixed precedence, and nothing ignored."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.config import Config, config_file, options, parser, resolve
from bgmpi.errors import InputError, UsageError
from bgmpi.values import duration, size

# Words that every reader of the table takes, by the option's name; the rest are read from its default.
TYPED = {
    "dtype": "float32", "load_format": "dummy", "generation_config": "none", "backend": "cpu", "progress": "lines",
    "log_level": "debug", "gpu_memory_utilization": "0.5", "top_p": "0.5", "min_p": "0.5", "stream_kv": "off",
    "hold_policy": "longest-decoded", "drill": "yield=2,migrate=3", "resume": "must", "checkpoint_kv": "stop",
    "on_rank_death": "shrink",
    "shard": "2/7", "prefix_sharing": "one-level",
}


def word_for(option) -> str:
    if option.name in TYPED:
        return TYPED[option.name]
    if isinstance(option.default, bool):
        return "off" if option.default else "on"
    return "7"


@pytest.mark.parametrize("option", options(), ids=lambda option: option.name)
def test_every_option_is_a_flag_a_variable_and_a_key_that_read_alike(option):
    word = word_for(option)
    flag = resolve([option.flags[-1], word], {})
    variable = resolve([], {option.variable: word})
    assert getattr(flag, option.name) == getattr(variable, option.name) != option.default
    assert (flag.source(option.name), variable.source(option.name)) == ("flag", "environment")
    if option.name != "config":
        for toml in (f'{option.name} = "{word}"', f'[{option.section}]\n{option.name} = "{word}"'):
            config = resolve([], {}, toml)
            assert getattr(config, option.name) == getattr(flag, option.name)
            assert config.source(option.name) == "file"


def test_help_names_every_flag_and_variable():
    told = " ".join(parser().format_help().split())
    for option in options():
        assert option.variable in told and all(flag in told for flag in option.flags)


def test_flag_beats_environment_beats_file_beats_model_beats_builtin():
    toml = "temperature = 0.1\nseed = 1\ntop_p = 0.1"
    environ = {"BGMPI_TEMPERATURE": "0.2", "BGMPI_SEED": "2"}
    model = {"temperature": 0.4, "top_p": 0.4, "min_p": 0.4}
    config = resolve(["--temperature", "0.3"], environ, toml).with_model_defaults(model)
    assert (config.temperature, config.seed, config.top_p, config.min_p, config.top_k) == (0.3, 2, 0.1, 0.4, 0)
    assert [config.source(name) for name in ("temperature", "seed", "top_p", "min_p", "top_k")] == [
        "flag", "environment", "file", "generation_config", "default"]


def test_a_value_typed_equal_to_the_default_is_still_remembered_as_typed():
    assert resolve(["--seed", "0"], {}).source("seed") == "flag"


def test_the_last_of_two_equal_flags_holds():
    assert resolve(["--seed", "1", "--seed=2"], {}).seed == 2


def test_an_empty_variable_counts_as_unset():
    assert resolve([], {"BGMPI_SEED": "", "BGMPI_MODEL": ""}).sources == {}


def test_variables_of_others_are_not_read():
    assert resolve([], {"SEED": "1", "VLLM_SEED": "1", "PATH": "/bin"}) == Config()


def test_switches_take_no_word_a_word_or_no_before_them():
    for words, wanted in (("--check", True), ("--check off", False), ("--no-check", False), ("--check=on", True)):
        assert resolve(words.split(), {}).check is wanted
    assert resolve([], {}, "check = true").check is True
    assert resolve(["--yield-points", "off"], {}).yield_points is False


@pytest.mark.parametrize(("argv", "environ", "toml", "words"), [
    (["--max-num-seq", "3"], {}, "", ["--max-num-seq", "did you mean --max-num-seqs"]),
    (["--xyzzy"], {}, "", ["--xyzzy", "--help"]),
    ([], {"BGMPI_SEEDS": "1"}, "", ["BGMPI_SEEDS", "did you mean BGMPI_SEED"]),
    ([], {}, "sed = 1", ["sed", "did you mean seed"]),
    ([], {}, "[memory]\nseed = 1", ["seed", "key"]),
    ([], {}, "[nowhere]\nseed = 1", ["nowhere"]),
    ([], {}, 'config = "a.toml"', ["config"]),
    ([], {}, "seed =", ["TOML"]),
    (["requests.jsonl"], {}, "", ["requests.jsonl", "-i"]),
    (["--model"], {}, "", ["--model", "argument"]),
    (["--seed", "x"], {}, "", ["--seed", "integer", "'x'"]),
    ([], {"BGMPI_TOP_P": "1.5"}, "", ["BGMPI_TOP_P", "<= 1", "1.5"]),
    ([], {}, "top_p = 0", ["top_p", "> 0"]),
    ([], {}, "max_num_seqs = 1.5", ["max_num_seqs", "whole number"]),
    ([], {}, "seed = true", ["seed", "integer"]),
    (["--dtype", "fp8"], {}, "", ["--dtype", "bfloat16", "fp8"]),
    (["--temperature", "nan"], {}, "", ["--temperature", "nan"]),
    (["--check", "maybe"], {}, "", ["--check", "on or off"]),
    (["-tp", "2"], {}, "", ["-tp 2", "--ranks"]),
    (["--no-enable-prefix-caching"], {}, "", ["--no-enable-prefix-caching", "--prefix-sharing off"]),
    (["--trust-remote-code"], {}, "", ["never run"]),
    (["--no-enable-expert-parallel"], {}, "", ["always"]),
    (["--model-path", "m"], {}, "", ["--model-path", "use --model"]),
    (["--mem-fraction-static", "0.8"], {}, "", ["--gpu-memory-utilization"]),
    (["--plan"], {}, "", ["--plan", "not in this version"]),
    ([], {}, "tensor_parallel_size = 2", ["tensor_parallel_size", "--ranks"]),
])
def test_what_cannot_be_meant_is_refused_with_advice(argv, environ, toml, words):
    with pytest.raises(UsageError) as refused:
        resolve(argv, environ, toml)
    assert refused.value.exit_code == 2
    for word in words:
        assert word in str(refused.value)


@pytest.mark.parametrize("argv", [
    ["-tp", "1"], ["--pipeline-parallel-size=1"], ["--enable-expert-parallel"], ["--enforce-eager"],
    ["--kv-cache-dtype", "auto"], ["--enable-prefix-caching"], ["--quantization", "none"],
])
def test_a_foreign_flag_that_asks_for_what_happens_anyway_is_noted_and_changes_nothing(argv):
    config = resolve(argv, {})
    assert config == Config() and len(config.notes) == 1 and config.notes[0] in list(config.explain())


def test_the_config_file_is_found_without_reading_it():
    assert config_file([], {}) is None
    assert config_file([], {"BGMPI_CONFIG": "a"}) == "a"
    assert config_file(["--config", "b"], {"BGMPI_CONFIG": "a"}) == "b"


def test_the_page_has_the_name_of_vllm_too():
    assert resolve(["--block-size", "16"], {}) == resolve([], {}, "page_tokens = 16") == Config(page_tokens=16)


def test_model_defaults_fill_what_nobody_set_and_leave_no_hidden_cap():
    config = Config().with_model_defaults({})
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (1.0, 1.0, 0, 0.0)
    assert config.max_tokens is None and config.sources == {}
    assert Config().with_model_defaults({"max_new_tokens": 9}).max_tokens is None


def test_generation_config_none_reads_nothing_of_the_model():
    assert Config(generation_config="none").with_model_defaults({"temperature": 0.6}).temperature == 1.0


def test_a_bad_generation_config_is_malformed_input_that_names_the_key():
    with pytest.raises(InputError, match=r"generation_config\.json: top_p.*--top-p"):
        Config().with_model_defaults({"top_p": "much"})


def test_no_limit_has_one_spelling_inside():
    assert resolve(["--top-k", "-1"], {}).top_k == Config().with_model_defaults({"top_k": -1}).top_k == 0


def test_every_value_not_default_is_explained_with_its_source():
    told = list(resolve(["--seed", "3"], {"BGMPI_MODEL": "m"}).explain())
    assert told == ['model = "m" (environment)', "seed = 3 (flag)"]


def test_the_json_holds_every_value_and_every_source():
    told = json.loads(resolve(["--host-kv-memory", "1G"], {}).to_json())
    assert set(told["values"]) == {option.name for option in options()}
    assert told["values"]["host_kv_memory"] == 1 << 30 and told["sources"] == {"host_kv_memory": "flag"}


def test_a_config_survives_a_copy_between_processes():
    config = resolve(["--seed", "3"], {})
    again = pickle.loads(pickle.dumps(config))
    assert again == config and again.sources == config.sources


@pytest.mark.parametrize(("word", "number"), [
    ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("8G", 8 << 30), ("1.5M", 3 << 19), ("2m", 2_000_000),
    ("1T", 1 << 40), (" 12 ", 12), (12, 12),
])
def test_small_letters_count_in_thousands_and_capitals_in_1024(word, number):
    assert size()(word) == number


@pytest.mark.parametrize("word", ["", "1.5", "25.6K", "-1", "0", "1kb", "1GB", "k", "1e3", "ten", True, 1.0, None, [1]])
def test_what_is_no_whole_size_is_refused(word):
    with pytest.raises(ValueError, match="whole number"):
        size()(word)


@pytest.mark.parametrize(("word", "seconds"), [
    ("90", 90), ("1.5s", 1.5), ("250ms", 0.25), ("5m", 300), ("1h30m", 5400), ("1d", 86400), (2, 2), (0.5, 0.5)])
def test_durations_are_seconds(word, seconds):
    assert duration(word) == pytest.approx(seconds)


@pytest.mark.parametrize("word", ["", "5 minutes", "-1", "m", "1h30", True, float("nan"), -1.0])
def test_what_is_no_duration_is_refused(word):
    with pytest.raises(ValueError, match="duration"):
        duration(word)


@given(st.lists(st.text(max_size=12), max_size=4), st.text(max_size=30))
def test_any_words_give_a_config_or_a_usage_error(argv, toml):
    try:
        resolve(argv, {}, toml)
    except UsageError as error:
        assert str(error)
