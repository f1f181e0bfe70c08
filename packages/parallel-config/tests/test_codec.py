"""Text to config: strict, all problems at once, with full paths and the nearest names."""

import pickle
from dataclasses import dataclass, field

import pytest

from parallel_config import (
    AcceleratorConfig,
    CheckpointConfig,
    CheckpointFormat,
    CompileConfig,
    ConfigError,
    FSDPConfig,
    OptimizerConfig,
    ParallelismConfig,
    SchedulerConfig,
)
from parallel_config.codec import Schema, parse, read_config_text
from parallel_config.registry import Registry


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the tagged section."""


@dataclass(frozen=True, kw_only=True)
class SmallModel(ModelConfig):
    width: int = 8
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    steps: int = 10
    lr: float = 0.1
    model: ModelConfig = field(default_factory=SmallModel)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    accelerator: AcceleratorConfig = field(default_factory=AcceleratorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    checkpoint_format: CheckpointFormat = CheckpointFormat.DCP


class NotAConfig:
    """Importable, and no config."""


MODELS = Registry(
    section="model",
    base=ModelConfig,
    builtin={"small": "parallel_config_test_models:SmallModel"},
    entry_point_group="parallel_config.tests",
)
SCHEMA = Schema(RunConfig, version=1, registries={"model": MODELS})


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    """Let the registry import this module's classes by path."""
    import sys
    import types

    module = types.ModuleType("parallel_config_test_models")
    module.SmallModel, module.NotAConfig = SmallModel, NotAConfig
    monkeypatch.setitem(sys.modules, "parallel_config_test_models", module)
    monkeypatch.setattr(SmallModel, "__module__", "parallel_config_test_models")


def load(text, *, trusted=True, schema=SCHEMA, toml=False):
    document = parse(text, source="run.json", toml=toml)
    return schema.from_document(document, source="run.json", trusted=trusted)


def load_file(path):
    text, toml = read_config_text(path)
    return load(text, toml=toml)


def problems(text, **options):
    with pytest.raises(ConfigError) as caught:
        load(text, **options)
    return [str(problem) for problem in caught.value.problems]


def test_what_is_written_reads_back_equal():
    config = RunConfig(
        lr=0.1 + 0.2,
        model=SmallModel(width=3, names=("a", "b")),
        parallelism=ParallelismConfig(dp_shard=-1),
        accelerator=AcceleratorConfig(
            mixed_precision="bf16",
            fsdp=FSDPConfig(wrap_modules=["Block"]),
            compile=CompileConfig(dynamic=None),
        ),
        checkpoint_format=CheckpointFormat.SAFETENSORS_DCP,
    )
    assert load(SCHEMA.dump(config)).config == config


def test_all_problems_are_told_at_once():
    text = """{"stpes": 5, "steps": "a", "accelerator": {"mixed_precision": "bf6",
      "fsdp": {"wrap_modles": 1, "wrap_modules": [1]}}, "parallelism": {"dp_shard": -3},
      "model": {"type": "small", "widht": 1}, "checkpoint_format": "zip"}"""
    assert problems(text) == [
        "model.widht is not a field. Did you mean 'width'?",
        'steps = "a", but it should be a valid integer.',
        "accelerator.mixed_precision = \"bf6\", but it must be one of 'no', 'bf16' or 'fp16'.",
        "accelerator.fsdp.wrap_modules[0] = 1, but it should be a valid string.",
        "accelerator.fsdp.wrap_modles is not a field. Did you mean 'wrap_modules'?",
        "checkpoint_format = \"zip\", but it must be one of 'safetensors', 'dcp' or "
        "'safetensors_dcp'.",
        "stpes is not a field. Did you mean 'steps'?",
        "parallelism.dp_shard = -3, but it must be at least 1, or -1 for all remaining ranks. "
        "Use --parallelism.dp_shard -1 or a positive number (ParallelismConfig.dp_shard).",
    ]


def test_what_another_version_wrote_is_read_without_the_keys_that_are_new():
    """BC-16: a person's slip is an error, the field of another version is named and left out."""
    document = {
        "steps": 7,
        "stpes": 5,
        "later": {"x": [1]},
        "model": {"type": "small", "width": 3, "rope": 2},
        "accelerator": {"mixed_precision": "bf16", "fsdp": {"wrap_modles": 1}, "compile": {"a": 0}},
    }
    loaded = SCHEMA.from_document(document, source="x", trusted=False, leave_out_unknown=True)
    wanted = AcceleratorConfig(mixed_precision="bf16")
    assert loaded.config == RunConfig(steps=7, model=SmallModel(width=3), accelerator=wanted)
    assert sorted(loaded.notes) == [
        "accelerator.compile.a = 0 is left out: this version does not have this field.",
        "accelerator.fsdp.wrap_modles = 1 is left out: this version does not have this field. "
        "Did you mean 'wrap_modules'?",
        'later = {"x": [1]} is left out: this version does not have this field.',
        "model.rope = 2 is left out: this version does not have this field.",
        "stpes = 5 is left out: this version does not have this field. Did you mean 'steps'?",
    ]
    assert set(loaded.left_out) == {note.split(" = ")[0] for note in loaded.notes}
    assert document["stpes"] == 5  # nothing is edited in place
    with pytest.raises(ConfigError, match="stpes is not a field"):
        SCHEMA.from_document(document, source="x", trusted=False)


def test_what_is_wrong_stays_wrong_beside_what_is_left_out():
    document = {"stpes": 5, "steps": "a", "model": {"type": "small", "width": "b", "rope": 2}}
    with pytest.raises(ConfigError) as caught:
        SCHEMA.from_document(document, source="x", trusted=False, leave_out_unknown=True)
    assert [str(problem) for problem in caught.value.problems] == [
        'model.width = "b", but it should be a valid integer.',
        'steps = "a", but it should be a valid integer.',
    ]


@pytest.mark.parametrize("name", ["run.json", "run.toml"])
def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path, name):
    text = "steps = 5" if name.endswith("toml") else '{"steps": 5}'
    (tmp_path / name).write_bytes(text.encode("utf-8-sig"))
    assert load_file(tmp_path / name).config.steps == 5
    (tmp_path / name).write_bytes(text.encode("utf-16"))
    with pytest.raises(ConfigError, match=r"is not UTF-8 text: .*\. Save it as UTF-8\."):
        load_file(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"steps": 1, "steps": 2}', "steps is given twice"),
        ('{"model": {"type": "small", "width": 1, "width": 2}}', "width is given twice"),
        ("", "run.json is empty"),
        ("[1]", "holds a list, but a config is a mapping"),
        ('{"steps": 1', "is not valid JSON"),
        ('{"lr": NaN}', "NaN is not a JSON number"),
        ('{"steps": 1.5}', "steps = 1.5"),
        ('{"steps": true}', "steps = true"),
        ('{"steps": null}', "steps = null"),
        ("[" * 100_000, "nested too deeply"),
        ('{"mixed_precision": "bf16"}', "Did you mean 'accelerator.mixed_precision'?"),
    ],
)
def test_what_is_no_config(text, expected):
    assert expected in problems(text)[0]


def test_a_missing_key_takes_its_default():
    assert load("{}").config == RunConfig()


def test_toml_reads_like_json():
    text = "steps = 3\n[accelerator.fsdp]\nwrap_modules = ['Block']\n"
    config = load(text, toml=True).config
    assert (config.steps, config.accelerator.fsdp.wrap_modules) == (3, ("Block",))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("run.yaml", b"steps: 1", "is YAML, which is not read"),
        ("run.txt", b"{}", "is neither .json nor .toml"),
        ("run.json", b"\xff\xfe", "is not UTF-8 text"),
        ("missing.json", None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_config(tmp_path, name, content, expected):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=expected):
        load_file(path)


def test_a_path_is_honoured_only_where_the_user_wrote_it():
    text = '{"model": {"type": "parallel_config_test_models:SmallModel", "width": 2}}'
    assert load(text).config.model == SmallModel(width=2)
    assert "So its code is imported only if you ask for it" in problems(text, trusted=False)[0]


def test_a_path_to_something_else_is_refused():
    text = '{"model": {"type": "parallel_config_test_models:NotAConfig"}}'
    assert "is not a ModelConfig" in problems(text)[0]
    assert "cannot be imported" in problems('{"model": {"type": "no_such_package:X"}}')[0]


def test_an_unknown_type_lists_what_there_is():
    assert problems('{"model": {"type": "smal"}}') == [
        "model.type = 'smal' is not registered. Registered: small. Did you mean 'small'?"
    ]


def test_an_older_file_is_migrated_and_says_so():
    def rename(document):
        document["steps"] = document.pop("num_steps")
        return document, ["num_steps is now steps"]

    newer = Schema(RunConfig, version=2, registries={"model": MODELS}, migrations={1: rename})
    loaded = load('{"schema_version": 1, "num_steps": 7}', schema=newer)
    assert (loaded.config.steps, loaded.notes) == (7, ("num_steps is now steps",))


@pytest.mark.parametrize("version", ["2", '"1"', "0", "true"])
def test_versions_that_cannot_be_read(version):
    assert problems(f'{{"schema_version": {version}}}')[0].startswith("schema_version = ")


def test_an_error_survives_the_way_to_another_rank():
    with pytest.raises(ConfigError) as caught:
        load('{"stpes": 1}')
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert copy.problems == caught.value.problems
