"""The one configuration tree: strict, typed, read from YAML with ``key=value`` overrides."""

from hvd_novel.config.loading import dump, load, nearest, with_absolute_paths
from hvd_novel.config.schema import (
    BatchConfig,
    CheckpointConfig,
    CompressionConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    LogConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SampleConfig,
    ScheduleConfig,
    ShardingConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "CompressionConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "LogConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "SampleConfig",
    "ScheduleConfig",
    "ShardingConfig",
    "dump",
    "load",
    "nearest",
    "with_absolute_paths",
]
