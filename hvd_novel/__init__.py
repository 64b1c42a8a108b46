"""Distributed training of novel-writing language models on Horovod."""

from importlib.metadata import version

__version__ = version("hvd-novel")
