"""The sections and keys of the configuration, with their types, bounds and defaults."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


def _tokens_or_auto(value: Any) -> Any:
    if value == "auto" or (type(value) is int and value > 0):
        return value
    raise ValueError("should be a number of tokens greater than 0, or auto")


TokensOrAuto = Annotated[int | Literal["auto"], BeforeValidator(_tokens_or_auto)]


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
    prefetch: Positive = 16
    """Packs made ahead of the step that is computed, by a thread of each rank."""
    loader_cores: Annotated[list[NonNegative], Field(min_length=1)] | None = None
    """CPU cores that this thread keeps to, on every node; null lets it run anywhere."""


class ModelConfig(Section):
    """An architecture of transformers with its own keys, or pretrained weights.

    `{type: llama, hidden_size: 512, ...}` takes any key of that architecture's configuration class;
    `{pretrained: DIR}` takes the weights and configuration found in DIR. The vocabulary size and the special
    token ids come from the token store.
    """

    model_config = ConfigDict(extra="allow")

    type: str | None = None
    """Architecture of a new model, such as llama."""
    pretrained: str | None = None
    """Folder of a trained model, with its tokenizer."""

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
    micro_batch_tokens: TokensOrAuto = 8192
    """Most tokens in one pack, that is in one forward and backward; more are accumulated, longer samples cut.

    `auto` tries at the start what fits into each rank's memory, and makes packs smaller when a step does not fit after
    all; gradients then travel after the last backward pass, not during it.
    """


class ShardingConfig(Section):
    """How the samples of a step are dealt to ranks."""

    strategy: Literal["cost", "token", "random", "greedy"] = "cost"
    """cost: equal cost in every step; others to compare with: token, random, greedy (equal tokens over the epoch)."""
    refit_every: NonNegative = 200
    """Steps between fits of the cost to measured times; the first comes after 50 at the latest. 0 keeps the model's."""
    steal: bool = False
    """Ranks claim packs while they compute, the costliest first: pays where ranks differ in speed."""


Mix = Annotated[tuple[Fraction, Fraction, Fraction], Field(strict=False)]
Length = Annotated[int, Field(ge=2)] | None


class CurriculumConfig(Section):
    """What kinds of samples come early, in the middle and late in the run."""

    enabled: bool = False
    """Also scales a pretrained model's rotary embedding to the store's longest sample, if it knows fewer positions."""
    boundaries: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.3, 0.7)
    """Where the middle and the late phase begin, as fractions of `schedule.steps`."""
    thresholds: Annotated[tuple[Positive, Positive], Field(strict=False)] = (512, 2048)
    """Tokens from which a sample is medium and long."""
    early: Mix = (0.8, 0.2, 0.0)
    """Shares of short, medium and long samples in the steps of the early phase, as long as there are enough."""
    middle: Mix = (0.0, 0.7, 0.3)
    late: Mix = (0.0, 0.4, 0.6)
    max_lengths: Annotated[tuple[Length, Length, Length], Field(strict=False)] = (None, None, None)
    """Most tokens of a sample trained as one piece in each phase; longer ones are cut. null sets no limit."""
    segment_weights: dict[str, Annotated[float, Field(ge=0)]] = {}
    """Segment types with weights other than 1: heavier ones come earlier in the epoch."""
    genre_weights: dict[str, Annotated[float, Field(ge=0)]] = {}

    @model_validator(mode="after")
    def _in_order(self) -> CurriculumConfig:
        for key in ("boundaries", "thresholds"):
            first, second = getattr(self, key)
            if first > second:
                raise ValueError(f"{key} must not fall: {first}, {second}")
        for key in ("early", "middle", "late"):
            if sum(getattr(self, key)) == 0:
                raise ValueError(f"{key} must give at least one kind of samples a share")
        return self


class OptimizerConfig(Section):
    """AdamW (Loshchilov & Hutter 2019), or one of its two kin that exchange momentum instead of gradients."""

    name: Literal["adamw", "onebit-adam", "topk-adam"] = "adamw"
    """onebit-adam goes with `compression: {name: onebit}`, topk-adam with `{name: topk, momentum: <first beta>}`."""
    freeze_step: Positive | None = None
    """Dense steps before the variance is frozen (onebit-adam, topk-adam); null waits until it is stable."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Peak of the schedule."""
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
    """Steps in which the rate rises from 0."""
    min_lr_ratio: Fraction = 0.1
    """Rate of the last step / peak."""

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


_RECHECK_EVERY = 1000


class CompressionConfig(Section):
    """What crosses the wire: a compressor of the `compressors` package by `name`, and its options.

    `{name: topk, density: 0.01}`, or with `policies`, see compressors/README.md.
    """

    model_config = ConfigDict(extra="allow")

    name: str = "none"
    """none, fp16, bf16, int8, onebit, topk, powersgd, randomk, rows, hierarchical, or a plug-in.

    `auto` measures network and coding at the start and takes the fastest of none, fp16 and int8.
    """
    warm_up: Literal["fp16", "bf16", "int8"] | None = None
    """What carries gradients while they are not compressed yet (the dense stage of onebit-adam and topk-adam,
    `dense_steps` of powersgd and topk); null for float32."""
    recheck_every: NonNegative | None = None
    """With `auto`: steps between reconsiderations; 0 for none, null for 1000."""

    @model_validator(mode="after")
    def _suits_auto(self) -> CompressionConfig:
        if self.name == "auto" and self.warm_up is not None:
            raise ValueError("warm_up goes with a compressor that begins later, not with auto; leave it out")
        if self.recheck_every is not None and self.name != "auto":
            raise ValueError(f"recheck_every goes with the name auto, not {self.name}")
        return self

    @property
    def recheck_steps(self) -> int:
        """`recheck_every`, or its default."""
        return _RECHECK_EVERY if self.recheck_every is None else self.recheck_every

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
    sharding: ShardingConfig = ShardingConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    compute: ComputeConfig = ComputeConfig()
    compression: CompressionConfig = CompressionConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    sample: SampleConfig = SampleConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _repeatable(self) -> Config:
        if self.run.deterministic and self.sharding.steal:
            raise ValueError(
                "sharding.steal deals packs by the speed of ranks and cannot repeat itself; "
                "leave it out, or set run.deterministic=false"
            )
        if self.run.deterministic and self.batch.micro_batch_tokens == "auto":
            raise ValueError(
                "batch.micro_batch_tokens=auto depends on free memory and cannot repeat itself; "
                "give a number, or set run.deterministic=false"
            )
        if self.run.deterministic and self.compression.name == "auto":
            raise ValueError(
                "compression.name=auto depends on measured times and cannot repeat itself; "
                "name a compressor, or set run.deterministic=false"
            )
        return self

    @model_validator(mode="after")
    def _auto_suits(self) -> Config:
        if self.compression.name == "auto" and self.optimizer.name != "adamw":
            raise ValueError(
                f"compression.name=auto chooses among compressors for adamw, and optimizer.name={self.optimizer.name} "
                "goes with one of its own; see `hvd-novel train --keys`"
            )
        return self
