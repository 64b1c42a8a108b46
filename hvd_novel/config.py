"""The one configuration tree: strict, typed, read from YAML with ``key=value`` overrides.

Every problem in a file is reported at once, each with its place and, for a name that does not exist, the
nearest one that does. Precedence: defaults < file < command line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hvd_novel.errors import UserError

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]

SectionCheck = Callable[[Any], list[tuple[str, str]]]
"""Takes a raw section and returns (key, problem) pairs: what only those who use the section can know."""


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced (except int to float)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


class RunConfig(Section):
    """The run folder and what makes a run repeatable."""

    dir: str
    """Folder for checkpoints, metrics, samples and the resolved configuration."""
    seed: NonNegative = 42
    """Seeds initialisation, document order, dropout and sampling."""
    deterministic: bool = False
    """Bit-exact repetition at equal world size: deterministic kernels, no tensor fusion in Horovod."""


class DataConfig(Section):
    """What is trained on."""

    store: str
    """Token store made by `hvd-novel prepare`."""


class ModelConfig(BaseModel):
    """An architecture of transformers with its own keys, or a folder with pretrained weights.

    `{type: llama, hidden_size: 512, ...}` takes any key of that architecture's configuration class;
    `{pretrained: DIR}` takes the weights and configuration found in DIR. The vocabulary size and the special
    token ids come from the token store.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    type: str | None = None
    pretrained: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.type is None) == (self.pretrained is None):
            raise ValueError("give either 'type' (a new model) or 'pretrained' (a folder with weights)")
        return self

    @property
    def architecture(self) -> dict[str, Any]:
        """The keys handed to the architecture's configuration class."""
        return dict(self.model_extra or {})


class BatchConfig(Section):
    """Sizes in tokens; a step is one optimizer update over all ranks."""

    tokens: Positive = 16384
    """Token budget of one step, over all ranks together."""
    micro_batch_tokens: Positive = 8192
    """Most tokens in one pack, that is in one forward and backward; more tokens a rank are accumulated."""


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), or one of its two kin that exchange momentum instead of gradients."""

    name: Literal["adamw", "onebit-adam", "topk-adam"] = "adamw"
    """onebit-adam goes with `compression: {name: onebit}`, topk-adam with `{name: topk, momentum: <first beta>}`."""
    freeze_step: Positive | None = None
    """Dense steps before the variance is frozen (onebit-adam, topk-adam); null waits until it is stable."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """For matrices; embeddings, norms and biases have their own below."""
    embedding_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    norm_weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """For norms, biases and every other parameter with fewer than two dimensions."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Largest norm of the global gradient; null switches clipping off."""


class ScheduleConfig(Section):
    """Linear warm-up, then a cosine from `optimizer.lr` down to `min_lr_ratio` of it."""

    steps: Positive
    """Optimizer steps of the whole run."""
    warmup_steps: NonNegative = 0
    min_lr_ratio: Fraction = 0.1

    @model_validator(mode="after")
    def _warmup_fits(self) -> ScheduleConfig:
        if self.warmup_steps >= self.steps:
            raise ValueError(f"warmup_steps ({self.warmup_steps}) must be smaller than steps ({self.steps})")
        return self


class ComputeConfig(Section):
    """Where and how the arithmetic is done."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """bf16 and fp16 compute under autocast with fp32 master weights; fp16 scales the loss dynamically."""
    attention: Literal["auto", "flash", "torch-varlen", "sdpa"] = "auto"
    gradient_checkpointing: bool = False
    loss_chunk_tokens: Positive = 1024
    """Tokens whose logits exist at once in the cross-entropy."""
    threads: Positive | None = None
    """CPU threads of each rank; null shares the cores that this process may use among the node's ranks."""


class CompressionConfig(BaseModel):
    """What crosses the wire: a compressor of the `compressors` package by `name`, and its options.

    `{name: topk, density: 0.01}`, or with `policies`, see compressors/README.md.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    name: str = "none"

    @property
    def options(self) -> dict[str, Any]:
        """What `compressors.get` takes besides the name."""
        return dict(self.model_extra or {})


class EvaluateConfig(Section):
    """Loss on the validation split, over all ranks."""

    every: NonNegative = 500
    """Steps between evaluations; 0 evaluates only at the end."""
    max_tokens: Positive | None = None
    """Evaluate on about this many tokens, the same ones each time; null takes the whole split."""


class SampleConfig(Section):
    """Texts written by the model while it trains."""

    every: NonNegative = 0
    """Steps between samples; 0 writes none."""
    prompt: str = ""
    genre: str = "unknown"
    max_new_tokens: Positive = 200
    temperature: Annotated[float, Field(ge=0)] = 0.8
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95


class CheckpointConfig(Section):
    """When the run's state is saved."""

    every: NonNegative = 500
    """Steps between checkpoints; 0 saves only at the end and on a signal."""
    keep: Positive = 3
    """Newest checkpoints kept."""


class LogConfig(Section):
    """How often a line is logged."""

    every: Positive = 10
    tensorboard: bool = True


class Config(Section):
    """Everything a training run depends on."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    schedule: ScheduleConfig
    batch: BatchConfig = BatchConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats (`1e-4` is a number), and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:\d[\d_]*(?:\.[\d_]*)?|\.\d[\d_]*)(?:[eE][-+]?\d+)?$|^[-+]?\.(?:inf|Inf|INF)$|^\.nan$"),
    list("-+.0123456789"),
)
# The resolvers of a character are tried in order: integers must come before the wider float pattern.
for _resolvers in _Loader.yaml_implicit_resolvers.values():
    _resolvers.sort(key=lambda resolver: resolver[0].endswith(":float"))


def load(path: Path, overrides: list[str], checks: Mapping[str, SectionCheck]) -> Config:
    """Read `path`, apply `overrides` (``a.b=value``, the value in YAML) and validate the whole.

    `checks` look closer at the sections whose keys depend on what is chosen there (model, compression).
    Raises UserError with one line per problem: file and line (or the override), key, what is wrong, and the
    nearest valid name for an unknown key.
    """
    tree, lines = _read_yaml(path)
    places = {key: f"{path}:{line}" for key, line in lines.items()}
    for override in overrides:
        key = _apply_override(tree, override)
        places[key] = f"command line ({override})"
    problems = []
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        problems = [_problem(item) for item in error.errors()]
    for section, check in checks.items():
        problems += [((section, key), text) for key, text in check(tree.get(section))]
    if problems:
        report = [f"  {_place(key, places, str(path))}: {'.'.join(key)}: {text}" for key, text in problems]
        raise UserError("\n".join(["the configuration cannot be used:", *report]))
    return config


def dump(config: Config) -> str:
    """`config` as YAML that `load` reads back to an equal value."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def nearest(name: str, valid: list[str]) -> str:
    """A hint for an unknown `name`: the closest valid name, or all of them."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else f"valid: {', '.join(sorted(valid))}"


def _read_yaml(path: Path) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"the configuration file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the configuration file {path} cannot be read: {error}") from None
    try:
        tree = yaml.load(text, _Loader)
        lines = dict(_key_lines(yaml.compose(text, _Loader)))
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of sections (run, data, model, schedule, ...)")
    return tree, lines


def _key_lines(node: yaml.Node | None, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], int]]:
    if not isinstance(node, yaml.MappingNode):
        return []
    found = []
    for key, value in node.value:
        path = (*prefix, str(key.value))
        found += [(path, key.start_mark.line + 1), *_key_lines(value, path)]
    return found


def _apply_override(tree: dict[str, Any], override: str) -> tuple[str, ...]:
    key, equals, text = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        raise UserError(f"the override '{override}' is not of the form section.key=value")
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise UserError(f"the value of the override '{override}' is not valid YAML: {error}") from None
    section = tree
    for name in path[:-1]:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise UserError(f"the override '{override}' goes into '{name}', which is a value, not a section")
    section[path[-1]] = value
    return path


def _problem(item: Any) -> tuple[tuple[str, ...], str]:
    key = tuple(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return key, f"unknown key; {nearest(key[-1], _valid_names(key[:-1]))}"
    if item["type"] == "missing":
        return key, "missing; it has no default"
    text = item["msg"].removeprefix("Value error, ")
    return key, text if isinstance(item["input"], dict) else f"{text} (got {item['input']!r})"


def _valid_names(section: tuple[str, ...]) -> list[str]:
    model: Any = Config
    for name in section:
        model = model.model_fields[name].annotation
    return list(model.model_fields)


def _place(key: tuple[str, ...], places: dict[tuple[str, ...], str], default: str) -> str:
    while key:
        if key in places:
            return places[key]
        key = key[:-1]
    return default
